"""Products whose epilogue needs sums of the rows that they multiply, as a norm's does.

A cut says who sums. A block of threads may do it while it multiplies: it sees whole rows anyway,
and there is no other kernel. But all blocks of a row do it again, and registers, copies and
instructions are taken from the product: of 1,576 rows by 3,072 columns of depth 768 that took twice
as long as the product alone (one H200 at 40%). Or a kernel of its own sums each row once, before a
product that is as fast as any other, and may be split. Which is faster is measured.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from typing import ClassVar

from tunerd.candidates.nests.contraction import unwidened
from tunerd.candidates.nests.nest import Nest, NotANest
from tunerd.candidates.triton.code import Scope, kernel_text, split
from tunerd.candidates.triton.launch import Launch
from tunerd.candidates.triton.product import Product, Tile

_BLOCK = 4096  # values that a block of threads sums
_WARPS = 4
_PER_SEC = 80e9  # operations of a block that sums while it multiplies
_LAUNCH_SECS, _BYTES_PER_SEC = 2.2e-6, 1.5e12  # of the kernel of the sums


@dataclass(frozen=True, order=True)
class SummedTile(Tile):
    """How a product is cut."""

    is_ahead: int = 0  # 1: a kernel of its own sums the rows first


@dataclass(frozen=True)
class SummedProduct(Product):
    """A product that also sums powers of its left operand."""

    NUMBER: ClassVar[int] = 5

    @staticmethod
    def of(nest: Nest, precision: str, weights: Collection[int] = ()) -> SummedProduct:
        """Return a nest as such a product; raises NotANest with the reason where it is none."""
        found = Product.of(nest, precision, weights)
        if not found.powers:
            raise NotANest("it sums nothing beside its products")
        return SummedProduct(**{f.name: getattr(found, f.name) for f in fields(found)})

    @cached_property
    def _alone(self) -> Product:
        """The product, as if somebody else had its sums."""
        own = {f.name: getattr(self, f.name) for f in fields(Product)}
        return Product(**own | {"powers": ()})

    @property
    def _width(self) -> int:
        return 1 << (self.depth - 1).bit_length()

    def summed_inside(self, tile: Tile) -> tuple[int, ...]:
        return () if _is_ahead(tile) else self.powers

    def tiles(self) -> Iterator[Tile]:
        for tile in super().tiles():
            yield SummedTile(**vars(tile))
        if not self.apart and self._width <= _BLOCK:
            for tile in self._alone.tiles():
                yield SummedTile(**vars(tile), is_ahead=1)

    def summing_secs(self, tile: Tile) -> float:
        # A value is loaded and widened, and then multiplied and added by each sum.
        return tile.rows * tile.depth * (1 + 2 * len(self.summed_inside(tile))) / _PER_SEC

    def features(self, tile: Tile, sms: float) -> tuple[float, ...]:
        if _is_ahead(tile):
            return self._alone.features(tile, sms)
        return super().features(tile, sms)

    def estimated_secs(self, tile: Tile, sms: float) -> float:
        if not _is_ahead(tile):
            return super().estimated_secs(tile, sms)
        read_bytes = self.rows * self.depth * self.item_bytes
        return self._alone.estimated_secs(tile, sms) + _LAUNCH_SECS + read_bytes / _BYTES_PER_SEC

    # --- the kernels ---------------------------------------------------------------------------

    def workspace(self, tile: Tile) -> int:
        own = self.rows * len(self.powers) if _is_ahead(tile) else 0
        return super().workspace(tile) + own

    def sums_at(self, tile: Tile) -> dict[int, str]:
        if not _is_ahead(tile):
            return {}
        first = super().workspace(tile)
        return {
            power: f"tl.load(workspace + {first + place} + rows * {len(self.powers)})[:, None]"
            for place, power in enumerate(self.powers)
        }

    def launches(self, tile: Tile, name: str) -> tuple[Launch, ...]:
        product = super().launches(tile, name)
        if not _is_ahead(tile):
            return product
        rows = _BLOCK // self._width
        grid = math.ceil(self.rows / rows), 1, 1
        sums = f"{name}_sums"
        text = self._summing(sums, rows, super().workspace(tile))
        return Launch(sums, text, grid, _WARPS, 1), *product

    def _summing(self, name: str, rows: int, first: int) -> str:
        """Return the text of a kernel that puts the sums of each row into the workspace."""
        masks = []
        if self._width != self.depth:
            masks.append((frozenset(self.depth_axes), f"(columns < {self.depth})[None, :]"))
        axes = {
            **split(self.row_axes, "rows", "[:, None]"),
            **split(self.depth_axes, "columns", "[None, :]"),
        }
        value = Scope(axes, masks).text(unwidened(self.left))
        count = len(self.powers)
        lines = [
            f"offs_m = tl.program_id(0) * {rows} + tl.arange(0, {rows})",
            f"columns = tl.arange(0, {self._width})",
            f"rows = tl.minimum(offs_m, {self.rows - 1})",
            f"wide = tl.cast({value}, tl.float32)",
            f"at = workspace + {first} + offs_m[:, None] * {count}",
            *(
                f"tl.store(at + {place}, tl.sum({' * '.join(['wide'] * power)}, axis=1,"
                f" keep_dims=True), mask=(offs_m < {self.rows})[:, None])"
                for place, power in enumerate(self.powers)
            ),
        ]
        params = [f"p{i}" for i in range(len(self.nest.params))]
        return kernel_text(name, [*params, "counters", "workspace"], lines)


def _is_ahead(tile: Tile) -> bool:
    return isinstance(tile, SummedTile) and bool(tile.is_ahead)
