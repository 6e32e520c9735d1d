"""Constants of a Relax module: compute with them once, then move them out of the code."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from tvm import relax
from tvm.ir import GenericConst
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.tirx import FloatImm, IntImm

from tunerd.frontend.onnx.uncertainty import nudged_by_a_bit
from tunerd.frontend.relax.movement import (
    Graph,
    counted_from_the_front,
    cut_of,
    op_name,
    shape_of,
    sources_of,
)
from tunerd.system.arrays import MODEL_TOLERANCES, rounded
from tunerd.vocabulary import Arrays

if TYPE_CHECKING:
    from tvm.ir import IRModule

_Compute = Callable[[relax.Call, list[np.ndarray]], np.ndarray | None]
_Fold = Callable[[relax.Call, list[np.ndarray]], np.ndarray]

# relax.transform.FoldConstant compiles a function with LLVM for every operator and shape, which
# took 25 s for DenseNet-121; with NumPy it is 0.1 s.
_ARITHMETIC: dict[str, Callable[..., np.ndarray]] = {
    "relax.add": np.add,
    "relax.subtract": np.subtract,
    "relax.multiply": np.multiply,
    "relax.divide": np.divide,
    "relax.sqrt": np.sqrt,
}
_COMMUTATIVE = frozenset(
    f"relax.{name}" for name in ("add", "multiply", "maximum", "minimum", "equal", "not_equal")
)
_ELEMENTWISE = _COMMUTATIVE | {
    f"relax.{name}"
    for name in ("subtract", "divide", "power", "greater", "greater_equal", "less", "less_equal")
}
_MOVES: dict[str, _Fold] = {
    "relax.reshape": lambda call, a: a[0].reshape(_shape(call)),
    "relax.expand_dims": lambda call, a: a[0].reshape(_shape(call)),
    "relax.squeeze": lambda call, a: a[0].reshape(_shape(call)),
    "relax.permute_dims": lambda call, a: a[0].transpose(_axes(call, a[0])),
    "relax.astype": lambda call, a: a[0],
}

_FEW_INDICES = 1 << 16
_SELECTIONS = frozenset(("relax.take", "relax.gather_nd"))
_OF_INDICES: dict[str, _Compute] = {
    "relax.shape_to_tensor": lambda call, a: a[0],
    "relax.astype": lambda call, a: a[0].astype(str(call.ty.dtype)),
    "relax.add": lambda call, a: np.add(*a),
    "relax.less": lambda call, a: np.less(*a),
    "relax.where": lambda call, a: np.where(*a),
    "relax.strided_slice": lambda call, a: _sliced(call, a[0]),
    "relax.take": lambda call, a: _taken(call, *a),
    "relax.gather_nd": lambda call, a: _gathered(call, *a),
}


def _sliced(call: relax.Call, a: np.ndarray) -> np.ndarray | None:
    cut = cut_of(call)
    return None if cut is None else a[cut]


def _taken(call: relax.Call, a: np.ndarray, at: np.ndarray) -> np.ndarray | None:
    axis = call.attrs.axis
    if axis is None:
        return None
    at = counted_from_the_front(call, at, a.shape[int(axis)])
    if at.size and not 0 <= at.min() <= at.max() < a.shape[int(axis)]:
        return None
    taken: np.ndarray = np.take(a, at, int(axis))
    return taken


def _gathered(call: relax.Call, a: np.ndarray, at: np.ndarray) -> np.ndarray | None:
    if int(call.attrs.batch_dims) or at.shape[-1] != a.ndim or at.min(initial=0) < 0:
        return None
    if (at >= a.shape).any():
        return None
    gathered: np.ndarray = a[tuple(np.moveaxis(at, -1, 0))]
    return gathered


def fold_constants(mod: IRModule) -> IRModule:
    """Return `mod` with calls of common operators on constants replaced by their results.

    A result larger than all operands is left alone: it is cheaper to compute than to read.
    """
    return _mutated(mod, _Folder(mod))


def fold_shapes(mod: IRModule) -> IRModule:
    """Return `mod` with what it computes from shapes, to index a tensor with, as constants.

    What selects all of a tensor in its order becomes a reshape.
    """
    return relax.transform.DeadCodeElimination()(_mutated(mod, _ShapeFolder(mod)))


def hoist_constants(mod: IRModule, *, num_inputs: int) -> tuple[IRModule, Arrays]:
    """Return `mod` with the constants of `main` as parameters after its inputs, and their values.

    The attribute `num_input` tells relax.transform.RewriteCUDAGraph that what follows the inputs
    does not change between calls. Scalars stay: kernels have them inside.
    """
    hoister = _Hoister(mod)
    mod = _mutated(mod, hoister)
    main = mod["main"]
    params = [*main.params, *hoister.params]
    main = relax.Function(params, main.body, main.ret_ty, main.is_pure, main.attrs)
    mod.update_func(mod.get_global_var("main"), main.with_attr("num_input", num_inputs))
    return mod, hoister.values


def round_constants(mod: IRModule, precision: str) -> IRModule:
    """Return `mod` with float32 weights of `main` as a precision has them, still as float32."""
    return _mutated(mod, _Rounder(mod, precision))


def nudge_constants(mod: IRModule, rng: np.random.Generator) -> IRModule:
    """Return `mod` with each weight of `main` moved by its last bit, up or down."""
    return _mutated(mod, _Nudger(mod, rng))


def second_operands(mod: IRModule) -> IRModule:
    """Return `mod` with constants as second operands, as scalars or of the rank of the result.

    ConvertLayout takes the layout of a result from the first operand or from the one of lower rank,
    and leaves scalars alone: a constant of rank 1, as TensorFlow and PaddlePaddle write scalars,
    would keep what it meets in NCHW. What has the rank stays: scales of quantizers are no scalars,
    so that layers that differ in them are one kernel.
    """
    return _mutated(mod, _SecondOperands(mod))


def positive_axes(mod: IRModule) -> IRModule:
    """Return `mod` with axes that count from the front where ConvertLayout fails on others.

    A squeeze of axis -2 is in each multi-head attention of PyTorch: a network with one would keep
    all of its convolutions in NCHW.
    """
    return _mutated(mod, _PositiveAxes(mod))


def idle_permutes_to_reshapes(mod: IRModule) -> IRModule:
    """Return `mod` with transposes that leave values in their order as reshapes, which are free.

    Such move dimensions of one only, or undo each other over a reshape, as where an image in NHWC
    becomes rows of channels by way of NCHW.
    """
    idle = _IdlePermutes(mod)
    idle.graph = Graph(mod)
    return _mutated(mod, idle)


def remove_redundant_reshapes(mod: IRModule) -> IRModule:
    """Return `mod` without reshapes to the same shape, and with one in place of two in a row.

    relax.transform.RemoveRedundantReshape takes 0.3 s to keep the one reshape of a ResNet-50.
    """
    return relax.transform.CanonicalizeBindings()(_mutated(mod, _Reshapes(mod)))


def name_inputs(mod: IRModule) -> IRModule:
    """Return `mod` with the parameters of `main` named input_0, input_1 and so on.

    Their ONNX names end up in generated code, where "gpu_0/data_0" is no identifier.
    """
    main = mod["main"]
    params = [relax.Var(f"input_{i}", p.ty) for i, p in enumerate(main.params)]
    renamer = _Renamer(mod)
    renamer.new = {o.__chandle__(): n for o, n in zip(main.params, params, strict=True)}
    body = renamer.visit_expr(main.body)
    main = relax.Function(params, body, main.ret_ty, main.is_pure, main.attrs)
    mod = mod.clone()
    mod.update_func(mod.get_global_var("main"), main)
    return mod


def rewritten(mod: IRModule, mutate: PyExprMutator) -> IRModule:
    """Return `mod` with `main` as a mutator has it that emits bindings of its own, tidied."""
    main = mutate.visit_expr(mod["main"])
    mutate.builder_.update_func(mod.get_global_var("main"), main)
    canonical = relax.transform.CanonicalizeBindings()(mutate.builder_.get())
    return relax.transform.DeadCodeElimination()(canonical)


def _mutated(mod: IRModule, mutate: PyExprMutator) -> IRModule:
    main = mutate.visit_expr(mod["main"])
    mod = mod.clone()
    mod.update_func(mod.get_global_var("main"), main)
    return mod


def _tensor(operand: relax.Expr) -> relax.Expr:
    is_number = isinstance(operand, FloatImm | IntImm)
    return relax.const(operand.value, str(operand.ty.dtype)) if is_number else operand


def _shape(call: relax.Call) -> tuple[int, ...]:
    return tuple(int(d) for d in call.ty.shape.values)


def _axes(call: relax.Call, a: np.ndarray) -> list[int]:
    axes = call.attrs.axes
    return list(range(a.ndim))[::-1] if axes is None else [int(i) for i in axes]


@mutator
class _Folder(PyExprMutator):  # type: ignore[misc]
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        visited = self.visit_expr_post_order(call)
        name = getattr(call.op, "name", "")
        if name not in _ARITHMETIC and name not in _MOVES:
            return visited
        if name in _ARITHMETIC:
            # As DecomposeOpsForInference leaves an epsilon. ConvertLayout crashes the process on
            # an operand that is a number instead of a tensor.
            operands = [_tensor(a) for a in visited.args]
            visited = relax.Call(visited.op, operands, visited.attrs, ty_args=visited.ty_args)
        operands = [a for a in visited.args if not isinstance(a, relax.ShapeExpr)]
        constants = [self._constant(a) for a in operands]
        values = [c.value.numpy() for c in constants if c is not None]
        if len(values) < len(operands):
            return visited
        if name in _MOVES:
            result = _MOVES[name](call, values)
        elif all(np.issubdtype(v.dtype, np.floating) for v in values):
            result = _ARITHMETIC[name](*values)
        else:
            return visited
        if result.size > max(v.size for v in values):
            return visited
        dtype = str(call.ty.dtype)
        return relax.const(np.ascontiguousarray(result.astype(dtype, copy=False)), dtype)

    def _constant(self, expr: relax.Expr) -> GenericConst | None:
        if isinstance(expr, relax.Var):
            expr = self.lookup_binding(expr)
        return expr if isinstance(expr, GenericConst) else None


@mutator
class _ShapeFolder(PyExprMutator):  # type: ignore[misc]
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        visited = self.visit_expr_post_order(call)
        name, shape = getattr(call.op, "name", ""), shape_of(call)
        if name not in _OF_INDICES or shape is None or math.prod(shape) > _FEW_INDICES:
            return visited
        operands = [self._integers(a) for a in visited.args]
        source = shape_of(call.args[0])
        size = math.prod(shape)
        has_all = source is not None and math.prod(source) == size
        if name in _SELECTIONS and operands[0] is None and has_all:
            # Of a tensor: its places are numbers, too.
            operands[0] = np.arange(size, dtype=np.int64).reshape(source)
        values = [o for o in operands if o is not None]
        result = _OF_INDICES[name](call, values) if len(values) == len(operands) else None
        if result is None or result.size != size:
            return visited
        if self._integers(visited.args[0]) is not None:
            dtype = str(call.ty.dtype)
            return relax.const(result.reshape(shape).astype(dtype, copy=False), dtype)
        is_whole = np.array_equal(result.ravel(), np.arange(result.size))
        return relax.op.reshape(visited.args[0], shape) if is_whole else visited

    def _integers(self, expr: relax.Expr) -> np.ndarray | None:
        """Return a constant that is no float, or the sizes of a tensor; an empty one of a shape."""
        bound = self.lookup_binding(expr) if isinstance(expr, relax.Var) else expr
        if isinstance(bound, GenericConst):
            value: np.ndarray = bound.value.numpy()
            return None if value.dtype.kind == "f" else value
        if getattr(getattr(bound, "op", None), "name", "") == "relax.shape_of":
            sizes = shape_of(bound.args[0])
            return None if sizes is None else np.array(sizes, np.int64)
        return np.empty(0) if isinstance(bound, relax.Tuple) else None


@mutator
class _Hoister(PyExprMutator):  # type: ignore[misc]
    def __init__(self, mod: IRModule) -> None:
        super().__init__(mod)
        self.params: list[relax.Var] = []
        self.values: Arrays = {}
        self._known: dict[int, relax.Var] = {}  # by address of the tensor: a constant has one

    def visit_generic_const_(self, const: GenericConst) -> relax.Expr:
        if not const.value.shape:
            return const
        key = const.value.__chandle__()
        if key not in self._known:
            var = relax.Var(f"weight_{len(self.params)}", const.ty)
            self._known[key] = var
            self.params.append(var)
            self.values[var.name] = np.from_dlpack(const.value)  # where it lies, without a copy
        return self._known[key]


@mutator
class _Rounder(PyExprMutator):  # type: ignore[misc]
    def __init__(self, mod: IRModule, precision: str) -> None:
        super().__init__(mod)
        self._precision = precision

    def visit_generic_const_(self, const: GenericConst) -> relax.Expr:
        if not const.value.shape or str(const.value.dtype) != "float32":
            return const
        return relax.const(rounded(const.value.numpy(), self._precision), "float32")


@mutator
class _Nudger(PyExprMutator):  # type: ignore[misc]
    def __init__(self, mod: IRModule, rng: np.random.Generator) -> None:
        super().__init__(mod)
        self._rng = rng

    def visit_generic_const_(self, const: GenericConst) -> relax.Expr:
        dtype = str(const.value.dtype)
        if not const.value.shape or dtype not in MODEL_TOLERANCES:
            return const
        return relax.const(nudged_by_a_bit(const.value.numpy(), self._rng), dtype)


@mutator
class _Renamer(PyExprMutator):  # type: ignore[misc]
    new: dict[int, relax.Var]  # by address of the old one

    def visit_var_(self, var: relax.Var) -> relax.Expr:
        return self.new.get(var.__chandle__(), var)


@mutator
class _SecondOperands(PyExprMutator):  # type: ignore[misc]
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        visited = self.visit_expr_post_order(call)
        name, shape = getattr(call.op, "name", ""), shape_of(call)
        if name not in _ELEMENTWISE or shape is None:
            return visited
        operands = [_of_rank(a, len(shape)) for a in visited.args]
        is_first = isinstance(operands[0], GenericConst) and operands[0].value.shape
        if name in _COMMUTATIVE and is_first:
            operands.reverse()
        return relax.Call(visited.op, operands, visited.attrs, ty_args=visited.ty_args)


def _of_rank(operand: relax.Expr, rank: int) -> relax.Expr:
    if not isinstance(operand, GenericConst) or len(operand.value.shape) in (0, rank):
        return operand
    value = operand.value.numpy()
    shape = () if value.size == 1 else (1,) * (rank - value.ndim) + value.shape
    return relax.const(value.reshape(shape), str(operand.value.dtype))


@mutator
class _PositiveAxes(PyExprMutator):  # type: ignore[misc]
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        visited = self.visit_expr_post_order(call)
        name = getattr(call.op, "name", "")
        if name == "relax.squeeze" and call.attrs.axis is not None:
            rank = len(call.args[0].ty.shape.values)
            return relax.op.squeeze(visited.args[0], [int(a) % rank for a in call.attrs.axis])
        if name == "relax.stack" and call.attrs.axis is not None:
            rank = len(call.ty.shape.values)
            return relax.op.stack(visited.args[0], int(call.attrs.axis) % rank)
        return visited


@mutator
class _Reshapes(PyExprMutator):  # type: ignore[misc]
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        visited = self.visit_expr_post_order(call)
        if getattr(call.op, "name", "") != "relax.reshape":
            return visited
        source = visited.args[0]
        before = self.lookup_binding(source) if isinstance(source, relax.Var) else None
        if isinstance(before, relax.Call) and getattr(before.op, "name", "") == "relax.reshape":
            source = before.args[0]
        shape = shape_of(call)
        if shape is None:
            return visited
        if shape_of(source) == shape:
            return source
        return visited if source is visited.args[0] else relax.op.reshape(source, shape)


@mutator
class _IdlePermutes(PyExprMutator):  # type: ignore[misc]
    graph: Graph

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        if op_name(call) == "relax.permute_dims":
            for moved in sources_of(self.graph, call):
                places = moved.places().ravel()
                if places.size == math.prod(_shape(moved.root)) and (np.diff(places) == 1).all():
                    return relax.op.reshape(self.visit_expr(moved.root), _shape(call))
        return self.visit_expr_post_order(call)
