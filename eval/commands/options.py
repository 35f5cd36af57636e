"""Every option that several commands have, defined once: its spelling, its default and what it refuses.

No module that is imported here may import torch, so that --help answers at once.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latent_santa.eval.commands.config_file import SEVERAL, add_config_option, single
from latent_santa.eval.errors import EvalError
from latent_santa.eval.run.models import DTYPES, QUANTS, ModelSpec

if TYPE_CHECKING:
    from latent_santa.config import SantaConfig
    from latent_santa.eval.run.render import Renderer

# SantaConfig's fields that are one option each, and equal in all settings of a run
SHARED = ("draws", "regroup_after", "routing_dtype", "backend", "kmeans_engine", "seed", "kmeans_seed")


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the defaults that say something, and keeps the paragraphs of a description."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        silent = action.default is None or action.default is False or "default" in (action.help or "")
        return action.help if silent else super()._get_help_string(action)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(super(Help, self)._fill_text(part, width, indent) for part in text.split("\n\n"))


def values(kind: Callable[[str], Any], example: str) -> Callable[[str], list[Any]]:
    """Parser of a list of `kind` separated by commas; it refuses an empty list, or an empty or wrong entry."""

    def parse(text: str) -> list[Any]:
        try:
            return [kind(word(part.strip())) for part in text.split(",")]
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise argparse.ArgumentTypeError(f"{text!r}: give values separated by commas, such as {example}") from error

    SEVERAL.add(parse)
    return parse


def positive(text: str) -> int:
    """An integer of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return number


def regrouping(text: str) -> int | str:
    """A number of rows, or auto."""
    return text if text == "auto" else int(text)


def word(text: str) -> str:
    """A text that is not empty."""
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty: give a value, or leave the option out")
    return text


def path(text: str) -> Path:
    """A path that is not empty: an empty one would mean the current directory."""
    return Path(word(text))


def team(text: str) -> tuple[int, int]:
    """P/R as two numbers."""
    size, _, representatives = text.partition("/")
    return int(size), int(representatives)


def budgets_of(text: str) -> tuple[str, list[int]]:
    """METHOD=S,S,... as a pair.

    Raises argparse.ArgumentTypeError if it is not.
    """
    method, equals, listed = text.partition("=")
    try:
        budgets = [int(part) for part in listed.split(",")]
    except ValueError:
        budgets = []
    if not equals or not method.strip() or not budgets:
        raise argparse.ArgumentTypeError(f"{text!r} is not METHOD=S,S,..., such as quest=256,512")
    return method.strip(), budgets


