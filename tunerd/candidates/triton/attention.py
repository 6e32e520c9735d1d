"""Attention with softmax in one pass over the keys, by tensor cores.

A block of threads holds some rows of Q and the sums that belong to them; it goes over K and V in
steps of keys, and scales what it has whenever a step has a greater maximum (Milakov and Gimelshein,
arXiv 1805.02867; Dao et al., FlashAttention, arXiv 2205.14135). Scores never leave the registers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from tunerd.candidates.nests.nest import Axis, Expr, Nest, NotANest, Reduction
from tunerd.candidates.triton.code import is_small
from tunerd.candidates.triton.features import Sizes, features
from tunerd.candidates.triton.launch import OneLaunch
from tunerd.candidates.triton.product import BLOCK_BYTES, SHARED_BYTES, TYPES

_MOST_DIMS = 256
_REGISTERS = 192  # of a thread, for scores and sums
_MOST_APART = 65535  # of a grid's second axis


@dataclass(frozen=True, order=True)
class Band:
    """How many rows of Q a block of threads holds, and how many keys a step has."""

    rows: int
    columns: int  # keys
    warps: int = 4
    stages: int = 2


@dataclass(frozen=True)
class Attention(OneLaunch):
    """A nest as sum over keys of exp(scores - their maximum) * V, with the sum of the weights."""

    nest: Nest
    precision: str
    query: Expr
    key: Expr
    value: Expr
    scores: Expr  # of a row and a key, from what the product has left
    start: float  # of the maximum
    product: int  # the numbers of these reductions
    most: int
    sums: int
    totals: tuple[int, ...]  # all alike
    row_axes: tuple[Axis, ...]
    column_axes: tuple[Axis, ...]
    apart: tuple[Axis, ...]  # of which each value has its own scores
    key_axis: Axis
    dim_axis: Axis

    @staticmethod
    def of(nest: Nest, precision: str) -> Attention:
        """Return a nest as attention; raises NotANest with the reason where it is none."""
        if precision not in TYPES:
            raise NotANest(f"tensor cores do not compute {precision}")
        if not is_small(nest.params):
            raise NotANest("a tensor has more than 2^31 elements")
        read = sorted({e.value for e in nest.epilogue.walk() if e.op == "reduced"})
        for number in read:
            if found := _sums(nest, number):
                weights, value = found
                break
        else:
            raise NotANest("it sums no weighted values")
        (key_axis,) = nest.reductions[number].axes
        scores, most = weights.args[0].args
        inner = [e for e in scores.walk() if e.op == "reduced"]
        if len(inner) != 1 or most.op != "reduced":
            raise NotANest("its weights are not of one product and its maximum")
        product = nest.reductions[inner[0].value]
        query, key = _operands(product, key_axis)
        maximum = nest.reductions[most.value]
        totals = tuple(n for n in read if n != number)
        alike = _Alike(nest)
        if maximum.fold != "max" or not alike.bodies(maximum.value, scores):
            raise NotANest("its maximum is not of its scores")
        if any(
            nest.reductions[n].fold != "add"
            or nest.reductions[n].start != 0
            or not alike.bodies(nest.reductions[n].value, weights)
            for n in totals
        ):
            raise NotANest("it reads another sum than that of its weights")
        rows = tuple(a for a in nest.axes if a in query.axes and a not in key.axes | value.axes)
        columns = tuple(a for a in nest.axes if a in value.axes and a not in query.axes | key.axes)
        apart = tuple(a for a in nest.axes if a not in rows + columns)
        if not rows or not columns:
            raise NotANest("it has no rows or no columns")
        found_ = Attention(
            nest,
            precision,
            query,
            key,
            value,
            scores,
            maximum.start,
            inner[0].value,
            most.value,
            number,
            totals,
            rows,
            columns,
            apart,
            key_axis,
            product.axes[0],
        )
        if max(found_.depth, found_.columns) > _MOST_DIMS or found_.batch > _MOST_APART:
            raise NotANest("its heads are too many, or too large for registers")
        return found_

    @cached_property
    def rows(self) -> int:
        return math.prod(a.extent for a in self.row_axes)

    @cached_property
    def columns(self) -> int:
        return math.prod(a.extent for a in self.column_axes)

    @cached_property
    def batch(self) -> int:
        return math.prod(a.extent for a in self.apart)

    @property
    def keys(self) -> int:
        return self.key_axis.extent

    @property
    def depth(self) -> int:
        return self.dim_axis.extent

    @property
    def dtype(self) -> str:
        """The type of operands as tensor cores take them."""
        return TYPES[self.precision][0]

    # --- the space -----------------------------------------------------------------------------

    def tiles(self) -> Iterator[Band]:
        for rows in (16, 32, 64, 128):
            if rows > 16 and rows >= 2 * self.rows:
                continue
            for keys in (16, 32, 64, 128, 256):
                if keys > 16 and keys >= 2 * self.keys:
                    continue
                # Of 64 rows, more than 4 warps would compute the same twice (seen in the PTX).
                for warps in sorted({max(1, rows // 32), rows // 16, min(4, rows // 8)}):
                    each = rows * (keys + padded(self.columns)) / (32 * warps)
                    if not 8 <= each <= _REGISTERS:
                        continue
                    for stages in (1, 2, 3):
                        steps = math.ceil(self.keys / keys)
                        if stages > steps or (stages == 1) != (steps == 1):
                            continue
                        if self._shared_bytes(rows, keys, stages) <= BLOCK_BYTES:
                            yield Band(rows, keys, warps, stages)

    def _shared_bytes(self, rows: int, keys: int, stages: int) -> int:
        dims, columns = padded(self.depth), padded(self.columns)
        return (rows * dims + stages * keys * (dims + columns)) * TYPES[self.precision][1]

    def estimated_secs(self, tile: Band, sms: float) -> float:
        """Estimate a call: waves over the SMs, and in each the steps of a block."""
        blocks = math.ceil(self.rows / tile.rows) * self.batch
        steps = math.ceil(self.keys / tile.columns)
        size = tile.rows * tile.columns
        shared = self._shared_bytes(tile.rows, tile.columns, tile.stages)
        each = tile.rows * (tile.columns + padded(self.columns)) // (32 * tile.warps)
        # Products of 64 rows by 4 warps are asynchronous; others hold their operands in registers.
        is_async = tile.rows >= 64 and tile.warps % 4 == 0
        held = 48 + (each if is_async else each * 3 // 2)
        registers = 32 * tile.warps * min(255, held)
        live = max(1, min(SHARED_BYTES // shared, 64 // tile.warps, 65536 // registers))
        busy = min(live, math.ceil(blocks / sms))
        peak = 4.0e12 * (0.5 if self.precision == "tf32" else 1.0)  # of an SM, per second
        full = (1.0 if is_async else 0.6) * (0.5 if held > 255 else 1.0)
        products = 2 * size * (padded(self.depth) + padded(self.columns)) / (peak * full)
        # An exponential, and what is around it, for which an SM wants 8 warps.
        scaled = tile.rows * padded(self.columns) * 2 / 190e9  # the sums, with each step
        softmax = (size * (1 / 24e9 + 8 / 190e9) + scaled) / min(1.0, busy * tile.warps / 8)
        bytes_ = tile.columns * (self.depth + self.columns) * TYPES[self.precision][1]
        alone = 0.5e-6 + (0.3e-6 if tile.warps > tile.rows // 16 else 0.0)  # a row in two warps
        begin = 0.08e-6  # of a step: barriers and places
        step = max(busy * (begin + products + softmax), busy * bytes_ / 70e9, alone)
        return math.ceil(blocks / (sms * busy)) * (1.2e-6 + steps * step) + 2e-6

    def features(self, tile: Band, sms: float) -> tuple[float, ...]:
        across, batch, _ = self.grid(tile)
        sizes = Sizes(
            rows=tile.rows,
            columns=tile.columns,
            depth=self.depth,
            splits=1,
            warps=tile.warps,
            stages=tile.stages,
            all_rows=self.rows,
            all_columns=self.columns,
            all_depth=self.keys,
            batch=batch,
            steps=math.ceil(self.keys / tile.columns),
            blocks=across * batch,
            shared_bytes=self._shared_bytes(tile.rows, tile.columns, tile.stages),
            each=tile.rows * tile.columns / (32 * tile.warps),
            wasted=across * tile.rows / self.rows,
        )
        return features(4, sizes, sms=sms, estimated_secs=self.estimated_secs(tile, sms))

    # --- the kernel ----------------------------------------------------------------------------

    def grid(self, tile: Band) -> tuple[int, int, int]:
        return math.ceil(self.rows / tile.rows), self.batch, 1

    def workspace(self, tile: Band) -> int:
        return 0

    def source(self, tile: Band, name: str) -> str:
        """Return the text of a Triton kernel that takes the parameters."""
        from tunerd.candidates.triton.attention_code import AttentionCode

        return AttentionCode(self, tile).text(name)


def padded(extent: int) -> int:
    """Return the extent of a block of values, a power of two that tensor cores take."""
    return max(16, 1 << (extent - 1).bit_length())


# --- matching ----------------------------------------------------------------------------------


def _sums(nest: Nest, number: int) -> tuple[Expr, Expr] | None:
    """Return the weights and the values of a reduction that sums their products, or None."""
    reduction = nest.reductions[number]
    value = reduction.value
    if reduction.fold != "add" or reduction.start or len(reduction.axes) != 1 or value.op != "mul":
        return None
    for weights, values in (value.args, value.args[::-1]):
        if weights.op == "exp" and weights.args[0].op == "sub" and len(values.loads) == 1:
            return weights, values
    return None


def _operands(product: Reduction, key_axis: Axis) -> tuple[Expr, Expr]:
    """Return Q and K of the product of which scores are made."""
    value = product.value
    if product.fold != "add" or product.start or len(product.axes) != 1 or value.op != "mul":
        raise NotANest("its scores are of no product")
    query, key = value.args
    if key_axis in query.axes:
        query, key = key, query
    if key_axis in query.axes or key_axis not in key.axes:
        raise NotANest("its keys are not those of its product")
    if any(len(side.loads) != 1 for side in (query, key)):
        raise NotANest("an operand is no single tensor")
    return query, key


class _Alike:
    """Tells whether expressions are the same but for the axes that they are reduced over."""

    def __init__(self, nest: Nest) -> None:
        self._nest = nest

    def bodies(self, a: Expr, b: Expr) -> bool:
        return self._are(a, b, {axis: axis for axis in self._nest.axes})

    def _are(self, a: Expr, b: Expr, axes: dict[Axis, Axis]) -> bool:
        if (a.op, a.dtype, len(a.args)) != (b.op, b.dtype, len(b.args)):
            return False
        if a.op == "axis":
            other: Axis = axes.setdefault(a.value, b.value)
            return bool(other == b.value and a.value.extent == other.extent)
        if a.op == "reduced" and a.value != b.value:
            one, two = (self._nest.reductions[e.value] for e in (a, b))
            if (one.fold, one.start, len(one.axes)) != (two.fold, two.start, len(two.axes)):
                return False
            return self._are(one.value, two.value, axes)
        return bool(a.value == b.value) and all(
            self._are(x, y, axes) for x, y in zip(a.args, b.args, strict=True)
        )
