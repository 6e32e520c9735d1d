"""Sums of products by tensor cores: matrix products, and convolutions as implicit ones.

A block of threads computes a tile of rows and columns in steps of depth, in fp32. With a split,
several blocks take a part of the depth each; whoever ends last adds their tiles up in their order,
so that equal inputs give equal bits, and the epilogue follows.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import ClassVar

from tunerd.candidates.nests.contraction import Contraction, contraction_of, unwidened
from tunerd.candidates.nests.nest import Axis, Expr, Nest, NotANest, Reduction
from tunerd.candidates.triton.code import is_small
from tunerd.candidates.triton.features import Sizes, features
from tunerd.candidates.triton.launch import OneLaunch

MAX_TILES = 4096  # of a split product: it has a counter for each
SHARED_BYTES = 220 << 10  # of an SM, for all of its blocks
BLOCK_BYTES = 224 << 10
TYPES = {"fp16": ("float16", 2), "bf16": ("bfloat16", 2), "tf32": ("float32", 4)}


@dataclass(frozen=True, order=True)
class Tile:
    """How a product is cut. Extents are in elements."""

    rows: int
    columns: int
    depth: int
    splits: int = 1
    warps: int = 4
    stages: int = 3


@dataclass(frozen=True)
class Product(Contraction, OneLaunch):
    """A contraction as tensor cores compute it."""

    NUMBER: ClassVar[int] = 0  # by which the cost model knows it

    precision: str
    weights: frozenset[int] = frozenset()  # parameters that are constants of the model
    number: int = 0  # of the sum of products among the reductions
    powers: tuple[int, ...] = ()  # of the left operand, that each of the other reductions sums
    groups: int = 1  # of a convolution that are taken as one, with zeros between them
    all_columns: int | None = None  # of all that are apart, where the last one has fewer
    fills_steps: bool = False  # with several taps, also where one tap has channels for a step

    @staticmethod
    def of(nest: Nest, precision: str, weights: Collection[int] = ()) -> Product:
        """Return a nest as a product; raises NotANest with the reason where it is none."""
        if precision not in TYPES:
            raise NotANest(f"tensor cores do not compute {precision}")
        number = _number(nest)
        if nest.reductions and is_of_integers(nest.reductions[number]):
            raise NotANest("it sums integers")
        found = contraction_of(nest, nest.reductions[number] if nest.reductions else None)
        others = [r for r in nest.reductions if r is not nest.reductions[number]]
        powers = tuple(_power(r, found.left, found.depth_axes) for r in others)
        if powers and unwidened(found.left).dtype != TYPES[precision][0]:
            raise NotANest("what it sums is not rounded as what it multiplies")
        if len(set(powers)) != len(powers):
            raise NotANest("it sums the same twice")
        if not is_small(nest.params):
            raise NotANest("a tensor has more than 2^31 elements")
        if found.columns < 8:
            raise NotANest("it has too few columns for tensor cores")
        own = {f.name: getattr(found, f.name) for f in fields(found)}
        return Product(
            **own, precision=precision, weights=frozenset(weights), number=number, powers=powers
        )

    @cached_property
    def is_flat(self) -> bool:
        """Whether a step of depth goes over all axes of the sum, as where the last one is short."""
        channels = self.depth_axes[-1].extent
        return len(self.depth_axes) > 1 and (self.fills_steps or channels < 16)

    @property
    def along(self) -> int:
        return self.depth if self.is_flat else self.depth_axes[-1].extent

    @property
    def _taps(self) -> int:
        return 1 if self.is_flat else math.prod(a.extent for a in self.depth_axes[:-1])

    def steps(self, depth: int) -> int:
        return self._taps * math.ceil(self.along / depth)

    @property
    def dtype(self) -> str:
        """The type of operands as tensor cores take them."""
        return TYPES[self.precision][0]

    @property
    def left_dtype(self) -> str:
        """The type of the sums, as the epilogue reads them."""
        return "float32"

    @property
    def item_bytes(self) -> int:
        return TYPES[self.precision][1]

    def operand_dtype(self, tile: Tile) -> str:
        """The type in which a cut has operands multiplied."""
        return self.dtype

    def sum_dtype(self, tile: Tile) -> str:
        """The type in which a cut sums."""
        return "float32"

    def summed_inside(self, tile: Tile) -> tuple[int, ...]:
        """The powers of the left operand that a cut sums while it multiplies."""
        return self.powers

    def sums_at(self, tile: Tile) -> dict[int, str]:
        """Return the text of the sums of powers that are in memory when a cut's kernel begins."""
        return {}

    # --- the space -----------------------------------------------------------------------------

    def tiles(self) -> Iterator[Tile]:
        """Yield the ways to cut it that fit shared memory and registers."""
        for bm in (16, 32, 64, 128, 256)[: 4 if self.is_flat else None]:
            if bm > 16 and bm >= 2 * self.rows:
                continue
            for bn in (16, 32, 64, 128, 256):
                if bn > 16 and bn >= 2 * self.columns:
                    continue
                if not 256 <= bm * bn <= 256 * 128:
                    continue
                for bk in (16, 32, 64, 128):
                    if (bk >= 2 * self.along and bk > 16) or (bk == 16 and self.along > 32):
                        continue
                    if bk * self.item_bytes > 256:
                        continue
                    yield from self._with_depth(bm, bn, bk)

    def _with_depth(self, bm: int, bn: int, bk: int) -> Iterator[Tile]:
        steps = self.steps(bk)
        blocks = self.batch * math.ceil(self.rows / bm) * math.ceil(self.columns / bn)
        for splits in (1, 2, 3, 4, 6, 8, 12, 16):
            if splits > 1 and (steps // splits < 2 or blocks > MAX_TILES or self.powers):
                continue
            for warps in (4, 8) if bm >= 64 else (2, 4):
                if not min(8, bm * bn / 64) <= bm * bn / (32 * warps) <= 128:
                    continue
                for stages in (2, 3, 4, 5, 6):
                    shared = self._shared_bytes(bm, bn, bk, stages)
                    if shared <= BLOCK_BYTES and stages <= math.ceil(steps / splits) + 1:
                        yield Tile(bm, bn, bk, splits, warps, stages)

    def estimated_secs(self, tile: Tile, sms: float) -> float:
        """Estimate a call: waves over the SMs, and in each a step's arithmetic or its bytes."""
        tiles = math.ceil(self.rows / tile.rows) * math.ceil(self.columns / tile.columns)
        tiles *= self.batch
        blocks, steps = tiles * tile.splits, math.ceil(self.steps(tile.depth) / tile.splits)
        buffers = tile.stages if tile.rows >= 64 else tile.stages - 1
        step_bytes = (tile.rows + tile.columns) * tile.depth * self.item_bytes
        shared = self._shared_bytes(tile.rows, tile.columns, tile.depth, tile.stages)
        registers = 32 * tile.warps * min(255, 40 + tile.rows * tile.columns // (32 * tile.warps))
        live = max(1, min(SHARED_BYTES // shared, 64 // tile.warps, 65536 // registers))
        busy = min(live, math.ceil(blocks / sms))
        full = min(1, tile.rows / 64) * min(1, tile.columns / 64)
        peak = 4.0e12 * self.rate(tile)  # of an SM, per second
        arithmetic = 2 * tile.rows * tile.columns * tile.depth / (peak * full)
        arithmetic += self.summing_secs(tile)
        moving = step_bytes / 70e9
        step = max(busy * arithmetic, busy * moving, 0.7e-6 / buffers)
        secs = math.ceil(blocks / (sms * busy)) * (1.0e-6 + steps * step) + 2e-6
        if tile.splits > 1:
            secs += 1.2e-6 + 2 * tile.splits * tiles * tile.rows * tile.columns * 4 / 2e12
        return secs

    def summing_secs(self, tile: Tile) -> float:
        """Estimate what a block takes in a step for anything else than products."""
        return 0.0

    def rate(self, tile: Tile) -> float:
        """Return how fast tensor cores are, over what they do in 16 bits."""
        return 0.5 if self.precision == "tf32" else 1.0

    def features(self, tile: Tile, sms: float) -> tuple[float, ...]:
        across, splits, batch = self.grid(tile)
        size = tile.rows * tile.columns
        sizes = Sizes(
            rows=tile.rows,
            columns=tile.columns,
            depth=tile.depth,
            splits=splits,
            warps=tile.warps,
            stages=tile.stages,
            all_rows=self.rows,
            all_columns=self.columns,
            all_depth=self.depth,
            batch=batch,
            steps=math.ceil(self.steps(tile.depth) / splits),
            blocks=across * splits * batch,
            shared_bytes=self._shared_bytes(tile.rows, tile.columns, tile.depth, tile.stages),
            each=size / (32 * tile.warps),
            wasted=self.groups * across * size / (self.rows * self.columns),
        )
        return features(self.NUMBER, sizes, sms=sms, estimated_secs=self.estimated_secs(tile, sms))

    def _shared_bytes(self, rows: int, columns: int, depth: int, stages: int) -> int:
        # Products of 64 rows and more are asynchronous: they keep one buffer longer.
        buffers = stages if rows >= 64 else stages - 1
        return max(1, buffers) * (rows + columns) * depth * self.item_bytes

    # --- the kernel ----------------------------------------------------------------------------

    def grid(self, tile: Tile) -> tuple[int, int, int]:
        tiles = math.ceil(self.rows / tile.rows) * math.ceil(self.columns / tile.columns)
        return tiles, tile.splits, self.batch

    def workspace(self, tile: Tile) -> int:
        """Return how many fp32 values a split needs to keep its sums in; 0 without one."""
        if tile.splits == 1:
            return 0
        across, _, batch = self.grid(tile)
        return across * batch * tile.splits * tile.rows * tile.columns

    def source(self, tile: Tile, name: str) -> str:
        """Return the text of a Triton kernel that takes the parameters, then what a split needs."""
        from tunerd.candidates.triton.product_code import ProductCode

        return ProductCode(self, tile).text(name)


# --- matching ----------------------------------------------------------------------------------


def is_of_integers(reduction: Reduction) -> bool:
    return reduction.value.dtype.startswith("int")


def _number(nest: Nest) -> int:
    """Return which reduction is the sum of products: that which has columns."""
    for number, reduction in enumerate(nest.reductions):
        if nest.axes and nest.axes[-1] in reduction.value.axes:
            return number
    return 0


def _power(reduction: Reduction, left: Expr, axes: tuple[Axis, ...]) -> int:
    """Return the power of the left operand that a reduction sums over the same depth."""
    if reduction.fold != "add" or reduction.start:
        raise NotANest("another reduction than a sum is in it")
    if tuple(a.extent for a in reduction.axes) != tuple(a.extent for a in axes):
        raise NotANest("its reductions go over different axes")
    value = _renamed(reduction.value, dict(zip(reduction.axes, axes, strict=True)))
    if value == left:
        return 1
    if value.op == "mul" and value.args == (left, left):
        return 2
    raise NotANest("it sums something else than what it multiplies")


def _renamed(expr: Expr, axes: dict[Axis, Axis]) -> Expr:
    if expr.op == "axis":
        return replace(expr, value=axes.get(expr.value, expr.value))
    return replace(expr, args=tuple(_renamed(a, axes) for a in expr.args))
