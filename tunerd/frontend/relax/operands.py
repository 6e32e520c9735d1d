"""Products that read an operand where it lies, in place of one that was transposed for them.

`x @ Transpose(z)` is a kernel that moves z and one that multiplies: fused, the product reads z by
other strides, and z is never stored again. So it is with the heads of an attention whose parts stay
kernels. It is for GPUs: there tiles of both operands are copied to shared memory in either order,
where on CPUs the vectors of a product are columns of its right operand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tvm
from tvm import relax, te, tirx
from tvm.ir import IRModule
from tvm.relax.expr_functor import PyExprMutator, mutator

from tunerd.frontend.relax.constants import rewritten
from tunerd.frontend.relax.movement import Graph, op_name, shape_of
from tunerd.frontend.relax.rewriting import TAKES_AN_EPILOGUE

_Read = tuple[Any, tuple[int, ...]]  # a tensor, and by which of its axes each one is read


def read_transposed(mod: IRModule) -> IRModule:
    """Return `mod` with products that read what was transposed for products alone as it was."""
    graph = Graph(mod)
    found = {
        b.value.__chandle__(): reads
        for b in graph.bindings
        if op_name(b.value) == "relax.matmul" and (reads := _reads(graph, b.value)) is not None
    }
    if not found:
        return mod
    folder = _Folder(mod)
    folder.found = found
    return rewritten(mod, folder)


def _reads(graph: Graph, product: Any) -> tuple[_Read, _Read] | None:
    """Return what a product may read; None where that is what it reads."""
    if any(len(shape_of(arg) or ()) < 2 or str(arg.ty.dtype) != "float32" for arg in product.args):
        return None
    first, second = (_read(graph, arg) for arg in product.args)
    is_same = all(
        read[0].same_as(arg) for read, arg in zip((first, second), product.args, strict=True)
    )
    return None if is_same else (first, second)


def _read(graph: Graph, operand: Any) -> _Read:
    rank = len(shape_of(operand) or ())
    moved = graph.call(operand, "relax.permute_dims")
    if moved is None or shape_of(moved.args[0]) is None or not _only_products_read(graph, operand):
        return operand, tuple(range(rank))
    axes = moved.attrs.axes
    order = range(rank)[::-1] if axes is None else (int(axis) % rank for axis in axes)
    return moved.args[0], tuple(order)


def _only_products_read(graph: Graph, operand: Any) -> bool:
    return all(op_name(user) == "relax.matmul" for user in graph.users.get(operand, ()))


@mutator
class _Folder(PyExprMutator):  # type: ignore[misc]
    found: Mapping[int, tuple[_Read, _Read]]  # by address of the product

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        reads = self.found.get(call.__chandle__())
        if reads is None:
            return super().visit_call_(call)
        (left, left_axes), (right, right_axes) = reads
        return self.builder_.call_te(
            lambda x, z: _product(x, left_axes, z, right_axes),
            self.visit_expr(left),
            self.visit_expr(right),
            primfunc_name_hint="matmul",
            primfunc_attrs={"op_pattern": TAKES_AN_EPILOGUE},
        )


def _product(x: te.Tensor, x_axes: Sequence[int], z: te.Tensor, z_axes: Sequence[int]) -> te.Tensor:
    x_shape, z_shape = ([t.shape[a] for a in axes] for t, axes in ((x, x_axes), (z, z_axes)))
    batch = max(x_shape[:-2], z_shape[:-2], key=len)
    shorter = min(x_shape[:-2], z_shape[:-2], key=len)
    lead = len(batch) - len(shorter)
    whole = [*batch[:lead], *(_larger(*pair) for pair in zip(batch[lead:], shorter, strict=True))]
    depth = te.reduce_axis(tvm.ir.Range(tirx.IntImm("int64", 0), x_shape[-1]), name="k")

    def at(tensor: te.Tensor, axes: Sequence[int], shape: Sequence[Any], places: Any) -> Any:
        """Return the value at places of the transposed tensor, whose batch is broadcast."""
        own = places[len(places) - len(shape) :]
        here = [0 if int(n) == 1 else place for n, place in zip(shape, own, strict=True)]
        return tensor(*(here[axes.index(axis)] for axis in range(len(axes))))

    def value(*i: Any) -> Any:
        left = at(x, x_axes, x_shape, (*i[:-1], depth))
        return te.sum(left * at(z, z_axes, z_shape, (*i[:-2], depth, i[-1])), axis=depth)

    return te.compute([*whole, x_shape[-2], z_shape[-1]], value, name="matmul")


def _larger(one: Any, other: Any) -> Any:
    return other if int(one) == 1 else one
