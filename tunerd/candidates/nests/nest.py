"""Task -> Nest: what a kernel computes, as one value of each element of its result.

TVM writes a fused kernel as blocks, one after the other, each over a buffer: a padding, a sum of
products, a bias, an activation. Here all of them become one expression: buffers between blocks are
replaced by what they hold, so that what is left reads the kernel's parameters, and what reductions
have left. It is exact, or there is none: a kernel that is anything else is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tunerd.candidates.nests.blocks import blocks_of, reduced_of, spatial_of

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.s_tir import SBlock
    from tvm.tirx import PrimFunc


class NotANest(ValueError):
    """The kernel is not of the form that the templates take."""


@dataclass(frozen=True)
class Axis:
    """A loop, from 0 to its extent."""

    name: str
    extent: int


@dataclass(frozen=True)
class Expr:
    """An operation on others. Its name is TVM's, in lower case; `value` says what is no operand."""

    op: str
    args: tuple[Expr, ...] = ()
    # Of "const": a number; of "axis": an Axis; of "load": a parameter's number; of "reduced": the
    # number of a reduction.
    value: Any = None
    dtype: str = ""

    def walk(self) -> Iterator[Expr]:
        yield self
        for each in self.args:
            yield from each.walk()

    @cached_property
    def axes(self) -> frozenset[Axis]:
        return frozenset(e.value for e in self.walk() if e.op == "axis")

    @cached_property
    def loads(self) -> frozenset[int]:
        return frozenset(e.value for e in self.walk() if e.op == "load")


@dataclass(frozen=True)
class Tensor:
    """A parameter of a kernel."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def strides(self) -> tuple[int, ...]:
        return tuple(math.prod(self.shape[i + 1 :]) for i in range(len(self.shape)))


@dataclass(frozen=True)
class Reduction:
    """The sum, or another fold, of a value over axes."""

    fold: str  # "add", "max" or "min"
    axes: tuple[Axis, ...]
    start: float
    value: Expr


@dataclass(frozen=True)
class Nest:
    """A kernel with one result."""

    params: tuple[Tensor, ...]  # the last is the result
    axes: tuple[Axis, ...]  # of the result, those of extent one left out
    target: Expr  # the place of an element in the result, counted in elements
    epilogue: Expr  # its value
    reductions: tuple[Reduction, ...] = ()  # each may read those before it

    @property
    def reduction(self) -> Reduction:
        """The only reduction; raises NotANest where there is none, or several."""
        if len(self.reductions) != 1:
            raise NotANest(f"it has {len(self.reductions) or 'no'} reductions")
        return self.reductions[0]


_BINARY = {
    "Add": "add",
    "Sub": "sub",
    "Mul": "mul",
    "Div": "div",
    "FloorDiv": "floordiv",
    "FloorMod": "floormod",
    "Max": "max",
    "Min": "min",
    "EQ": "eq",
    "NE": "ne",
    "LT": "lt",
    "LE": "le",
    "GT": "gt",
    "GE": "ge",
    "And": "and",
    "Or": "or",
}
_ROUNDINGS = ("floor", "ceil", "nearbyint")
CALLS = frozenset(
    ("exp", "log", "sqrt", "rsqrt", "erf", "tanh", "sigmoid", "fabs", "pow", *_ROUNDINGS)
)


def nest_of(mod: IRModule) -> Nest:
    """Return the nest of a task's module; raises NotANest with the reason."""
    return _Reader(mod["main"]).nest()


