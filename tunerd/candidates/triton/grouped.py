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
from tunerd.candidates.triton.product import Product, Tile

_WIDTHS = (16, 32, 64)  # of tiles that several groups are to fill


@dataclass(frozen=True, order=True)
class GroupedTile(Tile):
    """How a product is cut."""

    groups: int = 1  # that are taken as one


@dataclass(frozen=True)
class Grouped:
    """A convolution in groups as products."""

    products: tuple[Product, ...]  # each of as many groups as its `groups` says

    @staticmethod
    def of(nest: Nest, precision: str, weights: Collection[int] = ()) -> Grouped:
        """Return a nest as such products; raises NotANest with the reason where it is none."""
        found = Grouping.of(nest)
        counts = {min(width // found.columns, found.group.extent) for width in _WIDTHS}
        products, reason = [], None
        for count in sorted({1, *counts} - {0}):
            try:
                product = Product.of(found.together(count), precision, weights)
            except NotANest as error:
                reason = reason or error
                continue
            whole = found.channels.extent
            is_ragged = found.group.extent % count != 0
            products.append(
                replace(product, groups=count, all_columns=whole if is_ragged else None)
            )
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
                    yield GroupedTile(**own, groups=product.groups)

    def estimated_secs(self, tile: GroupedTile, sms: float) -> float:
        return self._of(tile).estimated_secs(tile, sms)

    def features(self, tile: GroupedTile, sms: float) -> tuple[float, ...]:
        return self._of(tile).features(tile, sms)

    def grid(self, tile: GroupedTile) -> tuple[int, int, int]:
        return self._of(tile).grid(tile)

    def workspace(self, tile: GroupedTile) -> int:
        return self._of(tile).workspace(tile)

    def source(self, tile: GroupedTile, name: str) -> str:
        return self._of(tile).source(tile, name)

    def _of(self, tile: GroupedTile) -> Product:
        return self._by_groups[tile.groups]

    @cached_property
    def _by_groups(self) -> dict[int, Product]:
        return {product.groups: product for product in self.products}
