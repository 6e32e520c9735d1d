"""The schedule of a cut of sums: which loops it has, in which order, and what is in vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tunerd.candidates.registers.stages import with_stages
from tunerd.candidates.registers.tiles import with_tiles
from tunerd.candidates.registers.units import operands
from tunerd.vocabulary import Layout

if TYPE_CHECKING:
    from tvm.ir import IRModule

    from tunerd.candidates.registers.sums import Cut, Sums
    from tunerd.candidates.registers.winograd import Winograd, WinogradCut


def scheduled(mod: IRModule, sums: Sums, cut: Cut) -> IRModule:
    """Return a module with the loops of its sums cut; raises what TVM raises for what is no cut."""
    from tvm.s_tir import Schedule

    scheduling = _Scheduling(Schedule(mod, error_render_level="fast"), sums)
    for _, layout in sums.layouts(cut):
        scheduling.pack(layout)
    if sums.unit.intrinsic is None:
        stored = scheduling.written()
        return with_tiles(scheduling.mod, sums, stored, cut)
    scheduling.cut(cut)
    return scheduling.mod


def in_stages(mod: IRModule, of: Winograd, cut: WinogradCut) -> IRModule:
    """Return a module whose convolution is in stages; raises as `scheduled` does."""
    from tvm.s_tir import Schedule

    scheduling = _Scheduling(Schedule(mod, error_render_level="fast"), of.sums)
    stored = scheduling.written(is_staged=False)
    return with_stages(scheduling.mod, of, stored, cut)


class _Scheduling:
    """Applies a cut to a schedule."""

    def __init__(self, schedule: Any, sums: Sums) -> None:
        self._s, self._of, self._unit = schedule, sums, sums.unit

    @property
    def mod(self) -> IRModule:
        return self._s.mod

    def pack(self, layout: Layout) -> None:
        """Read the weights in this layout."""
        from tvm import tirx

        block = self._s.get_sblock(self._of.sums)
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

    def written(self, *, is_staged: bool = True) -> str:
        """Leave two blocks whose loops are to be written: the sums, and what is stored of them.

        is_staged: whether what pads or moves what the sums read is computed before, not within.

        Returns the latter, which may be the sums themselves.
        """
        s, of = self._s, self._of
        stored = of.epilogue[-1] if of.epilogue else of.sums
        kept = {stored, *of.others[-1:]}
        within = () if is_staged else of.staged
        for name in (*within, *of.aside, *of.epilogue, *of.others):
            if name not in kept:
                s.compute_inline(s.get_sblock(name))
        for name in (*(of.staged if is_staged else ()), *of.others[-1:]):
            self._at_root(s.get_sblock(name))
        return stored

    def cut(self, cut: Cut) -> None:
        """Cut the loops of sums that an instruction computes."""
        s, of = self._s, self._of
        sums = s.get_sblock(of.sums)
        behind = [*of.epilogue, *of.others]
        is_fused = bool(of.epilogue and cut.fused)
        # What is computed by itself, tile by tile or at the end, has all before it in it.
        kept = {*behind[-1:], *([of.epilogue[-1]] if is_fused else [])}
        for name in (*of.aside, *behind):
            if name not in kept:
                s.compute_inline(s.get_sblock(name))
        if is_fused:
            last = s.get_sblock(of.epilogue[-1])
            tile, stored = self._tiled(last, cut)
            s.compute_at(sums, tile, preserve_unit_loops=True)
            self._store(stored)
            loops = s.get_loops(sums)[-len(s.get(sums).iter_vars) :]
        else:
            _, loops = self._tiled(sums, cut)
        self._sums(sums, loops, len(of.rows) + 1)
        if behind and not (is_fused and kept == {of.epilogue[-1]}):
            self._at_root(s.get_sblock(behind[-1]))
        for name in of.staged:
            self._at_root(s.get_sblock(name))

    def _tiled(self, block: Any, cut: Cut) -> tuple[Any, list[Any]]:
        """Cut a block's spatial loops; return the loop around a tile, and those inside of it.

        Inside are rows of the last two dimensions, vectors, and then what the block reduces.
        """
        s, rank = self._s, len(self._of.rows)
        loops = s.get_loops(block)
        rows, columns, reduced = loops[:rank], loops[rank], loops[rank + 1 :]
        outer, inner = [], []
        sizes = cut.tile(rank)
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
        depth, group = s.split(depth, [None, unit.group])
        s.reorder(*taps, depth, *inner, vectors, lanes, group)
        for loop in (*inner, vectors):
            s.unroll(loop)
        start = s.decompose_reduction(block, taps[0] if taps else depth)
        own = s.get_loops(start)
        s.vectorize(own[-1])
        for loop in own[-1 - spatial : -1]:
            s.unroll(loop)
        assert unit.intrinsic is not None
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
