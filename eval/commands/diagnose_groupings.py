"""``latent-santa diagnose kl``, ``windows``, ``distances`` and ``jensen``: diagnostics that sample nothing."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from latent_santa.eval.commands import diagnosing, options

if TYPE_CHECKING:
    from latent_santa.config import SantaConfig
    from latent_santa.eval.diagnose.work import Diagnostic


@dataclass(frozen=True)
class Kind:
    """One subcommand: its texts, its defaults and how its diagnostic is made.

    calls: whether the number of decoding calls can be chosen.
    """

    name: str
    about: str
    description: str
    defaults: diagnosing.Defaults
    make: Callable[[SantaConfig], Diagnostic]
    calls: bool = True


def _kl(base: SantaConfig) -> Diagnostic:
    from latent_santa.eval.diagnose.kl import Divergence

    return Divergence(base)


def _windows(base: SantaConfig) -> Diagnostic:
    from latent_santa.eval.diagnose.windows import Windows

    return Windows()


def _distances(base: SantaConfig) -> Diagnostic:
    from latent_santa.eval.diagnose.distances import Distances

    return Distances(base)


def _jensen(base: SantaConfig) -> Diagnostic:
    from latent_santa.eval.diagnose.jensen import Jensen

    return Jensen(base)


KINDS = (
    Kind(
        "kl",
        "Table 1: KL of the routing distribution from dense attention",
        """\
Table 1: KL(p || q) of the routing distribution from dense attention over the prompt (Equation 11), on dense decoding's
own queries. The paper compares teams routed by representatives with clusters routed by mean keys; here every partition
is routed by each key that it has, so that partition and key can be told apart.
""",
        {
            True: {"length": 2048, "tasks": "multikey,fwe,facts", "n": 2, "calls": 8},
            False: {"length": 8192, "tasks": "cwe,niah_single_1,qa_1", "n": 20, "calls": 33},
        },
        _kl,
    ),
    Kind(
        "jensen",
        "Figures 2 and 3: what one key misses of a group's attention mass",
        """\
Figures 2 and 3, with real groups beside constructed ones: the ratio of a group's exact attention mass to the surrogate
that its mean key gives (Equation 2), or its representative, on dense decoding's own queries.
""",
        {
            True: {"length": 2048, "tasks": "multivalue,fwe", "n": 2, "calls": 4},
            False: {"length": 8192, "tasks": "mla3", "n": 10, "calls": 16},
        },
        _jensen,
    ),
    Kind(
        "windows",
        "Table 7: attention mass of the best contiguous windows",
        """\
Table 7: the attention mass that 32 disjoint windows of 16 rows can hold at most, over that of the 512 heaviest rows
(Equation 12), of dense attention at the prompt's last token.
""",
        {
            True: {"length": 4096, "tasks": "multivalue,fwe", "n": 10, "calls": 1},
            False: {"length": 8192, "tasks": "cwe,niah_multivalue", "n": 10, "calls": 1},
        },
        _windows,
        calls=False,
    ),
    Kind(
        "distances",
        "Figure 4: distance of rows from their group's mean",
        """\
Figure 4: the mean Euclidean distance of a row from the mean of its group, for k-means clusters, contiguous chunks and
randomly shuffled chunks of 16 rows. Rows are rotated keys in GQA, content latents in MLA.
""",
        {
            True: {"length": 2048, "tasks": "all", "n": 2, "calls": 1},
            False: {"length": 8192, "tasks": "all", "n": 100, "calls": 1},
        },
        _distances,
        calls=False,
    ),
)


def add_parser(subparsers: Any) -> None:
    """Add the subcommands and their options."""
    for kind in KINDS:
        files = f"Writes {kind.name}.json, {kind.name}.md and pictures. The same command continues a run that stopped."
        example = f"Example: latent-santa diagnose {kind.name} --model builtin:tiny"
        parser = subparsers.add_parser(
            kind.name,
            help=kind.about,
            description=f"{kind.description}\n{files}\n\n{example}",
            formatter_class=options.Help,
        )
        diagnosing.add_options(parser, kind.defaults, kind.calls)
        diagnosing.add_grouping_options(parser)
        parser.set_defaults(run=lambda args, kind=kind: run(args, kind))


def run(args: argparse.Namespace, kind: Kind) -> int:
    """Measure, write the files and show the table."""
    spec, base = diagnosing.start(args, kind.defaults)
    return diagnosing.run(args, kind.make(base), spec, base)
