"""Parts that constant indices take out of a tensor, as slices.

A kernel of TVM that takes by indices is fused with nothing, and a slice is fused into what moves or
computes its values next. Exporters take queries, keys and values out of one product so, after a
transpose of all of it, which is a copy for the three of them: a part is cut out of the product.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from tvm import relax
from tvm.ir import IRModule
from tvm.relax.expr_functor import PyExprMutator, mutator

from tunerd.frontend.relax.constants import remove_redundant_reshapes, rewritten
from tunerd.frontend.relax.movement import (
    Graph,
    Moved,
    Strides,
    shape_of,
    sources_of,
    strides_of,
    taken_of,
)


def cut_out_parts(mod: IRModule) -> IRModule:
    """Return `mod` with slices in place of what `main` takes by constant indices in a row."""
    cutter = _Cutter(mod)
    cutter.graph = Graph(mod)
    if not any(taken_of(cutter.graph, b.value) for b in cutter.graph.bindings):
        return mod
    return remove_redundant_reshapes(rewritten(mod, cutter))


@mutator
class _Cutter(PyExprMutator):  # type: ignore[misc]
    graph: Graph  # of the module as it was

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        taken = taken_of(self.graph, call)
        shape = shape_of(call)
        if taken is None or shape is None:
            return super().visit_call_(call)
        for moved in reversed([*sources_of(self.graph, call)]):
            made = self._cut(moved)
            if made is not None:
                return made
        axis, part = taken
        source = self.visit_expr(call.args[0])
        cut = relax.op.strided_slice(source, [axis], [part.start], [part.stop])
        return relax.op.reshape(self.builder_.emit(cut), shape)

    def _cut(self, moved: Moved) -> relax.Expr | None:
        """Return a part as a slice of the root, moved; None where it is no slice of it."""
        sizes = shape_of(moved.root) or ()
        all_places = np.arange(math.prod(sizes)).reshape(sizes)
        places = moved.places(all_places)
        strides = strides_of(places) if places.size else None
        if strides is None:
            return None
        order = _order(places.shape, strides)
        own = places.transpose(order)
        first, last = (np.unravel_index(own.flat[n], sizes) for n in (0, -1))
        box = [slice(int(a), int(b) + 1) for a, b in zip(first, last, strict=True)]
        cut = all_places[tuple(box)]
        if not np.array_equal(cut.ravel(), own.ravel()):
            return None
        made = self.visit_expr(moved.root)
        if axes := [axis for axis, size in enumerate(sizes) if cut.shape[axis] < size]:
            begins = [box[axis].start for axis in axes]
            ends = [box[axis].stop for axis in axes]
            made = self.builder_.emit(relax.op.strided_slice(made, axes, begins, ends))
        made = self.builder_.emit(relax.op.reshape(made, own.shape))
        if order == sorted(order):
            return made
        return relax.op.permute_dims(made, [order.index(axis) for axis in range(places.ndim)])


def _order(shape: Sequence[int], strides: Strides) -> list[int]:
    """Return dimensions in the order that their values have in the root; those of one stay."""
    wide = [axis for axis, extent in enumerate(shape) if extent > 1]
    left = iter(sorted(wide, key=lambda axis: -strides.of[axis]))
    return [next(left) if extent > 1 else axis for axis, extent in enumerate(shape)]
