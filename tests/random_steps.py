"""Decoding steps of random sizes through the kernels and their twin; the seed of a case is all that it depends on."""

from __future__ import annotations

import random
from typing import Any

import torch

from latent_santa.kernels import Workspace
from latent_santa.step import DecodeStep, Sampling

from .kernel_cases import ROUNDING, compare, kernels, make_step, poison, twin
from .ties import is_tie

# few of them: each is compiled, while the sizes below are not
KINDS: tuple[dict[str, Any], ...] = (
    {"heads": 4, "dims": (32, 16)},
    {"heads": 16, "dims": (64, 32), "routing_dtype": "int8"},
    {"heads": 6, "dims": (128, 64), "routing_dtype": "int4"},
    {"heads": 33, "dims": (32, 16)},
    {"layout": "gqa", "heads": 3, "groups": 2, "dims": (24,), "values": 20},
    {"layout": "gqa", "heads": 7, "groups": 1, "dims": (64,), "routing_dtype": "int8"},
    {"layout": "gqa", "heads": 1, "groups": 3, "dims": (32,), "routing_dtype": "int4"},
    {"heads": 4, "dims": (32, 16), "summary": "mean"},
    {"layout": "gqa", "heads": 5, "groups": 2, "dims": (32,), "summary": "diagonal"},
    {"heads": 8, "dims": (64, 32), "summary": "isotropic", "routing_dtype": "int8"},
)
# a query in the rows' dtype: with bfloat16 the launches of many heads
MANY: tuple[dict[str, Any], ...] = (
    {"heads": 40, "dims": (64, 32)},
    {"heads": 64, "dims": (64, 32), "summary": "mean"},
    {"heads": 128, "dims": (512, 64), "summary": "mean"},
    {"heads": 128, "dims": (64, 32), "routing_dtype": "int8", "summary": "diagonal"},
    {"heads": 200, "dims": (32, 16)},
)
BLOCKS: dict[str, Any] = {"attend_rows": 16, "lanes": 64, "shares": 8, "combine_shares": 8}
TOLERANCES = {torch.float32: ROUNDING, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def random_case(seed: int, device: str, longest: int = 600, many: bool = False) -> tuple[DecodeStep, Sampling]:
    """The step and the sampling of a seed; sizes are smaller for a shorter ``longest`` prompt. ``many``: of more than
    32 heads."""
    draw = random.Random(seed)
    kind = draw.choice(MANY if many else KINDS)
    dtype = torch.bfloat16 if device != "cpu" and draw.random() < 0.5 else torch.float16
    lengths = [draw.randint(1, longest) for _ in range(draw.randint(1, 3))]
    suffix = draw.choice((0, 1, draw.randint(2, 40)))
    parent_size, representatives = draw.choice(((16, 4), (16, 4), (8, 1), (16, 16), (5, 2)))
    step = make_step(
        **kind, lengths=lengths, suffix=suffix, hidden=draw.randint(0, suffix), dtype=dtype, parent_size=parent_size,
        representatives=representatives, device=device, scale=draw.choice((0.02, 0.1, 0.3)), seed=seed,
        spare=draw.choice((0, 7)), query_dtype=dtype if many else torch.float32,
    )  # fmt: skip
    k = draw.choice((1, 2, draw.randint(3, 20), 40))
    parents = draw.choice((1, 3, draw.randint(4, 20))) if "summary" in kind else None
    estimator, noise = draw.choice(("per_head", "pooled")), draw.choice(("independent", "shared"))
    return step, Sampling(k, estimator, noise, parents)


def check_case(seed: int, device: str, longest: int = 600, many: bool = False) -> None:
    """The kernels against their twin, twice and bitwise equal, from scratch memory full of NaN.

    Raises:
        AssertionError: they differ; the message has the seed.
    """
    step, sampling = random_case(seed, device, longest, many)
    options = (sampling.k, sampling.estimator, sampling.noise, sampling.parents)
    space = Workspace({} if many else BLOCKS | {"by_runs": seed % 2 == 0})
    try:
        kernels(step, options[0], space, *options[1:])
        poison(space)
        got = kernels(step, options[0], space, *options[1:])
        poison(space)
        again = kernels(step, options[0], space, *options[1:])
        assert torch.equal(got.out, again.out) and torch.equal(got.lse, again.lse), "not repeatable"
        if not is_tie(step, sampling):
            compare(got, twin(step, *options), TOLERANCES[step.query[0].dtype])
    except Exception as error:
        sizes = f"{sampling}, {step.heads} heads, batch {step.batch}, {step.rows.length} rows, {step.rows.values.dtype}"
        raise AssertionError(f"seed {seed} on {device}, longest {longest} ({sizes}): {error}") from error
