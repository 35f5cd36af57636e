"""Which settings read least and keep a share of dense decoding, measured on prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.table import Table

from latent_santa.config import SantaConfig
from latent_santa.eval.report.tables import plain_table
from latent_santa.eval.run.comparison import Outcome, run_condition
from latent_santa.eval.run.conditions import label, name, swept
from latent_santa.eval.run.scoring import score
from latent_santa.eval.sources.samples import Sample


@dataclass(frozen=True)
class Wanted:
    """A prompt: token ids, cap on new tokens, and the sample whose answers score it; None for a prompt of one's own."""

    ids: list[int]
    max_new_tokens: int
    sample: Sample | None = None


@dataclass
class Candidate:
    """What settings kept and read over all prompts.

    kept    what each prompt's answer is worth: its score, or the share of dense's answer before the first other token
    of      what dense's answer is worth: its score, or 1
    read    rows read (numerators of Equation 13 or 14), and `dense` those that dense decoding reads
    """

    config: SantaConfig
    kept: list[float] = field(default_factory=list)
    of: list[float] = field(default_factory=list)
    read: int = 0
    dense: int = 0

    @property
    def share(self) -> float | None:
        """Percent of dense that is kept; None if dense has nothing to keep."""
        return 100 * sum(self.kept) / sum(self.of) if sum(self.of) else None

    @property
    def percent(self) -> float | None:
        """Rows read in percent of dense; None without a sampled call."""
        return 100 * self.read / self.dense if self.dense else None


def measure(
    santa: Any,
    tokenizer: Any,
    prompts: Sequence[Wanted],
    dense: SantaConfig,
    asked: Sequence[SantaConfig],
    step: Callable[[], None] = lambda: None,
) -> list[Candidate]:
    """Every setting on every prompt, which is prefilled once. The handle's model decodes greedily."""
    found = [Candidate(config) for config in asked]
    device = santa.model.get_input_embeddings().weight.device
    for prompt in prompts:
        prefilled = santa.prefill(torch.tensor([prompt.ids], device=device))

        def outcome(
            config: SantaConfig, base: Outcome | None, prompt: Wanted = prompt, made: Any = prefilled
        ) -> Outcome:
            return run_condition(santa, tokenizer, made, config, prompt.max_new_tokens, base, shadow=False)

        plain = outcome(dense, None)
        for candidate in found:
            sampled = outcome(candidate.config, plain)
            candidate.kept.append(_worth(sampled, prompt.sample))
            candidate.of.append(_worth(plain, prompt.sample))
            candidate.read += sampled.rows["numerator"]
            candidate.dense += sampled.rows["denominator"]
        step()
    return found


def _worth(outcome: Outcome, sample: Sample | None) -> float:
    if sample is None:
        return outcome.agreement / 100
    return score(outcome.answer, sample.references, sample.metric)


def best(found: Sequence[Candidate], keep: float) -> Candidate | None:
    """The one that reads fewest rows of those that keep `keep` percent; None if none does."""
    enough = [c for c in found if c.share is not None and c.percent is not None and c.share >= keep]
    return min(enough, key=lambda c: c.percent or 0.0, default=None)


def table(found: Sequence[Candidate], own: bool, prompts: int) -> Table:
    """Every setting with what it keeps and reads, fewest rows first; it fits 80 columns."""
    what = "answer\nkept" if own else "score\nkept"
    shown = plain_table(f"{prompts} prompts; shares of dense decoding", ("Setting", "S", what, "rows\nread"))
    for c in sorted(found, key=lambda c: c.percent or 0.0):
        shares = ("-" if value is None else f"{value:.1f} %" for value in (c.share, c.percent))
        shown.add_row(name(c.config), str(swept(c.config)["budget"]), *shares)
    return shown


def advice(found: Sequence[Candidate], chosen: Candidate | None, keep: float, prompts: int) -> list[str]:
    """What to take, and how far to trust it."""
    if chosen is not None:
        return [
            f"Fewest rows that keep {keep:g} %: {label(chosen.config)}, which keeps {chosen.share:.1f} % and reads "
            f"{chosen.percent:.1f} %.",
            f"It was chosen on the {prompts} prompts that it was measured on: try it on others before you rely on it.",
        ]
    known = [c for c in found if c.share is not None]
    if not known:
        return ["Dense decoding scores 0 on these prompts, so there is nothing to keep: give others."]
    most = max(known, key=lambda c: c.share or 0.0)
    return [f"No setting keeps {keep:g} %; {label(most.config)} keeps most, {most.share:.1f} %. Give larger --budgets."]


def patch_line(config: SantaConfig) -> str:
    """Python that patches a model with these settings: those that the method uses and that are not the defaults."""
    default = SantaConfig()
    changed = {field: value for field, value in config.used().items() if value != getattr(default, field)}
    arguments = ["model", *(f"{field}={value!r}" for field, value in changed.items())]
    return f"santa = latent_santa.patch({', '.join(arguments)})"