class _Reader:
    def __init__(self, function: PrimFunc) -> None:
        self._params = {p: i for i, p in enumerate(function.params)}
        self._tensors = tuple(
            Tensor(tuple(int(d) for d in p.ty.shape), str(p.ty.dtype)) for p in function.params
        )
        self._blocks: dict[Any, SBlock] = {}  # by the buffer that it writes
        for block, predicate in blocks_of(function):
            if len(block.writes) != 1 or getattr(predicate, "value", 0) != 1:
                raise NotANest("a block writes several buffers, or not everywhere")
            buffer = block.writes[0].source
            if buffer in self._blocks:
                raise NotANest("a buffer is written by several blocks")
            self._blocks[buffer] = block
        self._reductions: list[Reduction] = []
        # What reductions leave, by the buffer and the places in it: each place is its own.
        self._reduced: dict[tuple[Any, tuple[Expr, ...]], Expr] = {}
        self._depth = 0

    def nest(self) -> Nest:
        written = [p for p in self._params if p in self._blocks]
        if len(written) != 1 or self._params[written[0]] != len(self._params) - 1:
            raise NotANest("it has several results")
        out = written[0]
        tensor = self._tensors[-1]
        block = self._blocks[out]
        store = self._store(block)
        spatial = spatial_of(block)
        env = {v.var: axis_expr(Axis(f"o{i}", int(v.dom.extent))) for i, v in enumerate(spatial)}
        at = tuple(self._expr(i, env) for i in store.indices)
        if block.init is not None:
            places = tuple(env[v.var] for v in spatial)
            epilogue = cast(self._reduce(block, places), tensor.dtype)
        else:
            epilogue = self._expr(store.value, env)
        axes = tuple(e.value for e in env.values() if e.op == "axis")
        target = flat(at, tensor.strides)
        return Nest(self._tensors, axes, target, epilogue, tuple(self._reductions))

    def _store(self, block: SBlock) -> Any:
        from tvm import tirx

        if not isinstance(block.body, tirx.BufferStore):
            raise NotANest(f"block {block.name_hint} is no single store")
        return block.body

    def _reduce(self, block: SBlock, places: tuple[Expr, ...]) -> Expr:
        """Read a block that folds, at the places of its spatial axes; return what it leaves."""
        store = self._store(block)
        buffer = block.writes[0].source
        if (buffer, places) in self._reduced:
            return self._reduced[buffer, places]
        if len(self._reduced) == _MAX_REDUCTIONS:
            raise NotANest("it has too many reductions")
        spatial = spatial_of(block)
        inside = {v.var: place for v, place in zip(spatial, places, strict=True)}
        axes = []
        nth = len(self._reduced)
        for i, v in enumerate(reduced_of(block)):
            axis = Axis(f"r{nth}_{i}", int(v.dom.extent))
            inside[v.var] = axis_expr(axis)
            if axis.extent > 1:
                axes.append(axis)
        value = store.value
        fold = {"Add": "add", "Max": "max", "Min": "min"}.get(type(value).__name__)
        init = getattr(getattr(block.init, "value", None), "value", None)
        if fold is None or init is None:
            raise NotANest(f"its reduction is no sum, maximum or minimum, but {value}")
        own = getattr(value.a, "source", None)
        if own is None or own != buffer:
            raise NotANest("its reduction does not fold into its own result")
        self._reduced[buffer, places] = Expr("reduced")  # a place for it: it names its axes
        found = Reduction(fold, tuple(axes), float(init), self._expr(value.b, inside))
        self._reductions.append(found)
        dtype = str(buffer.ty.dtype) if hasattr(buffer, "ty") else str(buffer.dtype)
        left = dtype if dtype == "int32" else "float32"
        reduced = Expr("reduced", value=len(self._reductions) - 1, dtype=left)
        self._reduced[buffer, places] = reduced
        return reduced

    def _expr(self, node: Any, env: Mapping[Any, Expr]) -> Expr:
        kind = type(node).__name__
        dtype = str(node.ty.dtype) if hasattr(node.ty, "dtype") else str(node.ty)
        if kind in ("IntImm", "FloatImm"):
            return Expr("const", value=node.value, dtype=dtype)
        if kind == "Var":
            if node not in env:
                raise NotANest(f"{node} is no loop of the kernel")
            return env[node]
        if kind in _BINARY:
            a, b = self._expr(node.a, env), self._expr(node.b, env)
            return simple(Expr(_BINARY[kind], (a, b), dtype=dtype))
        if kind == "Not":
            return Expr("not", (self._expr(node.a, env),), dtype=dtype)
        if kind == "Cast":
            return cast(self._expr(node.value, env), dtype)
        if kind == "Select":
            parts = (node.condition, node.true_value, node.false_value)
            return select(*(self._expr(p, env) for p in parts), dtype=dtype)
        if kind == "TensorLoad":
            return self._load(node, env, dtype)
        if kind == "Call":
            name = str(node.op.name).rpartition(".")[2]
            args = tuple(self._expr(a, env) for a in node.args)
            if name == "if_then_else":
                return select(*args, dtype=dtype)
            if name in CALLS:
                return Expr(name, args, dtype=dtype)
            raise NotANest(f"it calls {name}")
        raise NotANest(f"it has a {kind}")

    def _load(self, node: Any, env: Mapping[Any, Expr], dtype: str) -> Expr:
        indices = tuple(self._expr(i, env) for i in node.indices)
        if node.source in self._params and node.source not in self._blocks:
            param = self._params[node.source]
            at = flat(indices, self._tensors[param].strides)
            return Expr("load", (at,), value=param, dtype=dtype)
        block = self._blocks.get(node.source)
        if block is None:
            raise NotANest("it reads what nothing writes")
        spatial = spatial_of(block)
        places = [v.var for v in spatial]
        if not self._store(block).indices and all(int(v.dom.extent) == 1 for v in spatial):
            if block.init is not None:
                raise NotANest("it reduces to one number")
            return self._expr(self._store(block).value, dict.fromkeys(places, number(0)))
        if [getattr(i, "name", None) for i in self._store(block).indices] != [
            str(v.name) for v in places
        ]:
            raise NotANest("a block writes its buffer in another order than its loops")
        if block.init is not None:
            if any(i.op not in ("axis", "const") for i in indices):
                raise NotANest("what was reduced is moved afterwards")
            return self._reduce(block, indices)
        self._depth += 1
        if self._depth > _MAX_EXPANSIONS:
            raise NotANest("its blocks read each other too often")
        return self._expr(self._store(block).value, dict(zip(places, indices, strict=True)))


