"""A scheduled kernel of one model -> a kernel that serves R models of its architecture at once.

The R models have one set of shapes and each its own weights, all of a model's in one piece of
memory, laid out alike (`artifacts.weights`). A *lane* of a launch serves one of them, and the
lane's *slot* says which: the distance from the piece whose weights the kernel is given to the
piece that the lane takes, in units of SLOT_BYTES. A kernel does not know how many models there are
or how large a piece is, so that one captured graph serves any R of them (Jain et al.,
arXiv 1901.10008, call such kernels super-kernels).

    f(a_0, ..., a_n)  ->  f(slots, b_0, ..., b_n)

`slots` are R int32. Of a weight, b_i is one-dimensional: that of the first piece. What else it
takes, b_i, has R rows of a_i. The schedule is that of one model with one more dimension of the
grid; on CPUs the lanes run one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from tvm import ir, s_tir, tirx
from tvm.tirx.buffer import is_buffer_var
from tvm_ffi import structural_map, structural_mutate, structural_walk

from tunerd.system.arrays import dtype_of
from tunerd.vocabulary import SLOT_BYTES

_AXIS, _WIDE_AXIS = "blockIdx.z", "blockIdx.x"
_MAX_BLOCKS = 65_535  # along _AXIS; CUDA's programming guide, compute capabilities


def for_tenants(
    func: tirx.PrimFunc, weights: Collection[int], count: int, *, is_cuda: bool
) -> tirx.PrimFunc:
    """Return the kernel of `count` models that a scheduled kernel of one model becomes.

    Args:
        func: the kernel, with its schedule, and its weights in the layout that this wants.
        weights: which of its arguments are weights.
        count: lanes, from 1 on.

    Raises ValueError for a kernel whose arguments are not whole tensors of known shape, or that
    reaches them in another way than by their elements.
    """
    if not isinstance(func.body, s_tir.SBlockRealize):
        raise ValueError("the kernel has no blocks, so it cannot serve several models")
    slots = tirx.decl_buffer((count,), "int32", "slots")
    weight_of = {a: _flat(a) for i, a in enumerate(func.params) if i in weights}
    row_of = {a: _with_rows(a, count) for i, a in enumerate(func.params) if i not in weights}
    params = [slots, *((weight_of | row_of)[argument] for argument in func.params)]
    root = func.body.block
    if is_cuda:  # on CPUs a lane may have what the one before it has left
        row_of |= {b: _with_rows(b, count) for b in _allocated(root) if b.scope() == "global"}
    lanes = _Lanes(count, slots, row_of, weight_of)
    body = lanes.of_nests(root.body) if is_cuda else lanes.one_after_the_other(root.body)
    block = s_tir.SBlock(
        [], [], [], root.name_hint, body, root.init,
        [row_of.get(buffer, buffer) for buffer in root.alloc_buffers],
        [], root.annotations,
    )  # fmt: skip
    attrs = {k: v for k, v in (func.attrs or {}).items() if k != "layout_free_buffers"}
    made = tirx.PrimFunc(
        params,
        s_tir.SBlockRealize([], tirx.const(True, "bool"), block),
        func.ret_type,
        ir.make_node("ir.DictAttrs", **attrs),
    )
    if left := _used(made.body, [*weight_of, *row_of]):
        names = ", ".join(sorted(buffer.name for buffer in left))
        raise ValueError(f"the kernel reaches {names} in another way than by elements, in lanes")
    return made


def _flat(weight: Any) -> Any:
    return tirx.decl_buffer((math.prod(_extents(weight)),), weight.dtype, weight.name)


def _with_rows(buffer: Any, count: int) -> Any:
    _extents(buffer)
    kind = str(buffer.shape[0].ty.dtype) if len(buffer.shape) else "int64"
    shape = [tirx.IntImm(kind, count), *buffer.shape]
    return tirx.decl_buffer(shape, buffer.dtype, buffer.name, scope=buffer.scope())


def _extents(buffer: Any) -> list[int]:
    if not is_buffer_var(buffer) or buffer.strides:
        raise ValueError(f"argument {buffer} is not a whole tensor")
    if not all(isinstance(extent, tirx.IntImm) for extent in buffer.shape):
        raise ValueError(f"argument {buffer} is not of one shape")
    return [int(extent) for extent in buffer.shape]


def _allocated(root: Any) -> list[Any]:
    found: list[Any] = []
    structural_walk(root, (s_tir.SBlock, lambda block: found.extend(block.alloc_buffers)))
    return found


def _used(body: Any, buffers: Collection[Any]) -> set[Any]:
    """Return those of some buffers that a statement has."""
    found: set[Any] = set()
    known = set(buffers)
    structural_walk(body, (ir.Var, lambda var: found.update({var} & known)))
    return found


@dataclass(frozen=True)
class _Lanes:
    """Puts loops over the lanes around what a kernel does."""

    count: int
    slots: Any
    rows: dict[Any, Any]  # by buffer of one model, that with a row for each
    weights: dict[Any, Any]  # by weight of one model, that of the first piece

    def one_after_the_other(self, body: Any) -> Any:
        lane = tirx.Var("lane", "int64")
        loop = tirx.ForKind.SERIAL
        return tirx.For(lane, _long(0), _long(self.count), loop, self._of_lane(body, lane))

    def of_nests(self, body: Any) -> Any:
        """Return what the host does, with each kernel that it launches changed."""

        def change(nest: Any, mutator: Any) -> Any:
            return self._of_nest(nest) if _axis(nest) else mutator.default_mutate(nest)

        return structural_mutate(body, ((tirx.For, tirx.AttrStmt), change))

    def _of_nest(self, nest: Any) -> Any:
        """Return a kernel with its lanes along one axis of the grid, outside of what is there."""
        axis = _AXIS
        if self.count * _extent(nest, axis) > _MAX_BLOCKS:
            axis = _WIDE_AXIS
        extent = _extent(nest, axis)
        block = tirx.Var("lane", "int64")
        lane = block if extent == 1 else tirx.floordiv(block, _long(extent))
        body = _without_axis(nest, axis, tirx.floormod(block, _long(extent)))
        bound = tirx.IterVar(None, tirx.Var(axis, "int64"), tirx.IterVar.ThreadIndex, axis)
        kind = tirx.ForKind.THREAD_BINDING
        blocks = _long(self.count * extent)
        return tirx.For(block, _long(0), blocks, kind, self._of_lane(body, lane), bound)

    def _of_lane(self, body: Any, lane: Any) -> Any:
        """Return what one lane does: `body`, with its rows and its weights."""
        own: dict[Any, Any] = {}  # weights: declared anew in each nest
        first: list[Any] = []
        used = _used(body, self.weights)
        for weight in (weight for weight in self.weights if weight in used):
            own[weight] = tirx.decl_buffer(weight.shape, weight.dtype, weight.name)
            kind = ir.PointerType(ir.PrimType(str(weight.dtype)), "global")
            pointer = tirx.Var(f"{weight.name}_of_lane", kind)
            unit = SLOT_BYTES // dtype_of(str(weight.dtype)).itemsize
            begin = tirx.Cast("int64", self.slots[lane]) * _long(unit)
            first.append(
                tirx.Bind(pointer, tirx.address_of(tirx.BufferLoad(self.weights[weight], [begin])))
            )
            first.append(tirx.DeclBuffer(own[weight], data=pointer))

        def load(node: Any) -> Any:
            row = self.rows.get(node.source)
            return node if row is None else tirx.BufferLoad(row, [lane, *node.indices])

        def store(node: Any) -> Any:
            row = self.rows.get(node.buffer)
            return node if row is None else tirx.BufferStore(row, node.value, [lane, *node.indices])

        def region(node: Any) -> Any:
            row = self.rows.get(node.source)
            only = ir.Range.from_min_extent(lane, 1)
            return node if row is None else tirx.BufferRegion(row, [only, *node.region])

        def allocating(node: Any) -> Any:
            if not any(buffer in self.rows for buffer in node.alloc_buffers):
                return node
            return s_tir.SBlock(
                node.iter_vars, node.reads, node.writes, node.name_hint, node.body, node.init,
                [self.rows.get(buffer, buffer) for buffer in node.alloc_buffers],
                node.match_buffers, node.annotations,
            )  # fmt: skip

        callbacks = (
            (ir.Var, lambda var: own.get(var, var)),
            (ir.TensorLoad, load),
            (tirx.BufferStore, store),
            (ir.TensorRegion, region),
            (s_tir.SBlock, allocating),
        )
        return tirx.stmt_seq(*first, structural_map(body, callbacks))


def _long(value: int) -> Any:
    return tirx.IntImm("int64", value)


def _axis(node: Any) -> str:
    """Return the axis of blocks or threads that a statement binds, empty where it binds none."""
    if isinstance(node, tirx.For):
        bound = node.thread_binding
        return "" if bound is None else str(bound.thread_tag)
    return str(node.node.thread_tag) if node.attr_key == "thread_extent" else ""


def _extent(nest: Any, axis: str) -> int:
    """Return how many blocks a kernel has along an axis."""
    found: set[int] = set()

    def visit(node: Any) -> None:
        if _axis(node) == axis:
            found.add(int(node.extent if isinstance(node, tirx.For) else node.value))

    structural_walk(nest, ((tirx.For, tirx.AttrStmt), visit))
    if len(found) > 1:
        raise ValueError(f"the kernel has {sorted(found)} blocks along {axis}")
    return found.pop() if found else 1


def _without_axis(nest: Any, axis: str, index: Any) -> Any:
    """Return a kernel with an index in place of each variable that is bound to an axis."""
    bound: dict[Any, Any] = {}

    def unbind(node: Any) -> Any:
        if _axis(node) != axis:
            return node
        var = node.loop_var if isinstance(node, tirx.For) else node.node.var
        bound[var] = index.astype(str(var.ty.dtype))
        return node.body

    body = structural_map(nest, ((tirx.For, tirx.AttrStmt), unbind))
    return structural_map(body, (ir.Var, lambda var: bound.get(var, var))) if bound else body
