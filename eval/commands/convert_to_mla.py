"""``latent-santa convert-to-mla``: a Qwen2 checkpoint written again as DeepSeek-V2, for testing MLA on real weights."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from latent_santa.eval.commands.options import at_least


def add_parser(subparsers: Any) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "convert-to-mla",
        help="write a Qwen2 checkpoint as DeepSeek-V2 (MLA) of the same function, to test MLA on real weights",
        description=(
            "Write a local Qwen2 checkpoint (GQA) as a DeepSeek-V2 checkpoint (MLA) that computes the same. It is for "
            "testing MLA paths on real weights: the latent holds the keys and values of all KV heads, so nothing is "
            "compressed, and few of its dimensions take part in content scores. What rounds is said in "
            "latent_santa.eval.convert.layer."
        ),
    )
    parser.add_argument("source", type=Path, metavar="QWEN2_CHECKPOINT", help="directory with safetensors files")
    parser.add_argument("out", type=Path, metavar="OUT", help="directory to make; its parent has to exist")
    parser.add_argument(
        "--content-pairs",
        type=int,
        default=8,
        metavar="N",
        help="rotary pairs per head that also score through the latent (default: 8); each makes the rotary part two "
        "numbers wider per KV head; 0: content scores are zero",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Convert, and say what the new checkpoint is."""
    from rich.console import Console

    from latent_santa.eval.convert.checkpoint import convert
    from latent_santa.eval.run.progress import Progress
    from latent_santa.kernels.support import MOST_KEY_DIMS

    at_least(args, content_pairs=0)
    console = Console(stderr=True)
    with Progress(console) as progress:
        found = convert(args.source, args.out, progress.stage, progress.step, args.content_pairs)
        progress.end_stage()
    s = found.shapes
    print(f"{args.out}: DeepSeek-V2, {found.bytes / 1e9:.2f} GB of weights")
    print(
        f"A row holds {s.rank} + {s.rope} numbers (latent + rotary part), the source's {2 * s.keys} (keys + values): "
        "nothing is compressed."
    )
    print(
        f"Content scores use {s.nope} dimensions per head. First layer, both ways in float32: {found.error:.1e} apart."
    )
    if s.rope > MOST_KEY_DIMS[1]:
        fits = ", and --content-pairs 0 would fit" if s.keys <= MOST_KEY_DIMS[1] and s.nope else ""
        most = f"The Triton kernels take rotary parts of at most {MOST_KEY_DIMS[1]} numbers"
        print(f"{most}: sampled attention of this one runs in PyTorch{fits}.")
    print('transformers warns of "mscale_all_dim" when it loads this: DeepSeek-V2 reads it all the same.')
    if found.left_out:
        print(f"{len(found.left_out)} tensors of the source have no place in it: {', '.join(found.left_out[:3])}")
    return 0
