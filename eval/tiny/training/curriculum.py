"""What the training data looks like as training goes on (progress from 0 to 1)."""

from __future__ import annotations

from dataclasses import dataclass

# (up to this progress, {sequence length in tokens: weight})
LENGTHS: tuple[tuple[float, dict[int, float]], ...] = (
    (0.02, {136: 1}),
    (0.05, {136: 0.3, 272: 0.7}),
    (0.12, {272: 0.5, 544: 0.3, 1088: 0.2}),
    (0.28, {272: 0.2, 544: 0.2, 1088: 0.35, 2176: 0.25}),
    (0.50, {272: 0.1, 544: 0.1, 1088: 0.3, 2176: 0.3, 4352: 0.2}),
    (0.62, {272: 0.05, 544: 0.1, 1088: 0.25, 2176: 0.3, 4352: 0.3}),
    (1.01, {272: 0.05, 544: 0.1, 1088: 0.25, 2176: 0.28, 4352: 0.2, 8704: 0.12}),
)
# (up to this progress, share of warm-up samples among sequences of at most 544 tokens)
PAIRS = ((0.02, 0.4), (0.05, 0.2), (0.12, 0.1), (1.01, 0.03))
# Harder forms start once plain retrieval stands, and reach their full share later.
RAMP = (0.06, 0.30)


@dataclass(frozen=True)
class Mix:
    """Shares of the data's forms.

    lengths  weight of each sequence length
    pairs    share of warm-up samples at short lengths
    apart    share of samples whose keys and values are apart; gap: most phrases between them
    made, english  shares of samples whose keys are made-up or English words; the other keys are listed
    """

    lengths: dict[int, float]
    pairs: float
    apart: float
    gap: int
    made: float
    english: float


def mix(progress: float, longest: int | None = None) -> Mix:
    """The mixture at a progress; `longest` leaves out longer sequences (the shortest always stays)."""
    lengths = next(weights for limit, weights in LENGTHS if progress < limit)
    if longest is not None:
        kept = {length: weight for length, weight in lengths.items() if length <= longest}
        lengths = kept or {min(LENGTHS[0][1]): 1.0}
    ramp = min(1.0, max(0.0, (progress - RAMP[0]) / (RAMP[1] - RAMP[0])))
    return Mix(
        lengths=lengths,
        pairs=next(share for limit, share in PAIRS if progress < limit),
        apart=0.55 * ramp,
        gap=1 + round(2 * ramp),
        made=0.30 * ramp,
        english=0.15 * ramp,
    )
