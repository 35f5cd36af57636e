"""Pooled corrections: one inclusion probability a team of the union, for all heads of its group."""

from __future__ import annotations

import triton
import triton.language as tl

from .draws import log_inclusion, wait


@triton.jit
def pool_kernel(
    phi, tau, kth, flags, count, pooled, MP, H, WORDS, T: tl.constexpr, HB: tl.constexpr, SHARED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, sequence * G + group) writes ``pooled (B G, MP)``, log c_g of the flagged teams i T .. i T + T - 1.

    A head misses team g, given the others' scores, with probability exp(-exp(phi - T)), where T is its (K+1)-st score
    if it selected g and its K-th if not. Independent draws miss it together with the product, a shared one with the
    smallest.
    """
    bg = tl.program_id(1)
    team = tl.program_id(0) * T + tl.arange(0, T)
    ok = team < tl.load(count + bg)
    flags += bg.to(tl.int64) * WORDS * MP
    wait(PDL)
    used = tl.zeros((T,), tl.int32)
    for word in range(WORDS):
        used |= tl.load(flags + word * MP + team, mask=ok, other=0)
    ok = used != 0
    # most blocks of teams hold none that was selected
    if tl.sum(ok.to(tl.int32), 0) > 0:
        top = tl.full((T,), float("-inf"), tl.float32)
        mass = tl.zeros((T,), tl.float32)
        for h0 in range(0, H, HB):
            head = h0 + tl.arange(0, HB)
            real = head < H
            line = bg.to(tl.int64) * H + head
            score = tl.load(
                phi + line[:, None] * MP + team[None, :], mask=real[:, None] & ok[None, :], other=float("-inf")
            )
            bits = tl.load(flags + (h0 // 32) * MP + team, mask=ok, other=0)
            picked = ((bits[None, :] >> (h0 % 32 + tl.arange(0, HB))[:, None]) & 1) != 0
            above = tl.load(tau + line, mask=real, other=0.0)[:, None]
            below = tl.load(kth + line, mask=real, other=0.0)[:, None]
            # a threshold of -inf means certain inclusion; so does a large finite margin, without inf - inf
            margin = tl.minimum(score - tl.where(picked, above, below), 1e4)
            margin = tl.where(score == float("-inf"), float("-inf"), margin)
            new = tl.maximum(top, tl.max(margin, 0))
            safe = tl.where(new == float("-inf"), 0.0, new)
            mass = mass * tl.exp(top - safe) + tl.sum(tl.exp(margin - safe[None, :]), 0)
            top = new
        joint = top if SHARED else top + tl.log(mass)
        tl.store(pooled + bg.to(tl.int64) * MP + team, log_inclusion(joint), mask=ok)
