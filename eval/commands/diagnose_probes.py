"""``latent-santa diagnose probes``: Figure 5, k-means on keys against k-means on probe fingerprints, by accuracy."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from latent_santa.eval.commands import options, ruler
from latent_santa.eval.commands.run_options import evaluate

NAME = "probes"
DEFAULTS: dict[bool, dict[str, Any]] = {
    False: {"tasks": "cwe,niah_multikey_3,qa_1,qa_2", "n": 50, "length": 8192, "budgets": [128, 256, 512]},
    True: {"tasks": "multivalue,facts", "n": 6, "length": 2048, "budgets": [8, 32]},
}
DESCRIPTION = """\
Figure 5: accuracy with parents from k-means on keys and from k-means on probe fingerprints (Appendix B.5), beside SANTA
and dense attention. A fingerprint holds a key's products with the prompt's last 64 queries of all heads that share it.
Everything else is equal.

This is a run as `ruler` makes it, with the same folder and the same options, and probes.png, probes.md and probes.json
beside its tables. --resume continues it.

Example: latent-santa diagnose probes --model builtin:tiny
"""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand: ruler's options with Figure 5's defaults."""

    def shown(name: str) -> str:
        values = (own.get(name, "kmeans,probes") for own in DEFAULTS.values())
        real, tiny = (",".join(map(str, value)) if isinstance(value, list) else value for value in values)
        return f"{real}; builtin:tiny {tiny}" if real != tiny else real

    parser = subparsers.add_parser(
        NAME,
        help="Figure 5: accuracy of parents from keys and from probe fingerprints",
        description=DESCRIPTION,
        formatter_class=options.Help,
    )
    ruler.add_options(parser, shown, NAME, "builtin:tiny")
    parser.set_defaults(run=run, methods="dense,santa,santa++", estimators="per_head", parents="kmeans,probes")


def run(args: argparse.Namespace) -> int:
    """Run or resume, then draw the bars; the exit code of the run."""
    for name, value in DEFAULTS[args.model == "builtin:tiny"].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    ruler.check_floor(args)
    stem = args.model.rstrip("/").rpartition("/")[2].replace(":", "-")
    args.out = args.out or Path("out") / f"diagnose-{NAME}-{stem}"
    args.resume = True  # as every diagnostic: the same command continues it
    code = evaluate(args)
    if not args.dry_run and os.environ.get("RANK", "0") == "0":  # of several processes the first one writes
        from latent_santa.eval.diagnose.probes import write_figure

        write_figure(args.out, args.plot)
    return code
