"""The paper's algorithms and equations in loops and float64: what to read first, and what the fast code is tested on.

Every function names the algorithm and its lines, or the equation. Nothing here shares code with the fast functions, nor
does the noise beside it (:mod:`latent_santa.naive_noise`); only numpy is needed. Row, team and head numbers start at 0.

Symbols: N rows, D key dimensions, V value dimensions, M teams, H query heads of one sharing group. k_i, v_i are a row's
key and value; T_g is a team, l_g its representative's key, n_g its size; E is the exact suffix.

MLA needs no functions of its own: a key row is the content latent beside the rotary key, a value row is the content
latent, and a query is the absorbed content query beside its rotary part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


class Team(NamedTuple):
    """T_g, its rows in rising order, and the row whose prefill key is l_g."""

    members: list[int]
    representative: int


# ---- Parents: Algorithms 3 and 4 ----


def requested_parents(n: int, parent_size: int) -> int:
    """Algorithm 3, line 3: M_parent = min(N, max(2, floor(N / P)))."""
    return min(n, max(2, n // parent_size))


def kmeans_parents(keys: Any, parent_size: int, minibatch_kmeans: Callable[[Array, int], Any]) -> list[list[int]]:
    """Algorithm 3: keys (N, D), P, and a function from keys and M_parent to that many centers (M_parent, D)."""
    k = np.asarray(keys, dtype=np.float64)
    M_parent = requested_parents(len(k), parent_size)  # line 3
    mu = np.asarray(minibatch_kmeans(k, M_parent), dtype=np.float64)  # line 4
    b = []
    for k_i in k:  # line 5; index() finds the first of equals
        distances = [squared_distance(k_i, mu_u) for mu_u in mu]
        b.append(distances.index(min(distances)))
    return parents_from_labels(b)


def parents_from_labels(b: Iterable[int]) -> list[list[int]]:
    """Algorithm 3, line 6: labels b (N,) to parents in the order of their centers, empty ones omitted."""
    parents: dict[int, list[int]] = {}
    for i, u in enumerate(b):
        parents.setdefault(int(u), []).append(i)
    return [parents[u] for u in sorted(parents)]


def contiguous_parents(n: int, parent_size: int) -> list[list[int]]:
    """Algorithm 4: N and P to consecutive spans, the last one possibly short."""
    M_parent = math.ceil(n / parent_size)  # line 3
    return [list(range(u * parent_size, min((u + 1) * parent_size, n))) for u in range(M_parent)]  # line 4


# ---- Teams: Algorithm 2 ----


def squared_distance(a: Array, b: Array) -> float:
    """||a - b||^2 of two (D,) vectors, from the differences themselves: exact duplicates are at exactly 0."""
    difference = a - b
    return float(np.dot(difference, difference))


def mean_key(keys: Array, rows: Sequence[int]) -> Array:
    """Arithmetic mean (D,) of the given rows of keys (N, D)."""
    return np.asarray(sum((keys[i] for i in rows), np.zeros(keys.shape[1])) / len(rows))


def build_teams(keys: Any, parents: Sequence[Sequence[int]], representatives: int) -> list[Team]:
    """Algorithm 2: keys (N, D), parents that partition the rows, R; teams in the order of appending.

    Ties of representatives go to the lowest row, ties of rows to the earliest representative, and a representative
    always owns its row. In MLA, ``keys`` are the content latents alone (Appendix F).
    """
    k = np.asarray(keys, dtype=np.float64)
    teams = []  # line 3
    for C in parents:  # line 4
        C = sorted(C)  # min(), max() and index() take the first of equals: rising order is the paper's tie rule
        r, mu = min(representatives, len(C)), mean_key(k, C)  # line 5
        L = [min(C, key=lambda i: squared_distance(k[i], mu))]  # line 6: j_1
        for _ in range(1, r):  # line 7
            rest = [i for i in C if i not in L]
            j_u = max(rest, key=lambda i: min(squared_distance(k[i], k[j]) for j in L))  # line 8
            L.append(j_u)  # line 9
        b = {}
        for i in C:  # line 11
            distances = [squared_distance(k[i], k[j]) for j in L]
            b[i] = distances.index(min(distances))  # line 12
        for u, j_u in enumerate(L):  # line 14: a representative owns its row
            b[j_u] = u
        for u, j_u in enumerate(L):  # line 15
            teams.append(Team([i for i in C if b[i] == u], j_u))  # line 16
    return teams  # line 19


def centroid_groups(keys: Any, parents: Sequence[Sequence[int]]) -> list[tuple[list[int], Array]]:
    """Appendix B.2: each parent is one group, routed by the mean (D,) of its rows of keys (N, D).

    The groups serve as ``teams`` of :func:`attention_group` and the means as its ``routing_keys``; K is
    :func:`centroid_budget`.
    """
    k = np.asarray(keys, dtype=np.float64)
    return [(sorted(C), mean_key(k, C)) for C in parents]


def team_budget(budget: int, parent_size: int, representatives: int, teams: int) -> int:
    """Equation 5: K = min(M, S / (P / R)), both quotients integral."""
    if parent_size % representatives or budget % (parent_size // representatives):
        raise ValueError("P must be divisible by R and S by P / R")
    return min(teams, budget // (parent_size // representatives))


def centroid_budget(budget: int, group_size: int, groups: int) -> int:
    """Appendix B.2: floor(S / B) groups, no more than there are."""
    return min(groups, budget // group_size)


# ---- Decoding: Algorithm 1 ----


class HeadOutput(NamedTuple):
    """Algorithm 1: ``U`` (V,) and ``Z``, both times exp(-shift); ``o`` (V,); the set S; team -> log c_g."""

    U: Array
    Z: float
    o: Array
    selected: set[int]
    log_corrections: dict[int, float]


class Counts(NamedTuple):
    """Rows of one layer, sharing group and decoding step: m_c, u_c, e_c, N_c of Equation 13.

    In Equation 14, r_c is ``routing``, the union of all I_{c,h} is ``union`` + ``suffix``, and d_c is ``dense``.
    """

    routing: int
    union: int
    suffix: int
    dense: int


class GroupOutput(NamedTuple):
    """A sharing group: ``outputs`` (H, V), ``U`` (H, V) and ``Z`` (H,) times exp(-shift_h), ``shift`` and log Z (H,).

    ``selected[h]`` are the teams that head h itself selected; ``log_corrections[h]`` maps every team that head h used
    to log c_g (pooled: the same map, over the union, for every head).
    """

    outputs: Array
    U: Array
    Z: Array
    shift: Array
    lse: Array
    selected: list[set[int]]
    log_corrections: list[dict[int, float]]
    counts: Counts


def score(query: Any, key: Any, scale: float) -> float:
    """s_i = scale * q.k_i of two (D,) vectors."""
    return float(scale) * float(np.dot(np.asarray(query, dtype=np.float64), np.asarray(key, dtype=np.float64)))


def routing_scores(query: Any, teams: Sequence[Any], routing_keys: Any, scale: float) -> list[float]:
    """Equation 3: phi_g = log n_g + scale * q.l_g, (M,)."""
    return [math.log(len(team[0])) + score(query, l_g, scale) for team, l_g in zip(teams, routing_keys, strict=True)]


def select(phi: Any, noise: Any, k: int) -> tuple[set[int], float, float]:
    """Algorithm 1, lines 8-10: S, tau, and the K-th largest perturbed score; phi and noise are (M,).

    Equal scores, of probability zero, go to the lower team. K >= M selects every team; then tau is -inf, and so is the
    K-th largest where there is none.
    """
    Y = [float(p) + float(G_g) for p, G_g in zip(phi, noise, strict=True)]
    order = sorted(range(len(Y)), key=lambda g: (-Y[g], g))
    tau = Y[order[k]] if k < len(order) else -math.inf
    kth = Y[order[k - 1]] if 1 <= k <= len(order) else -math.inf
    return set(order[:k]), tau, kth


def log_correction(phi: float, tau: float) -> float:
    """Equation 7: log c_g = log(1 - exp(-exp(phi - tau))), 0 for tau = -inf, accurate in both tails."""
    x = min(phi - tau, 700.0)
    if x < -40.0:  # 1 - exp(-e^x) = e^x (1 - e^x / 2 + ...)
        return x
    e = math.exp(x)
    return math.log(-math.expm1(-e)) if e < 0.7 else math.log1p(-math.exp(-e))


def row_log_weights(teams: Sequence[Any], log_c: dict[int, float], suffix: Sequence[int]) -> dict[int, float]:
    """Algorithm 1, line 13: the rows I, each with the log of its factor in lines 17-18: 0 in E, -log c_g in T_g."""
    rows = [(i, 0.0) for i in suffix] + [(i, -log_c[g]) for g in log_c for i in teams[g][0]]
    assert len(dict(rows)) == len(rows), "teams and suffix overlap"
    return dict(rows)


def weighted_sums(
    query: Any, keys: Any, values: Any, log_weights: dict[int, float], scale: float, shift: float
) -> tuple[Array, float]:
    """Algorithm 1, lines 14-18: U (V,) and Z over the given rows, both times exp(-shift)."""
    U, Z = np.zeros(len(values[0]), dtype=np.float64), 0.0
    for i, log_weight in log_weights.items():  # line 14
        a_i = math.exp(score(query, keys[i], scale) + log_weight - shift)  # line 15, with 1 / c_g
        U = U + a_i * np.asarray(values[i], dtype=np.float64)  # line 17
        Z += a_i  # line 18
    return U, Z


def attention_head(
    query: Any, keys: Any, values: Any, teams: Sequence[Any], routing_keys: Any, suffix: Sequence[int],
    scale: float, k: int, noise: Sequence[float], shift: float = 0.0,
) -> HeadOutput:  # fmt: skip
    """Algorithm 1: q (D,), current k (N, D) and v (N, V), teams (T_g first), their l (M, D), E, K and noise G (M,).

    ``U`` and ``Z`` come times exp(-shift), where shift must not depend on the draws; ``o`` does not depend on it.
    """
    M = len(teams)
    K = min(k, M)  # line 3
    if K == M:  # line 4
        log_c = dict.fromkeys(range(M), 0.0)  # line 5: S is every team, c_g = 1
    else:
        phi = routing_scores(query, teams, routing_keys, scale)  # line 7
        S, tau, _ = select(phi, noise, K)  # lines 8-10
        log_c = {g: log_correction(phi[g], tau) for g in sorted(S)}  # line 11
    rows = row_log_weights(teams, log_c, suffix)  # line 13
    U, Z = weighted_sums(query, keys, values, rows, scale, shift)  # lines 14-18
    return HeadOutput(U, Z, U / Z, set(log_c), log_c)  # line 19


def pooled_log_correction(phi: Sequence[float], thresholds: Sequence[float], shared: bool) -> float:
    """log P(team g is in the union | all other scores), from phi_{h,g} and T_{h,-g}, both (H,).

    Independent noise: 1 - prod_h exp(-exp(phi_h - T_h)), a sum of exponentials. Shared noise: g is in the union when
    its one draw exceeds min_h(T_h - phi_h), so 1 - exp(-exp(max_h(phi_h - T_h))).
    """
    gaps = [p - t for p, t in zip(phi, thresholds, strict=True)]
    top = max(gaps)
    if shared or top == math.inf:
        return log_correction(top, 0.0)
    return log_correction(top + math.log(sum(math.exp(gap - top) for gap in gaps)), 0.0)


def pooled_corrections(phi: Any, noise: Any, k: int, shared: bool) -> tuple[list[set[int]], dict[int, float]]:
    """The pooled estimator's part of Algorithm 1, lines 8-11: phi and noise (H, M), K < M.

    Every head uses every team of the union, so c_g is the union's inclusion probability.

    Returns:
        Each head's S, and team of the union -> log c_g.
    """
    heads = range(len(phi))
    picks = [select(phi[h], noise[h], k) for h in heads]
    log_c = {}
    for g in sorted(set().union(*(S for S, _, _ in picks))):
        # T_{h,-g}: without g, the K-th largest is the (K+1)-st of all if g was above it, else still the K-th of all
        thresholds = [tau if g in S else kth for S, tau, kth in picks]
        log_c[g] = pooled_log_correction([phi[h][g] for h in heads], thresholds, shared)
    return [S for S, _, _ in picks], log_c


def attention_group(
    queries: Any, keys: Any, values: Any, teams: Sequence[Any], routing_keys: Any, suffix: Sequence[int],
    scale: float, k: int, noise: Any, estimator: str = "per_head", shared: bool = False,
) -> GroupOutput:  # fmt: skip
    """Algorithm 1 for the heads of one sharing group: q (H, D), k (N, D), v (N, V), l (M, D), G (H, M).

    Args:
        keys, values: the current cache; rows in no team and not in the suffix are not visible.
        teams: T_g first in each (:class:`Team`, or :func:`centroid_groups`).
        routing_keys: the frozen prefill copies.
        estimator: ``"per_head"`` (the paper) or ``"pooled"``.
        shared: whether the H rows of noise are one draw; matters for the pooled correction.
    """
    visible = [i for team in teams for i in team[0]] + list(suffix)
    heads, everything = range(len(queries)), k >= len(teams)
    shift = np.array([max(score(queries[h], keys[i], scale) for i in visible) for h in heads])
    if estimator not in ("per_head", "pooled"):
        raise ValueError(f"unknown estimator {estimator!r}")
    results = []
    if estimator == "pooled" and not everything:
        assert not shared or all(list(noise[h]) == list(noise[0]) for h in heads), "shared noise differs between heads"
        phi = [routing_scores(query, teams, routing_keys, scale) for query in queries]
        selected, log_c = pooled_corrections(phi, noise, k, shared)
        rows = row_log_weights(teams, log_c, suffix)
        for h in heads:
            U, Z = weighted_sums(queries[h], keys, values, rows, scale, shift[h])
            results.append(HeadOutput(U, Z, U / Z, selected[h], log_c))
    else:
        for h in heads:
            args = (queries[h], keys, values, teams, routing_keys, suffix, scale, k, noise[h], shift[h])
            results.append(attention_head(*args))
    union = {i for head in results for g in head.selected for i in teams[g][0]}
    masses = np.array([head.Z for head in results])
    return GroupOutput(
        outputs=np.array([head.o for head in results]),
        U=np.array([head.U for head in results]),
        Z=masses,
        shift=shift,
        lse=np.log(masses) + shift,
        selected=[head.selected for head in results],
        log_corrections=[head.log_corrections for head in results],
        counts=Counts(0 if everything else len(teams), len(union), len(suffix), len(visible)),
    )


# ---- Baselines ----


def dense(queries: Any, keys: Any, values: Any, scale: float) -> Array:
    """Equation 1: queries (H, D) over all given keys (N, D) and values (N, V); outputs (H, V)."""
    outputs = []
    for query in queries:
        shift = max(score(query, key, scale) for key in keys)
        U, Z = weighted_sums(query, keys, values, dict.fromkeys(range(len(keys)), 0.0), scale, shift)
        outputs.append(U / Z)
    return np.array(outputs)


def gumbel_rows(
    queries: Any, keys: Any, values: Any, prompt: Sequence[int], suffix: Sequence[int],
    scale: float, budget: int, noise: Any, estimator: str = "per_head", shared: bool = False,
) -> GroupOutput:  # fmt: skip
    """SANTA++ whose every prompt row is a team, routed by its exact score in the current cache; K = S rows.

    Shapes as in :func:`attention_group`, noise (H, len(prompt)), team g being row prompt[g]. ``counts.routing`` is the
    scan of all visible keys, whatever the budget; ``counts.union`` are the distinct sampled rows.
    """
    teams = [Team([i], i) for i in prompt]
    exact = [keys[i] for i in prompt]
    result = attention_group(queries, keys, values, teams, exact, suffix, scale, budget, noise, estimator, shared)
    return result._replace(counts=result.counts._replace(routing=result.counts.dense))


def santa(queries: Any, keys: Any, values: Any, uniforms: Any, scale: float) -> tuple[Array, Counts]:
    """SANTA (Lee et al., 2026): S draws with replacement from the attention weights, the plain mean of their values.

    Args:
        queries, keys, values: (H, D), (N, D) and (N, V); every row is visible, and there is no exact suffix.
        uniforms: (H, S) in [0, 1): independent draws, or :func:`systematic`.

    Returns:
        Outputs (H, V), and counts: the scan of N keys, and the distinct rows that any head of the group drew.
    """
    outputs, drawn = [], set()
    for query, us in zip(queries, uniforms, strict=True):
        s = [score(query, key, scale) for key in keys]
        weights = [math.exp(s_i - max(s)) for s_i in s]
        cumulated = np.cumsum(weights)
        total = np.zeros(len(values[0]))
        for u in us:  # row i covers the stretch of [0, Z) from the sum before its weight to the sum with it
            i = next(i for i, upper in enumerate(cumulated) if u * cumulated[-1] < upper)
            total = total + np.asarray(values[i], dtype=np.float64)
            drawn.add(i)
        outputs.append(total / len(us))
    return np.array(outputs), Counts(len(keys), len(drawn), 0, len(keys))


def systematic(u: float, draws: int) -> list[float]:
    """Systematic sampling: S positions (i + u) / S from one uniform draw."""
    return [(i + u) / draws for i in range(draws)]


# ---- Rows read: Equations 13 and 14 ----


def access_gqa(calls: Iterable[Sequence[int]], santa: bool = False) -> float:
    """Equation 13 in percent, from the :class:`Counts` of steps (layer, KV head, token).

    After a scan of every key (SANTA, Appendix C.1), m_c is N_c keys and each sampled or suffix row is one value more.
    """
    numerator = denominator = 0
    for m_c, u_c, e_c, N_c in calls:
        numerator += m_c + (1 if santa else 2) * (u_c + e_c)
        denominator += 2 * N_c
    return 100.0 * numerator / denominator


def access_mla(calls: Iterable[Sequence[int]]) -> float:
    """Equation 14 in percent, from the :class:`Counts` of steps (layer, token): shared latent rows."""
    counts = list(calls)
    return 100.0 * sum(r_c + u_c + e_c for r_c, u_c, e_c, _ in counts) / sum(d_c for _, _, _, d_c in counts)
