"""``latent-santa answer``: several questions about one text, which is prefilled and grouped once."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from latent_santa.config import PRESETS, SantaConfig
from latent_santa.eval.commands import options
from latent_santa.eval.commands.config_file import read
from latent_santa.eval.errors import EvalError

if TYPE_CHECKING:
    from latent_santa.eval.run.render import Renderer

DESCRIPTION = """\
Answer several questions about one text, greedily. The text is prefilled and grouped once; every question then stands
behind it alone, as if the others had not been asked, and its answer is decoded under sampled attention. Shown with each
answer: the rows that its decoding read, in percent of dense's.

Example: latent-santa answer --model ID_OR_PATH --context-file report.txt --question "Who wrote it?" "When?"
"""


def add_parser(subparsers: Any) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "answer",
        help="several questions about one text: one prefill and one grouping, an answer each",
        description=DESCRIPTION,
        formatter_class=options.Help,
    )
    options.add_model_options(parser, default="builtin:tiny")
    prompts = parser.add_argument_group("prompts").add_argument
    prompts("--context-file", type=options.path, required=True, metavar="FILE", help="the text")
    prompts("--question", nargs="+", default=[], metavar="TEXT", help="questions, each in quotes")
    prompts("--question-file", type=options.path, metavar="FILE", help="more questions, one per line")
    prompts("--max-new-tokens", type=int, default=64, help="tokens to generate for each question")
    prompts(
        "--chat-template",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="use the tokenizer's chat template, if it has one",
    )
    settings = parser.add_argument_group("method").add_mutually_exclusive_group()
    settings.add_argument("--preset", choices=tuple(PRESETS), help="named settings; without them, those of patch()")
    settings.add_argument("--config", type=read, metavar="FILE", help="settings that SantaConfig.save wrote")
    parser.add_argument("--json", type=options.path, metavar="FILE", help="also write everything as JSON")
    parser.set_defaults(run=run, answer_prefix="none", template_option=[])


def run(args: argparse.Namespace) -> int:
    """Answer and print."""
    import torch

    import latent_santa
    from latent_santa.eval.report.tables import output_console
    from latent_santa.eval.run import sizes
    from latent_santa.eval.run.generation import make_greedy
    from latent_santa.eval.run.models import check_supported, load, load_config, load_tokenizer
    from latent_santa.eval.run.store import write_atomic
    from latent_santa.patches.limits import context_limit

    spec = options.model_spec(args)
    settings = args.config or (SantaConfig.preset(args.preset) if args.preset else SantaConfig())
    options.at_least(args, max_new_tokens=1)
    questions = [*args.question, *_lines(args)]
    if not questions:
        raise EvalError('no question: give --question "TEXT" "TEXT", or --question-file FILE')
    if args.json is not None and (args.json.is_dir() or not args.json.resolve().parent.is_dir()):
        raise EvalError(f"--json {args.json}: give a file in an existing directory")
    config = load_config(spec)
    check_supported(spec, config)
    tokenizer = load_tokenizer(spec)
    renderer = options.renderer(args, tokenizer)
    for warning in renderer.warnings():
        print(f"warning: {warning}", file=sys.stderr)
    context, turns = parts(renderer, options.prompt_text(args.context_file), questions)
    rows = len(context) + max(map(len, turns)) + args.max_new_tokens
    asked = f"{rows} tokens of text, question and --max-new-tokens {args.max_new_tokens}"
    sizes.check_positions(context_limit(config), rows, asked, spec.name)
    sizes.check_cache(config, rows, spec, asked)
    model = load(spec, tokenizer).model
    make_greedy(model, tokenizer)
    device, console = model.get_input_embeddings().weight.device, output_console()
    answers: list[dict[str, Any]] = []
    with latent_santa.patch(model, settings) as santa, torch.inference_mode():
        prompt = santa.prefill(torch.tensor([context], device=device))
        console.print(f"{len(context)} tokens of text, prefilled and grouped once", highlight=False)
        for question, turn in zip(questions, turns, strict=True):
            santa.reset()
            output = prompt.follow(torch.tensor([turn], device=device), max_new_tokens=args.max_new_tokens)
            new = output[0, len(context) + len(turn) :].tolist()
            text = tokenizer.decode(new, skip_special_tokens=True).strip()
            answers.append({"question": question, "answer": text, "tokens": len(new), "rows": santa.access.totals()})
            console.print(f"\n{question}\n{text}", markup=False, highlight=False, soft_wrap=True)
            console.print(f"({len(new)} tokens, {santa.access.percent:.1f} % of dense's rows read)", highlight=False)
    if args.json:
        record = {"model": spec.name, "settings": settings.to_dict(), "context_tokens": len(context)}
        write_atomic(args.json, json.dumps(record | {"answers": answers}, indent=1) + "\n")
    return 0


def parts(renderer: Renderer, context: str, questions: list[str]) -> tuple[list[int], list[list[int]]]:
    """Token ids of the text and of what follows it for each question, which are tokenised apart.

    Raises:
        EvalError: the chat template changes a question, or puts other words before the text for another question.
    """
    heads: list[str] = []
    turns: list[list[int]] = []
    for question in questions:
        head, found, tail = renderer.text(f"{context}\n\n{question}", "").rpartition(question)
        if not found or (heads and head != heads[0]):
            raise EvalError(
                f"question {question!r}: the chat template does not leave text and question as they are, so the text "
                "cannot be prefilled apart; use --no-chat-template"
            )
        heads.append(head)
        turns.append(renderer.tokenizer(found + tail, add_special_tokens=False)["input_ids"])
    return renderer.ids(heads[0]), turns


def _lines(args: argparse.Namespace) -> list[str]:
    """Questions of --question-file; empty lines are none."""
    if args.question_file is None:
        return []
    return [line.strip() for line in options.prompt_text(args.question_file).splitlines() if line.strip()]
