"""What is done to a task before the loops of its sums are written: by schedules of TVM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunerd.candidates.registers.amx_loops import with_amx
from tunerd.candidates.registers.stages import with_stages
from tunerd.candidates.registers.tiles import with_tiles
from tunerd.candidates.registers.units import operands
from tunerd.vocabulary import Layout

if TYPE_CHECKING:
    from tvm.ir import IRModule

    from tunerd.candidates.registers.amx import Amx, AmxCut
    from tunerd.candidates.registers.sums import Cut, Sums
    from tunerd.candidates.registers.winograd import Winograd, WinogradCut


def scheduled(mod: IRModule, sums: Sums, cut: Cut) -> IRModule:
    """Return a module with the loops of its sums cut; raises what TVM raises for what is no cut."""
    from tvm.s_tir import Schedule

    scheduling = _Scheduling(Schedule(mod, error_render_level="fast"), sums)
    for _, layout in sums.layouts(cut):
        scheduling.pack(layout)
    stored = scheduling.written()
    return with_tiles(scheduling.mod, sums, stored, cut)


def in_stages(mod: IRModule, of: Winograd, cut: WinogradCut) -> IRModule:
    """Return a module whose convolution is in stages; raises as `scheduled` does."""
    from tvm.s_tir import Schedule

    scheduling = _Scheduling(Schedule(mod, error_render_level="fast"), of.sums)
    stored = scheduling.written(is_staged=False)
    return with_stages(scheduling.mod, of, stored, cut)


def in_tiles(mod: IRModule, of: Amx, cut: AmxCut) -> IRModule:
    """Return a module whose products are in AMX's tiles; raises as `scheduled` does."""
    from tvm.s_tir import Schedule

    scheduling = _Scheduling(Schedule(mod, error_render_level="fast"), of.sums)
    stored = scheduling.written()
    return with_amx(scheduling.mod, of, stored, cut)


class _Scheduling:
    """Applies a cut to a schedule."""

    def __init__(self, schedule: Any, sums: Sums) -> None:
        self._s, self._of = schedule, sums

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
