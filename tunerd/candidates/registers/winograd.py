"""Convolutions of 3 x 3 by Winograd's algorithm: fewer products, of values that are transformed.

For some rows of tiles at a time, three stages: tiles of the image are transformed, channel by
channel; for each of a transformed tile's elements, a product of a matrix of tiles by channels with
the transformed filters, whose sums stay in registers as those of `sums` do; and the products become
outputs, with what follows the convolution. What is between the stages stays in the caches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tunerd.candidates.nests.blocks import blocks_of, reduced_of, spatial_of
from tunerd.candidates.registers import sums as of_sums
from tunerd.candidates.registers.schedule import in_stages
from tunerd.candidates.registers.sums import Sums
from tunerd.candidates.registers.units import operands
from tunerd.vocabulary import Layout
from tunerd.vocabulary.winograd import TAPS, TRANSFORMS, Matrix

if TYPE_CHECKING:
    from tvm.ir import IRModule

_FEWEST_SUMS = 6  # of a tile in registers, if there are as many: fewer wait for each other
_MOST_WASTED = 1.15  # of rows, where those of a block are no multiple of a register tile's
_KEPT_BYTES = 4 << 20  # most that is between the stages
_FILTER_BYTES_PER_CYCLE = 4.0  # of the L3 cache, each read once: what one Xeon core obtained


@dataclass(frozen=True, order=True)
class WinogradCut:
    """How a convolution is cut."""

    outputs: int  # of a tile in each direction: 2 or 4
    high: int  # rows of tiles of a block, of which all three stages are computed
    rows: int  # tiles whose sums are in registers
    vectors: int  # of channels of the output, likewise


@dataclass(frozen=True)
class Winograd:
    """A task that is such a convolution, with stride 1 and channels that fill vectors."""

    sums: Sums

    @classmethod
    def of(cls, mod: IRModule, sums: Sums) -> Winograd:
        """Read a task's module; raises ValueError where it is none. sums: of this module."""
        if len(sums.rows) != 3 or sums.taps != (TAPS, TAPS) or sums.has_own_rows:
            raise ValueError("it is no convolution of 3 x 3")
        if sums.weights is None or sums.groups > 1:
            raise ValueError("its filters are of integers, or of groups")
        if sums.depth % sums.unit.lanes:
            raise ValueError(f"its {sums.depth} channels fill no vectors")
        (block,) = (b for b, _ in blocks_of(mod["main"]) if str(b.name_hint) == sums.sums)
        if not _is_dense(block):
            raise ValueError("its taps do not lie side by side")
        return cls(sums)

    def tiles(self) -> Iterator[WinogradCut]:
        unit = self.sums.unit
        for outputs in TRANSFORMS:
            high, wide = self.tiles_of(outputs)
            for of_block in of_sums.divisors(high):
                all_rows = of_block * wide
                if of_block > 1 and self._bytes_between(outputs, all_rows) > _KEPT_BYTES:
                    continue
                for vectors in of_sums.divisors(self.sums.vectors):
                    for rows in range(1, min(16, all_rows) + 1):
                        used = rows * vectors
                        wasted = math.ceil(all_rows / rows) * rows / all_rows
                        if used + vectors > unit.registers:
                            continue
                        if used < _FEWEST_SUMS and rows < all_rows:
                            continue
                        if wasted <= _MOST_WASTED:
                            yield WinogradCut(outputs, of_block, rows, vectors)

    def tiles_of(self, outputs: int) -> tuple[int, int]:
        """Return how many tiles of so many outputs an image is high and wide."""
        _, height, width = self.sums.rows
        return math.ceil(height / outputs), math.ceil(width / outputs)

    def estimated_secs(self, cut: WinogradCut, sms: float) -> float:
        """Return a rough time on the task's cores: what is issued, or what is loaded."""
        sums, unit = self.sums, self.sums.unit
        size = cut.outputs + TAPS - 1
        high, wide = self.tiles_of(cut.outputs)
        blocks = sums.rows[0] * high // cut.high
        all_tiles = cut.high * wide
        transforms = TRANSFORMS[cut.outputs]
        of_inputs = all_tiles * (sums.depth // unit.lanes) * _cycles(transforms.inputs, size, size)
        of_outputs = (
            all_tiles * sums.vectors * _cycles(transforms.outputs, cut.outputs, 2 * cut.outputs)
        )
        used = cut.rows * cut.vectors
        step = max(used / unit.per_cycle, (cut.rows + cut.vectors) / 2, of_sums.LATENCY)
        filters_of_step = cut.vectors * unit.vector_bytes
        if sums.depth * filters_of_step > of_sums.L1_BYTES:
            step = max(step, filters_of_step / of_sums.L2_BYTES_PER_CYCLE)
        register_tiles = size**2 * math.ceil(all_tiles / cut.rows) * sums.vectors // cut.vectors
        of_products = register_tiles * (sums.depth * step + 2.0 * used + 10.0)
        cycles = (of_inputs + of_products + of_outputs) * blocks
        filters = 4 * size**2 * sums.depth * sums.columns
        between = self._bytes_between(cut.outputs, all_tiles)
        # One block after the other finds the filters in the L2 cache, where they have room there.
        times = blocks if filters + between > of_sums.L2_BYTES else 1
        loaded = filters * times / _FILTER_BYTES_PER_CYCLE
        if between > of_sums.L2_BYTES:
            loaded += 2 * between * blocks / of_sums.L3_BYTES_PER_CYCLE
        cores = max(1, sums.cores)
        # Blocks are spread over the cores; where they are fewer, what is in each of them is.
        alone = cores if blocks < cores else blocks / math.ceil(blocks / cores)
        return of_sums.overlapped(cycles / alone, loaded / cores) / of_sums.HERTZ

    def _bytes_between(self, outputs: int, tiles: int) -> int:
        """Return the bytes that lie between the stages, of so many tiles."""
        return 4 * (outputs + TAPS - 1) ** 2 * tiles * (self.sums.depth + self.sums.columns)

    def features(self, cut: WinogradCut, sms: float) -> tuple[float, ...]:
        """Return as many as `Sums.features` does."""
        sums = self.sums
        sizes = (
            cut.high, cut.rows, cut.vectors, cut.rows * cut.vectors,
            math.prod(sums.rows), sums.columns, sums.depth, (cut.outputs + TAPS - 1) ** 2,
            sums.depth,
        )  # fmt: skip
        secs = math.log2(self.estimated_secs(cut, sms))
        return (*map(math.log2, sizes), float(cut.outputs), 3.0, secs)

    def layouts(self, cut: WinogradCut) -> tuple[tuple[int, Layout], ...]:
        """Return `LoweredKernel.layouts` of a cut: transformed, those of a panel in one piece."""
        assert self.sums.weights is not None
        number, (*_, depth, columns) = self.sums.weights
        size = cut.vectors * self.sums.unit.lanes
        split = ((cut.outputs + TAPS - 1) ** 2, depth, columns // size, size)
        return ((number, Layout(split, (0, 2, 1, 3), winograd=cut.outputs)),)

    def scheduled(self, mod: IRModule, cut: WinogradCut) -> IRModule:
        """Return the module in three stages; raises what TVM raises for what is no cut of it."""
        return in_stages(mod, self, cut)


def _cycles(matrix: Matrix, columns: int, stored: int) -> float:
    """Return what it takes to apply a matrix to both sides of a tile of vectors."""
    size = len(matrix[0])
    used = sum(value != 0 for row in matrix for value in row)
    return used * (size + columns) / 2 + size**2 / 2 + stored * columns


def _is_dense(block: Any) -> bool:
    """Whether sums read a value as far away as their tap is from the first one, in both directions.

    That is no stride and no dilation, and filters of shape [3, 3, in, out].
    """
    from tvm import tirx

    spatial = [v.var for v in spatial_of(block)]
    reduced = [v.var for v in reduced_of(block)]
    image, filters = operands(block)
    expected = [*spatial[:1], *zip(spatial[1:3], reduced[:2], strict=True), reduced[2]]

    def is_at(index: Any, place: Any) -> bool:
        if not isinstance(place, tuple):
            return bool(index.same_as(place))
        is_sum = isinstance(index, tirx.Add)
        return is_sum and index.a.same_as(place[0]) and index.b.same_as(place[1])

    at = [*image.indices]
    own = [*reduced, spatial[-1]]
    return (
        len(at) == len(expected)
        and all(map(is_at, at, expected))
        and len(filters.indices) == len(own)
        and all(map(is_at, filters.indices, own))
    )
