"""What multiplies and adds up: by which instruction, and which block of a task it computes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tunerd.candidates.nests.blocks import reduced_of, spatial_of
from tunerd.candidates.registers.intrinsic import dot_products
from tunerd.system import amx
from tunerd.vocabulary.model import INTEGER_PRODUCTS, STAGED, VNNI_GROUP, VNNI_LANES

if TYPE_CHECKING:
    from tvm.target import Target

_FEWEST_LANES = 4
# CPUs of one unit for 512 bits, or of two for 256 that are one for 512: by LLVM's names.
_ONE_UNIT = frozenset(("znver4", "cannonlake", "icelake-client", "tigerlake", "rocketlake"))


@dataclass(frozen=True)
class Unit:
    """An instruction that adds products to a vector of sums.

    find: the place of the block of sums among a task's, by the blocks and the task's parameters;
        raises ValueError with the reason where there is none.
    is_staged: whether a block that the sums read is computed before them, not within.
    instruction: returns a vector of sums with products added, given the sums, a group of values and
        the weights of all; None: the products are added lane by lane, and LLVM finds its own.
    """

    lanes: int  # sums in a vector
    group: int  # products that are added up to each
    registers: int  # for sums and weights: what else is needed is left
    value_bytes: int  # of what is multiplied
    find: Callable[[Sequence[Any], Sequence[Any]], int]
    is_staged: Callable[[Any], bool]
    instruction: Callable[[Any, Any, Any], Any] | None = None
    per_cycle: int = 2  # vectors that a core multiplies and adds to

    @property
    def vector_bytes(self) -> int:
        """Return the bytes of weights of a vector, for a step."""
        return self.lanes * self.group * self.value_bytes

    def fitting(self, columns: int) -> Unit:
        """Return itself, with shorter vectors where these fill so many columns and its own do not.

        Raises ValueError where none do.
        """
        lanes = self.lanes
        while self.instruction is None and columns % lanes and lanes > _FEWEST_LANES:
            lanes //= 2
        if columns % lanes:
            raise ValueError(f"its {columns} columns fill no vectors")
        return replace(self, lanes=lanes)

    def overlapping(self, columns: int) -> Unit:
        """Return itself with the longest vectors that so many columns hold, if they do not fill it.

        Raises ValueError where there are too few columns, or where an instruction takes all lanes.
        """
        if self.instruction is not None or columns < _FEWEST_LANES:
            raise ValueError(f"its {columns} columns hold no vector")
        return replace(self, lanes=min(self.lanes, 1 << (columns.bit_length() - 1)))

    def weights(self, block: Any, params: Sequence[Any]) -> tuple[int, tuple[int, ...]] | None:
        """Return which parameter has the weights by columns, and its shape; None: another form."""
        if self.instruction is not None:
            return None
        source = operands(block)[1].source
        number = next(i for i, param in enumerate(params) if param.same_as(source))
        return number, tuple(int(extent) for extent in source.ty.shape)

    def row_bytes(self, block: Any, rows: Sequence[Any]) -> int:
        """Return the bytes from what one row of the sums reads to what the next one does."""
        steps = distances(block, rows[-1:])
        return steps[0] * self.value_bytes if steps else 0

    def apart(self, block: Any, rows: Sequence[Any]) -> tuple[bool, ...]:
        """Say of each dimension of the rows whether weights are others along it."""
        used = _variables(operands(block)[1].indices)
        return tuple(any(v.var.same_as(u) for u in used) for v in rows)


def has_tiles(target: Target) -> bool:
    """Say whether a CPU has AMX's products of bytes."""
    import tvm

    return bool(tvm.target.codegen.target_has_features([*amx.FEATURES], target))


def vnni(target: Target) -> Unit:
    """AVX-512 VNNI: bytes times bytes, four of the depth at a time."""
    return Unit(
        VNNI_LANES, VNNI_GROUP, 31, 1,
        _integer_products, lambda block: block.name_hint == STAGED, dot_products,
        per_cycle=_per_cycle(target),
    )  # fmt: skip


def fma(target: Target) -> Unit:
    """Multiply and add in fp32, by the widest vectors of a CPU; ValueError where none is known."""
    import tvm

    def has(*features: str) -> bool:
        return bool(tvm.target.codegen.target_has_features(list(features), target))

    if has("avx512f"):
        lanes, registers = 16, 32
    elif has("avx2", "fma"):
        lanes, registers = 8, 16
    elif "aarch64" in str(target.attrs.get("mtriple", "")):
        lanes, registers = 4, 32
    else:
        raise ValueError("its CPU has no vectors that multiply and add")
    per_cycle = _per_cycle(target) if lanes == 16 else 2
    return Unit(lanes, 1, registers - 1, 4, _products, _is_no_copy, per_cycle=per_cycle)


