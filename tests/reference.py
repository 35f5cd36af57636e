"""SANTA++ in float64 and plain loops, written from the paper alone: what the implementation is tested against.

Indices are 0-based. N rows, D key dims, V value dims, M teams, H query heads of one sharing group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
MASK32 = 0xFFFFFFFF

# (counter, key, output), the known answers published with Random123 for philox4x32, 10 rounds.
PHILOX_KNOWN_ANSWERS = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((MASK32,) * 4, (MASK32,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
)  # fmt: skip


class Team(NamedTuple):
    """One team: its row indices, increasing, and the row index of its representative."""

    members: list[int]
    representative: int


class Counts(NamedTuple):
    """Row counts of one layer, sharing group and decoding call: m_c, u_c, e_c, N_c of Equation 13; SANTA: see there."""

    routing: int
    union: int
    suffix: int
    dense: int


class HeadOutput(NamedTuple):
    """Algorithm 1: `U` (V,) and `Z`, both times exp(-shift); `o` (V,); teams selected; team -> log c_g."""

    U: Array
    Z: float
    o: Array
    selected: set[int]
    log_corrections: dict[int, float]


class GroupOutput(NamedTuple):
    """A sharing group: `outputs` (H, V), `U` (H, V) and `Z` (H,) times exp(-shift_h), `shift` (H,), log `Z` `lse` (H,).

    `selected[h]` are the teams head h itself selected; `log_corrections[h]` maps every team head h used to log c_g
    (pooled: the same map, over the union, for every head).
    """

    outputs: Array
    U: Array
    Z: Array
    shift: Array
    lse: Array
    selected: list[set[int]]
    log_corrections: list[dict[int, float]]
    counts: Counts


def contiguous_parents(n: int, parent_size: int) -> list[list[int]]:
    """Algorithm 4: ceil(n / parent_size) consecutive spans, the last one possibly short."""
    count = -(-n // parent_size)
    return [list(range(u * parent_size, min((u + 1) * parent_size, n))) for u in range(count)]


def requested_parents(n: int, parent_size: int) -> int:
    """Algorithm 3: number of k-means centers, min(N, max(2, floor(N / P)))."""
    return min(n, max(2, n // parent_size))


def parents_from_labels(labels: Iterable[int]) -> list[list[int]]:
    """Algorithm 3, last line: (N,) center labels to parents in center order, empty centers omitted."""
    parents: dict[int, list[int]] = {}
    for i, label in enumerate(labels):
        parents.setdefault(int(label), []).append(i)
    return [parents[label] for label in sorted(parents)]


def team_budget(budget: int, parent_size: int, representatives: int, teams: int) -> int:
    """Equation 5: K = min(M, S / (P / R)), both quotients integral."""
    if parent_size % representatives or budget % (parent_size // representatives):
        raise ValueError("P must be divisible by R and S by P / R")
    return min(teams, budget // (parent_size // representatives))


def centroid_budget(budget: int, group_size: int, groups: int) -> int:
    """Appendix B.2: floor(S / B) groups, no more than there are."""
    return min(groups, budget // group_size)


def squared_distance(a: Array, b: Array) -> float:
    """||a - b||^2 of two (D,) vectors, from the differences themselves (exact duplicates are at exactly 0)."""
    difference = a - b
    return float(np.dot(difference, difference))


def mean_key(keys: Array, members: Sequence[int]) -> Array:
    """Arithmetic mean (D,) of the given rows of keys (N, D)."""
    return np.asarray(sum((keys[i] for i in members), np.zeros(keys.shape[1])) / len(members))


def build_teams(keys: Any, parents: Sequence[Sequence[int]], representatives: int) -> list[Team]:
    """Algorithm 2: keys (N, D), parents partitioning the rows, R = representatives; teams in order of appending.

    Representative-selection ties go to the lowest row index, assignment ties to the earliest selected representative,
    and a representative always owns its row. For MLA, `keys` are the content latents alone (Appendix F).
    """
    keys = np.asarray(keys, dtype=np.float64)
    teams = []
    for parent in parents:
        rows = sorted(parent)
        mean = mean_key(keys, rows)
        # min() and max() keep the first of equals, so walking rows in increasing order is the paper's tie rule.
        chosen = [min(rows, key=lambda i: squared_distance(keys[i], mean))]
        while len(chosen) < min(representatives, len(rows)):
            rest = [i for i in rows if i not in chosen]
            chosen.append(max(rest, key=lambda i: min(squared_distance(keys[i], keys[j]) for j in chosen)))
        owner = {}
        for i in rows:
            distances = [squared_distance(keys[i], keys[j]) for j in chosen]
            owner[i] = distances.index(min(distances))
        owner.update({j: u for u, j in enumerate(chosen)})
        teams += [Team([i for i in rows if owner[i] == u], j) for u, j in enumerate(chosen)]
    return teams


def centroid_groups(keys: Any, parents: Sequence[Sequence[int]]) -> list[tuple[list[int], Array]]:
    """Appendix B.2: each parent is one group, routed by the mean (D,) of its rows of keys (N, D).

    The result is a `teams` argument for `attention_group`, its means the `routing_keys`; K is `centroid_budget`.
    """
    keys = np.asarray(keys, dtype=np.float64)
    return [(sorted(parent), mean_key(keys, parent)) for parent in parents]


def philox4x32_10(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]:
    """Philox4x32 with 10 rounds (Salmon et al., 2011): 4 counter words and 2 key words to 4 words, all uint32."""
    c0, c1, c2, c3 = (int(word) for word in counter)
    k0, k1 = (int(word) for word in key)
    for _ in range(10):
        product0, product1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1 = (product1 >> 32) ^ c1 ^ k0, product1 & MASK32
        c2, c3 = (product0 >> 32) ^ c3 ^ k1, product0 & MASK32
        k0, k1 = (k0 + 0x9E3779B9) & MASK32, (k1 + 0xBB67AE85) & MASK32
    return c0, c1, c2, c3


def uniform(word: int) -> float:
    """uint32 word to (0, 1): clamp(float32(word) * 2^-32, 2^-33, 1 - 2^-24), every step in float32."""
    u = np.float32(np.uint32(word)) * np.float32(2.0**-32)
    return float(min(max(u, np.float32(2.0**-33)), np.float32(1.0 - 2.0**-24)))


def gumbel(key: Sequence[int], step: int, layer: int, group: int, head: int, team: int, shared: bool) -> float:
    """One standard Gumbel draw -log(-log1p(-u)); key is the sequence's two uint32 (low, high), head is in-group.

    The counter is (team, group * 65536 + head // 4, step, layer), the draw is output word head % 4.
    Shared noise gives every head of the group the draw of its head 0.
    """
    head = 0 if shared else head
    words = philox4x32_10((team, group * 65536 + head // 4, step, layer), key)
    return -math.log(-math.log1p(-uniform(words[head % 4])))


def select(phi: Any, noise: Any, k: int) -> tuple[set[int], float, float]:
    """Algorithm 1, lines 8-10: (teams of the K largest phi + noise, tau the (K+1)-st, the K-th largest).

    phi and noise are (M,). Equal scores, of probability zero, go to the lower team index. K >= M selects every team;
    then tau is -inf, and so is the K-th largest where there is none.
    """
    scores = [float(p) + float(n) for p, n in zip(phi, noise, strict=True)]
    order = sorted(range(len(scores)), key=lambda g: (-scores[g], g))
    tau = scores[order[k]] if k < len(order) else -math.inf
    kth = scores[order[k - 1]] if 1 <= k <= len(order) else -math.inf
    return set(order[:k]), tau, kth


def log_correction(phi: float, tau: float) -> float:
    """Equation 7: log(1 - exp(-exp(phi - tau))), 0 for tau = -inf, accurate in both tails."""
    x = min(phi - tau, 700.0)
    if x < -40.0:  # 1 - exp(-e^x) = e^x (1 - e^x / 2 + ...)
        return x
    e = math.exp(x)
    return math.log(-math.expm1(-e)) if e < 0.7 else math.log1p(-math.exp(-e))


def pooled_log_correction(phi: Sequence[float], thresholds: Sequence[float], shared: bool) -> float:
    """log P(team g is in the union | everyone's other scores), from phi_{h,g} and T_{h,-g}, both (H,).

    Independent noise: 1 - prod_h exp(-exp(phi_h - T_h)), a sum of exponentials. Shared noise: g is in the union when
    its one draw exceeds min_h(T_h - phi_h), so 1 - exp(-exp(max_h(phi_h - T_h))).
    """
    gaps = [p - t for p, t in zip(phi, thresholds, strict=True)]
    top = max(gaps)
    if shared or top == math.inf:
        return log_correction(top, 0.0)
    return log_correction(top + math.log(sum(math.exp(gap - top) for gap in gaps)), 0.0)


def score(query: Any, key: Any, scale: float) -> float:
    """scale * q.k of two (D,) vectors."""
    return float(scale) * float(np.dot(np.asarray(query, dtype=np.float64), np.asarray(key, dtype=np.float64)))


def weighted_sums(
    query: Any, keys: Any, values: Any, log_weights: dict[int, float], scale: float, shift: float
) -> tuple[Array, float]:
    """Algorithm 1, lines 14-18: sums of exp(s_i + log weight_i - shift) times v_i (V,) and times 1, over given rows."""
    total, mass = np.zeros(len(values[0]), dtype=np.float64), 0.0
    for i, log_weight in log_weights.items():
        weight = math.exp(score(query, keys[i], scale) + log_weight - shift)
        total = total + weight * np.asarray(values[i], dtype=np.float64)
        mass += weight
    return total, mass


def row_log_weights(teams: Sequence[Any], corrections: dict[int, float], suffix: Sequence[int]) -> dict[int, float]:
    """Row -> log of its weight besides e^{s_i}: 0 in the suffix, -log c_g in team g. Rows must not repeat."""
    rows = [(i, 0.0) for i in suffix] + [(i, -log_c) for g, log_c in corrections.items() for i in teams[g][0]]
    assert len(dict(rows)) == len(rows), "teams and suffix overlap"
    return dict(rows)


def routing_scores(query: Any, teams: Sequence[Any], routing_keys: Any, scale: float) -> list[float]:
    """Equation 3: phi_g = log n_g + scale * q.l_g, (M,)."""
    return [math.log(len(team[0])) + score(query, key, scale) for team, key in zip(teams, routing_keys, strict=True)]


def attention_head(
    query: Any, keys: Any, values: Any, teams: Sequence[Any], routing_keys: Any, suffix: Sequence[int],
    scale: float, k: int, noise: Sequence[float], shift: float = 0.0,
) -> HeadOutput:  # fmt: skip
    """Algorithm 1 for one head: query (D,), keys (N, D), values (N, V), routing_keys (M, D), noise (M,).

    `U` and `Z` come times exp(-shift), where shift must not depend on the draws; `o` does not depend on it.
    """
    k = min(k, len(teams))
    if k == len(teams):
        corrections = dict.fromkeys(range(len(teams)), 0.0)
    else:
        phi = routing_scores(query, teams, routing_keys, scale)
        chosen, tau, _ = select(phi, noise, k)
        corrections = {g: log_correction(phi[g], tau) for g in sorted(chosen)}
    weights = row_log_weights(teams, corrections, suffix)
    total, mass = weighted_sums(query, keys, values, weights, scale, shift)
    return HeadOutput(total, mass, total / mass, set(corrections), corrections)


def pooled_corrections(phi: Any, noise: Any, k: int, shared: bool) -> tuple[list[set[int]], dict[int, float]]:
    """design.md, pooled: phi and noise (H, M), K < M; (teams selected by each head, union team -> log c_g)."""
    heads = range(len(phi))
    picks = [select(phi[h], noise[h], k) for h in heads]
    corrections = {}
    for g in sorted(set().union(*(chosen for chosen, _, _ in picks))):
        # T_{h,-g}: without g, the K-th largest is the (K+1)-st of all if g was above it, else still the K-th of all.
        thresholds = [tau if g in chosen else kth for chosen, tau, kth in picks]
        corrections[g] = pooled_log_correction([phi[h][g] for h in heads], thresholds, shared)
    return [chosen for chosen, _, _ in picks], corrections


def attention_group(
    queries: Any, keys: Any, values: Any, teams: Sequence[Any], routing_keys: Any, suffix: Sequence[int],
    scale: float, k: int, noise: Any, estimator: str = "per_head", shared: bool = False,
) -> GroupOutput:  # fmt: skip
    """One sharing group: queries (H, D), keys (N, D), values (N, V), routing_keys (M, D), noise (H, M).

    MLA is the same function: a key row is [content latent, rotary key], a value row is the content latent, a query
    the absorbed content query beside its rotary part. `teams` hold members first (`Team`, or `centroid_groups`).
    `routing_keys` are the frozen prefill copies, `keys` and `values` the current cache; rows of it that are in no team
    and not in the suffix are not visible. `estimator` is "per_head" (the paper) or "pooled" (design.md), for which
    `shared` says that the H rows of noise are one draw. With K >= M no representative is scored: routing counts 0.
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
        chosen, pooled = pooled_corrections(phi, noise, k, shared)
        weights = row_log_weights(teams, pooled, suffix)
        for h in heads:
            total, mass = weighted_sums(queries[h], keys, values, weights, scale, shift[h])
            results.append(HeadOutput(total, mass, total / mass, chosen[h], pooled))
    else:
        for h in heads:
            args = (queries[h], keys, values, teams, routing_keys, suffix, scale, k, noise[h], shift[h])
            results.append(attention_head(*args))
    U, Z = np.array([head.U for head in results]), np.array([head.Z for head in results])
    outputs, selected = np.array([head.o for head in results]), [head.selected for head in results]
    union = {i for teams_of_head in selected for g in teams_of_head for i in teams[g][0]}
    counts = Counts(0 if everything else len(teams), len(union), len(suffix), len(visible))
    corrections = [head.log_corrections for head in results]
    return GroupOutput(outputs, U, Z, shift, np.log(Z) + shift, selected, corrections, counts)


def santa_group(
    queries: Any, keys: Any, values: Any, prompt: Sequence[int], suffix: Sequence[int],
    scale: float, budget: int, noise: Any, estimator: str = "per_head", shared: bool = False,
) -> GroupOutput:  # fmt: skip
    """SANTA (Section 5): every prompt row its own team, routed by its exact score in the current cache, K = S rows.

    Shapes as in `attention_group`, noise (H, len(prompt)), team g being row prompt[g]. `counts.routing` is the key
    scan over all N_c visible rows, whatever the budget; `counts.union` are the distinct sampled rows.
    """
    teams = [Team([i], i) for i in prompt]
    exact = [keys[i] for i in prompt]
    result = attention_group(queries, keys, values, teams, exact, suffix, scale, budget, noise, estimator, shared)
    return result._replace(counts=result.counts._replace(routing=result.counts.dense))


def dense(queries: Any, keys: Any, values: Any, scale: float) -> Array:
    """Equation 1: queries (H, D) over all given keys (N, D) and values (N, V); outputs (H, V)."""
    outputs = []
    for query in queries:
        shift = max(score(query, key, scale) for key in keys)
        total, mass = weighted_sums(query, keys, values, dict.fromkeys(range(len(keys)), 0.0), scale, shift)
        outputs.append(total / mass)
    return np.array(outputs)


def access_gqa(calls: Iterable[Sequence[int]], santa: bool = False) -> float:
    """Equation 13 in percent, from `Counts` of calls (layer, KV head, step): key and value vectors, pooled.

    SANTA (Appendix C.1): the key scan is N_c vectors, then one value vector for each sampled or suffix row.
    """
    numerator = denominator = 0
    for routing, union, suffix, rows in calls:
        numerator += routing + (1 if santa else 2) * (union + suffix)
        denominator += 2 * rows
    return 100.0 * numerator / denominator


def access_mla(calls: Iterable[Sequence[int]]) -> float:
    """Equation 14 in percent, from `Counts` of calls (layer, step): shared latent rows, pooled over calls."""
    counts = list(calls)
    return 100.0 * sum(r + u + e for r, u, e, _ in counts) / sum(d for _, _, _, d in counts)
