"""Teams of the blocks that a step's tokens fill (Algorithm 2, lines 4-14); in PyTorch :func:`.teams.assign_rows`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def first_equal(x, value):
    """The first place of the float32 ``x`` that holds ``value``; the last place where none does (NaN)."""
    i = tl.arange(0, x.shape[0])
    return tl.min(tl.where(x == value, i, x.shape[0] - 1), 0)


@triton.jit
def paged_group_kernel(
    latents, slot_mapping, team, row, size, mean, row_stride, D: tl.constexpr, BD: tl.constexpr, ROPE: tl.constexpr,
    BROPE: tl.constexpr, SIZE: tl.constexpr, P: tl.constexpr, R: tl.constexpr, MEANS: tl.constexpr,
):  # fmt: skip
    """Program (token, parent of a block) makes the R teams of one parent, if the token's row is the last of a block;
    MEANS: and its mean row, a latent of D dimensions and ROPE others."""
    slot = tl.load(slot_mapping + tl.program_id(0))
    i_parent = tl.program_id(1)
    if (slot >= 0) & (slot % SIZE == SIZE - 1):
        i_block = slot // SIZE
        first = i_block * SIZE + i_parent * P
        i_row = tl.arange(0, P)
        i_dim = tl.arange(0, BD)
        p_points = latents + (first + i_row)[:, None] * row_stride + i_dim[None, :]
        b_point = tl.load(p_points, mask=(i_dim < D)[None, :] & (i_row >= 0)[:, None], other=0.0).to(tl.float32)
        b_mean = tl.sum(b_point, 0) / P  # [BD]
        if MEANS:
            i_rope = tl.arange(0, BROPE)
            p_rotary = latents + D + (first + i_row)[:, None] * row_stride + i_rope[None, :]
            m_rotary = (i_rope < ROPE)[None, :] & (i_row >= 0)[:, None]
            b_rotary = tl.sum(tl.load(p_rotary, mask=m_rotary, other=0.0).to(tl.float32), 0) / P  # [BROPE]
            p_mean = mean + (first // P) * (D + ROPE)
            tl.store(p_mean + i_dim, b_mean.to(mean.dtype.element_ty), mask=i_dim < D)
            tl.store(p_mean + D + i_rope, b_rotary.to(mean.dtype.element_ty), mask=i_rope < ROPE)
        b_away = b_point - b_mean[None, :]  # [P, BD]
        b_from_mean = tl.sum(b_away * b_away, 1)  # [P]
        if P == 2:  # both are equally far; rounding must not break the tie
            b_from_mean = b_from_mean * 0.0
        chosen = first_equal(b_from_mean, tl.min(b_from_mean, 0))  # line 6
        b_nearest = tl.full((P,), float("inf"), tl.float32)
        b_team = tl.zeros((P,), tl.int32)
        m_chosen = i_row < 0
        for u in tl.static_range(R):
            m_now = i_row == chosen
            b_away = b_point - tl.sum(tl.where(m_now[:, None], b_point, 0.0), 0)[None, :]
            b_distance = tl.sum(b_away * b_away, 1)  # [P]
            # lines 11-14: ties stay with the representative chosen earlier, which owns its own row
            m_closer = b_distance < b_nearest
            b_team = tl.where(m_closer | m_now, u, b_team)
            b_nearest = tl.where(m_closer, b_distance, b_nearest)
            m_chosen = m_chosen | m_now
            tl.store(row + i_block * (SIZE // P * R) + i_parent * R + u, (i_parent * P + chosen).to(tl.uint8))
            b_left = tl.where(m_chosen, float("-inf"), b_nearest)
            chosen = first_equal(b_left, tl.max(b_left, 0))  # line 8
        tl.store(team + first + i_row, b_team.to(tl.uint8))
        for u in tl.static_range(R):
            n_g = tl.sum((b_team == u).to(tl.int32), 0)
            tl.store(size + i_block * (SIZE // P * R) + i_parent * R + u, n_g.to(tl.uint8))