def _per_cycle(target: Target) -> int:
    """Return how many vectors of 512 bits a CPU adds to in a cycle."""
    return 1 if str(target.attrs.get("mcpu", "")) in _ONE_UNIT else 2


def _integer_products(blocks: Sequence[Any], _: Sequence[Any]) -> int:
    names = [str(block.name_hint) for block in blocks]
    if names.count(INTEGER_PRODUCTS) != 1:
        raise ValueError("it has no products of 8 bits")
    return names.index(INTEGER_PRODUCTS)


def _products(blocks: Sequence[Any], params: Sequence[Any]) -> int:
    """Find sums of products of fp32, whose weights lie by columns in a parameter."""
    from tvm import ir, tirx

    places = [i for i, block in enumerate(blocks) if block.init is not None]
    if len(places) != 1:
        raise ValueError("it has no sums of products, or several")
    block = blocks[places[0]]
    store = block.body
    if not isinstance(store, tirx.BufferStore) or str(store.buffer.ty.dtype) != "float32":
        raise ValueError("it has no sums of products in fp32")
    value = store.value
    is_sum = isinstance(value, tirx.Add) and isinstance(value.b, tirx.Mul)
    if not is_sum or not all(isinstance(x, ir.TensorLoad) for x in (value.b.a, value.b.b)):
        raise ValueError("it has no sums of products")
    weights = value.b.b
    spatial = spatial_of(block)
    reduced = reduced_of(block)
    column = spatial[-1].var
    *before, last = weights.indices
    is_by_columns = last.same_as(column) and is_shifted(store.indices[-1], column)
    if not is_by_columns or any(v.same_as(column) for v in _variables(before)):
        raise ValueError("its columns are not those of its weights")
    group_columns(block)
    if not reduced or not any(weights.source.same_as(param) for param in params):
        raise ValueError("its weights are computed by itself")
    return places[0]


def group_columns(block: Any) -> int:
    """Return for how many columns of a block of sums the same is read of the rows.

    For those of a group where a convolution has groups; for one where each column has values of
    its own, which lie as columns do, as of a depthwise convolution. Raises ValueError where columns
    read rows in another way.
    """
    column = spatial_of(block)[-1]
    count = int(column.dom.extent)
    *before, last = operands(block)[0].indices
    sizes = set().union(*(_divisors_of(column.var, index) for index in (*before, last)))
    if not sizes:
        return count
    (size, *others) = sizes
    if size == 1 and any(_divisors_of(column.var, index) for index in before):
        size = 0
    if others or not size or count % size:
        raise ValueError("its columns read the rows in another way than in groups")
    return int(size)


def _divisors_of(var: Any, expression: Any) -> set[int]:
    """Return by what a variable is divided wherever an expression has it; 0: it is not known."""
    from tvm import tirx

    if not uses(expression, var):
        return set()
    if expression.same_as(var):
        return {1}
    if isinstance(expression, tirx.FloorDiv) and expression.a.same_as(var):
        return {int(getattr(expression.b, "value", 0))}
    if isinstance(expression, tirx.Add):
        return _divisors_of(var, expression.a) | _divisors_of(var, expression.b)
    if isinstance(expression, tirx.Mul):
        parts = [_divisors_of(var, part) for part in (expression.a, expression.b)]
        return {size if size != 1 else 0 for size in set().union(*parts)}
    return {0}


def operands(block: Any) -> tuple[Any, Any]:
    """Return what the sums of a block load: of the rows, and of the weights."""
    product = block.body.value.b
    left, right = (x.value if hasattr(x, "value") else x for x in (product.a, product.b))
    return left, right


def distances(block: Any, loops: Sequence[Any]) -> list[int]:
    """Return the elements from what a step of each loop reads of the rows to what the next does.

    Empty where there is no loop, or where elements are not equally far apart.
    """
    from tvm.sym import detect_linear_equation

    read = operands(block)[0]
    extents = map(int, read.source.ty.shape)
    place = functools.reduce(
        lambda sum_, axis: sum_ * axis[1] + axis[0], zip(read.indices, extents, strict=True), 0
    )
    steps = [*detect_linear_equation(place, [loop.var for loop in loops])] if loops else []
    return [int(step) for step in steps[: len(loops)]]


def is_shifted(index: Any, var: Any) -> bool:
    """Whether an index is a variable, or a variable and a constant."""
    from tvm import tirx

    if isinstance(index, tirx.Add) and isinstance(index.b, tirx.IntImm):
        index = index.a
    return bool(index.same_as(var))


def _is_no_copy(block: Any) -> bool:
    """Whether a block does more than to name what it reads."""
    from tvm import ir

    return not isinstance(block.body.value, ir.TensorLoad)


def uses(expression: Any, var: Any) -> bool:
    return any(each.same_as(var) for each in _variables([expression]))


def _variables(expressions: Sequence[Any]) -> list[Any]:
    from tvm.tirx.analysis import undefined_vars

    return [var for each in expressions for var in undefined_vars(each)]
