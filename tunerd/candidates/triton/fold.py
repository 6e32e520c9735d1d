"""Reductions by many threads: means over an image, and products with a vector.

A block of threads folds a piece of the depth, by columns, and then over its rows; with a split,
several blocks fold a part each, as in `product`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from tunerd.candidates.nests.nest import Axis, Nest, NotANest
from tunerd.candidates.triton.code import (
    FOLDS,
    WHOLE,
    Scope,
    consecutive,
    float_text,
    is_small,
    joined,
    kernel_text,
    split,
    widened,
)
from tunerd.candidates.triton.features import Sizes, features
from tunerd.candidates.triton.launch import OneLaunch
from tunerd.candidates.triton.product import MAX_TILES

_LEAST_DEPTH = 32
_MOST_ROWS = 4096


@dataclass(frozen=True, order=True)
class Piece:
    """What a block of threads folds at once. Extents are in elements."""

    depth: int
    columns: int
    splits: int = 1
    warps: int = 4

    @property
    def stages(self) -> int:
        return 2


@dataclass(frozen=True)
class Fold(OneLaunch):
    """A nest as folds of columns, for each row of its result."""

    nest: Nest
    row_axes: tuple[Axis, ...]
    column_axes: tuple[Axis, ...]

    @staticmethod
    def of(nest: Nest) -> Fold:
        """Return a nest as folds; raises NotANest with the reason where that does not fit it."""
        reduction = nest.reduction
        if math.prod(a.extent for a in reduction.axes) < _LEAST_DEPTH:
            raise NotANest("its reduction goes over few values")
        if not is_small(nest.params):
            raise NotANest("a tensor has more than 2^31 elements")
        if not nest.axes:
            raise NotANest("it has one result")
        found = Fold(nest, nest.axes[:-1], nest.axes[-1:])
        if found.rows > _MOST_ROWS:
            raise NotANest("it has too many results for a block of threads each")
        return found

    @cached_property
    def rows(self) -> int:
        return math.prod(a.extent for a in self.row_axes)

    @cached_property
    def columns(self) -> int:
        return self.column_axes[0].extent

    @cached_property
    def depth(self) -> int:
        return math.prod(a.extent for a in self.nest.reduction.axes)

    # --- the space -----------------------------------------------------------------------------

    def tiles(self) -> Iterator[Piece]:
        can_split = self.nest.reduction.fold == "add" and self.nest.reduction.start == 0
        for columns in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            if columns >= 2 * self.columns:
                continue
            for depth in (16, 32, 64, 128, 256, 512, 1024):
                if depth >= 2 * self.depth:
                    continue
                for warps in (1, 2, 4, 8):
                    if not 1 <= depth * columns / (32 * warps) <= 32:
                        continue
                    for splits in (1, 2, 4, 8, 16, 32, 64):
                        if splits > 1 and (
                            not can_split
                            or splits * depth > self.depth
                            or self.rows * math.ceil(self.columns / columns) > MAX_TILES
                        ):
                            continue
                        yield Piece(depth, columns, splits, warps)

    def estimated_secs(self, tile: Piece, sms: float) -> float:
        """Estimate a call: waves over the SMs, and in each the bytes that a block reads."""
        across, down, splits = self.grid(tile)
        blocks = across * down * splits
        live = max(1, min(32, 64 // tile.warps))
        waves = max(1.0, blocks / (sms * live))
        busy = min(live, math.ceil(blocks / sms))
        steps = math.ceil(self.depth / tile.depth / splits)
        wide = min(1.0, tile.columns / 32)
        moved = tile.depth * tile.columns * 4 / 60e9 / wide * busy
        secs = waves * steps * max(moved, 0.4e-6 / 2) + 2.2e-6
        return secs + (1.0e-6 + 0.03e-6 * splits if splits > 1 else 0.0)

    def features(self, tile: Piece, sms: float) -> tuple[float, ...]:
        across, down, splits = self.grid(tile)
        sizes = Sizes(
            rows=1,
            columns=tile.columns,
            depth=tile.depth,
            splits=splits,
            warps=tile.warps,
            stages=1,
            all_rows=self.rows,
            all_columns=self.columns,
            all_depth=self.depth,
            batch=1,
            steps=math.ceil(self.depth / tile.depth / splits),
            blocks=across * down * splits,
            each=tile.depth * tile.columns / (32 * tile.warps),
        )
        return features(2, sizes, sms=sms, estimated_secs=self.estimated_secs(tile, sms))

    # --- the kernel ----------------------------------------------------------------------------

    def grid(self, tile: Piece) -> tuple[int, int, int]:
        return math.ceil(self.columns / tile.columns), self.rows, tile.splits

    def workspace(self, tile: Piece) -> int:
        """Return how many fp32 values a split needs to keep its folds in; 0 without one."""
        if tile.splits == 1:
            return 0
        across, down, _ = self.grid(tile)
        return across * down * tile.splits * tile.columns

    def source(self, tile: Piece, name: str) -> str:
        """Return the text of a Triton kernel that takes the parameters, then what a split needs."""
        nest, reduction = self.nest, self.nest.reduction
        is_split = tile.splits > 1
        params = [f"p{i}" for i in range(len(nest.params))]
        params += ["counters", "workspace"] if is_split else []
        steps = math.ceil(self.depth / tile.depth)
        per = math.ceil(steps / tile.splits)
        axes = {
            **split(self.row_axes, "row", ""),
            **split(self.column_axes, "columns", "[None, :]"),
        }
        masks = []
        if self.columns % tile.columns:
            masks.append((frozenset(self.column_axes), f"(offs_n < {self.columns})[None, :]"))
        is_ragged = self.depth % tile.depth != 0
        held = f"(d < {self.depth})[:, None]"
        within = [(frozenset(reduction.axes), held)] if is_ragged else []
        scope = Scope({**axes, **split(reduction.axes, "d", "[:, None]")}, [*masks, *within])
        value = widened(scope.text(reduction.value), reduction.value.dtype)
        start = float_text(reduction.start)
        neutral = "0.0" if reduction.fold == "add" else start
        if is_ragged:
            value = f"tl.where({held}, {value}, {neutral})"
        lines = [
            "row = tl.program_id(1)",
            "split = tl.program_id(2)",
            f"offs_n = tl.program_id(0) * {tile.columns} + tl.arange(0, {tile.columns})",
            f"columns = {consecutive('offs_n', tile.columns)}",
            f"begin = split * {per}" if is_split else "begin = 0",
            f"end = min(begin + {per}, {steps})" if is_split else f"end = {steps}",
            f"acc = tl.full(({tile.depth}, {tile.columns}), {neutral}, tl.float32)",
            "for kt in range(begin, end):",
            f"    d = kt * {tile.depth} + tl.arange(0, {tile.depth})",
            f"    acc = {FOLDS[reduction.fold].format('acc', value)}",
            f"acc = {WHOLE[reduction.fold]}(acc, axis=0, keep_dims=True)",
        ]
        pad = ""
        if is_split:
            across = math.ceil(self.columns / tile.columns)
            lines += [
                f"at = tl.arange(0, {tile.columns})[None, :]",
                f"mine = row * {across} + tl.program_id(0)",
                *joined(tile.splits, across * self.rows, tile.columns, (1, tile.columns)),
            ]
            pad = "    "
        if reduction.fold == "add" and reduction.start:
            lines.append(f"{pad}acc = acc + {start}")
        lines.append(f"{pad}{Scope(axes, masks, {}, ['acc']).stored(nest, ())}")
        return kernel_text(name, params, lines)
