"""Where the values of a tensor lie in the one that operators have only moved them from.

Reshapes, transposes, slices and the like are followed back to a tensor that something computes. It
is done with the places themselves, as an array of numbers, so that no rule about operators has to
be right: an array is a sum of its indices times strides, or it is not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from tvm import relax
from tvm.ir import GenericConst, IRModule

# Operators that compute each value by itself: of one tensor, with numbers after it, and of two.
OF_ONE = frozenset(
    f"relax.{name}"
    for name in (
        "abs", "clip", "erf", "exp", "nn.gelu", "nn.gelu_tanh", "nn.leakyrelu", "nn.relu",
        "nn.silu", "sigmoid", "sqrt", "tanh",
    )
)  # fmt: skip
OF_TWO = frozenset(
    f"relax.{name}" for name in ("add", "divide", "maximum", "minimum", "multiply", "subtract")
)

_FEW_PLACES = 1 << 24  # of a tensor, whose order is followed
_MOST_MOVES = 6

Places = npt.NDArray[np.int64]
_Move = Callable[[Places], Places]


class Graph:
    """The bindings of `main`, and what reads each variable."""

    def __init__(self, mod: IRModule) -> None:
        self.bindings = [b for block in mod["main"].body.blocks for b in block.bindings]
        self._values = {b.var: b.value for b in self.bindings}
        self._vars = {b.value.__chandle__(): b.var for b in self.bindings}
        self.users: dict[Any, list[Any]] = {}  # what variables are bound to that read one
        for expr in (*self._values.values(), mod["main"].body.body):

            def note(node: Any, user: Any = expr) -> None:
                if isinstance(node, relax.Var):
                    self.users.setdefault(node, []).append(user)

            relax.analysis.post_order_visit(expr, note)

    def var_of(self, call: Any) -> Any:
        """Return the variable that a call is bound to."""
        return self._vars[call.__chandle__()]

    def is_used_once(self, var: Any) -> bool:
        return len(self.users.get(var, ())) == 1

    def value(self, expr: Any) -> Any:
        """Return what a variable is bound to; parameters and constants as they are."""
        while isinstance(expr, relax.Var) and expr in self._values:
            expr = self._values[expr]
        return expr

    def call(self, expr: Any, *names: str) -> Any:
        """Return the call of one of these operators that `expr` is, or None."""
        found = self.value(expr)
        return found if op_name(found) in names else None

    def constant(self, expr: Any) -> npt.NDArray[Any] | None:
        """Return the values of a constant; None of what is none."""
        found = self.value(expr)
        return np.asarray(found.value.numpy()) if isinstance(found, GenericConst) else None

    def number(self, expr: Any) -> float | None:
        """Return the only value of a constant."""
        found = self.constant(expr)
        return float(found.item()) if found is not None and found.size == 1 else None


def op_name(expr: Any) -> str:
    return getattr(expr.op, "name", "") if isinstance(expr, relax.Call) else ""


def shape_of(expr: Any) -> tuple[int, ...] | None:
    """Return the shape of a tensor; None of what is no tensor of fixed shape."""
    shape = getattr(getattr(expr, "ty", None), "shape", None)
    if not isinstance(shape, relax.ShapeExpr):
        return None
    try:
        return tuple(int(d) for d in shape.values)
    except TypeError:
        return None


# --- back to where values come from ------------------------------------------------------------


@dataclass(frozen=True)
class Moved:
    """A tensor as the values of another one, elsewhere and times a number."""

    root: Any
    moves: tuple[_Move, ...] = ()  # from the root on
    factor: float = 1.0

    def places(self, base: Places | None = None) -> Places:
        """Return the place in the root of each value; `base`: those of the root, if others."""
        if base is None:
            shape = shape_of(self.root) or ()
            base = np.arange(np.prod(shape, dtype=int), dtype=np.int64).reshape(shape)
        for move in self.moves:
            base = move(base)
        return base


def sources_of(graph: Graph, expr: Any) -> Iterator[Moved]:
    """Yield an expression as its operand, moved, then as the operand of that, and so on.

    As far as there are only moves, and places are few enough to be followed.
    """
    found = Moved(expr)
    for _ in range(_MOST_MOVES):
        step = move_of(graph, found.root)
        shape = None if step is None else shape_of(step[0])
        if step is None or shape is None or math.prod(shape) > _FEW_PLACES:
            return
        found = Moved(step[0], (step[1], *found.moves))
        yield found


def moved(graph: Graph, expr: Any) -> Moved:
    """Follow a tensor back over what only moves values or multiplies all with one number."""
    moves: list[_Move] = []
    factor = 1.0
    while True:
        if (scaled := _scaled(graph, expr)) is not None:
            expr, by = scaled
            factor *= by
        elif (found := move_of(graph, expr)) is not None:
            expr, move = found
            moves.append(move)
        else:
            return Moved(expr, tuple(reversed(moves)), factor)


def _scaled(graph: Graph, expr: Any) -> tuple[Any, float] | None:
    call = graph.call(expr, "relax.multiply", "relax.divide")
    if call is None:
        return None
    a, b = call.args
    by = graph.number(b)
    if by is None and op_name(call) == "relax.multiply":
        a, by = b, graph.number(a)
    if by is None or not by or shape_of(a) != shape_of(call):
        return None
    return a, by if op_name(call) == "relax.multiply" else 1.0 / by


def move_of(graph: Graph, expr: Any) -> tuple[Any, _Move] | None:
    """Return what an operator moves, and how."""
    call, shape = graph.value(expr), shape_of(expr)
    if shape is None:
        return None
    if isinstance(call, relax.TupleGetItem):
        split = graph.call(call.tuple_value, "relax.split")
        return None if split is None else (split.args[0], _part(split, int(call.index)))
    name = op_name(call)
    if name in ("relax.reshape", "relax.expand_dims", "relax.squeeze"):
        return call.args[0], lambda x: x.reshape(shape)
    if name == "relax.broadcast_to":
        return call.args[0], lambda x: np.broadcast_to(x, shape)
    if name == "relax.permute_dims":
        axes = None if call.attrs.axes is None else [int(a) for a in call.attrs.axes]
        return call.args[0], lambda x: x.transpose(axes)
    if (taken := taken_of(graph, call)) is not None:
        axis, part = taken
        where = (slice(None),) * axis + (slice(part.start, part.stop),)
        return call.args[0], lambda x: x[where].reshape(shape)
    if name == "relax.strided_slice":
        cut = cut_of(call)
        if cut is not None and _empty_of(call.args[0])[cut].shape == shape:
            return call.args[0], lambda x: x[cut]
    return None


def _part(split: Any, index: int) -> _Move:
    sections, axis = split.attrs.indices_or_sections, int(split.attrs.axis)
    at = [int(i) for i in sections] if hasattr(sections, "__len__") else int(sections)
    return lambda x: np.split(x, at, axis)[index]


def taken_of(graph: Graph, call: Any) -> tuple[int, range] | None:
    """Return the axis along which constant indices take a part, and which; None of others.

    Only of indices that follow each other: the part is a slice, in the shape of the result.
    """
    extents = shape_of(call.args[0]) if op_name(call) == "relax.take" else None
    if extents is None or call.attrs.axis is None:
        return None
    indices, axis = graph.constant(call.args[1]), int(call.attrs.axis)
    if indices is None or not indices.size or not -len(extents) <= axis < len(extents):
        return None
    axis %= len(extents)
    indices = counted_from_the_front(call, indices, extents[axis])
    first = int(indices.flat[0])
    part = range(first, first + indices.size)
    is_inside = first >= 0 and part.stop <= extents[axis]
    return (axis, part) if is_inside and np.array_equal(indices.ravel(), part) else None


def counted_from_the_front(take: Any, indices: Places, extent: int) -> Places:
    """Return the indices of a take, where some may count from the end, as those from the front."""
    return indices.astype(np.int64) % extent if str(take.attrs.mode) == "wrap" else indices


def cut_of(call: Any) -> tuple[slice, ...] | None:
    """Return which part of its operand a strided slice is; None where that is not fixed."""
    rank = len(shape_of(call.args[0]) or ())
    try:
        axes, begins, ends, *rest = ([int(_number(n)) for n in arg] for arg in call.args[1:])
    except (TypeError, AttributeError):
        return None
    strides = rest[0] if rest else [1] * len(axes)
    cut = [slice(None)] * rank
    for axis, begin, end, stride in zip(axes, begins, ends, strides, strict=True):
        cut[axis] = slice(begin, end, stride)
    return tuple(cut)


def _number(node: Any) -> int:
    return int(getattr(node, "value", node))


def _empty_of(expr: Any) -> Places:
    return np.broadcast_to(np.int64(0), shape_of(expr) or ())


# --- strides -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Strides:
    """Places as a sum: of an offset, and of indices times strides."""

    offset: int
    of: tuple[int, ...]


def strides_of(places: Places) -> Strides | None:
    """Return places as a sum of strides; None where they are none."""
    first = (0,) * places.ndim
    offset = int(places[first])
    found = [
        int(places[(*first[:axis], 1, *first[axis + 1 :])]) - offset if extent > 1 else 0
        for axis, extent in enumerate(places.shape)
    ]
    made: Places = np.array(offset, np.int64)
    for stride, indices in zip(found, np.ogrid[tuple(map(slice, places.shape))], strict=True):
        made = made + stride * indices
    return Strides(offset, tuple(found)) if np.array_equal(made, places) else None


def splits_of(lead: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield leading dimensions as they are and, where there is one, as two."""
    yield lead
    if len(lead) == 1:
        for outer in range(2, lead[0]):
            if lead[0] % outer == 0:
                yield outer, lead[0] // outer


def strides_of_all(
    places: list[Places], lead: tuple[int, ...]
) -> tuple[tuple[int, ...], list[Strides]] | None:
    """Return the strides of arrays that have the leading dimensions and two more each."""
    for split in splits_of(lead):
        shaped = (p.reshape(*split, *p.shape[-2:]) for p in places)
        found = list(itertools.takewhile(lambda s: s is not None, map(strides_of, shaped)))
        if len(found) == len(places):
            return split, [s for s in found if s is not None]
    return None
