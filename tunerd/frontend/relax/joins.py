"""Concatenations and splits that nobody computes: each kernel writes and reads parts in place.

A part is read and written by kernels alone, which know where it lies in its root, the tensor that
all is joined in. What is joined again later, as the features of a dense block are, has one root.

What a split or a slice cuts out of a tensor is a part of it, too: its readers find it there, and
where all pieces of a tensor are joined in order, the whole of it is one part of what they join.

It is worth it where a kernel that only joins or cuts is left: one that was fused into what follows
stays there. Parts begin at, and come in steps of, what a thread loads at once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tvm import relax

from tunerd.frontend.relax.movement import Graph, op_name, shape_of
from tunerd.frontend.relax.precision import DTYPES, with_types
from tunerd.system.arrays import dtype_of

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.tirx import PrimFunc

_ALIGNMENT = 16  # bytes, the widest load of a thread

_Spec = tuple[tuple[int, ...], str]  # shape and type


@dataclass(frozen=True)
class Part:
    """Where a tensor lies: from `offset` on along an axis of the root, whole along all others."""

    root: Any  # the variable of what is joined last
    axis: int
    offset: int


@dataclass(frozen=True)
class Joins:
    """Which concatenations and splits of `main` are left out."""

    parts: dict[Any, Part]  # by variable, also of roots
    joined: frozenset[Any]  # variables that a concatenation was bound to
    cut: frozenset[Any] = frozenset()  # those that a split or a slice was, and their fields

    @property
    def left_out(self) -> frozenset[Any]:
        """All variables whose bindings an artifact does not have."""
        return self.joined | self.cut


def joins_of(mod: IRModule, refused: Collection[Any] = ()) -> Joins:
    """Return what of `main` can be written in place; `refused` are roots that nothing is part of.

    The kernels are those of `frontend.relax.lowering`, with nothing scheduled yet.
    """
    found = _Finder(mod, refused)
    for binding in reversed(found.graph.bindings):
        axis = found.axis_of(binding.value)
        if axis is not None:
            pieces = list(binding.value.args[1])
            found.join(binding.var, axis, found.uncut(pieces, axis))
            if binding.var not in found.joined:
                found.join(binding.var, axis, pieces)
    for binding in found.graph.bindings:
        if op_name(binding.value) == "relax.call_tir":
            found.cut_out(binding.var)
    return Joins(found.parts, frozenset(found.joined), frozenset(found.cut))


class _Finder:
    def __init__(self, mod: IRModule, refused: Collection[Any]) -> None:
        self.graph = Graph(mod)
        self.parts: dict[Any, Part] = {}
        self.joined: set[Any] = set()
        self.cut: set[Any] = set()
        self._mod, self._refused = mod, refused

    def axis_of(self, value: Any) -> int | None:
        """Return along which axis a kernel joins tensors; None of one that does anything else."""
        is_kernel = op_name(value) == "relax.call_tir"
        return joined_axis(self._mod[value.args[0]]) if is_kernel else None

    def join(self, whole: Any, axis: int, pieces: list[Any]) -> None:
        """Give each piece its part, unless something is in the way.

        What is joined last comes first, so that a piece that has a part has it in a larger tensor.
        """
        own = self.parts.get(whole)
        known = [self.parts[piece] for piece in pieces if piece in self.parts]
        if known:
            if own is None and len(known) == len(pieces) and self._is_run(known, pieces, axis):
                self.parts[whole] = known[0]
                self.joined.add(whole)
            return
        if own is None:
            if whole in self._refused or not self._is_inside(whole, has_views=True):
                return
            own = Part(whole, axis, 0)
        if own.axis != axis or len(set(pieces)) != len(pieces):
            return
        sizes = [(shape_of(piece) or ())[axis] for piece in pieces]
        offsets = [own.offset + sum(sizes[:n]) for n in range(len(pieces))]
        is_fit = (self._is_piece(p, own) for p in pieces)
        if not all(is_fit) or not all(_is_aligned(own, offset) for offset in offsets):
            return
        self.parts[whole] = own
        self.joined.add(whole)
        for piece, offset in zip(pieces, offsets, strict=True):
            self.parts[piece] = Part(own.root, axis, offset)

    def uncut(self, pieces: Sequence[Any], axis: int) -> list[Any]:
        """Return pieces, with a tensor itself where it follows cut into all of its pieces."""
        found: list[Any] = []
        left = list(pieces)
        while left:
            first = self._cut_from(left[0])
            run = 0 if first is None else self._run(first.root, left, axis)
            found.append(first.root if first is not None and run else left[0])
            left = left[run or 1 :]
        return found

    def _run(self, whole: Any, pieces: Sequence[Any], axis: int) -> int:
        """Return how many of the first pieces are all of `whole`, cut; 0 where they are not."""
        size, offset = (shape_of(whole) or ())[axis], 0
        for count, piece in enumerate(pieces, 1):
            if self._cut_from(piece) != Part(whole, axis, offset):
                return 0
            offset += (shape_of(piece) or ())[axis]
            if offset == size:
                return count
        return 0

    def _cut_from(self, piece: Any) -> Part | None:
        """Return the tensor that a split or a slice cut a piece out of, and where it was there."""
        value, index = self.graph.value(piece), 0
        if isinstance(value, relax.TupleGetItem):
            value, index = self.graph.value(value.tuple_value), int(value.index)
        if op_name(value) != "relax.call_tir" or len(value.args[1]) != 1:
            return None
        cut = cut_by(self._mod[value.args[0]])
        return None if cut is None else Part(value.args[1][0], cut[0], cut[1][index])

    def cut_out(self, var: Any) -> None:
        """Give each piece that a call bound to `var` cuts its part, unless something is in the way.

        What is cut first comes first, and after all that is joined.
        """
        pieces = [var]
        if isinstance(var.ty, relax.TupleType):
            users = self.graph.users.get(var, ())
            if not all(isinstance(user, relax.TupleGetItem) for user in users):
                return
            pieces = [self.graph.var_of(user) for user in users]
        parts: dict[Any, Part] = {}
        for piece in pieces:
            place = self._cut_from(piece)
            own = None if place is None else self._source(place)
            if place is None or own is None or piece in self.parts or own.axis != place.axis:
                return
            parts[place.root] = own
            parts[piece] = Part(own.root, own.axis, own.offset + place.offset)
            if not self._is_inside(piece) or not _is_aligned(own, parts[piece].offset):
                return
        self.parts |= parts
        self.cut |= {var, *pieces} if parts else set()

    def _source(self, place: Part) -> Part | None:
        """Return where a tensor lies that something was cut out of: where it is, if in nothing."""
        whole = place.root
        if whole in self.parts:
            return self.parts[whole]
        is_made = op_name(self.graph.value(whole)) == "relax.call_tir"
        if not is_made or whole in self._refused or not self._is_inside(whole, has_views=True):
            return None
        return Part(whole, place.axis, 0)

    def _is_run(self, parts: Sequence[Part], pieces: Sequence[Any], axis: int) -> bool:
        """Say whether pieces lie one after the other in one root already."""
        offset = parts[0].offset
        for part, piece in zip(parts, pieces, strict=True):
            if part != Part(parts[0].root, axis, offset):
                return False
            offset += (shape_of(piece) or ())[axis]
        return True

    def _is_piece(self, var: Any, own: Part) -> bool:
        """Say whether a kernel makes it, of the type of all, and kernels alone read it."""
        value = self.graph.value(var)
        is_made = op_name(value) == "relax.call_tir" and shape_of(var) is not None
        return is_made and var.ty.dtype == own.root.ty.dtype and self._is_inside(var)

    def _is_inside(self, var: Any, *, has_views: bool = False) -> bool:
        """Say whether kernels alone read a value; `has_views`: or views that they read."""
        for user in self.graph.users.get(var, ()):
            name = op_name(user)
            if name == "relax.reshape" and has_views:
                if not self._is_inside(self.graph.var_of(user), has_views=True):
                    return False
            elif name != "relax.call_tir":
                return False
        return True


def _is_aligned(part: Part, offset: int) -> bool:
    shape = shape_of(part.root) or ()
    step = math.prod(shape[part.axis + 1 :]) * dtype_of(str(part.root.ty.dtype)).itemsize
    return offset * step % _ALIGNMENT == 0 and shape[part.axis] * step % _ALIGNMENT == 0


# --- which kernels join, and which cut -----------------------------------------------------------


def joined_axis(kernel: PrimFunc) -> int | None:
    """Return along which axis a kernel joins its tensors, where that is all it does."""
    from tvm import tirx
    from tvm_ffi import structural_equal

    *pieces, whole = [(tuple(map(int, p.ty.shape)), str(p.ty.dtype)) for p in kernel.params]
    axis = _axis([shape for shape, _ in pieces], whole[0])
    if axis is None:
        return None
    plain = tirx.PrimFunc(kernel.params, kernel.body, kernel.ret_type)
    same = (_joining((*pieces, whole), axis, dtype) for dtype in {whole[1], "float32"})
    return axis if any(structural_equal(plain, each) for each in same) else None


def _axis(pieces: Sequence[tuple[int, ...]], whole: tuple[int, ...]) -> int | None:
    if len(pieces) < 2 or any(len(shape) != len(whole) for shape in pieces):
        return None
    for axis, size in enumerate(whole):
        rest = {(*shape[:axis], *shape[axis + 1 :]) for shape in pieces}
        is_rest = rest == {(*whole[:axis], *whole[axis + 1 :])}
        if is_rest and sum(shape[axis] for shape in pieces) == size:
            return axis
    return None


@functools.lru_cache(512)
def _joining(specs: tuple[_Spec, ...], axis: int, dtype: str) -> PrimFunc:
    """Return TVM's kernel that joins, computed in a type and stored in those of `specs`."""
    from tvm import te, tirx, topi

    pieces = [
        te.placeholder([tirx.IntImm("int64", size) for size in shape], dtype)
        for shape, _ in specs[:-1]
    ]
    made = te.create_prim_func([*pieces, topi.concatenate(pieces, axis)])
    made = with_types(made, [own for _, own in specs])
    return tirx.PrimFunc(made.params, made.body, made.ret_type)


