"""Sums of products in the vector registers of a CPU: how they are cut, and the schedule of a cut.

A tile of sums stays in registers while the whole depth is added to it: some rows, in one or two
dimensions, times some vectors of columns. For each step of the depth, each vector of weights is
loaded once for all rows, and each row's value is spread over a register once for all vectors. What
follows the sums, such as a bias or a rescaling, is computed of a tile as it is stored.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tunerd.candidates.nests.blocks import blocks_of, reduced_of, spatial_of
from tunerd.candidates.registers import units
from tunerd.candidates.registers.schedule import scheduled
from tunerd.candidates.registers.units import Unit, is_shifted
from tunerd.vocabulary import Layout

if TYPE_CHECKING:
    from tvm.ir import IRModule

_MOST_ROWS, _MOST_VECTORS = 16, 16
L1_BYTES, L2_BYTES = 32 << 10, 1 << 20
_L2_WAYS = 8
_L1_WAYS, _PAGE_BYTES = 8, 4096  # a way of the L1 cache is a page, on x86-64
_CROWDED = 1.3  # times as long, where the rows of a tile displace each other there
L2_BYTES_PER_CYCLE, L3_BYTES_PER_CYCLE = 40.0, 16.0
_NOT_HIDDEN = 0.25  # of the lesser of computing and loading, which the other does not hide
LATENCY = 5.0  # cycles until a sum can be added to again
HERTZ = 3.5e9


@dataclass(frozen=True, order=True)
class Cut:
    """How sums are cut."""

    height: int  # rows of a tile in the last but one dimension of the rows
    width: int  # and in the last one
    vectors: int  # of columns
    columns_outside: int  # 1: all rows for some columns, then the next columns; 0: the other way

    def tile(self, rank: int) -> list[int]:
        """Return the rows of a tile in each of so many dimensions."""
        return [*[1] * (rank - 2), self.height, self.width][-rank:] if rank else []


@dataclass(frozen=True)
class Sums:
    """A task that has one block of such sums."""

    unit: Unit
    sums: str  # the block
    rows: tuple[int, ...]  # of the sums, without columns
    apart: tuple[bool, ...]  # of each of these dimensions: whether each has weights of its own
    groups: int  # of columns, each of which reads other values of the rows
    columns: int  # of a group
    taps: tuple[int, ...]  # the reduction's loops, without the depth
    depth: int
    staged: tuple[str, ...]  # blocks that pad or move what the sums read, computed before
    aside: tuple[str, ...]  # blocks that prepare what the epilogue reads, or only name what is read
    epilogue: tuple[str, ...]  # blocks behind the sums, in order, element by element
    others: tuple[str, ...]  # and behind those
    cores: int
    row_bytes: int  # from what one row reads to what the next one does
    weights: tuple[int, tuple[int, ...]] | None = None  # which parameter, and its shape, by columns
    has_own_rows: bool = False  # each column reads values of its own, which lie as columns do
    is_packed: bool = False  # the weights of each panel of columns lie in one piece
    is_overlapping: bool = False  # the last vector of a group overlaps the one before it

    @classmethod
    def of(cls, mod: IRModule, unit: Unit, cores: int, *, is_overlapping: bool = False) -> Sums:
        """Read a task's module; raises ValueError where it is none.

        is_overlapping: vectors may overlap; ValueError where they fill the columns, too, or where
            what follows the sums does not store each at its place.
        """
        function = mod["main"]
        blocks = [block for block, _ in blocks_of(function)]
        place = unit.find(blocks, function.params)
        block = blocks[place]
        names = [str(b.name_hint) for b in blocks]
        read = {region.source for region in block.reads}
        staged: list[str] = []
        aside: list[Any] = []
        for each in blocks[:place]:
            if each.writes[0].source in read and unit.is_staged(each):
                staged.append(str(each.name_hint))
            else:
                aside.append(each)
        derived = {block.writes[0].source}
        epilogue: list[str] = []
        others: list[str] = []
        spatial = spatial_of(block)
        extents = [int(v.dom.extent) for v in spatial]
        depth = [int(v.dom.extent) for v in reduced_of(block)]
        for each in blocks[place + 1 :]:
            own = [int(v.dom.extent) for v in each.iter_vars]
            if not any(region.source in derived for region in each.reads):
                aside.append(each)
                continue
            is_one = _is_elementwise(each) and _reads_in_place(each, derived)
            derived.add(each.writes[0].source)
            if others or own != extents or not is_one:
                others.append(str(each.name_hint))
            else:
                epilogue.append(str(each.name_hint))
        if any(b.init is not None for b in blocks if b is not block):
            raise ValueError("it reduces something else beside its products")
        alike = units.group_columns(block)
        has_own_rows = alike == 1 < extents[-1]
        columns = extents[-1] if has_own_rows else alike
        groups = extents[-1] // columns
        if is_overlapping and groups == 1 and columns % unit.lanes == 0:
            raise ValueError("its columns fill vectors")
        if not is_overlapping and groups > 1:
            raise ValueError("its columns are in groups")
        return cls(
            unit=unit.overlapping(columns) if is_overlapping else unit.fitting(columns),
            sums=names[place],
            rows=tuple(extents[:-1]),
            apart=unit.apart(block, spatial[:-1]),
            groups=groups,
            columns=columns,
            taps=tuple(depth[:-1]),
            depth=depth[-1],
            staged=tuple(staged),
            aside=tuple(str(each.name_hint) for each in aside),
            epilogue=tuple(epilogue),
            others=tuple(others),
            cores=cores,
            row_bytes=unit.row_bytes(block, spatial[:-1]),
            weights=unit.weights(block, function.params),
            has_own_rows=has_own_rows,
            is_overlapping=is_overlapping,
        )

    def packed(self, weight_args: Collection[int]) -> Sums | None:
        """Return itself with packed weights; None where these are none of the model's."""
        is_weight = self.weights is not None and self.weights[0] in weight_args
        return replace(self, is_packed=True) if is_weight and not self.is_overlapping else None

    @property
    def reads_in_order(self) -> bool:
        """Whether the weights of a tile lie as its steps read them, and the next tile's behind."""
        return self.is_packed

    @cached_property
    def steps(self) -> int:
        """The instructions that are added to one vector of sums."""
        return math.prod(self.taps) * self.depth // self.unit.group

    @cached_property
    def vectors(self) -> int:
        """How many vectors the columns of a group are."""
        return -(-self.columns // self.unit.lanes)

    def tiles(self) -> Iterator[Cut]:
        whole = [1 if apart else rows for rows, apart in zip(self.rows, self.apart, strict=True)]
        high, wide = ([1, 1, *whole])[-2:]
        for height, width in itertools.product(divisors(high), divisors(wide)):
            if height * width > _MOST_ROWS:
                continue
            for vectors in divisors(self.vectors):
                used = height * width * vectors + vectors
                if vectors > _MOST_VECTORS or used > self.unit.registers:
                    continue
                if self.is_packed and vectors == self.vectors:
                    continue  # the only panel lies in one piece as it is
                for outside in (0, 1):
                    yield Cut(height, width, vectors, outside)

    def estimated_secs(self, tile: Cut, sms: float) -> float:
        """Return a rough time on the task's cores: what is issued, or what is loaded."""
        unit = self.unit
        rows, sums = tile.height * tile.width, tile.height * tile.width * tile.vectors
        loads = (sums if self.has_own_rows else rows) + tile.vectors
        step = max(sums / unit.per_cycle, loads / 2, LATENCY)
        cores = max(1, self.cores)
        all_vectors = self.groups * self.vectors
        all_tiles = math.prod(self.rows) // rows * all_vectors // tile.vectors
        tiles = math.ceil(all_tiles / cores)  # of the core that ends last
        if rows > _L1_WAYS * _PAGE_BYTES // math.gcd(self.row_bytes, _PAGE_BYTES):
            step *= _CROWDED
        # Behind the depth each vector of sums is rescaled, rounded and stored.
        cycles = tiles * (self.steps * step + 12.0 * sums + 20.0)
        panel = self.steps * unit.vector_bytes * tile.vectors  # weights of a tile
        panels = all_vectors / tile.vectors
        far = panel if tile.columns_outside else panel * panels
        bandwidth = L2_BYTES_PER_CYCLE if far <= self._kept_bytes(tile) else L3_BYTES_PER_CYCLE
        loaded = tiles * panel / bandwidth if far > L1_BYTES else 0.0
        read = math.prod(self.rows) * self.depth * unit.value_bytes  # for each panel, or once
        if tile.columns_outside and read > L2_BYTES and not self.has_own_rows:
            loaded += read * panels / cores / L3_BYTES_PER_CYCLE
        return overlapped(cycles, loaded) / HERTZ

    def _kept_bytes(self, tile: Cut) -> int:
        """Return how much of a panel of weights the L2 cache keeps.

        Where rows of weights are a power of two apart, few of its sets have room for them.
        """
        if self.is_packed or self.weights is None:
            return L2_BYTES
        way = L2_BYTES // _L2_WAYS
        apart = self.groups * self.columns * self.unit.value_bytes
        places = way // math.gcd(apart, way)
        return min(L2_BYTES, places * _L2_WAYS * tile.vectors * self.unit.vector_bytes)

    def features(self, tile: Cut, sms: float) -> tuple[float, ...]:
        sizes = (
            tile.height, tile.width, tile.vectors, tile.height * tile.width * tile.vectors,
            math.prod(self.rows), self.groups * self.columns, self.depth, math.prod(self.taps),
            self.steps,
        )  # fmt: skip
        logs = [math.log2(s) for s in sizes]
        secs = math.log2(self.estimated_secs(tile, sms))
        kind = 2.0 if self.is_overlapping else float(self.is_packed)
        return (*logs, float(tile.columns_outside), kind, secs)

    def layouts(self, cut: Cut) -> tuple[tuple[int, Layout], ...]:
        """Return `LoweredKernel.layouts` of a cut: those of a panel of columns in one piece."""
        if not self.is_packed or self.weights is None:
            return ()
        number, (*before, columns) = self.weights
        size, last = cut.vectors * self.unit.lanes, len(before)
        panels = Layout((*before, columns // size, size), (last, *range(last), last + 1))
        return ((number, panels),)

    def scheduled(self, mod: IRModule, cut: Cut) -> IRModule:
        """Return the module with its loops cut; raises what TVM raises for what is no cut of it."""
        return scheduled(mod, self, cut)


def overlapped(cycles: float, loaded: float) -> float:
    """Return the cycles of computing and loading at once."""
    return max(cycles, loaded) + _NOT_HIDDEN * min(cycles, loaded)


def _is_elementwise(block: Any) -> bool:
    """Whether a block stores at the places of its loops, in their order, or at equal distance."""
    from tvm import tirx

    store = block.body
    if not isinstance(store, tirx.BufferStore):
        return False
    loops = [v.var for v in block.iter_vars]
    return len(store.indices) == len(loops) and all(map(is_shifted, store.indices, loops))


def _reads_in_place(block: Any, buffers: Collection[Any]) -> bool:
    """Whether a block reads some buffers at the places of its loops alone."""
    loops = [v.var for v in block.iter_vars]
    return all(
        int(at.extent) == 1 and at.min.same_as(loop)
        for region in block.reads
        if region.source in buffers
        for at, loop in zip(region.region, loops, strict=True)
    )


def divisors(of: int) -> list[int]:
    """Return what divides a number without a rest, up to 64."""
    return [n for n in range(1, min(of, 64) + 1) if of % n == 0]
