"""Slices that are joined in order again, with more beside them, as the results of one split.

Exporters write either for the halves of a block, of which one is computed on. A slice would be
fused into the concatenation, where nobody can leave it out; a split is a kernel of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import relax
from tvm.ir import IRModule
from tvm.relax.expr_functor import PyExprMutator, mutator

from tunerd.frontend.relax.movement import Graph, cut_of, shape_of

_SLICE = "relax.strided_slice"


@dataclass
class _Split:
    """What some slices are together."""

    axis: int
    at: list[int]  # where each but the first begins
    made: Any = None


def gather_slices(mod: IRModule) -> IRModule:
    """Return `mod` with a split in `main` for all slices of a tensor that a concatenation joins."""
    graph = Graph(mod)
    gatherer = _Gatherer(mod)
    gatherer.splits = {}
    for binding in graph.bindings:
        call = graph.call(binding.var, "relax.concat")
        pieces = graph.value(call.args[0]) if call is not None else None
        if isinstance(pieces, relax.Tuple) and call.attrs.axis is not None:
            axis = int(call.attrs.axis) % len(shape_of(call) or (0,))
            gatherer.splits |= _splits(graph, list(pieces.fields), axis)
    if not gatherer.splits:
        return mod
    main = gatherer.visit_expr(mod["main"])
    mod = mod.clone()
    mod.update_func(mod.get_global_var("main"), main)
    return mod


def _splits(graph: Graph, pieces: list[Any], axis: int) -> dict[Any, tuple[_Split, int]]:
    """Return the slices that are all of a tensor in order: by handle, of what, and which."""
    found: dict[Any, tuple[_Split, int]] = {}
    for first in range(len(pieces)):
        run: list[Any] = []
        end = 0
        for piece in pieces[first:]:
            call = graph.call(piece, _SLICE)
            if call is None or _begin(call, axis) != end:
                break
            if run and not call.args[0].same_as(run[0].args[0]):
                break
            run.append(call)
            end += (shape_of(call) or ())[axis]
        size = (shape_of(run[0].args[0]) or ())[axis] if run else -1
        if end == size and 1 < len(run) < len(pieces):
            split = _Split(axis, [_begin(each, axis) or 0 for each in run[1:]])
            found |= {each.__chandle__(): (split, n) for n, each in enumerate(run)}
    return found


def _begin(call: Any, axis: int) -> int | None:
    """Return where a slice along this axis alone begins; None of any other."""
    shape, cut = shape_of(call.args[0]), cut_of(call)
    if shape is None or cut is None:
        return None
    ranges = [range(size)[each] for size, each in zip(shape, cut, strict=True)]
    wanted = [range(size) for size in shape]
    wanted[axis] = wanted[axis][ranges[axis].start : ranges[axis].stop]
    return ranges[axis].start if ranges == wanted else None


@mutator
class _Gatherer(PyExprMutator):  # type: ignore[misc]
    splits: dict[Any, tuple[_Split, int]]

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        split, index = self.splits.get(call.__chandle__(), (None, 0))
        visited = self.visit_expr_post_order(call)
        if split is None:
            return visited
        if split.made is None:
            whole = relax.op.split(visited.args[0], split.at, split.axis)
            split.made = self.builder_.emit(whole)
        return relax.TupleGetItem(split.made, index)
