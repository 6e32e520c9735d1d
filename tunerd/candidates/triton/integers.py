"""Products of values and weights of 8 bits by tensor cores, summed as whole numbers.

A cut says in which arithmetic: tensor cores multiply 8 bits at twice the rate of 16, and move half
the bytes, but a value of uint8 is moved down to int8 on its way, and its layout in shared memory is
another one. Or operands are widened to fp16, which holds them exactly, and summed in fp32, which
holds sums up to 2^24. Which is faster is measured, like any other part of a cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from tunerd.candidates.nests.contraction import contraction_of, unwidened
from tunerd.candidates.nests.nest import Nest, NotANest
from tunerd.candidates.triton.code import is_small
from tunerd.candidates.triton.product import TYPES, Product, Tile, is_of_integers

_LEAST_DEPTH = 32  # of an instruction's operands of 8 bits
_MAX_EXACT = 1 << 24  # of float32
_LARGEST = 128 * 128  # product of two values


@dataclass(frozen=True, order=True)
class IntegerTile(Tile):
    """How a product is cut."""

    is_wide: int = 0  # 1: operands of fp16; 0: of int8


@dataclass(frozen=True)
class Integers(Product):
    """A product of int8 with sums of int32."""

    @staticmethod
    def of_integers(nest: Nest, precision: str) -> Integers:
        """Return a nest as such a product; raises NotANest with the reason where it is none."""
        if precision not in TYPES:
            raise NotANest(f"tensor cores do not compute {precision}")
        reduction = nest.reduction
        if not is_of_integers(reduction):
            raise NotANest("it sums no integers")
        found = contraction_of(nest, reduction)
        if not _is_narrow(found.left.dtype, unwidened(found.right).dtype, found.depth):
            raise NotANest("it multiplies no values of 8 bits")
        if not is_small(nest.params):
            raise NotANest("a tensor has more than 2^31 elements")
        if found.columns < 8:
            raise NotANest("it has too few columns for tensor cores")
        own = {f.name: getattr(found, f.name) for f in fields(found)}
        return Integers(**own, precision=precision)

    @property
    def dtype(self) -> str:
        return "int8"

    @property
    def item_bytes(self) -> int:
        return 1

    @property
    def left_dtype(self) -> str:
        return "int32"

    @property
    def _is_exact_in_floats(self) -> bool:
        return self.depth * _LARGEST <= _MAX_EXACT

    def operand_dtype(self, tile: Tile) -> str:
        return "float16" if _is_wide(tile) else "int8"

    def sum_dtype(self, tile: Tile) -> str:
        return "float32" if _is_wide(tile) else "int32"

    def rate(self, tile: Tile) -> float:
        return 1.0 if _is_wide(tile) else 2.0

    def tiles(self) -> Iterator[Tile]:
        for tile in super().tiles():
            own = {f.name: getattr(tile, f.name) for f in fields(tile)}
            if tile.depth >= _LEAST_DEPTH:
                yield IntegerTile(**own)
            if self._is_exact_in_floats and tile.stages <= 4:
                yield IntegerTile(**own, is_wide=1)


def _is_wide(tile: Tile) -> bool:
    return isinstance(tile, IntegerTile) and bool(tile.is_wide)


def _is_narrow(left: str, right: str, depth: int) -> bool:
    return left == "int32" and right == "int8" and depth >= _LEAST_DEPTH // 2
