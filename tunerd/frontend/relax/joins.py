"""Concatenations that nobody computes: each kernel writes into its part of what they join.

A part is read and written by kernels alone, which know where it lies in its root, the tensor that
all is joined in. What is joined again later, as the features of a dense block are, has one root.

It is worth it where a kernel that only joins is left: a concatenation that was fused into what
follows stays there. Parts begin at, and come in steps of, what a thread loads at once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tunerd.frontend.relax.movement import Graph, op_name, shape_of
from tunerd.frontend.relax.precision import with_types
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
    """Which concatenations of `main` are left out."""

    parts: dict[Any, Part]  # by variable, also of roots
    joined: frozenset[Any]  # variables that a concatenation was bound to


def joins_of(mod: IRModule, refused: Collection[Any] = ()) -> Joins:
    """Return what of `main` can be written in place; `refused` are roots that nothing is part of.

    The kernels are those of `frontend.relax.lowering`, with nothing scheduled yet.
    """
    found = _Finder(mod, refused)
    for binding in reversed(found.graph.bindings):
        axis = found.axis_of(binding.value)
        if axis is not None:
            found.join(binding.var, axis, list(binding.value.args[1]))
    return Joins(found.parts, frozenset(found.joined))


class _Finder:
    def __init__(self, mod: IRModule, refused: Collection[Any]) -> None:
        self.graph = Graph(mod)
        self.parts: dict[Any, Part] = {}
        self.joined: set[Any] = set()
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


# --- which kernels join --------------------------------------------------------------------------


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
