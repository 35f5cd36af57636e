"""Two-stage routing: parents are sampled first, and only the teams of sampled parents are scored and sampled.

One stage scores every representative on every step, R/P of all rows: at long contexts most of what a step reads. Two
stages score one vector per parent, then the representatives of the sampled parents.

The estimator stays unbiased before normalisation. Stage 1 draws parents by Gumbel-top-K1 over phi_p, an estimate of a
parent's log mass, and stage 2 teams by Gumbel-top-K2 with fresh noise over psi_g = log n_g + s(q, l_g) - log c_p, since
a sampled parent stands for 1 / c_p of itself. Given the other parents' noise, p is in with probability c_p, which does
not depend on p's own noise; given stage 1, the same holds for g and c_g. So

    E[1{g in} / (c_p c_g)] = E[(1{p in} / c_p) E[1{g in} / c_g | stage 1]] = 1,

and rows of a selected team enter both sums with weight 1 / (c_p c_g). This holds per head, where a head uses its own
parents and teams, and pooled, where c_p and c_g are the unions' inclusion probabilities.

In loops it is :func:`latent_santa.naive_two_stage.two_stage_group`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .routing_keys import key_scores
from .sampling import Selection, listed, routing_scores, select, take_all
from .step import DecodeStep, Sampling


def select_teams(step: DecodeStep, sampling: Sampling) -> Selection:
    """The teams that a step reads: one stage over all teams, or two where ``sampling.parents`` is K1."""
    teams, k = step.teams, sampling.k
    assert teams is not None, "this estimator samples teams"
    parents = teams.parents
    if sampling.parents is not None:
        assert parents is not None, "teams for two-stage routing carry their parents' records"
        if parents.C > sampling.parents:
            return _in_two_stages(step, sampling)
    if teams.M <= k:  # Algorithm 1, line 4, for all sequences of the batch
        return take_all(teams.sizes > 0)
    phi = routing_scores(step.query, teams, step.scale)
    gumbels = step.draw.gumbels(step.groups, step.heads, teams.M, sampling.shared)
    return select(phi, gumbels, k, sampling.estimator, sampling.shared, step.peers)


def _in_two_stages(step: DecodeStep, sampling: Sampling) -> Selection:
    """Both stages, where no sequence has K1 parents or fewer for certain.

    A sequence with K1 parents or fewer, or with K2 teams or fewer in its sampled parents, samples nothing in that
    stage: its threshold is -inf and its corrections are exactly 1; nothing is counted for it.
    """
    teams, k = step.teams, sampling.k
    assert teams is not None and teams.parents is not None and sampling.parents is not None
    parents, shape = teams.parents, (step.groups, step.heads)
    phi = parents.routing_scores(step.query, step.scale)
    gumbels = step.draw.parent_gumbels(*shape, parents.C, sampling.shared)
    first = select(phi, gumbels, sampling.parents, sampling.estimator, sampling.shared, step.peers)
    routing = first.routing * parents.vectors
    # the teams of the sampled parents, T of them at most, known without looking
    heads = step.all_heads if first.whole is None else step.heads
    most = min(teams.M, heads * sampling.parents * parents.most_teams)
    index = listed(first.union, parents.of_team, most)
    slot = torch.where(index >= 0, index, teams.M)
    parent = parents.of_team.long().gather(2, index.clamp_min(0)).clamp_min(0)
    log_c = first.log_correction.gather(3, parent[:, :, None].expand(-1, -1, first.log_correction.shape[2], -1))
    log_c = log_c.masked_fill((index < 0)[:, :, None], torch.inf)
    union = index >= 0
    if first.whole is None:
        scored = union.sum(-1)
    else:
        of_team = parents.of_team.long()
        scored = (first.whole.gather(2, of_team.clamp_min(0)) & (of_team >= 0)).sum(-1)
    if most > k:
        psi = _team_scores(step, index) - log_c
        gumbels = step.draw.listed_gumbels(index, step.heads, teams.M, sampling.shared)
        # per head each process lists teams of its own
        peers = step.peers if sampling.pooled else None
        second = select(psi, gumbels, k, sampling.estimator, sampling.shared, peers)
        log_c, union = log_c + second.log_correction, second.union
    union = _spread(union, slot, teams.M, False)
    return Selection(
        union=union,
        log_correction=_spread(log_c, slot[:, :, None].expand_as(log_c), teams.M, torch.inf),
        routing=routing + torch.where(scored > k, scored, 0),
        whole=None if first.whole is None or step.peers is None else step.peers.any(union),
    )


def _team_scores(step: DecodeStep, index: Tensor) -> Tensor:
    """log n_g + s(q, l_g) of the listed teams ``(B, G, T)``, -inf where the list is unused: ``(B, G, H, T)``."""
    teams = step.teams
    assert teams is not None
    place = index.clamp_min(0)
    s = key_scores(step.query, tuple(part.take(place) for part in teams.routing_keys), step.scale)
    s = s + teams.sizes.gather(2, place).clamp_min(1).to(s.dtype).log()[:, :, None]
    return s.masked_fill((index < 0)[:, :, None], -torch.inf)


def _spread(values: Tensor, slot: Tensor, teams: int, rest: float) -> Tensor:
    """Values of the listed teams at their places among all M teams; ``rest`` elsewhere."""
    full = values.new_full((*values.shape[:-1], teams + 1), rest)
    return full.scatter_(-1, slot, values)[..., :-1]
