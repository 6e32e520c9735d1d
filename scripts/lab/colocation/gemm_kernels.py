"""One Triton kernel for many products of one shape, whose operands a table in memory names.

So each problem has matrices of its own, wherever they lie, and a launch takes any of them: a
captured graph is bound to other problems by writing the tables (Punica's SGMV and cuBLAS's
GemmBatched work alike). The compiler cannot know how these addresses are aligned, and moves two
bytes at a time where it is not told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

# rows, columns and depth of a tile, warps, stages
_TILES = (
    (32, 32, 64, 4, 4), (32, 64, 64, 4, 4), (64, 32, 64, 4, 4), (64, 64, 32, 4, 4),
    (64, 64, 64, 4, 3), (128, 64, 32, 4, 3), (64, 128, 32, 4, 3), (128, 128, 32, 8, 3),
    (128, 128, 64, 8, 3), (64, 128, 64, 4, 4), (128, 64, 64, 4, 4), (128, 128, 64, 4, 4),
    (128, 128, 64, 8, 4), (64, 256, 64, 4, 4), (128, 256, 64, 8, 3), (256, 128, 64, 8, 3),
    (128, 128, 128, 8, 2),
)  # fmt: skip
_ROWS = (8, 16, 32, 64)  # of a tile of a product with a vector


@triton.jit  # type: ignore[untyped-decorator]
def products(  # type: ignore[no-untyped-def]
    lefts, rights, outs, like,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Multiply (rows, DEPTH) by (DEPTH, COLUMNS), rows of tiles by problems in the grid."""
    across = COLUMNS // BN
    tile_m, tile_n = tl.program_id(0) // across, tl.program_id(0) % across
    z = tl.program_id(1)
    left = tl.load(lefts + z).to(like.dtype)
    right = tl.load(rights + z).to(like.dtype)
    out = tl.load(outs + z).to(like.dtype)
    m = tile_m * BM + tl.arange(0, BM)
    n = tile_n * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    x_at = left + m[:, None] * DEPTH + k[None, :]
    w_at = right + k[:, None] * COLUMNS + n[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for _ in range(DEPTH // BK):
        tl.multiple_of(x_at, [16, 16])
        tl.multiple_of(w_at, [16, 16])
        acc = tl.dot(tl.load(x_at), tl.load(w_at), acc, input_precision=PRECISION)
        x_at += BK
        w_at += BK * COLUMNS
    at = out + m[:, None] * COLUMNS + n[None, :]
    tl.multiple_of(at, [16, 16])
    tl.store(at, acc.to(like.dtype.element_ty))


@triton.jit  # type: ignore[untyped-decorator]
def products_with_vectors(  # type: ignore[no-untyped-def]
    lefts, rights, outs, like, DEPTH: tl.constexpr, BM: tl.constexpr
):
    """Multiply (rows, DEPTH) by (DEPTH, 1), DEPTH a power of two."""
    z = tl.program_id(1)
    left = tl.load(lefts + z).to(like.dtype)
    right = tl.load(rights + z).to(like.dtype)
    out = tl.load(outs + z).to(like.dtype)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    k = tl.arange(0, DEPTH)
    x_at = left + m[:, None] * DEPTH + k[None, :]
    tl.multiple_of(x_at, [16, 16])
    w_at = right + k
    tl.multiple_of(w_at, 16)
    w = tl.load(w_at).to(tl.float32)
    found = tl.sum(tl.load(x_at).to(tl.float32) * w[None, :], axis=1)
    tl.store(out + m, found.to(like.dtype.element_ty))


@dataclass(frozen=True)
class Launch:
    """A kernel with its tiles, for a number of problems of one shape."""

    kernel: Any
    grid: tuple[int, int]
    constants: dict[str, Any]
    warps: int
    stages: int

    def queue(self, tables: Sequence[Any], like: Any) -> None:
        """Queue it. Tables of lefts, rights and outs hold addresses; `like` has the type."""
        self.kernel[self.grid](
            *tables, like, **self.constants,
            num_warps=self.warps, num_stages=self.stages,
        )  # fmt: skip


def launches(shape: tuple[int, int, int], count: int, precision: str) -> Sequence[Launch]:
    """Return the ways to cut a product (rows, columns, depth) that divide it."""
    rows, columns, depth = shape
    if columns == 1:
        return [
            Launch(products_with_vectors, (rows // bm, count), {"DEPTH": depth, "BM": bm}, 4, 1)
            for bm in _ROWS
            if rows % bm == 0
        ]
    how = {"fp32": "ieee", "tf32": "tf32"}.get(precision, "tf32")
    return [
        Launch(
            products,
            (rows // bm * (columns // bn), count),
            {"COLUMNS": columns, "DEPTH": depth, "PRECISION": how, "BM": bm, "BN": bn, "BK": bk},
            warps,
            stages,
        )
        for bm, bn, bk, warps, stages in _TILES
        if rows % bm == 0 and columns % bn == 0 and depth % bk == 0
    ]
