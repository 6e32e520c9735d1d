"""Products whose operands come by the bulk copy engine of Hopper GPUs (TMA).

Host code makes a tensor map of each operand at every call, and passes it by value. The engine
copies boxes of it to shared memory, with zeros for what lies outside of the matrix, so that the
loop over depth computes no addresses and no masks. On one H200 at 40% the best cut with pointers
took 1.00 to 1.31 times as long in eighteen of twenty products, with maps of PyTorch's tensors
(results/tensor-cores/not-measured.md). No GPU has run these kernels yet, so that the source offers
them only where it is told to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import ClassVar

from tunerd.candidates.nests.contraction import unwidened
from tunerd.candidates.nests.nest import Axis, Expr, NotANest, linear
from tunerd.candidates.triton.launch import Launch, TensorMap
from tunerd.candidates.triton.product import Product, Tile
from tunerd.candidates.triton.product_code import ASYNC_ROWS, ProductCode

LEAST_ARCH = 90
_TYPES = ("float16", "bfloat16")
_STRIDE_BYTES = 16  # of which a row's stride is a multiple (cuTensorMapEncodeTiled)
_GAIN, _LOSS = 0.97, 1.02  # over the estimate with pointers, from this many rows and below


@dataclass(frozen=True)
class Matrix:
    """An operand in memory. Extents and the stride are in elements."""

    param: int
    shape: tuple[int, int]  # the second lies together
    stride: int  # from one of the first to the next
    dtype: str
    has_depth_last: bool  # else the rows or columns of the product lie together

    def block(self, across: int, depth: int) -> tuple[int, int]:
        """Return what a step takes of it, for a tile of so many rows or columns."""
        return (across, depth) if self.has_depth_last else (depth, across)


def matrix_of(operand: Expr, own: Sequence[Axis], depth: Sequence[Axis]) -> Matrix:
    """Return an operand as a matrix that TMA reads; raises NotANest with the reason.

    own: the axes of its rows or columns in the product; depth: those of the sum.
    """
    load = unwidened(operand)
    place = linear(load.args[0]) if load.op == "load" else None
    if place is None or place.constant or load.dtype not in _TYPES:
        raise NotANest("an operand is no matrix of 16 bits as it lies in memory")
    across, along = (_stride(place.factors, axes) for axes in (own, depth))
    if place.factors.keys() - {*own, *depth} or None in (across, along):
        raise NotANest("an operand's axes do not lie one after the other")
    extents = [math.prod(a.extent for a in axes) for axes in (own, depth)]
    if along == 1:
        shape, stride = (extents[0], extents[1]), across
    elif across == 1:
        shape, stride = (extents[1], extents[0]), along
    else:
        raise NotANest("nothing of an operand lies together")
    assert stride is not None
    if stride < shape[1] or stride * 2 % _STRIDE_BYTES:
        raise NotANest(f"an operand's rows do not begin at multiples of {_STRIDE_BYTES} bytes")
    return Matrix(load.value, shape, stride, load.dtype, along == 1)


def _stride(factors: Mapping[Axis, int], axes: Sequence[Axis]) -> int | None:
    """Return the stride of several axes as one; None where they are no one axis."""
    inner = factors.get(axes[-1], 0)
    expected = inner
    for axis in reversed(axes):
        if not inner or factors.get(axis, 0) != expected:
            return None
        expected *= axis.extent
    return inner


@dataclass(frozen=True)
class BulkProduct(Product):
    """A product both of whose operands TMA brings. Its cuts are those of Product."""

    NUMBER: ClassVar[int] = 6

    @staticmethod
    def of_product(found: Product) -> BulkProduct:
        """Return a product as one whose operands TMA brings; raises NotANest with the reason."""
        if found.dtype not in _TYPES:
            raise NotANest(f"TMA brings no operands of {found.precision}")
        if found.powers or found.apart or len(found.depth_axes) > 1:
            raise NotANest("it is no plain product of two matrices")
        made = BulkProduct(**{f.name: getattr(found, f.name) for f in fields(found)})
        if any(matrix.dtype != found.dtype for matrix in made.matrices):
            raise NotANest("an operand is not of the type that is multiplied")
        return made

    @cached_property
    def matrices(self) -> tuple[Matrix, Matrix]:
        """The left operand and the right one; raises NotANest."""
        return (
            matrix_of(self.left, self.row_axes, self.depth_axes),
            matrix_of(self.right, self.column_axes, self.depth_axes),
        )

    def estimated_secs(self, tile: Tile, sms: float) -> float:
        factor = _GAIN if tile.rows >= ASYNC_ROWS else _LOSS
        return factor * super().estimated_secs(tile, sms)

    def launches(self, tile: Tile, name: str) -> tuple[Launch, ...]:
        (launch,) = super().launches(tile, name)
        maps = (
            TensorMap(m.param, m.shape, m.stride, m.dtype, m.block(across, tile.depth))
            for m, across in zip(self.matrices, (tile.rows, tile.columns), strict=True)
        )
        return (replace(launch, maps=tuple(maps)),)

    def source(self, tile: Tile, name: str) -> str:
        """Return the text of a Triton kernel; its last parameters are the tensor maps."""
        return BulkCode(self, tile).text(name)


@dataclass(frozen=True)
class BulkCode(ProductCode):
    """A product whose operands TMA brings, cut in one way."""

    product: BulkProduct

    def params(self) -> list[str]:
        return [*super().params(), "left_map", "right_map"]

    def _operand(
        self,
        name: str,
        operand: Expr,
        own: dict[Axis, str],
        depth: dict[Axis, str],
        loading: str = "",
    ) -> tuple[str, list[str]]:
        tile, (left, right) = self.tile, self.product.matrices
        is_left = name == "left"
        matrix = left if is_left else right
        across = f"tile_m * {tile.rows}" if is_left else f"tile_n * {tile.columns}"
        along = f"kt * {tile.depth}"
        first, second = (across, along) if matrix.has_depth_last else (along, across)
        turned = "" if matrix.has_depth_last == is_left else ".T"
        return f"{name}_map.load([{first}, {second}]){turned}", []
