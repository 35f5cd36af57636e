"""A step's rows into their slots, and teams of the blocks that they fill (Algorithm 2, lines 4-14), in one launch; in
PyTorch :func:`.teams.assign_rows`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def first_equal(x, value):
    """The first place of the float32 ``x`` that holds ``value``; the last place where none does (NaN)."""
    i = tl.arange(0, x.shape[0])
    return tl.min(tl.where(x == value, i, x.shape[0] - 1), 0)


@triton.jit
def rows_of_parent(new, old, i_token, i_row, m_new, new_stride, old_stride, D: tl.constexpr, BD: tl.constexpr):
    """Rows ``[P, BD]`` in float32 as ``old`` holds them: those that come with this step from ``new``, since other
    programs may not have written them yet."""
    i_dim = tl.arange(0, BD)
    m_dim = (i_dim < D)[None, :]
    p_new = new + i_token.to(tl.int64)[:, None] * new_stride + i_dim[None, :]
    p_old = old + i_row.to(tl.int64)[:, None] * old_stride + i_dim[None, :]
    b_new = tl.load(p_new, mask=m_new[:, None] & m_dim, other=0.0).to(old.dtype.element_ty)
    b_old = tl.load(p_old, mask=(i_row >= 0)[:, None] & ~m_new[:, None] & m_dim, other=0.0)
    return tl.where(m_new[:, None], b_new, b_old).to(tl.float32)


@triton.jit
def paged_write_kernel(
    latents, rotary, new_latents, new_rotary, slot_mapping, team, row, size, mean, row_stride, new_latent_stride,
    new_rotary_stride, D: tl.constexpr, BD: tl.constexpr, ROPE: tl.constexpr, BROPE: tl.constexpr, SIZE: tl.constexpr,
    P: tl.constexpr, R: tl.constexpr, MEANS: tl.constexpr,
):  # fmt: skip
    """Program (token, parent of a block) writes the token's row (parent 0 alone), and makes the R teams of one parent
    if the row is the last of a block; MEANS: and its mean row, a latent of D dimensions and ROPE others."""
    i_token = tl.program_id(0)
    i_parent = tl.program_id(1)
    slot = tl.load(slot_mapping + i_token)
    i_dim = tl.arange(0, BD)
    i_rope = tl.arange(0, BROPE)
    if (slot >= 0) & (i_parent == 0):
        b_latent = tl.load(new_latents + i_token.to(tl.int64) * new_latent_stride + i_dim, mask=i_dim < D, other=0.0)
        b_rope = tl.load(new_rotary + i_token.to(tl.int64) * new_rotary_stride + i_rope, mask=i_rope < ROPE, other=0.0)
        tl.store(latents + slot * row_stride + i_dim, b_latent.to(latents.dtype.element_ty), mask=i_dim < D)
        tl.store(rotary + slot * row_stride + i_rope, b_rope.to(latents.dtype.element_ty), mask=i_rope < ROPE)
    if (slot >= 0) & (slot % SIZE == SIZE - 1):
        i_block = slot // SIZE
        first = i_block * SIZE + i_parent * P
        i_row = tl.arange(0, P)
        # a request's tokens stand one after another: those of this block that are in this step end with this one
        i_before = SIZE - 1 - (i_parent * P + i_row)
        i_from = i_token - i_before
        m_new = tl.load(slot_mapping + i_from, mask=i_from >= 0, other=-1) == slot - i_before
        b_point = rows_of_parent(
            new_latents, latents, i_from, first + i_row, m_new, new_latent_stride, row_stride, D=D, BD=BD
        )  # [P, BD]
        b_mean = tl.sum(b_point, 0) / P  # [BD]
        if MEANS:
            b_rotary = rows_of_parent(
                new_rotary, rotary, i_from, first + i_row, m_new, new_rotary_stride, row_stride, D=ROPE, BD=BROPE
            )  # [P, BROPE]
            p_mean = mean + (first // P) * (D + ROPE)
            tl.store(p_mean + i_dim, b_mean.to(mean.dtype.element_ty), mask=i_dim < D)
            tl.store(p_mean + D + i_rope, (tl.sum(b_rotary, 0) / P).to(mean.dtype.element_ty), mask=i_rope < ROPE)
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
