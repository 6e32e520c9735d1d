"""Products of whole numbers of 8 bits in integers, where a device has instructions for that.

`quantizers` leaves a quantized product as one of whole numbers: values of 8 bits less their zero
point, times constants of which each is a whole number. The product of the values as they are stored
is computed, exactly, and what the zero point adds to it, which is a number for each column, is
taken off. Padding is the zero point; or it is zero, where tensor cores are to read what was copied
as it is, and near the edges less is taken off.

A CPU with AVX-512 VNNI multiplies 64 pairs of 8 bits and adds them up in groups of four by one
instruction, where it multiplies 16 of float32. It takes values of 0 to 255 on one side and of -128
to 127 on the other. Tensor cores take two values of -128 to 127. Values that are stored otherwise
are moved by 128, and with them their zero point.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax, te, tirx
from tvm.ir import IRModule
from tvm.relax.expr_functor import PyExprMutator, mutator

from tunerd.frontend.relax.constants import rewritten
from tunerd.frontend.relax.movement import Graph, op_name, shape_of
from tunerd.frontend.relax.rewriting import TAKES_AN_EPILOGUE
from tunerd.vocabulary.model import INTEGER_PRODUCTS, STAGED, VNNI_GROUP, VNNI_LANES

_MAX_TERMS = (1 << 31) // (255 * 128)  # of a sum that int32 holds
_MOST_EDGES = 16  # kinds of places that read padding, each a vector in the kernel
_TILE = range(4, 17)  # rows that fill registers beside the columns
_ROWS = 8  # of which a multiple is computed where no such number divides the rows


def has_instructions(target: tvm.target.Target) -> bool:
    """Say whether a CPU multiplies 64 pairs of 8 bits at once."""
    return bool(tvm.target.codegen.target_has_features(["avx512vnni", "avx512f"], target))


@dataclass(frozen=True)
class Form:
    """How a device takes a product."""

    dtype: str  # of the values that are multiplied
    shift: Mapping[str, int]  # what is added to stored values, so that they are of it
    columns: int  # of which there must be a multiple
    group: int  # to a multiple of which the depth is filled up with zeros
    weight: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]  # of [height, width, depth, ...]
    at: Callable[..., Any]  # of a weight so: column, height, width, depth -> its value
    rows: Callable[[int], int]  # that are computed of a matrix
    has_zero_edges: bool  # whether padding is zero, where the edges are apart


def use_integers(mod: IRModule, form: Form) -> IRModule:
    """Return `mod` with products of 8 bits in `main` as kernels of integers.

    Convolutions must be in NHWC with constant weights, in one group; matrices constant on the
    right. Everything else stays as it is.
    """
    graph = Graph(mod)
    found = {}
    for binding in graph.bindings:
        product = _product_of(graph, binding.value, form)
        if product is not None:
            found[binding.value.__chandle__()] = product
    if not found:
        return mod
    rewriter = _Rewriter(mod)
    rewriter.found, rewriter.form = found, form
    rewriter.keeps_zeros = form.has_zero_edges and any(map(_has_zero_point, found.values()))
    return rewritten(mod, rewriter)


@dataclass(frozen=True)
class _Product:
    """A product of stored values, less their zero point, and a constant."""

    values: Any  # of uint8 or int8
    moves: tuple[Any, ...]  # transposes and reshapes of the values before that, the last one first
    zero: Any  # a number, or an expression of one number
    weight: np.ndarray[Any, Any]  # int8 [height, width, depth, columns]
    dtype: str  # of the result
    conv: Any = None  # the attributes of a convolution; None of a matrix product


def _product_of(graph: Graph, call: Any, form: Form) -> _Product | None:
    if op_name(call) not in ("relax.nn.conv2d", "relax.matmul"):
        return None
    is_conv = op_name(call) == "relax.nn.conv2d"
    if is_conv and not _is_taken(call.attrs):
        return None
    weight = _narrow(graph, call.args[1])
    stored = _stored(graph, call.args[0])
    if weight is None or stored is None or weight.ndim != (4 if is_conv else 2):
        return None
    *taps, columns = weight.shape
    values, moves, zero = stored
    if columns % form.columns or math.prod(taps) > _MAX_TERMS:
        return None
    if len(shape_of(call.args[0]) or ()) < 2:
        return None
    weight = weight.reshape(weight.shape if is_conv else (1, 1, *weight.shape))
    is_padded = is_conv and any(int(p) for p in call.attrs.padding)
    if is_padded and not isinstance(zero, int):
        return None
    dtype = str(call.ty.dtype)
    return _Product(values, moves, zero, weight, dtype, call.attrs if is_conv else None)


def _is_taken(attrs: Any) -> bool:
    return (attrs.data_layout, attrs.kernel_layout, attrs.groups) == ("NHWC", "HWIO", 1)


def _narrow(graph: Graph, expr: Any) -> np.ndarray[Any, Any] | None:
    """Return a constant of whole numbers that int8 holds."""
    moved = graph.call(expr, "relax.subtract", "relax.astype")
    values = graph.constant(expr)
    if moved is not None:
        parts = [_constant(graph, a) for a in moved.args]
        if any(p is None for p in parts):
            return None
        first = parts[0].astype(np.float64)
        values = first - parts[1] if op_name(moved) == "relax.subtract" else first
    if values is None or values.dtype.kind not in "fiu":
        return None
    small = np.clip(np.nan_to_num(values), -128, 127).astype(np.int8)
    return small if np.array_equal(small, values) else None


def _constant(graph: Graph, expr: Any) -> Any:
    widened = graph.call(expr, "relax.astype")
    return graph.constant(expr if widened is None else widened.args[0])


def _stored(graph: Graph, expr: Any) -> tuple[Any, tuple[Any, ...], Any] | None:
    """Return the values of 8 bits that an operand widens, and the zero point that it subtracts.

    Between them: the transposes and reshapes on the way, the last one first.
    """
    zero: Any = None
    moves = []
    while (widened := graph.call(expr, "relax.astype")) is None:
        if (move := graph.call(expr, "relax.permute_dims", "relax.reshape")) is not None:
            moves.append(move)
            expr = move.args[0]
            continue
        less = graph.call(expr, "relax.subtract")
        if less is None or zero is not None or math.prod(shape_of(less.args[1]) or (1,)) != 1:
            return None
        expr, at = less.args
        number = graph.number(at)
        zero = at if number is None else int(number)
        if number is not None and number != zero:
            return None
    if str(widened.args[0].ty.dtype) not in ("int8", "uint8"):
        return None
    return widened.args[0], tuple(moves), 0 if zero is None else zero


@mutator
class _Rewriter(PyExprMutator):  # type: ignore[misc]
    found: dict[int, _Product]  # by address of the call
    form: Form
    keeps_zeros: bool  # as `quantizers` has it

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        product = self.found.get(call.__chandle__())
        if product is None:
            return super().visit_call_(call)
        values = self.visit_expr(product.values)
        for move in reversed(product.moves):
            operands = [values, *move.args[1:]]
            values = self.builder_.emit(relax.Call(move.op, operands, move.attrs))
        form, conv = self.form, product.conv
        shift = form.shift[str(product.values.ty.dtype)]
        rows = None if conv else int((shape_of(values) or ())[-2])
        zero = product.zero + shift if isinstance(product.zero, int) else None
        has_edges = form.has_zero_edges and zero and not shift
        edges = _edges_of(product, values) if has_edges else None
        made = self.builder_.call_te(
            functools.partial(
                _sums,
                form=form,
                columns=product.weight.shape[-1],
                taps=product.weight.shape[:2],
                pad=[int(p) for p in conv.padding] if conv else [0] * 4,
                strides=[int(s) for s in conv.strides] if conv else [1, 1],
                dilation=[int(d) for d in conv.dilation] if conv else [1, 1],
                fill=zero or 0 if edges is None else 0,
                rows=None if rows is None else form.rows(rows),
            ),
            values,
            relax.const(form.weight(product.weight)),
            primfunc_name_hint=INTEGER_PRODUCTS,
            primfunc_attrs={"op_pattern": TAKES_AN_EPILOGUE},
        )
        out = self.builder_.emit(made)
        if rows is not None and rows != form.rows(rows):
            out = self.builder_.emit(relax.op.strided_slice(out, [-2], [0], [rows]))
        columns = product.weight.sum(axis=(0, 1, 2), dtype=np.int64).astype(np.int32)
        if zero is not None and edges is not None:
            out = self._less_at_edges(out, zero, edges)
        elif zero is not None:
            out = self._less(out, zero, columns)
        else:
            out = self._less(out, shift, columns)
            number = self.builder_.emit(relax.op.astype(self.visit_expr(product.zero), "int32"))
            taken = self.builder_.emit(relax.op.multiply(number, relax.const(columns)))
            out = self.builder_.emit(relax.op.subtract(out, taken))
        return out if product.dtype == "int32" else relax.op.astype(out, product.dtype)

    def _less(self, out: relax.Expr, zero: int, columns: np.ndarray[Any, Any]) -> relax.Expr:
        taken = zero * columns
        if not taken.any() and not self.keeps_zeros:
            return out
        return self.builder_.emit(relax.op.subtract(out, relax.const(taken)))

    def _less_at_edges(self, out: relax.Expr, zero: int, edges: _Edges) -> relax.Expr:
        made = self.builder_.call_te(
            functools.partial(_less_edges, edges=edges),
            out,
            *(relax.const(zero * vector) for vector in edges.sums),
            primfunc_name_hint="subtract_edges",
        )
        return self.builder_.emit(made)


def _has_zero_point(product: _Product) -> bool:
    return isinstance(product.zero, int) and product.zero != 0


@dataclass(frozen=True)
class _Edges:
    """What a convolution with padding of zero sums of its weight alone: less near the edges."""

    before: tuple[int, int]  # rows, and places of a row, that read padding at their begin
    after: tuple[int, int]  # and at their end
    sums: tuple[np.ndarray[Any, Any], ...]  # int32 [columns], for each kind of row and of place

    @property
    def kinds(self) -> tuple[int, int]:
        return self.before[0] + 1 + self.after[0], self.before[1] + 1 + self.after[1]


def _edges_of(product: _Product, values: relax.Expr) -> _Edges | None:
    """Return the edges; None without padding, or where no place is between them."""
    conv, shape = product.conv, shape_of(values)
    if conv is None or shape is None or not any(int(p) for p in conv.padding):
        return None
    top, left, bottom, right = (int(p) for p in conv.padding)
    inside, before, after = [], [], []
    for axis, pad in enumerate(((top, bottom), (left, right))):
        taps, stride = product.weight.shape[axis], int(conv.strides[axis])
        dilation, size = int(conv.dilation[axis]), shape[1 + axis]
        count = (size + sum(pad) - (taps - 1) * dilation - 1) // stride + 1
        at = np.arange(count)[:, None] * stride + np.arange(taps) * dilation - pad[0]
        reads = (at >= 0) & (at < size)  # [places, taps]
        (whole,) = np.nonzero(reads.all(axis=1))
        if whole.size == 0 or whole[-1] - whole[0] >= whole.size:
            return None
        before.append(int(whole[0]))
        after.append(int(count - 1 - whole[-1]))
        inside.append(np.concatenate([reads[: whole[0] + 1], reads[whole[-1] + 1 :]]))
    sums = product.weight.sum(axis=2, dtype=np.int32)
    made = np.einsum("hy,vz,yzo->hvo", *(i.astype(np.int32) for i in inside), sums)
    vectors = made.reshape(-1, made.shape[-1]).astype(np.int32)
    if len(vectors) > _MOST_EDGES:
        return None
    return _Edges((before[0], before[1]), (after[0], after[1]), tuple(vectors))


def _less_edges(x: te.Tensor, *taken: te.Tensor, edges: _Edges) -> te.Tensor:
    """Return sums [n, height, width, columns] less what is taken of each kind of place.

    As products with conditions: vectors of columns are an epilogue, and a table of them is none.
    """

    def is_of(kind: int, at: Any, axis: int) -> Any:
        before, count = edges.before[axis], edges.kinds[axis]
        size = int(x.shape[1 + axis])
        if kind < before:
            return at == kind
        if kind > before:
            return at == size - count + kind
        return tirx.all(at >= before, at < size - edges.after[axis])

    def less(n: Any, h: Any, v: Any, o: Any) -> Any:
        value = x(n, h, v, o)
        for number, vector in enumerate(taken):
            row, place = divmod(number, edges.kinds[1])
            is_there = tirx.all(is_of(row, h, 0), is_of(place, v, 1))
            value = value - is_there.astype("int32") * vector(o)
        return value

    return te.compute(x.shape, less)


def _rows_to_cut(rows: int) -> int:
    """Return how many rows of a matrix are computed: some more where they cannot be cut."""
    if rows <= _TILE[-1] or any(rows % n == 0 for n in _TILE):
        return rows
    return rows + -rows % _ROWS


def packed(weight: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a weight [height, width, depth, columns] as instructions read it.

    Its shape is [columns / 16, height, width, depth / 4, 16, 4]: 64 bytes of 16 columns and four
    of the depth lie together. What is missing of the last four is zero.
    """
    height, width, depth, columns = weight.shape
    full = np.pad(weight, ((0, 0), (0, 0), (0, -depth % VNNI_GROUP), (0, 0)))
    apart = full.reshape(height, width, -1, VNNI_GROUP, columns // VNNI_LANES, VNNI_LANES)
    return np.ascontiguousarray(apart.transpose(4, 0, 1, 2, 5, 3))


def _in_columns(weight: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a weight [height, width, depth, columns] with each column's depth together.

    So tensor cores read 8 bits. Its shape is [columns, height, width, depth].
    """
    return np.ascontiguousarray(weight.transpose(3, 0, 1, 2))


VNNI = Form(
    dtype="uint8",
    shift={"uint8": 0, "int8": 128},
    columns=VNNI_LANES,
    group=VNNI_GROUP,
    weight=packed,
    at=lambda w, o, y, z, k: w(
        o // VNNI_LANES, y, z, k // VNNI_GROUP, o % VNNI_LANES, k % VNNI_GROUP
    ),
    rows=_rows_to_cut,
    has_zero_edges=False,
)
TENSOR_CORES = Form(
    dtype="int8",
    shift={"int8": 0, "uint8": -128},
    columns=1,
    group=1,
    weight=_in_columns,
    at=lambda w, o, y, z, k: w(o, y, z, k),
    rows=lambda rows: rows,
    has_zero_edges=True,
)


def _sums(
    x: te.Tensor,
    w: te.Tensor,
    *,
    form: Form,
    columns: int,
    taps: tuple[int, int],
    pad: list[int],
    strides: list[int],
    dilation: list[int],
    fill: int,
    rows: int | None,
) -> te.Tensor:
    """Return the sums of products, int32, of x [n, height, width, depth] or [..., rows, depth].

    rows: that are computed of a matrix; None of a convolution.
    """
    top, left, bottom, right = pad
    depth = int(x.shape[-1])
    full = depth + -depth % form.group
    height, width = taps
    shift = form.shift[str(x.dtype)]
    is_matrix = rows is not None
    is_longer = is_matrix and rows != int(x.shape[-2])
    is_staged = any(pad) or full > depth or shift or is_longer

    def value(*i: Any) -> Any:
        found = x(*i)
        return (found.astype("int16") + shift).astype(form.dtype) if shift else found

    def staged(*i: Any) -> Any:
        tests = [i[-1] < depth] if full > depth else []
        tests += [i[-2] < x.shape[-2]] if is_longer else []
        at = i
        if not is_matrix:
            n, h, v, c = i
            at = (n, h - top, v - left, c)
            for place, (before, after), size in ((h, (top, bottom), 1), (v, (left, right), 2)):
                tests += [place >= before] if before else []
                tests += [place < before + x.shape[size]] if after else []
        if not tests:
            return value(*at)
        return tirx.if_then_else(tirx.all(*tests), value(*at), tirx.const(fill, form.dtype))

    shape = [int(d) for d in x.shape]
    if rows is not None:
        padded = [*shape[:-2], rows, full]
    else:
        padded = [shape[0], shape[1] + top + bottom, shape[2] + left + right, full]
    source = x
    if is_staged:
        # Not inlined for VNNI: an instruction reads bytes that lie together.
        attrs = {"meta_schedule.inline_rule": "disable"} if form.group > 1 else None
        source = te.compute(padded, staged, name=STAGED, attrs=attrs)
    k = te.reduce_axis((0, full), name="k")
    if rows is not None:
        return te.compute(
            [*padded[:-1], columns],
            lambda *i: te.sum(
                source(*i[:-1], k).astype("int32") * form.at(w, i[-1], 0, 0, k).astype("int32"),
                axis=k,
            ),
            name=INTEGER_PRODUCTS,
        )
    reach = [(n - 1) * d + 1 for n, d in zip((height, width), dilation, strict=True)]
    out = [(n - r) // s + 1 for n, r, s in zip(padded[1:3], reach, strides, strict=True)]
    y, z = (te.reduce_axis((0, n), name=name) for n, name in ((height, "y"), (width, "z")))
    return te.compute(
        [shape[0], *out, columns],
        lambda n, h, v, o: te.sum(
            source(n, h * strides[0] + y * dilation[0], v * strides[1] + z * dilation[1], k).astype(
                "int32"
            )
            * form.at(w, o, y, z, k).astype("int32"),
            axis=[y, z, k],
        ),
        name=INTEGER_PRODUCTS,
    )