_MAX_EXPANSIONS = 2000
_MAX_REDUCTIONS = 8


# --- expressions -------------------------------------------------------------------------------


def axis_expr(axis: Axis) -> Expr:
    if axis.extent == 1:
        return number(0)
    return Expr("axis", value=axis, dtype="int64")


def number(value: int) -> Expr:
    return Expr("const", value=value, dtype="int64")


def cast(expr: Expr, dtype: str) -> Expr:
    if expr.dtype == dtype:
        return expr
    if expr.op == "const" and dtype.startswith(("float", "bfloat")):
        return Expr("const", value=float(expr.value), dtype=dtype)
    return Expr("cast", (expr,), dtype=dtype)


def select(condition: Expr, yes: Expr, no: Expr, *, dtype: str) -> Expr:
    if condition.op == "const":
        return yes if condition.value else no
    return Expr("select", (condition, yes, no), dtype=dtype)


def flat(indices: tuple[Expr, ...], strides: tuple[int, ...]) -> Expr:
    """Return the place in a tensor, counted in elements."""
    place = number(0)
    for index, stride in zip(indices, strides, strict=True):
        scaled = simple(Expr("mul", (index, number(stride)), dtype="int64"))
        place = simple(Expr("add", (place, scaled), dtype="int64"))
    return place


_FOLDED: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "floordiv": lambda a, b: a // b,
    "floormod": lambda a, b: a % b,
    "max": max,
    "min": min,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "and": lambda a, b: bool(a and b),
    "or": lambda a, b: bool(a or b),
}


def simple(expr: Expr) -> Expr:
    """Return an integer or logical expression with its constants folded."""
    a, b = expr.args
    if expr.dtype.startswith("float") or expr.dtype.startswith("bfloat"):
        return expr
    if a.op == b.op == "const" and (expr.op not in ("floordiv", "floormod") or b.value):
        if not isinstance(a.value, float) and not isinstance(b.value, float):
            return Expr("const", value=_FOLDED[expr.op](a.value, b.value), dtype=expr.dtype)
        return expr
    neutral = {"add": 0, "sub": 0, "mul": 1, "floordiv": 1}.get(expr.op)
    if b.op == "const" and b.value == neutral:
        return a
    if expr.op in ("add", "mul") and a.op == "const" and a.value == neutral:
        return b
    if expr.op == "mul" and any(x.op == "const" and x.value == 0 for x in (a, b)):
        return number(0)
    if expr.op == "floormod" and b.op == "const" and b.value == 1:
        return number(0)
    if expr.op in ("and", "or"):
        for one, other in ((a, b), (b, a)):
            if one.op == "const":
                return other if bool(one.value) == (expr.op == "and") else one
    told = _always(expr)
    return expr if told is None else Expr("const", value=told, dtype=expr.dtype)


def _always(expr: Expr) -> bool | None:
    """Return what a comparison says everywhere; None where that differs, or is not known."""
    if expr.op not in ("lt", "le", "gt", "ge"):
        return None
    a, b = (linear(x) for x in expr.args)
    if a is None or b is None:
        return None
    least = most = a.constant - b.constant
    for axis in {*a.factors, *b.factors}:
        reach = (a.factors.get(axis, 0) - b.factors.get(axis, 0)) * (axis.extent - 1)
        least, most = least + min(0, reach), most + max(0, reach)
    first, last = (bool(_FOLDED[expr.op](x, 0)) for x in (least, most))
    return first if first == last else None


@dataclass(frozen=True)
class Linear:
    """A sum of axes times factors, and a constant."""

    factors: Mapping[Axis, int]
    constant: int = 0


def linear(expr: Expr) -> Linear | None:
    """Return an expression as a sum of axes times factors; None where it is no such sum."""
    if expr.op == "const" and not isinstance(expr.value, float):
        return Linear({}, int(expr.value))
    if expr.op == "axis":
        return Linear({expr.value: 1})
    if expr.op == "cast" and "int" in expr.dtype:
        return linear(expr.args[0])
    if expr.op not in ("add", "sub", "mul"):
        return None
    a, b = (linear(x) for x in expr.args)
    if a is None or b is None:
        return None
    if expr.op == "mul":
        if a.factors and b.factors:
            return None
        if b.factors:
            a, b = b, a
        factors = {axis: f * b.constant for axis, f in a.factors.items()}
        return Linear(factors, a.constant * b.constant)
    sign = 1 if expr.op == "add" else -1
    factors = dict(a.factors)
    for axis, factor in b.factors.items():
        factors[axis] = factors.get(axis, 0) + sign * factor
    return Linear({x: f for x, f in factors.items() if f}, a.constant + sign * b.constant)
