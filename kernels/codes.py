"""Routing keys in 4 bits, unpacked inside the kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from .interpreter import INTERPRETED


def _unpacking(kind: str, exponent: str, one: str, less: str) -> tl.constexpr:
    """PTX for four bytes to eight numbers of 16 bits.

    A byte ``nn`` below 16 under the byte ``exponent`` is the number 2^e + nn; it is multiplied by 1 and added ``less``,
    which is -(2^e + 8), in the only addition that all devices have for pairs.
    """
    lines = [
        ".reg .b32 low, high, one, less;",
        f"mov.b32 one, {one};",
        f"mov.b32 less, {less};",
        "and.b32 low, $4, 0x0F0F0F0F;",
        "shr.u32 high, $4, 4;",
        "and.b32 high, high, 0x0F0F0F0F;",
    ]
    for i, (source, bytes_taken) in enumerate((n, b) for n in ("low", "high") for b in ("0x4140", "0x4342")):
        lines.append(f"prmt.b32 ${i}, {source}, {exponent}, {bytes_taken};")
    lines += [f"fma.rn.{kind} ${i}, ${i}, one, less;" for i in range(4)]
    return tl.constexpr("{" + "\n".join(lines) + "}")


BRAIN = _unpacking("bf16x2", "0x43434343", "0x3F803F80", "0xC308C308")  # 128 + nn, -136
HALF = _unpacking("f16x2", "0x64646464", "0x3C003C00", "0xE408E408")  # 1024 + nn, -1032


@triton.jit
def nibbles(codes, dtype: tl.constexpr):
    """Bytes as the numbers in their low and in their high halves, each less 8, in ``dtype``.

    For 16-bit floats a byte permutation makes two numbers at once, where conversions make one in several steps.
    """
    if INTERPRETED or (dtype != tl.bfloat16 and dtype != tl.float16):
        return ((codes & 15).to(tl.int32) - 8).to(dtype), ((codes >> 4).to(tl.int32) - 8).to(dtype)
    elif dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            BRAIN, "=r,=r,=r,=r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        return tl.inline_asm_elementwise(
            HALF, "=r,=r,=r,=r,r", [codes], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )


@triton.jit
def half_float(word):
    """The float16 in a word's lower half, as float32."""
    return word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
