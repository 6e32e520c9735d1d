"""Convolutions in groups on tensor cores: a product of each group, or of several groups at once.

A group of few channels fills no instruction of tensor cores, whose products are of 16 channels and
more. So a block of threads may take several groups as one, with zeros for the weights that would
lead from one of them to another. They are nowhere stored: what is loaded of the weights is masked,
so that a model's memory and a launch for several tenants have them as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property

from tunerd.candidates.nests.grouping import Grouping
from tunerd.candidates.nests.nest import Nest, NotANest
from tunerd.candidates.triton.launch import Launch
from tunerd.candidates.triton.product import Product, Tile

_WIDTHS = (16, 32, 64)  # of tiles that several groups are to fill
_LONG = 64  # channels of a tap, beside which a step's masks and rounding up matter little


@dataclass(frozen=True, order=True)
class GroupedTile(Tile):
    """How a product is cut."""

    groups: int = 1  # that are taken as one
    fills_steps: int = 0  # 1: with several taps, also where one tap has channels for a step


@dataclass(frozen=True)
class Grouped:
    """A convolution in groups as products."""

    products: tuple[Product, ...]

    @staticmethod
    def of(nest: Nest, precision: str, weights: Collection[int] = ()) -> Grouped:
        """Return a nest as such products; raises NotANest with the reason where it is none."""
        found = Grouping.of(nest)
        counts = {min(width // found.outputs, found.group.extent) for width in _WIDTHS}
        products, reason = [], None
        for count in sorted({1, *counts} - {0}):
            try:
                product = Product.of(found.together(count), precision, weights)
            except NotANest as error:
                reason = reason or error
                continue
            is_ragged = found.group.extent % count != 0
            whole = found.channels.extent if is_ragged else None
            product = replace(product, groups=count, all_columns=whole)
            products.append(product)
            if len(product.depth_axes) > 1 and not product.is_flat and product.along < _LONG:
                products.append(replace(product, fills_steps=True))
        if not products:
            raise reason or NotANest("it has no groups of channels")
        return Grouped(tuple(products))

    @property
    def nest(self) -> Nest:
        return self.products[0].nest

    @property
    def rows(self) -> int:
        return self.products[0].rows

    def tiles(self) -> Iterator[GroupedTile]:
        """Yield the ways to cut it; where groups are taken as one, a tile has all their columns."""
        for product in self.products:
            for tile in product.tiles():
                if product.groups == 1 or tile.columns >= product.columns:
                    own = {f.name: getattr(tile, f.name) for f in fields(tile)}
                    yield GroupedTile(
                        **own, groups=product.groups, fills_steps=int(product.fills_steps)
                    )

    def estimated_secs(self, tile: GroupedTile, sms: float) -> float:
        return self._of(tile).estimated_secs(tile, sms)

    def features(self, tile: GroupedTile, sms: float) -> tuple[float, ...]:
        return self._of(tile).features(tile, sms)

    def workspace(self, tile: GroupedTile) -> int:
        return self._of(tile).workspace(tile)

    def launches(self, tile: GroupedTile, name: str) -> tuple[Launch, ...]:
        return self._of(tile).launches(tile, name)

    def _of(self, tile: GroupedTile) -> Product:
        return self._by_tile[tile.groups, tile.fills_steps]

    @cached_property
    def _by_tile(self) -> dict[tuple[int, int], Product]:
        return {(product.groups, int(product.fills_steps)): product for product in self.products}
