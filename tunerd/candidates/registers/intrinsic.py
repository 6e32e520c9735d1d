"""AVX-512 VNNI's VPDPBUSD: products of bytes, four of which are added to each of 16 sums."""

from __future__ import annotations

from typing import Any


def dot_products(sums: Any, values: Any, weights: Any) -> Any:
    """Return sums, int32x16, with products added.

    values: uint8x4, the same for all sums.
    weights: int8x64, four for each sum.
    """
    from tvm import tirx

    everywhere = tirx.Broadcast(tirx.reinterpret("int32", values), 16)
    # Since LLVM 21 it takes bytes, and refuses the same as int32.
    return tirx.call_llvm_pure_intrin(
        "int32x16", "llvm.x86.avx512.vpdpbusd.512",
        sums, tirx.reinterpret("uint8x64", everywhere), weights,
    )  # fmt: skip
