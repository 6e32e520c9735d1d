"""Attention as one kernel: softmax(Q K^T * scale + mask) V, with what moves the heads.

Exporters write it as a dozen operators: the slices of one product, or three products, reshapes and
transposes to heads and back, a scale on one side or both, masks that are added or selected, and a
guard against rows without any key. All of it becomes one function that reads what was computed
before the heads were made and writes what is computed after they were joined. Products of one
tensor with Q's, K's and V's weights become one product.

It is for GPUs and for products by tensor cores: sources without a template of it do better with its
parts, each a kernel of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tvm import relax
from tvm.ir import GenericConst, IRModule
from tvm.relax.expr_functor import PyExprMutator, mutator

from tunerd.frontend.relax.attention_kernel import Access, AttentionKernel, Step
from tunerd.frontend.relax.constants import rewritten
from tunerd.frontend.relax.movement import (
    Graph,
    Moved,
    Places,
    Strides,
    move_of,
    moved,
    op_name,
    shape_of,
    strides_of,
    strides_of_all,
)

_HEAD_DIMS = range(16, 257)
_LEAST_KEYS = 16


def fuse_attention(mod: IRModule) -> IRModule:
    """Return `mod` with each attention of `main` as a call of one function."""
    graph = Graph(mod)
    found = {}
    for binding in graph.bindings:
        attention = _attention(graph, binding)
        if attention is not None:
            found[attention.last.__chandle__()] = attention
    if not found:
        return mod
    fuser = _Fuser(mod)
    fuser.found = found
    return rewritten(mod, fuser)


@dataclass(frozen=True)
class _Attention:
    """What is known of an attention."""

    last: Any  # the call that joins the heads, or the last before one that cannot be folded in
    operands: tuple[Moved, Moved, Moved]  # to Q [..., row, dim], K [..., key, dim], V [..., key, e]
    masks: tuple[Moved, ...]  # to [..., row, key]
    kernel: AttentionKernel  # with the operands' places in their own roots
    merged: _Merged | None = None


@dataclass(frozen=True)
class _Merged:
    """Products of one tensor with several weights, as one."""

    data: Any
    weight: np.ndarray[Any, Any]  # shape [depth, columns of all]
    bias: np.ndarray[Any, Any] | None  # shape [columns of all]
    shape: tuple[int, ...]  # of the result
    numbers: tuple[int, ...]  # of the operands that are parts of it


@dataclass
class _Scores:
    """The way from the product of Q and K to the softmax."""

    product: Any
    steps: list[Step] = field(default_factory=list)
    masks: list[Moved] = field(default_factory=list)
    mask_places: list[Places] = field(default_factory=list)


_JOINS = frozenset(f"relax.{n}" for n in ("permute_dims", "reshape", "expand_dims", "squeeze"))


# --- matching ----------------------------------------------------------------------------------


def _attention(graph: Graph, binding: Any) -> _Attention | None:
    """Return the attention whose last product a binding is."""
    product = graph.call(binding.var, "relax.matmul")
    if product is None or str(binding.var.ty.dtype) != "float32":
        return None
    weights, guarded = _unguarded(graph, product.args[0])
    softmax = graph.call(weights, "relax.nn.softmax")
    out_shape = shape_of(product)
    weights_shape = shape_of(weights)
    if softmax is None or out_shape is None or weights_shape is None:
        return None
    if int(softmax.attrs.axis) not in (-1, len(weights_shape) - 1):
        return None
    scores = _scores(graph, softmax.args[0])
    if scores is None or not graph.is_used_once(product.args[0]):
        return None
    lead, (rows, columns), keys = out_shape[:-2], out_shape[-2:], weights_shape[-1]
    query, key = (moved(graph, a) for a in scores.product.args)
    value = moved(graph, product.args[1])
    dims = (shape_of(scores.product.args[0]) or (0,))[-1]
    if dims not in _HEAD_DIMS or columns not in _HEAD_DIMS or keys < _LEAST_KEYS:
        return None
    operands = (query, key, value)
    merged = _merged(graph, operands)
    shapes = ((rows, dims), (keys, dims), (keys, columns))
    places = [
        _as(m.places(_base(merged, operands, n)), lead, shape, transposed=n == 1)
        for n, (m, shape) in enumerate(zip(operands, shapes, strict=True))
    ]
    masks = [_as(p, lead, (rows, keys)) for p in scores.mask_places]
    if any(p is None for p in (*places, *masks)):
        return None
    found = strides_of_all([p for p in (*places, *masks) if p is not None], lead)
    if found is None:
        return None
    lead, strides = found
    last, order = _joined(graph, binding.var, (*lead, rows, columns))
    scale = query.factor * key.factor
    steps = [*([Step("scale", scale)] if scale != 1.0 else []), *scores.steps]
    kernel = AttentionKernel(
        lead=lead,
        rows=rows,
        keys=keys,
        dims=dims,
        columns=columns,
        operands=tuple(map(_access, strides[:3])),
        masks=tuple(map(_access, strides[3:])),
        steps=tuple(steps),
        factor=value.factor,
        is_guarded=guarded,
        order=order,
    )
    return _Attention(graph.value(last), operands, tuple(scores.masks), kernel, merged)


def _access(strides: Strides) -> Access:
    return Access(strides.offset, strides.of)


def _as(
    places: Places,
    lead: tuple[int, ...],
    shape: tuple[int, int],
    *,
    transposed: bool = False,
) -> Places | None:
    """Return places with the leading dimensions of the result, and two more."""
    if transposed:
        places = places.swapaxes(-1, -2)
    own = places.shape[:-2]
    if places.shape[-2:] != shape or len(own) > len(lead) != 1:
        return None
    if math.prod(own) == math.prod(lead):
        return places.reshape(*lead, *shape)
    own = (1,) * (len(lead) - len(own)) + own
    if len(own) != len(lead) or any(a not in (1, b) for a, b in zip(own, lead, strict=True)):
        return None
    return np.broadcast_to(places.reshape(*own, *shape), (*lead, *shape))


def _unguarded(graph: Graph, expr: Any) -> tuple[Any, bool]:
    """Return the weights without where(isnan(weights), 0, weights), and whether they had it."""
    where = graph.call(expr, "relax.where")
    if where is None:
        return expr, False
    test, yes, no = where.args
    isnan = graph.call(test, "relax.isnan")
    if isnan is None or not isnan.args[0].same_as(no):
        return expr, False
    return (no, True) if graph.number(yes) == 0 else (expr, False)


def _scores(graph: Graph, expr: Any) -> _Scores | None:
    """Follow what softmax is taken of back to a product, over scales and masks."""
    call = graph.value(expr)
    name = op_name(call)
    shape = shape_of(expr)
    if shape is None:
        return None
    if name == "relax.matmul":
        return _Scores(call)
    if name == "relax.reshape":
        found = _scores(graph, call.args[0]) if graph.is_used_once(call.args[0]) else None
        if found is None or (shape_of(call.args[0]) or ())[-2:] != shape[-2:]:
            return None
        found.mask_places = [p.reshape(shape) for p in found.mask_places]
        return found
    if name in ("relax.multiply", "relax.divide", "relax.add"):
        return _elementwise(graph, call, shape)
    if name == "relax.where":
        test, yes, no = call.args
        for inner, other, step in ((yes, no, "keep"), (no, yes, "replace")):
            fill = graph.number(other)
            if fill is None or shape_of(inner) != shape or not graph.is_used_once(inner):
                continue
            found = _scores(graph, inner)
            return (
                None if found is None else _with_mask(graph, found, Step(step, fill), test, shape)
            )
    return None


def _elementwise(graph: Graph, call: Any, shape: tuple[int, ...]) -> _Scores | None:
    a, b = call.args
    ways = [(a, b)] if op_name(call) == "relax.divide" else [(a, b), (b, a)]
    for inner, other in ways:
        number = graph.number(other) or 0.0
        if shape_of(inner) != shape or graph.constant(inner) is not None:
            continue
        if not graph.is_used_once(inner) or (not number and op_name(call) != "relax.add"):
            continue
        found = _scores(graph, inner)
        if found is None:
            continue
        if op_name(call) == "relax.add":
            return _with_mask(graph, found, Step("add"), other, shape)
        by = number if op_name(call) == "relax.multiply" else 1.0 / number
        found.steps.append(Step("scale", by))
        return found
    return None


def _with_mask(
    graph: Graph, scores: _Scores, step: Step, mask: Any, shape: tuple[int, ...]
) -> _Scores:
    found = moved(graph, mask)
    if found.factor != 1.0 or shape_of(found.root) is None:
        found = Moved(mask)
    scores.masks.append(found)
    scores.mask_places.append(np.broadcast_to(found.places(), shape))
    scores.steps.append(step)
    return scores


def _joined(graph: Graph, var: Any, shape: tuple[int, ...]) -> tuple[Any, tuple[int, ...]]:
    """Follow the result, of `shape` with its leading dimensions, over what only moves it.

    Returns the call after which it is a transpose of that shape, if seen so, and the order of its
    dimensions.
    """
    call = graph.value(var)
    best = call, tuple(range(len(shape)))
    places = np.arange(math.prod(shape), dtype=np.int64).reshape(shape_of(var) or ())
    users = {b.value.__chandle__(): b.var for b in graph.bindings}
    while graph.is_used_once(var):
        var = users.get(graph.users[var][0].__chandle__())
        if var is None or op_name(graph.value(var)) not in _JOINS:
            break
        _, move = move_of(graph, var) or (None, None)
        if move is None:
            break
        places = move(places)
        found = strides_of(np.argsort(places, axis=None).reshape(shape))
        if found is not None:
            order = sorted(range(len(shape)), key=lambda i: (shape[i] > 1, -found.of[i]))
            best = graph.value(var), tuple(order)
    return best


# --- products ----------------------------------------------------------------------------------


def _merged(graph: Graph, operands: Sequence[Moved]) -> _Merged | None:
    """Return the products of one tensor that operands are, as one; None where there is one."""
    products = [_product(graph, m.root) for m in operands]
    for first in products:
        if first is None:
            continue
        numbers = tuple(
            n for n, p in enumerate(products) if p is not None and p.data.same_as(first.data)
        )
        roots = [operands[n].root for n in numbers]
        if len(set(roots)) < 2 or len(set(roots)) != len(roots):
            continue
        parts = [p for n in numbers if (p := products[n]) is not None]
        biases = [p.bias for p in parts]
        bias = None
        if any(b is not None for b in biases):
            bias = np.concatenate(
                [
                    np.zeros(p.weight.shape[1], np.float32) if p.bias is None else p.bias
                    for p in parts
                ]
            )
        weight = np.concatenate([p.weight for p in parts], axis=1)
        shape = (*(shape_of(roots[0]) or ())[:-1], weight.shape[1])
        return _Merged(first.data, weight, bias, shape, numbers)
    return None


@dataclass(frozen=True)
class _Product:
    data: Any
    weight: np.ndarray[Any, Any]
    bias: np.ndarray[Any, Any] | None


def _product(graph: Graph, root: Any) -> _Product | None:
    """Return a product with a constant, and a bias, that nothing else reads."""
    if not isinstance(root, relax.Var) or not graph.is_used_once(root):
        return None
    call, bias = graph.value(root), None
    if op_name(call) == "relax.add":
        for inner, other in (call.args, call.args[::-1]):
            bias = graph.constant(other)
            if bias is not None and op_name(graph.value(inner)) == "relax.matmul":
                if bias.size != bias.shape[-1] or not graph.is_used_once(inner):
                    return None
                call = graph.value(inner)
                break
    if op_name(call) != "relax.matmul" or not isinstance(call.args[0], relax.Var):
        return None
    weight = graph.constant(call.args[1])
    if weight is None or weight.ndim != 2 or str(weight.dtype) != "float32":
        return None
    bias = None if bias is None else np.broadcast_to(bias.ravel(), weight.shape[1:])
    return _Product(call.args[0], weight, bias)


def _base(merged: _Merged | None, operands: Sequence[Moved], number: int) -> Places | None:
    """Return where the root of an operand lies in the merged product, if it is a part of it."""
    if merged is None or number not in merged.numbers:
        return None
    begin = 0
    for n in merged.numbers:
        shape = shape_of(operands[n].root) or ()
        if n == number:
            whole = np.arange(math.prod(merged.shape), dtype=np.int64).reshape(merged.shape)
            return whole[..., begin : begin + shape[-1]]
        begin += shape[-1]
    return None


# --- rewriting ---------------------------------------------------------------------------------


@mutator
class _Fuser(PyExprMutator):  # type: ignore[misc]
    found: Mapping[int, _Attention]  # by address of the call that each takes the place of

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        attention = self.found.get(call.__chandle__())
        if attention is None:
            return super().visit_call_(call)
        merged = attention.merged
        product = None if merged is None else self._product(merged)
        numbers: dict[int, int] = {}  # of tensors that are passed, by address
        passed: list[relax.Expr] = []
        numbered = []
        for n, operand in enumerate((*attention.operands, *attention.masks)):
            is_part = merged is not None and n in merged.numbers
            root = product if product is not None and is_part else operand.root
            key = root.__chandle__()
            if key not in numbers:
                numbers[key] = len(passed)
                passed.append(self._flat(root, is_new=is_part))
            numbered.append(numbers[key])
        kernel = attention.kernel
        made = self.builder_.call_te(
            kernel.computed, passed, numbered, primfunc_name_hint="attention"
        )
        shape = shape_of(call) or ()
        if kernel.shape == shape:
            return made
        return relax.op.reshape(self.builder_.emit(made), shape)

    def _product(self, merged: _Merged) -> relax.Expr:
        data = self.visit_expr(merged.data)
        made = self.builder_.emit(relax.op.matmul(data, relax.const(merged.weight)))
        if merged.bias is not None:
            made = self.builder_.emit(relax.op.add(made, relax.const(merged.bias)))
        return made

    def _flat(self, root: relax.Expr, *, is_new: bool) -> relax.Expr:
        size = math.prod(shape_of(root) or ())
        if isinstance(root, GenericConst):
            return relax.const(np.ascontiguousarray(root.value.numpy()).reshape(size))
        root = root if is_new else self.visit_expr(root)
        return self.builder_.emit(relax.op.reshape(root, (size,)))
