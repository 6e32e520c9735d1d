"""Sums of products in the vector registers of a CPU: how they are cut, and the schedule of a cut.

A tile of sums stays in registers while the whole depth is added to it: some rows, in one or two
dimensions, times some vectors of columns. For each step of the depth, each vector of weights is
loaded once for all rows, and each row's value is spread over a register once for all vectors. What
follows the sums, such as a bias or a rescaling, is computed of a tile as it is stored.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tunerd.candidates.nests.blocks import REDUCE, blocks_of
from tunerd.candidates.registers import units
from tunerd.candidates.registers.units import Unit, is_shifted, operands
from tunerd.vocabulary import Layout

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.target import Target

_MOST_ROWS, _MOST_VECTORS = 16, 16
_L1_BYTES, _L2_BYTES = 32 << 10, 1 << 20
_L2_WAYS = 8
_L1_WAYS, _PAGE_BYTES = 8, 4096  # a way of the L1 cache is a page, on x86-64
_CROWDED = 1.3  # times as long, where the rows of a tile displace each other there
_L2_BYTES_PER_CYCLE, _L3_BYTES_PER_CYCLE = 40.0, 16.0
_LATENCY = 5.0  # cycles until a sum can be added to again
_HERTZ = 3.5e9


@dataclass(frozen=True, order=True)
class Cut:
    """How sums are cut."""

    height: int  # rows of a tile in the last but one dimension of the rows
    width: int  # and in the last one
    vectors: int  # of columns
    columns_outside: int  # 1: all rows for some columns, then the next columns; 0: the other way
    fused: int  # 1: what follows is computed tile by tile; 0: behind all sums


@dataclass(frozen=True)
class Sums:
    """A task that has one block of such sums."""

    unit: Unit
    sums: str  # the block
    rows: tuple[int, ...]  # of the sums, without columns
    apart: tuple[bool, ...]  # of each of these dimensions: whether each has weights of its own
    columns: int
    taps: tuple[int, ...]  # the reduction's loops, without the depth
    depth: int
    staged: tuple[str, ...]  # blocks that pad or move what the sums read, computed before
    aside: tuple[str, ...]  # blocks that prepare what the epilogue reads, or only name what is read
    epilogue: tuple[str, ...]  # blocks behind the sums, in order, element by element
    others: tuple[str, ...]  # and behind those
    cores: int
    row_bytes: int  # from what one row reads to what the next one does
    weights: tuple[int, tuple[int, ...]] | None = None  # which parameter, and its shape, by columns
    is_packed: bool = False  # the weights of each panel of columns lie in one piece

    @classmethod
    def of(cls, mod: IRModule, unit: Unit, cores: int) -> Sums:
        """Read a task's module; raises ValueError where it is none."""
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
        spatial = [v for v in block.iter_vars if int(v.iter_type) != REDUCE]
        extents = [int(v.dom.extent) for v in spatial]
        depth = [int(v.dom.extent) for v in block.iter_vars if int(v.iter_type) == REDUCE]
        for each in blocks[place + 1 :]:
            own = [int(v.dom.extent) for v in each.iter_vars]
            if not any(region.source in derived for region in each.reads):
                aside.append(each)
                continue
            derived.add(each.writes[0].source)
            if others or own != extents or not _is_elementwise(each):
                others.append(str(each.name_hint))
            else:
                epilogue.append(str(each.name_hint))
        if any(b.init is not None for b in blocks if b is not block):
            raise ValueError("it reduces something else beside its products")
        return cls(
            unit=unit.fitting(extents[-1]),
            sums=names[place],
            rows=tuple(extents[:-1]),
            apart=unit.apart(block, spatial[:-1]),
            columns=extents[-1],
            taps=tuple(depth[:-1]),
            depth=depth[-1],
            staged=tuple(staged),
            aside=tuple(str(each.name_hint) for each in aside),
            epilogue=tuple(epilogue),
            others=tuple(others),
            cores=cores,
            row_bytes=unit.row_bytes(block, spatial[:-1]),
            weights=unit.weights(block, function.params),
        )

    @cached_property
    def steps(self) -> int:
        """The instructions that are added to one vector of sums."""
        return math.prod(self.taps) * self.depth // self.unit.group

    def tiles(self) -> Iterator[Cut]:
        whole = [1 if apart else rows for rows, apart in zip(self.rows, self.apart, strict=True)]
        high, wide = ([1, 1, *whole])[-2:]
        for height, width in itertools.product(_divisors(high), _divisors(wide)):
            if height * width > _MOST_ROWS:
                continue
            for vectors in _divisors(self.columns // self.unit.lanes):
                used = height * width * vectors + vectors
                if vectors > _MOST_VECTORS or used > self.unit.registers:
                    continue
                if self.is_packed and vectors * self.unit.lanes == self.columns:
                    continue  # the only panel lies in one piece as it is
                apart = (0, 1) if self.epilogue and self.unit.may_store_apart else (1,)
                for outside, fused in itertools.product((0, 1), apart):
                    yield Cut(height, width, vectors, outside, fused)

    def estimated_secs(self, tile: Cut, sms: float) -> float:
        """Return a rough time on the task's cores: what is issued, or what is loaded."""
        unit = self.unit
        rows, sums = tile.height * tile.width, tile.height * tile.width * tile.vectors
        step = max(float(sums), (rows + tile.vectors) / 2, _LATENCY)
        cores = max(1, self.cores)
        all_tiles = math.prod(self.rows) // rows * self.columns // (tile.vectors * unit.lanes)
        tiles = math.ceil(all_tiles / cores)  # of the core that ends last
        if rows > _L1_WAYS * _PAGE_BYTES // math.gcd(self.row_bytes, _PAGE_BYTES):
            step *= _CROWDED
        # Behind the depth each vector of sums is rescaled, rounded and stored.
        cycles = tiles * (self.steps * step + 12.0 * sums + 20.0)
        if not tile.fused:
            cycles += math.prod(self.rows) * self.columns / unit.lanes * 8.0 / cores
        panel = self.steps * unit.vector_bytes * tile.vectors  # weights of a tile
        weights = panel * self.columns / (tile.vectors * unit.lanes)
        far = weights if not tile.columns_outside else panel
        bandwidth = _L2_BYTES_PER_CYCLE if far <= self._kept_bytes(tile) else _L3_BYTES_PER_CYCLE
        loaded = tiles * panel / bandwidth if far > _L1_BYTES else 0.0
        return max(cycles, loaded) / _HERTZ

    def _kept_bytes(self, tile: Cut) -> int:
        """Return how much of a panel of weights the L2 cache keeps.

        Where rows of weights are a power of two apart, few of its sets have room for them.
        """
        if self.is_packed or self.weights is None:
            return _L2_BYTES
        way, apart = _L2_BYTES // _L2_WAYS, self.columns * self.unit.value_bytes
        places = way // math.gcd(apart, way)
        return min(_L2_BYTES, places * _L2_WAYS * tile.vectors * self.unit.vector_bytes)

    def features(self, tile: Cut, sms: float) -> tuple[float, ...]:
        sizes = (
            tile.height, tile.width, tile.vectors, tile.height * tile.width * tile.vectors,
            math.prod(self.rows), self.columns, self.depth, math.prod(self.taps), self.steps,
        )  # fmt: skip
        logs = [math.log2(s) for s in sizes]
        secs = math.log2(self.estimated_secs(tile, sms))
        return (*logs, float(tile.columns_outside), float(tile.fused), float(self.is_packed), secs)

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
        from tvm.s_tir import Schedule

        schedule = Schedule(mod, error_render_level="fast")
        _Scheduling(schedule, self, cut).run()
        return schedule.mod


def first_cut(mod: IRModule, target: Target) -> IRModule | None:
    """Return the module of a function as its estimate would cut it; None where it has no sums."""
    cores = int(target.attrs.get("num-cores", 1))
    for make in (units.fma, lambda _: units.vnni()):
        try:
            found = Sums.of(mod, make(target), cores)
        except ValueError:
            continue
        best = min(found.tiles(), key=lambda cut: found.estimated_secs(cut, 0.0), default=None)
        return None if best is None else found.scheduled(mod, best)
    return None


def _is_elementwise(block: Any) -> bool:
    """Whether a block stores at the places of its loops, in their order, or at equal distance."""
    from tvm import tirx

    store = block.body
    if not isinstance(store, tirx.BufferStore):
        return False
    loops = [v.var for v in block.iter_vars]
    return len(store.indices) == len(loops) and all(map(is_shifted, store.indices, loops))


def _divisors(of: int) -> list[int]:
    return [n for n in range(1, min(of, 64) + 1) if of % n == 0]


class _Scheduling:
    """Applies a cut to a schedule."""

    def __init__(self, schedule: Any, sums: Sums, cut: Cut) -> None:
        self._s, self._of, self._cut, self._unit = schedule, sums, cut, sums.unit

    def run(self) -> None:
        s, of = self._s, self._of
        sums = s.get_sblock(of.sums)
        for _, layout in of.layouts(self._cut):
            self._pack(sums, layout)
        behind = [*of.epilogue, *of.others]
        is_fused = bool(of.epilogue and self._cut.fused)
        # What is computed by itself, tile by tile or at the end, has all before it in it.
        kept = {*behind[-1:], *([of.epilogue[-1]] if is_fused else [])}
        for name in (*of.aside, *behind):
            if name not in kept:
                s.compute_inline(s.get_sblock(name))
        if is_fused:
            last = s.get_sblock(of.epilogue[-1])
            tile, stored = self._tiled(last)
            s.compute_at(sums, tile, preserve_unit_loops=True)
            self._store(stored)
            loops = s.get_loops(sums)[-len(s.get(sums).iter_vars) :]
        else:
            _, loops = self._tiled(sums)
        self._sums(sums, loops, len(of.rows) + 1)
        if behind and not (is_fused and kept == {of.epilogue[-1]}):
            self._at_root(s.get_sblock(behind[-1]))
        for name in of.staged:
            self._at_root(s.get_sblock(name))

    def _pack(self, block: Any, layout: Layout) -> None:
        """Read the weights in this layout."""
        from tvm import tirx

        own = self._s.get(block)
        _, weights = operands(own)
        number = next(i for i, r in enumerate(own.reads) if r.source.same_as(weights.source))
        shape = [int(extent) for extent in weights.source.ty.shape]
        index_map = tirx.IndexMap.from_func(
            lambda *axes: layout.place(axes, shape),
            ndim=len(shape),
            index_dtype=str(weights.indices[-1].ty.dtype),
        )
        self._s.transform_layout(block, ("read", number), index_map)

    def _tiled(self, block: Any) -> tuple[Any, list[Any]]:
        """Cut a block's spatial loops; return the loop around a tile, and those inside of it.

        Inside are rows of the last two dimensions, vectors, and then what the block reduces.
        """
        s, cut, rank = self._s, self._cut, len(self._of.rows)
        loops = s.get_loops(block)
        rows, columns, reduced = loops[:rank], loops[rank], loops[rank + 1 :]
        outer, inner = [], []
        sizes = [*[1] * max(0, rank - 2), cut.height, cut.width][-rank:] if rank else []
        for loop, size in zip(rows, sizes, strict=True):
            whole, part = s.split(loop, [None, size])
            outer.append(whole)
            inner.append(part)
        panel, inside = s.split(columns, [None, cut.vectors * self._unit.lanes])
        around = [panel, *outer] if cut.columns_outside else [*outer, panel]
        s.reorder(*around, *reduced, *inner, inside)
        fused = s.fuse(*around)
        if self._of.cores > 1:
            s.parallel(fused)
        return fused, [*inner, inside, *reduced]

    def _sums(self, block: Any, loops: Sequence[Any], spatial: int) -> None:
        s, unit = self._s, self._unit
        inner, columns, reduced = loops[: spatial - 1], loops[spatial - 1], loops[spatial:]
        vectors, lanes = s.split(columns, [None, unit.lanes])
        *taps, depth = reduced
        group = []
        if unit.intrinsic is None:
            s.vectorize(lanes)
        else:
            depth, of_four = s.split(depth, [None, unit.group])
            group = [of_four]
        s.reorder(*taps, depth, *inner, vectors, lanes, *group)
        for loop in (*inner, vectors):
            s.unroll(loop)
        start = s.decompose_reduction(block, taps[0] if taps else depth)
        own = s.get_loops(start)
        s.vectorize(own[-1])
        for loop in own[-1 - spatial : -1]:
            s.unroll(loop)
        if unit.intrinsic is not None:
            s.tensorize(lanes, unit.intrinsic())

    def _store(self, loops: Sequence[Any]) -> None:
        """Store a tile by vectors."""
        s = self._s
        vectors, lanes = s.split(loops[-1], [None, self._unit.lanes])
        s.vectorize(lanes)
        for loop in (*loops[:-1], vectors):
            s.unroll(loop)

    def _at_root(self, block: Any) -> None:
        """Compute a whole block by itself, by vectors of its innermost loop."""
        s = self._s
        *outer, last = s.get_loops(block)
        size = int(s.get(last).extent)
        width = next((w for w in (64, 32, 16, 8, 4, size) if size % w == 0 and w <= 64), 0)
        if width > 1:
            around, lanes = s.split(last, [None, width])
            s.vectorize(lanes)
            outer.append(around)
        if self._of.cores > 1 and outer:
            s.parallel(s.fuse(*outer))
