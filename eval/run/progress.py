"""Progress of long work: a bar on a terminal, elsewhere a line every half minute."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

SECONDS_BETWEEN_LINES = 30.0
FOR_COUNTS = 45  # columns for bar, count and times, which a long note would push out


class Progress:
    """Counts steps of several stages, as a context manager; `quiet` (for other processes than the first) is silent."""

    def __init__(self, console: Console, quiet: bool = False, every: float = SECONDS_BETWEEN_LINES) -> None:
        self.console = console
        self.quiet = quiet
        self.every = every
        self.bar: Bar | None = None
        if console.is_terminal and not quiet:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=10),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
            )
            self.bar = Bar(*columns, console=console)
        self._stage = -1
        self._label, self._total, self._done, self._note = "", 0, 0, ""
        self._last = time.monotonic()

    def __enter__(self) -> Progress:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar:
            self.bar.stop()

    def stage(self, label: str, total: int, done: int = 0) -> None:
        """Begin a stage of `total` steps, `done` of which were done before."""
        self._label, self._total, self._done, self._note = label, total, done, ""
        if self.bar:
            self._stage = self.bar.add_task(label, total=total, completed=done, note="")

    def step(self, note: str = "") -> None:
        """One step is done; `note` is what to show beside the count."""
        self._done += 1
        self._note = note or self._note
        if self.bar:
            room = self.console.width - FOR_COUNTS - len(self._label)
            self.bar.update(self._stage, advance=1, note=self._note[: max(0, room)])  # type: ignore[arg-type]
        elif not self.quiet and time.monotonic() - self._last >= self.every:
            self._line()

    def end_stage(self) -> None:
        """Close the stage: its last state stays as a line, its bar goes."""
        if self.bar:
            self.bar.remove_task(self._stage)  # type: ignore[arg-type]
        if not self.quiet:
            self._line()

    def _line(self) -> None:
        self._last = time.monotonic()
        text = f"{self._label}: {self._done}/{self._total}" + (f", {self._note}" if self._note else "")
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)
