"""The split softmax put together: outputs, log masses and the ledger's row counts (Algorithm 1, line 19)."""

from __future__ import annotations

import triton
import triton.language as tl

from .draws import wait


@triton.jit(do_not_specialize=["shares"])
def combine_kernel(
    part_out, part_max, part_sum, part_rows, count, out, lse, counts, K, shares, G, H, GROUPS, V: tl.constexpr,
    BV: tl.constexpr, NS: tl.constexpr, BS: tl.constexpr, ALL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (value block, h, sequence * G + group) weighs the shares' sums by exp(part_max - their maximum).

    Writes ``out (B G, H, V)``, ``lse (B G, H)`` and ``counts (3, B G)`` int64: routing, union and suffix rows.
    """
    h = tl.program_id(1)
    bg = tl.program_id(2)
    line = bg.to(tl.int64) * H + h
    dim = tl.program_id(0) * BV + tl.arange(0, BV)
    wait(PDL)
    share = tl.arange(0, NS)
    top = tl.load(part_max + line * shares + share, mask=share < shares, other=float("-inf"))
    mass = tl.load(part_sum + line * shares + share, mask=share < shares, other=0.0)
    most = tl.max(top, 0)
    safe = tl.where(most == float("-inf"), 0.0, most)
    whole = tl.sum(mass * tl.exp(top - safe), 0)
    total = tl.zeros((BV,), tl.float32)
    for start in range(0, shares, BS):
        s = start + tl.arange(0, BS)
        at = line * shares + s
        t = tl.load(part_max + at, mask=s < shares, other=float("-inf"))
        # a share without mass wrote no sum
        ok = (t > float("-inf"))[:, None] & (dim < V)[None, :]
        part = tl.load(part_out + at[:, None] * V + dim[None, :], mask=ok, other=0.0)
        total += tl.sum(part * tl.exp(t - safe)[:, None], 0)
    # a sequence without any row (all padding) gets zeros, as in PyTorch
    tl.store(out + line * V + dim, total / tl.where(whole == 0.0, 1.0, whole), mask=dim < V)
    if tl.program_id(0) == 0:
        tl.store(lse + line, safe + tl.log(whole))
        if h == 0:
            union = tl.load(part_rows + (bg.to(tl.int64) * shares + share) * 2, mask=share < shares, other=0)
            exact = tl.load(part_rows + (bg.to(tl.int64) * shares + share) * 2 + 1, mask=share < shares, other=0)
            n = tl.load(count + bg)
            routed = tl.where((n > K) & (not ALL), n, 0)
            tl.store(counts + bg, routed.to(tl.int64))
            tl.store(counts + GROUPS + bg, tl.sum(union.to(tl.int64), 0))
            tl.store(counts + 2 * GROUPS + bg, tl.sum(exact.to(tl.int64), 0))
