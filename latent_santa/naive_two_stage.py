"""Two-stage routing in loops and float64: the reference of :mod:`latent_santa.two_stage`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .naive import (
    Array,
    Counts,
    log_correction,
    pooled_corrections,
    routing_scores,
    row_log_weights,
    score,
    select,
    weighted_sums,
)

# added to the layer in the noise counter of parents, so that they draw other noise than teams
PARENTS = 1 << 31


class Stage(NamedTuple):
    """The outcome of one stage: what each head selected, and item -> log c for what it may use."""

    selected: list[set[int]]
    log_c: list[dict[int, float]]


class TwoStageOutput(NamedTuple):
    """U (H, V) and Z (H,), both times exp(-shift) per head, U / Z, and counts; parents are counted once per vector."""

    U: Array
    Z: Array
    outputs: Array
    counts: Counts
    parents: Stage
    teams: list[dict[int, float]]


def delta(query: Any, spread: Any, summary: str, scale: float) -> float:
    """Half the variance of a parent's scores if its keys were Gaussian; spread is one entry per key part.

    Args:
        query: (D_1,), (D_2,), ...: the query's parts.
        spread: per part the mean squared distance (``"isotropic"``) or the variances (``"diagonal"``).
    """
    if summary == "mean":
        return 0.0
    total = 0.0
    for q, part in zip(query, spread, strict=True):
        if summary == "isotropic":
            total += sum(x * x for x in q) * float(part) / len(q)
        else:
            total += sum(x * x * float(v) for x, v in zip(q, part, strict=True))
    return scale**2 * total / 2


def summarise(rows: Sequence[Any], summary: str) -> tuple[list[Array], list[Any]]:
    """mu_p and the spread of a parent's keys, per key part: rows is a list of (n, D_i) arrays."""
    means = [np.mean(part, axis=0) for part in rows]
    if summary == "mean":
        return means, []
    squares = [(np.asarray(part) - mean) ** 2 for part, mean in zip(rows, means, strict=True)]
    if summary == "isotropic":
        return means, [float(square.sum(-1).mean()) for square in squares]
    return means, [square.mean(0) for square in squares]


def stage(phi: Any, noise: Any, k: int, members: Sequence[set[int]], estimator: str, shared: bool) -> Stage:
    """One Gumbel-top-K stage over the items that each head may select.

    Args:
        phi, noise: (H, M).
        members: for each head the items it may select.
    """
    heads = range(len(phi))
    everything = set().union(*members)
    if len(everything) <= k:
        return Stage([set(m) for m in members], [dict.fromkeys(sorted(m), 0.0) for m in members])
    if estimator == "pooled":
        items = sorted(everything)
        part = [[phi[h][i] for i in items] for h in heads]
        draws = [[noise[h][i] for i in items] for h in heads]
        selected, log_c = pooled_corrections(part, draws, k, shared)
        named = {items[i]: c for i, c in log_c.items()}
        return Stage([{items[i] for i in S} for S in selected], [named for _ in heads])
    found = Stage([], [])
    for h in heads:
        items = sorted(members[h])
        S, tau, _ = select([phi[h][i] for i in items], [noise[h][i] for i in items], k)
        found.selected.append({items[i] for i in S})
        found.log_c.append({items[i]: log_correction(phi[h][items[i]], tau) for i in sorted(S)})
    return found


def two_stage_group(
    queries: Any, keys: Any, values: Any, teams: Sequence[Any], routing_keys: Any, parents: Sequence[Sequence[int]],
    parent_scores: Any, suffix: Sequence[int], scale: float, k1: int, k2: int, parent_noise: Any, noise: Any,
    estimator: str = "per_head", shared: bool = False, vectors: int = 1,
) -> TwoStageOutput:  # fmt: skip
    """Both stages for the heads of one sharing group: q (H, D), k (N, D), v (N, V), l (M, D).

    Args:
        parents: the teams of each parent.
        parent_scores: (H, C), phi_p with its delta.
        parent_noise, noise: Gumbel draws (H, C) and (H, M).
        vectors: vectors that scoring a parent reads.
    """
    heads = range(len(queries))
    first = stage(parent_scores, parent_noise, k1, [set(range(len(parents)))] * len(queries), estimator, shared)
    owner = {g: p for p, members in enumerate(parents) for g in members}
    open_teams = [{g for p in log_c for g in parents[p]} for log_c in first.log_c]
    scored = len(set().union(*open_teams))
    log_mass = [routing_scores(query, teams, routing_keys, scale) for query in queries]
    psi = [[log_mass[h][g] - first.log_c[h].get(owner[g], math.inf) for g in range(len(teams))] for h in heads]
    second = stage(psi, noise, k2, open_teams, estimator, shared)
    visible = [i for team in teams for i in team[0]] + list(suffix)
    U, Z, log_cs, union = [], [], [], set()
    for h in heads:
        log_c = {g: c + first.log_c[h][owner[g]] for g, c in second.log_c[h].items()}
        shift = max(score(queries[h], keys[i], scale) for i in visible)
        sums = weighted_sums(queries[h], keys, values, row_log_weights(teams, log_c, suffix), scale, shift)
        U.append(sums[0])
        Z.append(sums[1])
        log_cs.append(log_c)
        union |= {i for g in log_c for i in teams[g][0]}
    routing = (vectors * len(parents) if len(parents) > k1 else 0) + (scored if scored > k2 else 0)
    counts = Counts(routing, len(union), len(suffix), len(visible))
    masses = np.array(Z)
    return TwoStageOutput(np.array(U), masses, np.array(U) / masses[:, None], counts, first, log_cs)
