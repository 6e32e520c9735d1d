"""Expressions of a nest as the text of a Triton kernel.

A tile has rows, columns and, while it sums products, steps of depth. Each axis of a nest is one of
them, a scalar, or a part of one by division; the text of an expression is a block of what its axes
are, [rows, 1], [1, columns] or both, which Triton broadcasts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tunerd.candidates.nests.nest import Axis, Expr, Linear, Nest, NotANest, Tensor, linear
from tunerd.candidates.triton.functions import ERF, SIGMOID, called_by

_INFIX = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "floordiv": "//",
    "floormod": "%",
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "and": "&",
    "or": "|",
}
_CUT_BITS = 13  # of a float32's fraction, which tensor cores leave out in TF32
_TYPES = {
    "float16": "tl.float16",
    "bfloat16": "tl.bfloat16",
    "float32": "tl.float32",
    "int32": "tl.int32",
    "int64": "tl.int64",
    "int16": "tl.int16",
    "int8": "tl.int8",
    "uint8": "tl.uint8",
    "bool": "tl.int1",
}
POINTERS = {
    "float16": "*fp16",
    "bfloat16": "*bf16",
    "float32": "*fp32",
    "int32": "*i32",
    "int64": "*i64",
    "int16": "*i16",
    "int8": "*i8",
    "uint8": "*u8",
    "bool": "*i1",
}


Masks = Sequence[tuple[frozenset[Axis], str]]


def nearest_tf32(text: str) -> str:
    """Return the text of a float32 block that tensor cores round to the nearest TF32.

    They cut the last bits off, which makes each product smaller: 80 layers of EfficientNet-B0 lost
    a fifth of the output's size. Half of the last bit that stays, added before, makes it rounding.
    """
    half = 1 << (_CUT_BITS - 1)
    return f"tl.cast(tl.cast({text}, tl.int32, bitcast=True) + {half}, tl.float32, bitcast=True)"


@dataclass(frozen=True)
class Scope:
    """What names stand for at one place of a kernel."""

    axes: Mapping[Axis, str]  # the text of each axis, in the shape that it has there
    masks: Masks = ()  # holds where these axes are inside
    places: Mapping[int, str] = field(default_factory=dict)  # of a parameter, instead of its sum
    reduced: Sequence[str] = ()  # the text of what each reduction has left
    loading: str = ""  # further arguments of each load

    def text(self, expr: Expr, *, condition: str = "") -> str:
        """Return an expression as text; loads are done where `condition` holds, and are 0 else."""
        op, args = expr.op, expr.args
        if op == "const":
            return _constant(expr)
        if op == "axis":
            return str(self.axes[expr.value])
        if op == "reduced":
            return str(self.reduced[expr.value])
        if op == "load":
            return self._load(expr, condition)
        if op == "select":
            return self._select(expr, condition)
        texts = [self.text(a, condition=condition) for a in args]
        if op == "cast":
            return _cast(texts[0], args[0].dtype, expr.dtype)
        if op == "div":
            return f"({texts[0]} / {texts[1]})"
        if op in _INFIX:
            return f"({texts[0]} {_INFIX[op]} {texts[1]})"
        if op in _FUNCTIONS:
            return _FUNCTIONS[op](*texts)
        raise NotANest(f"{op} has no text in Triton")

    def place(self, at: Expr) -> str:
        """Return the text of a place in a tensor: what is linear is put together by axis."""
        found = linear(at)
        return self.text(at) if found is None else self.sum_of(found)

    def sum_of(self, place: Linear) -> str:
        parts = [
            f"{self.axes[a]} * {f}" if f != 1 else self.axes[a] for a, f in place.factors.items()
        ]
        if place.constant or not parts:
            parts.append(str(place.constant))
        return " + ".join(parts)

    def mask(self, axes: frozenset[Axis], condition: str = "") -> str:
        """Return where something of these axes is inside of its tensor; empty: everywhere."""
        needed = [text for of, text in self.masks if of & axes]
        return " & ".join([*needed, *([condition] if condition else [])])

    def stored(self, nest: Nest, rows: tuple[Axis, ...], *, shape: str = "") -> str:
        """Return the text that stores the epilogue of a nest, for a tile of `shape`."""
        place = linear(nest.target)
        where = (
            self.text(nest.target)
            if place is None
            else by_axes(place, self.axes, rows, "rows[:, None]")
        )
        if rows and not any(axis.extent > 1 for axis in rows):
            where = f"rows[:, None] * 0 + {where}"
        result = self.text(nest.epilogue)
        if shape:
            result = f"tl.broadcast_to({result}, {shape})"
        mask = self.mask(frozenset((*nest.axes, *rows)))
        how = f", mask={mask}" if mask else ""
        return f"tl.store(p{len(nest.params) - 1} + ({where}), {result}{how})"

    def _load(self, expr: Expr, condition: str) -> str:
        (at,) = expr.args
        where = self.places.get(expr.value) or self.place(at)
        mask = self.mask(at.axes, condition)
        if not at.axes and mask:
            mask = ""  # one element, which is there for all
        how = f", mask={mask}, other=0.0" if mask else ""
        loaded = f"tl.load(p{expr.value} + ({where}){how}{self.loading})"
        return f"({loaded} != 0)" if expr.dtype == "bool" else loaded

    def _select(self, expr: Expr, condition: str) -> str:
        test, yes, no = expr.args
        told = self.text(test)
        # A load must not reach outside of its tensor where its value is not wanted.
        both = f"{condition} & {told}" if condition else told
        if no.op == "const" and no.value == 0 and _is_zero_where_masked(yes):
            return self.text(yes, condition=both)
        against = f"~({told})"
        neither = f"{condition} & {against}" if condition else against
        yes_text = self.text(yes, condition=both if yes.loads else condition)
        no_text = self.text(no, condition=neither if no.loads else condition)
        return f"tl.where({told}, {yes_text}, {no_text})"


def _is_zero_where_masked(expr: Expr) -> bool:
    while expr.op == "cast":
        (expr,) = expr.args
    return expr.op == "load"


def _constant(expr: Expr) -> str:
    value = expr.value
    if expr.dtype == "bool":
        return "True" if value else "False"
    if isinstance(value, float):
        return float_text(value)
    return str(value)


FOLDS = {"add": "{} + {}", "max": "tl.maximum({}, {})", "min": "tl.minimum({}, {})"}
WHOLE = {"add": "tl.sum", "max": "tl.max", "min": "tl.min"}


def widened(text: str, dtype: str) -> str:
    """Return what is folded in fp32."""
    return text if dtype == "float32" else f"tl.cast({text}, tl.float32)"


def float_text(value: float) -> str:
    return repr(value) if math.isfinite(value) else f"float('{value}')"


def kernel_text(name: str, params: Sequence[str], lines: Sequence[str]) -> str:
    """Return the text of a kernel from the lines of its body, and of the functions it calls."""
    head = f"def {name}({', '.join(params)}):"
    text = "\n".join([head, *(f"    {line}" for line in lines)]) + "\n"
    return text + called_by(text)


def consecutive(name: str, size: int) -> str:
    """Return the text of numbers that begin at a multiple of their count, which Triton is told."""
    return f"tl.max_contiguous(tl.multiple_of({name}, {size}), {size})"


def _cast(text: str, source: str, target: str) -> str:
    if source == target:
        return text
    if target not in _TYPES:
        raise NotANest(f"Triton's templates have no {target}")
    return f"tl.cast({text}, {_TYPES[target]})"


_FUNCTIONS: dict[str, Callable[..., str]] = {
    "max": lambda a, b: f"tl.maximum({a}, {b})",
    "min": lambda a, b: f"tl.minimum({a}, {b})",
    "not": lambda a: f"~({a})",
    "exp": lambda a: f"tl.exp({a})",
    "log": lambda a: f"tl.log({a})",
    "sqrt": lambda a: f"tl.sqrt_rn({a})",
    "rsqrt": lambda a: f"tl.rsqrt({a})",
    "erf": lambda a: f"{ERF}({a})",
    "tanh": lambda a: f"(2.0 * {SIGMOID}(2.0 * {a}) - 1.0)",
    "sigmoid": lambda a: f"{SIGMOID}({a})",
    "fabs": lambda a: f"tl.abs({a})",
    "floor": lambda a: f"tl.floor({a})",
    "ceil": lambda a: f"tl.ceil({a})",
    "nearbyint": lambda a: f"tl.extra.cuda.libdevice.rint({a})",
}


def split(axes: Sequence[Axis], name: str, shape: str) -> dict[Axis, str]:
    """Return the text of each axis of a product of axes, as a part of the number called `name`.

    `shape` is what makes a block of it: "[:, None]", "[None, :]" or nothing.

    >>> split([Axis("a", 4), Axis("b", 8)], "rows", "[:, None]")[Axis("a", 4)]
    '(rows // 8)[:, None]'
    """
    found = {}
    inner = 1
    for i, axis in reversed(list(enumerate(axes))):
        part = name if inner == 1 else f"{name} // {inner}"
        if i:
            part = f"{part} % {axis.extent}"
        found[axis] = f"({part}){shape}" if part != name else f"{name}{shape}"
        inner *= axis.extent
    return found


def is_small(tensors: Sequence[Tensor]) -> bool:
    """Whether a place in each tensor is a number of 32 bits."""
    return all(math.prod(t.shape) < 1 << 31 for t in tensors)


def by_axes(place: Linear, axes: Mapping[Axis, str], rows: tuple[Axis, ...], whole: str) -> str:
    """Return the text of a place; rows that lie one after the other are taken as one number."""
    factors = dict(place.factors)
    parts = []
    inner = factors.get(rows[-1], 0) if rows else 0
    if len(rows) > 1 and inner:
        expected = inner
        ordered = True
        for axis in reversed(rows):
            ordered = ordered and factors.get(axis, 0) == expected
            expected *= axis.extent
        if ordered:
            parts.append(f"{whole} * {inner}" if inner != 1 else whole)
            for axis in rows:
                del factors[axis]
    scope = Scope(axes)
    rest = Linear(factors, place.constant)
    if factors or place.constant or not parts:
        parts.append(scope.sum_of(rest))
    return " + ".join(parts)


def joined(
    splits: int, tiles: int, size: int, shape: tuple[int, ...], dtype: str = "float32"
) -> list[str]:
    """Return what follows when each split has its part of `acc`: the last of a tile adds them up.

    It adds them in their order, whoever comes last, so that equal inputs give equal bits. `at` are
    the places of a tile's values, `mine` is the number of the tile; what comes after is inside of
    the condition that this block was the last one. The workspace is of float32; what is summed in
    another type of 32 bits is kept there as its bits.
    """
    loaded = f'tl.load(workspace + (s * {tiles} + mine) * {size} + at, cache_modifier=".cg")'
    kept = "acc"
    if dtype != "float32":
        kept = "tl.cast(acc, tl.float32, bitcast=True)"
        loaded = f"tl.cast({loaded}, {_TYPES[dtype]}, bitcast=True)"
    return [
        f"tl.store(workspace + (split * {tiles} + mine) * {size} + at, {kept})",
        "tl.debug_barrier()",
        'done = tl.atomic_add(counters + mine, 1, sem="acq_rel")',
        f"if done == {splits - 1}:",
        f"    acc = tl.zeros({shape}, {_TYPES[dtype]})",
        f"    for s in range({splits}):",
        f"        acc += {loaded}",
        "    tl.store(counters + mine, 0)",
    ]
