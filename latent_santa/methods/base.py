"""What a method is: how its settings are checked, how a prompt is grouped, how a step attends, what a row costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ..access import Unit, attended_unit
from ..backends import Backend
from ..prompt_queries import PromptQueries
from ..rows import Rows
from ..step import DecodeStep, Output, Sampling
from ..teams import Teams

if TYPE_CHECKING:
    from ..config import SantaConfig

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
        window: queries of a prompt's last tokens that its rows are grouped by, in :meth:`build_by_queries`.
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
        self, points: Sequence[Tensor], rows: Sequence[Rows], member: Tensor, config: SantaConfig
    ) -> Iterable[Teams | None]:
        """Group a span of prompt rows, for several layers at once.

        Args:
            points: for each layer ``(B, G, N, D)``, what distances are measured on.
            rows: each layer's cache, N rows.
            member: ``(B, N)`` bool, rows to group.
            config: the settings.

        Returns:
            Each layer's team records; None for a method that has none.
        """
        return [None] * len(points)

    def build_by_queries(
        self, queries: Sequence[PromptQueries], rows: Sequence[Rows], member: Tensor, config: SantaConfig
    ) -> Iterable[Teams]:
        """What a method with a ``window`` does in place of :meth:`build`.

        Args:
            queries: of each layer, those of the span's last ``window`` tokens, or of all if it has fewer.
        """
        raise NotImplementedError(f"method {self.name!r} looks at no queries")

    def attend(self, step: DecodeStep, config: SantaConfig, choose: Choose) -> Output:
        """One decoding step of one layer; ``choose`` gives the backend that runs the sampled operator."""
        raise NotImplementedError(f"method {self.name!r} leaves decoding to the model's own attention")

    def full(self, step: DecodeStep, config: SantaConfig) -> bool:
        """Whether the step selects everything there is, which makes it dense attention."""
        return step.teams is not None and step.teams.M <= self.teams_per_head(config)

    def unit(self, rows: Rows, teams: Teams | None, config: SantaConfig) -> Unit:
        """What one counted row costs (Equations 13 and 14)."""
        return attended_unit(rows, teams)
