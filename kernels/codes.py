"""Routing keys and queries in integer codes."""

from __future__ import annotations

import triton
import triton.language as tl

from .draws import INTERPRETED


def _unpacking() -> tl.constexpr:
    """PTX for four bytes of codes to eight bytes: their low and their high halves, each less 8 in two's complement.

    Eight is taken from 128 + n, so that no byte borrows from its neighbour, and the high bit is turned over after it.
    """
    lines = [".reg .b32 high;", "shr.u32 high, $2, 4;"]
    for i, source in enumerate(("$2", "high")):
        lines += [
            f"lop3.b32 ${i}, {source}, 0x0F0F0F0F, 0x80808080, 0xEA;",  # (source & 0x0F..) | 0x80..
            f"sub.u32 ${i}, ${i}, 0x08080808;",
            f"xor.b32 ${i}, ${i}, 0x80808080;",
        ]
    return tl.constexpr("{" + "\n".join(lines) + "}")


UNPACK = _unpacking()


@triton.jit
def nibbles(codes):
    """Bytes as the numbers in their low and in their high halves, each less 8, int8; four at once."""
    if INTERPRETED:
        return ((codes & 15).to(tl.int32) - 8).to(tl.int8), ((codes >> 4).to(tl.int32) - 8).to(tl.int8)
    else:
        return tl.inline_asm_elementwise(UNPACK, "=r,=r,r", [codes], dtype=(tl.int8, tl.int8), is_pure=True, pack=4)


@triton.jit
def rounded(x):
    """float32 below 2^22 in magnitude to the nearest integer, ties to even, as int8."""
    return ((x + 12582912.0) - 12582912.0).to(tl.int8)


@triton.jit
def half_float(word):
    """The float16 in a word's lower half, as float32."""
    return word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