def cut_by(kernel: PrimFunc) -> tuple[int, tuple[int, ...]] | None:
    """Return along which axis a kernel cuts its tensor, and where each of its results begins.

    None of a kernel that does anything else.
    """
    from tvm import tirx
    from tvm_ffi import structural_walk

    source, *pieces = kernel.params
    if any(str(piece.ty.dtype) != str(source.ty.dtype) for piece in pieces):
        return None
    axes = {_cut_axis(source, piece) for piece in pieces}
    axis = axes.pop() if len(axes) == 1 else None
    stores: list[Any] = []
    structural_walk(kernel.body, (tirx.BufferStore, stores.append))
    if axis is None or len(stores) != len(pieces):
        return None
    found = [_offset(*each, source, axis) for each in zip(stores, pieces, strict=True)]
    offsets = tuple(offset for offset in found if offset is not None)
    return (axis, offsets) if len(offsets) == len(found) else None


def _cut_axis(source: Any, piece: Any) -> int | None:
    """Return the only axis along which a piece is smaller."""
    sizes, own = ([int(size) for size in each.ty.shape] for each in (source, piece))
    axes = [n for n, size in enumerate(sizes) if own[n : n + 1] != [size]]
    return axes[0] if len(axes) == 1 and len(own) == len(sizes) else None


def _offset(store: Any, piece: Any, source: Any, axis: int) -> int | None:
    """Return how far along an axis of `source` a piece is read; None if in any other way."""
    from tvm import ir, tirx

    value, dtype = store.value, str(source.ty.dtype)
    exact = ("float32", dtype) if dtype in DTYPES.values() else ()
    while isinstance(value, tirx.Cast) and str(value.ty.dtype) in exact:
        value = value.value
    if not isinstance(value, ir.TensorLoad) or not value.source.same_as(source):
        return None
    if not store.buffer.same_as(piece):
        return None
    offset = 0
    for n, (to, at) in enumerate(zip(store.indices, value.indices, strict=True)):
        if n == axis and isinstance(at, tirx.Add) and isinstance(at.b, tirx.IntImm):
            offset, at = int(at.b), at.a
        if not isinstance(to, tirx.Var) or not to.same_as(at):
            return None
    return offset