def template_option(text: str) -> tuple[str, Any]:
    """NAME=VALUE as a pair; a value that reads as JSON (true, 3, null) is taken for it, any other is a text.

    Raises argparse.ArgumentTypeError if there is no name.
    """
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, such as enable_thinking=false")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def add_model_options(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """Add --model and what belongs to it. Without a default --model must be given."""
    add = parser.add_argument_group("model").add_argument
    add(
        "--model",
        type=word,
        default=default,
        required=default is None,
        metavar="ID_OR_PATH",
        help="hub id (OWNER/NAME), directory, or builtin:tiny, the embedded MLA model",
    )
    add("--revision", type=word, help="hub revision of the model")
    add("--dtype", default="auto", choices=DTYPES, help="weights and cache; auto: float32 on a CPU, else bfloat16")
    add(
        "--quant",
        default="none",
        choices=QUANTS,
        help="int8: bitsandbytes LLM.int8, routed experts too, except kv_b_proj and lm_head, as in Appendix F",
    )
    add("--device", type=word, default="auto", help="cpu, cuda, cuda:1, ...; auto: a GPU if there is one")
    add("--device-map", type=word, help="auto: one model over several GPUs")
    add("--offline", action="store_true", help="local files and the hub cache only")
    add(
        "--math-sdpa",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="PyTorch's math kernel for dense attention on a GPU, if it chooses it; Appendix F disables it",
    )


def add_prompt_options(parser: argparse.ArgumentParser, length: int | None, shown: str = "%(default)s") -> Any:
    """Add --length and how a prompt is rendered; returns the group, for a command's own options.

    length  the default in tokens, None where it depends on the model; `shown` is then its text
    """
    group = parser.add_argument_group("prompts")
    group.add_argument(
        "--length", type=int, default=length, help=f"tokens of prompt and answer together (default: {shown})"
    )
    group.add_argument(
        "--chat-template",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="use the tokenizer's chat template, if it has one",
    )
    group.add_argument(
        "--template-option",
        type=template_option,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a variable of the chat template, such as enable_thinking=false; may be given several times",
    )
    group.add_argument(
        "--answer-prefix",
        default="assistant",
        choices=("assistant", "user", "none"),
        help="the turn that the beginning of the answer is written in",
    )
    return group


def add_method_options(
    parser: argparse.ArgumentParser, budgets: str, parents: str, several_regroupings: bool = False
) -> None:
    """Add the settings of the method; the texts say the defaults of --budgets and --parents by model."""
    group = parser.add_argument_group("method (Section 2, Appendix A)")
    add = group.add_argument
    add(
        "--methods",
        type=values(str, "dense,santa++"),
        default="dense,santa++",
        help="of dense, absorbed_dense, santa++ (Algorithm 1), santa, gumbel_rows, centroid (Appendix B.2), and the "
        "baselines that latent_santa/methods/README.md describes: oracle_rows, oracle_teams, top_teams, "
        "uncorrected, quest, page_mean, "
        "rope_blocks, infllm, sparq, streaming_llm, snapkv, tova, h2o, magicpig",
    )
    add(
        "--budgets",
        type=values(int, "128,256"),
        help=f"S, nominal budgets; each head selects K = S / (P / R) teams (default: {budgets})",
    )
    add(
        "--budgets-of",
        type=budgets_of,
        action="append",
        default=[],
        metavar="METHOD=S,S",
        help="S of one method instead of --budgets, since equal S reads other rows under other methods; may be given "
        "several times",
    )
    add(
        "--estimators",
        type=values(str, "per_head,pooled"),
        default="per_head,pooled",
        help="whose teams a head uses: its own (per_head), or the union's (pooled)",
    )
    add(
        "--parents",
        type=values(str, "kmeans,contiguous"),
        help=f"of kmeans (Algorithm 3), contiguous (Algorithm 4) and probes (Appendix B.5) (default: {parents})",
    )
    add("--parent-size", type=int, help="P, nominal rows per parent (default: 16)")
    add("--representatives", type=int, help="R, most representatives per parent (default: 4)")
    add("--teams", type=values(team, "16/4,16/1"), help="several P/R at once, instead of the two options above")
    add(
        "--routing",
        type=values(str, "one_stage,two_stage"),
        default="one_stage",
        help="one_stage scores every representative (Algorithm 1); two_stage samples parents first",
    )
    add(
        "--parents-per-head",
        type=values(int, "32,64"),
        metavar="K1",
        help="K1 of two_stage: parents that each head samples; K of Equation 5 is then K2 (default: 64)",
    )
    add(
        "--parent-summary",
        type=values(str, "mean,isotropic"),
        help="two_stage: a parent's mean key, or with its keys' spread isotropic or diagonal (default: mean)",
    )
    add(
        "--exact-first",
        type=values(int, "0,16"),
        help="first rows of a sequence that are attended exactly, in no team (default: 0)",
    )
    add(
        "--exact-last",
        type=values(int, "0,48"),
        help="last rows of a prompt that are attended exactly, in no team (default: 0)",
    )
    add(
        "--centroid-sizes",
        type=values(int, "16,32"),
        default="16",
        help="B, nominal rows per cluster of centroid; rows per page of quest, page_mean, rope_blocks and infllm",
    )
    add(
        "--noise",
        type=values(str, "independent,shared"),
        default="independent",
        help="Gumbel noise: one draw per head (independent), or one that the heads of a group have in common (shared)",
    )
    add("--hash-bits", type=values(int, "8,10"), default="10", help="K of magicpig: bits per hash table")
    add("--hash-tables", type=values(int, "75,150"), default="150", help="L of magicpig: hash tables")
    add(
        "--draws",
        default="independent",
        choices=("independent", "systematic"),
        help="how santa draws its S rows: each by itself, or all from one uniform per head",
    )
    add(
        "--regroup-after",
        type=values(regrouping, "0,64") if several_regroupings else regrouping,
        default="0,auto" if several_regroupings else "auto",
        metavar="ROWS",
        help="most generated rows that stay exact before they are grouped into teams too; 0: no limit (the paper)",
    )
    add(
        "--routing-dtype",
        default="model",
        choices=("model", "int8", "int4"),
        help="format of the frozen routing keys (model: the cache's); it changes bytes read, not rows",
    )
    add(
        "--backend",
        default="auto",
        choices=("auto", "torch", "triton"),
        help="operators of sampled attention; auto: Triton for rows on a GPU where it can run, else PyTorch",
    )
    add(
        "--kmeans-engine",
        default="auto",
        choices=("auto", "sklearn", "torch"),
        help="k-means of the parents; auto: PyTorch for rows on a GPU, else scikit-learn",
    )
    add("--seed", type=int, default=0, help="base seed of the sampling noise")
    add("--kmeans-seed", type=int, default=0, help="seed of k-means")
    add(
        "--also",
        type=values(str, "recommended,mine.json"),
        default=[],
        metavar="SETTINGS",
        help="single settings beside the combinations above: names of presets, or files that SantaConfig.save wrote",
    )
    add_config_option(group)


def model_spec(args: argparse.Namespace, check: bool = True) -> ModelSpec:
    """The specification of the model, checked unless nothing will run.

    Raises:
        EvalError: options that cannot go together; nothing has been loaded yet.
    """
    names = ("revision", "dtype", "quant", "device", "device_map", "offline", "math_sdpa")
    together = getattr(args, "tensor_parallel", False)  # of commands that make a run
    spec = ModelSpec(args.model, tensor_parallel=together, **{name: getattr(args, name) for name in names})
    if check:
        spec.check()
    return spec


def renderer(args: argparse.Namespace, tokenizer: Any) -> Renderer:
    """How prompts are rendered. Raises EvalError for a --template-option that the chat template does not read."""
    from latent_santa.eval.run.render import Renderer

    made = Renderer(tokenizer, args.answer_prefix, args.chat_template, dict(args.template_option))
    made.check()
    return made


def base_config(args: argparse.Namespace, spec: ModelSpec) -> SantaConfig:
    """What all settings of a run share. Raises EvalError."""
    from latent_santa.eval.run.conditions import checked_config

    return checked_config(spec.resolved_device(), method="dense", **{name: getattr(args, name) for name in SHARED})


def conditions(args: argparse.Namespace, base: SantaConfig) -> tuple[SantaConfig, ...]:
    """Every asked combination of method and settings on top of what they share, dense first. Raises EvalError."""
    from latent_santa.eval.run.conditions import expand
    from latent_santa.methods import METHODS

    if args.teams and (args.parent_size, args.representatives) != (None, None):
        raise EvalError("--teams replaces --parent-size and --representatives: give one or the other")
    at_least(args, parent_size=1, representatives=1)
    teams = args.teams or [(args.parent_size or 16, args.representatives or 4)]
    routing: list[dict[str, Any]] = []
    two_stages = (args.parents_per_head, args.parent_summary)
    if any(two_stages) and "two_stage" not in args.routing:
        raise EvalError("--parents-per-head and --parent-summary are of --routing two_stage: add it, or leave them out")
    for kind in args.routing:
        axes = (two_stages[0] or [64], two_stages[1] or ["mean"]) if kind == "two_stage" else ()
        named = (dict(zip(("parents_per_head", "parent_summary"), part, strict=False)) for part in product(*axes))
        routing += [{"routing": kind, **fields} for fields in named]
    sizes = (args.parents, teams, args.centroid_sizes)
    hashes = [{"hash_bits": k, "hash_tables": n} for k, n in product(args.hash_bits, args.hash_tables)]
    exact = [{"exact_first": a, "exact_last": b} for a, b in product(args.exact_first or [0], args.exact_last or [0])]
    own = dict(args.budgets_of)
    for method in own:
        if method not in args.methods:
            raise EvalError(f"--budgets-of {method}: it is not among --methods {','.join(args.methods)}: add it there")
        if method in METHODS and "budget" not in METHODS[method].settings:
            raise EvalError(f"--budgets-of {method}: it has no budget: leave the option out")
    configs = [single(word, base, SHARED) for word in args.also]
    found = expand(base, args.methods, args.budgets, args.estimators, *sizes, routing, args.noise, hashes, exact, own)
    _refuse_what_none_uses(args, {one.method for one in (*found, *configs)})
    return tuple(dict.fromkeys((*found, *configs)))


def _refuse_what_none_uses(args: argparse.Namespace, methods: set[str]) -> None:
    """See that each option of methods is of some method of the run; the others go without it. Raises EvalError."""
    from latent_santa.config import SantaConfig
    from latent_santa.eval.run.conditions import swept_by
    from latent_santa.methods import METHODS

    if methods <= {"dense"}:
        return  # it takes all settings
    for names, used_by in (
        (("draws", "regroup_after", "routing_dtype", "backend", "kmeans_engine"), lambda name: METHODS[name].settings),
        (("noise", "routing", "exact_first", "exact_last", "hash_bits", "hash_tables"), swept_by),
    ):
        for name in names:
            default, given = getattr(SantaConfig(), name), getattr(args, name)
            other = [value for value in (given if isinstance(given, list) else [given]) if value not in (None, default)]
            users = [method for method in METHODS if name in used_by(method)]
            if other and not methods.intersection(users):
                raise EvalError(
                    f"--{name.replace('_', '-')} {other[0]}: of {', '.join(sorted(methods))} none uses it, "
                    f"only {', '.join(users)}: leave the option out, or add such a method"
                )


def at_least(args: argparse.Namespace, **least: int) -> None:
    """See that numbers that were given are not too small; a name is the option's with underscores.

    Raises:
        EvalError: one is; the message names the option, the limit and the number.
    """
    for name, limit in least.items():
        given = getattr(args, name)
        if given is not None and given < limit:
            raise EvalError(f"--{name.replace('_', '-')} must be at least {limit}, got {given}")


def prompt_text(path: Path) -> str:
    """The text of a --prompt-file.

    Raises:
        EvalError: it cannot be read, or is no text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise EvalError(f"--prompt-file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise EvalError(f"--prompt-file {path} is not UTF-8 text: {error}") from error
