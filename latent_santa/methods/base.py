"""What a method is: how its settings are checked, how a prompt is grouped, how a step attends, what a row costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ..access import Unit, attended_unit
from ..backends import Backend
from ..probes import PROBES
from ..prompt_queries import PromptQueries
from ..rows import Rows
from ..step import DecodeStep, Output, Sampling
from ..teams import Teams

if TYPE_CHECKING:
    from ..config import SantaConfig

# what regroup_after="auto" is: RULER's answers, of at most 128 tokens, read what they read in the paper; k-means, which
# takes more steps, runs half as often
REGROUP_AFTER = {"contiguous": 128, "kmeans": 256}

Choose = Callable[[DecodeStep, Sampling], Backend]


class Method:
    """One way to attend while decoding. The defaults are those of a method without teams.

    Attributes:
        name: the value of ``SantaConfig.method``.
        about: one line for a table or ``--help``.
        settings: fields of ``SantaConfig`` that change what the method does.
        sampled: False for a method that leaves a decoding call to the model's own attention.
        fixed_shapes: whether a step launches the same kernels on the same shapes whatever its tensors hold, and reads
            none of them on the host, so that a CUDA graph may replay it.
        window: queries of a prompt's last tokens that its rows are grouped by, in :meth:`build_by_queries`; ``EVERY``
            for those of all its tokens.
        apart: whether ``attend`` may be given a share of a sharing group's heads, with the processes that have the
            others (``DecodeStep.peers``). Where not, each process attends with all heads and keeps its own.
    """

    name: str
    about: str
    settings: tuple[str, ...] = ()
    sampled = True
    fixed_shapes = False
    window = 0
    apart = False

    def check(self, config: SantaConfig) -> None:
        """See that the settings go together.

        Raises:
            ValueError: they do not; the message names field, value and rule.
        """

    def teams_per_head(self, config: SantaConfig) -> int:
        """K, what each head selects, before the cap by what there is."""
        return config.budget

    def grouped_by(self, config: SantaConfig) -> tuple[str, ...]:
        """Fields of the settings that the prompt's teams depend on."""
        return ()

    def build(
        self,
        points: Sequence[Tensor],
        rows: Sequence[Rows],
        member: Tensor,
        config: SantaConfig,
        bound: int | None = None,
        parents: list[Tensor] | None = None,
    ) -> Iterable[Teams | None]:
        """Group a span of rows, for several layers at once.

        Args:
            points: for each layer ``(B, G, N, D)``, what distances are measured on.
            rows: each layer's N rows of the span.
            member: ``(B, N)`` bool, rows to group.
            config: the settings.
            bound: parents that no sequence has more of, for a span of generated rows: the host then need not wait for
                the device to learn how many teams there are.
            parents: each layer's, where they were formed before.

        Returns:
            Each layer's team records; None for a method that has none.
        """
        return [None] * len(points)

    def build_by_queries(
        self, queries: Iterable[PromptQueries], rows: Sequence[Rows], member: Tensor, config: SantaConfig
    ) -> Iterable[Teams]:
        """What a method with a ``window`` does instead of :meth:`build`.

        Args:
            queries: of each layer, those of the span's last ``window`` tokens, or of all if it has fewer. Each is made
                when it is asked for: those of a whole prompt are large.
        """
        raise NotImplementedError(f"method {self.name!r} looks at no queries")

    def regroup_after(self, config: SantaConfig) -> int:
        """Rows that the exact suffix holds at most, before generated rows are grouped as well; 0 for no limit."""
        if "regroup_after" not in self.settings or self.parents(config) == "probes":
            return 0  # fingerprints need the queries of a prompt's prefill
        if isinstance(config.regroup_after, int):
            return config.regroup_after
        return max(REGROUP_AFTER[self.parents(config)], config.parent_size)

    def parents(self, config: SantaConfig) -> str:
        """How rows are first grouped: ``"kmeans"``, ``"contiguous"`` or ``"probes"``."""
        return config.parents if "parents" in self.settings else "contiguous"

    def queries(self, config: SantaConfig) -> int:
        """Queries of a prompt's last tokens that its grouping looks at."""
        return PROBES if self.parents(config) == "probes" else self.window

    def per_parent(self, config: SantaConfig) -> int:
        """The most teams of one parent."""
        return config.representatives if "representatives" in self.settings else 1

    def attend(self, step: DecodeStep, config: SantaConfig, choose: Choose) -> Output:
        """One decoding step of one layer; ``choose`` gives the backend that runs the sampled operator."""
        raise NotImplementedError(f"method {self.name!r} leaves decoding to the model's own attention")

    def full(self, step: DecodeStep, config: SantaConfig) -> bool:
        """Whether the step selects everything there is, which makes it dense attention."""
        return step.teams is not None and self.every_team(step.teams, config)

    def every_team(self, teams: Teams, config: SantaConfig) -> bool:
        """Whether K covers every team that there is."""
        return teams.most_teams <= self.teams_per_head(config)

    def unit(self, rows: Rows, teams: Teams | None, config: SantaConfig) -> Unit:
        """What one counted row costs (Equations 13 and 14)."""
        return attended_unit(rows, teams)
