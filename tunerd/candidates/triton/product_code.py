"""The text of a product's kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from tunerd.candidates.nests.contraction import ONE_ROW, unwidened
from tunerd.candidates.nests.nest import Axis, Expr, Linear, linear
from tunerd.candidates.triton.code import (
    Masks,
    Scope,
    by_axes,
    consecutive,
    joined,
    kernel_text,
    nearest_tf32,
    split,
)
from tunerd.candidates.triton.product import Product, Tile
from tunerd.vocabulary import TF32

_GROUP = 4  # rows of tiles, whose blocks come together
ASYNC_ROWS = 64  # of the least tile that is multiplied asynchronously, from shared memory
# It makes a second load of the same values another one than the first.
_AGAIN = ', eviction_policy="evict_last"'


@dataclass(frozen=True)
class ProductCode:
    """A product, cut in one way."""

    product: Product
    tile: Tile

    def text(self, name: str) -> str:
        lines = [*self._begin(), *self._loop(), *self._end()]
        return kernel_text(name, self.params(), lines)

    def params(self) -> list[str]:
        """Return the names of the kernel's parameters."""
        params = [f"p{i}" for i in range(len(self.product.nest.params))]
        if self.product.workspace(self.tile):
            params += ["counters", "workspace"]
        return params

    # --- where a tile lies ---------------------------------------------------------------------

    @cached_property
    def _tiles(self) -> tuple[int, int]:
        product, tile = self.product, self.tile
        return math.ceil(product.rows / tile.rows), math.ceil(product.columns / tile.columns)

    @cached_property
    def _rows(self) -> dict[Axis, str]:
        return split(self.product.row_axes, "rows", "[:, None]")

    @cached_property
    def _columns(self) -> dict[Axis, str]:
        return split(self.product.column_axes, "columns", "[None, :]")

    @cached_property
    def _apart(self) -> dict[Axis, str]:
        return split(self.product.apart, "apart", "")

    @cached_property
    def _row_masks(self) -> Masks:
        product = self.product
        if product.rows % self.tile.rows == 0:
            return []
        return [(frozenset(product.row_axes), f"(offs_m < {product.rows})[:, None]")]

    @cached_property
    def _column_masks(self) -> Masks:
        product, masks = self.product, []
        if product.columns % self.tile.columns:
            masks.append(f"(offs_n < {product.columns})[None, :]")
        if product.all_columns is not None:
            masks.append(f"(offs_n < {product.all_columns} - apart * {product.columns})[None, :]")
        return [(frozenset(product.column_axes), mask) for mask in masks]

    def _begin(self) -> list[str]:
        product, tile = self.product, self.tile
        rows = f"tl.minimum(offs_m, {product.rows - 1})" if self._row_masks else "offs_m"
        return [
            "pid = tl.program_id(0)",
            "split = tl.program_id(1)",
            "apart = tl.program_id(2)",
            *_order(*self._tiles),
            f"offs_m = tile_m * {tile.rows} + tl.arange(0, {tile.rows})",
            f"offs_n = tile_n * {tile.columns} + tl.arange(0, {tile.columns})",
            f"offs_k = tl.arange(0, {tile.depth})",
            f"rows = {rows}",
            f"columns = {consecutive('offs_n', tile.columns)}",
        ]

    # --- the sum -------------------------------------------------------------------------------

    def _loop(self) -> list[str]:
        product, tile = self.product, self.tile
        steps = product.steps(tile.depth)
        per = math.ceil(steps / tile.splits)
        inside, left_depth, right_depth = self._depth("kt")
        left, left_at = self._operand("left", product.left, self._rows, left_depth)
        right, right_at = self._operand("right", product.right, self._columns, right_depth)
        how = ', input_precision="tf32"' if product.precision == TF32 else ""
        if product.sum_dtype(tile) != "float32":
            how = f", out_dtype=tl.{product.sum_dtype(tile)}"
        before, summing = self._summing()
        return [
            *left_at,
            *right_at,
            f"begin = split * {per}" if tile.splits > 1 else "begin = 0",
            f"end = min(begin + {per}, {steps})" if tile.splits > 1 else f"end = {steps}",
            f"acc = tl.zeros(({tile.rows}, {tile.columns}), tl.{product.sum_dtype(tile)})",
            *before,
            "for kt in range(begin, end):",
            *(f"    {line}" for line in inside),
            f"    x = {left}",
            f"    w = {right}",
            f"    acc = tl.dot(x, w, acc{how})",
            *(f"    {line}" for line in summing),
        ]

    def _summing(self) -> tuple[list[str], list[str]]:
        """Return what the loop begins with, and what a step does, to sum powers of the left side.

        Where products are asynchronous, they read shared memory that Triton 3.6 overwrites one step
        too early if anything else reads it, too (triton-lang/triton, issue 6691): rows of wrong
        sums, now and then. So the sums have a load of their own there, one step ahead.
        """
        product, tile = self.product, self.tile
        powers = product.summed_inside(tile)
        if not powers:
            return [], []
        before = [f"sum{n} = tl.zeros(({tile.rows}, 1), tl.float32)" for n in powers]
        step = [
            f"sum{n} += tl.sum({' * '.join(['wide'] * n)}, axis=1, keep_dims=True)" for n in powers
        ]
        if tile.rows < ASYNC_ROWS:
            return before, ["wide = tl.cast(x, tl.float32)", *step]
        ahead, depth, _ = self._depth("ahead")
        again, _ = self._operand("left", product.left, self._rows, depth, _AGAIN)
        first = [line.replace("ahead", "begin") for line in ahead]
        next_one = ["ahead = min(kt + 1, end - 1)", *ahead, f"again = {again}"]
        return (
            [*before, *first, f"again = {again}"],
            ["wide = tl.cast(again, tl.float32)", *next_one, *step],
        )

    def _depth(self, step: str) -> tuple[list[str], dict[Axis, str], dict[Axis, str]]:
        """Return what a step begins with, and the text of the sum's axes for either operand.

        A step lies within one tap of a convolution, so that the tap is a scalar, and its channels
        lie together; where there are too few of these, it goes over all axes.
        """
        product, tile = self.product, self.tile
        if product.is_flat:
            left = split(product.depth_axes, "k", "[None, :]")
            right = split(product.depth_axes, "k", "[:, None]")
            return [f"k = {step} * {tile.depth} + offs_k"], left, right
        *taps, last = product.depth_axes
        along = math.ceil(product.along / tile.depth)
        if not taps:
            inside = [f"k = {step} * {tile.depth} + offs_k"]
        elif along > 1:
            inside = [f"tap = {step} // {along}", f"k = ({step} % {along}) * {tile.depth} + offs_k"]
        else:
            inside = [f"tap = {step}", "k = offs_k"]
        scalars = split(taps, "tap", "")
        return inside, {**scalars, last: "k[None, :]"}, {**scalars, last: "k[:, None]"}

    def _operand(
        self,
        name: str,
        operand: Expr,
        own: dict[Axis, str],
        depth: dict[Axis, str],
        loading: str = "",
    ) -> tuple[str, list[str]]:
        """Return the text of a step's operand, and what is computed of it before the loop."""
        product = self.product
        is_left = name == "left"
        masks = list(() if is_left else self._column_masks)
        if product.along % self.tile.depth:
            shape = "[None, :]" if is_left else "[:, None]"
            masks.append((frozenset(product.depth_axes), f"(k < {product.along}){shape}"))
        axes = {**self._apart, **own, **depth}
        places, before = {}, []
        (load,) = {e for e in operand.walk() if e.op == "load"}
        if (place := linear(load.args[0])) is not None:
            moving = {a: f for a, f in place.factors.items() if a in depth}
            still = {a: f for a, f in place.factors.items() if a not in depth}
            start = by_axes(Linear(still, place.constant), axes, product.row_axes, "rows[:, None]")
            if is_left and product.row_axes == (ONE_ROW,):
                start = f"rows[:, None] * 0 + {start}"
            before.append(f"{name}_at = {start}")
            places[load.value] = f"{name}_at + {Scope(axes).sum_of(Linear(moving))}"
        operand = unwidened(operand)
        text = Scope(axes, masks, places, loading=loading).text(operand)
        dtype = product.operand_dtype(self.tile)
        if operand.dtype != dtype:
            text = f"tl.cast({text}, tl.{dtype})"
        if (
            product.precision == TF32 and dtype == "float32" and load.value not in product.weights
        ):  # those are rounded
            text = nearest_tf32(text)
        return text, before

    # --- the epilogue --------------------------------------------------------------------------

    def _end(self) -> list[str]:
        product, tile = self.product, self.tile
        nest = product.nest
        lines = [f"sum{power} = {text}" for power, text in product.sums_at(tile).items()]
        pad = ""
        if tile.splits > 1:
            tiles = self._tiles[0] * self._tiles[1]
            shape = (tile.rows, tile.columns)
            lines += [
                f"at = tl.arange(0, {tile.rows})[:, None] * {tile.columns}"
                f" + tl.arange(0, {tile.columns})[None, :]",
                f"mine = apart * {tiles} + pid",
                *joined(
                    tile.splits,
                    tiles * product.batch,
                    tile.rows * tile.columns,
                    shape,
                    product.sum_dtype(tile),
                ),
            ]
            pad = "    "
        axes = {**self._apart, **self._rows, **self._columns}
        loads = [e for e in nest.epilogue.walk() if e.op == "load"]
        places = {}
        for load in loads:
            place = linear(load.args[0])
            if place is not None and all(o == load for o in loads if o.value == load.value):
                places[load.value] = by_axes(place, axes, product.row_axes, "rows[:, None]")
        left = [f"sum{n}" for n in product.powers]
        is_wide = product.sum_dtype(tile) != product.left_dtype
        acc = f"tl.cast(acc, tl.{product.left_dtype})" if is_wide else "acc"
        left.insert(product.number, acc)
        scope = Scope(axes, [*self._row_masks, *self._column_masks], places, left)
        return [*lines, f"{pad}{scope.stored(nest, product.row_axes)}"]


def _order(tiles_m: int, tiles_n: int) -> list[str]:
    """Take tiles by groups of a few rows of them: neighbours read the same operands."""
    if tiles_m == 1:
        return ["tile_m = 0", "tile_n = pid"]
    if tiles_n == 1:
        return ["tile_m = pid", "tile_n = 0"]
    width = _GROUP * tiles_n
    return [
        f"first = pid // {width} * {_GROUP}",
        f"height = min({tiles_m} - first, {_GROUP})",
        f"tile_m = first + pid % {width} % height",
        f"tile_n = pid % {width} // height",
    ]
