"""Kernels without tensor cores: depthwise convolutions, pools, and what only moves or maps values.

A block of threads computes a tile of the result, rows by columns; columns are the axes whose values
lie together. A fold over a window, or over all places of an image, is a loop that is unrolled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from tunerd.candidates.nests.nest import Axis, Nest, NotANest
from tunerd.candidates.triton.code import (
    FOLDS,
    Scope,
    consecutive,
    float_text,
    is_small,
    kernel_text,
    split,
    widened,
)
from tunerd.candidates.triton.features import Sizes, features
from tunerd.candidates.triton.launch import OneLaunch

_MOST_UNROLLED = 64
_MOST_FOLDED = 4096


@dataclass(frozen=True, order=True)
class Block:
    """What a block of threads computes. Extents are in elements."""

    rows: int
    columns: int
    warps: int = 4

    @property
    def stages(self) -> int:
        return 1


@dataclass(frozen=True)
class Loops(OneLaunch):
    """A nest as a loop over the elements of its result."""

    nest: Nest
    row_axes: tuple[Axis, ...]
    column_axes: tuple[Axis, ...]

    @staticmethod
    def of(nest: Nest) -> Loops:
        """Return a nest as loops; raises NotANest with the reason where they do not fit it."""
        if not nest.axes:
            raise NotANest("it has one result")
        if not is_small(nest.params):
            raise NotANest("a tensor has more than 2^31 elements")
        if nest.reductions and math.prod(a.extent for a in nest.reduction.axes) > _MOST_FOLDED:
            raise NotANest("its reduction goes over too many values for one thread")
        return Loops(nest, nest.axes[:-1], nest.axes[-1:])

    @cached_property
    def rows(self) -> int:
        return math.prod(a.extent for a in self.row_axes)

    @cached_property
    def columns(self) -> int:
        return self.column_axes[0].extent

    @cached_property
    def folded(self) -> int:
        return math.prod(a.extent for r in self.nest.reductions for a in r.axes)

    # --- the space -----------------------------------------------------------------------------

    def tiles(self) -> Iterator[Block]:
        for columns in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
            if columns >= 2 * self.columns:
                continue
            for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256):
                if rows >= 2 * self.rows:
                    continue
                for warps in (1, 2, 4, 8):
                    if min(1, rows * columns / 32) <= rows * columns / (32 * warps) <= 32:
                        yield Block(rows, columns, warps)

    def estimated_secs(self, tile: Block, sms: float) -> float:
        """Estimate a call: waves over the SMs, and in each the bytes or the operations."""
        blocks = math.ceil(self.rows / tile.rows) * math.ceil(self.columns / tile.columns)
        live = max(1, min(32, 64 // tile.warps))
        waves = max(1.0, blocks / (sms * live))
        size = tile.rows * tile.columns
        each = size / (32 * tile.warps)
        busy = min(live, math.ceil(blocks / sms))
        wide = min(1.0, tile.columns / 64) * min(1.0, each / 4 + 0.25)
        operations = size * self.folded * 12 / (128 * 1.5e9) * busy
        moved = size * min(self.folded, 4) * 4 / 60e9 / wide * busy
        latency = 0.5e-6 * math.ceil(self.folded / 16)
        return waves * (latency + max(operations, moved)) + 2e-6

    def features(self, tile: Block, sms: float) -> tuple[float, ...]:
        across, down, _ = self.grid(tile)
        sizes = Sizes(
            rows=tile.rows,
            columns=tile.columns,
            depth=1,
            splits=1,
            warps=tile.warps,
            stages=1,
            all_rows=self.rows,
            all_columns=self.columns,
            all_depth=self.folded,
            batch=1,
            steps=self.folded,
            blocks=across * down,
            each=tile.rows * tile.columns / (32 * tile.warps),
        )
        return features(1, sizes, sms=sms, estimated_secs=self.estimated_secs(tile, sms))

    # --- the kernel ----------------------------------------------------------------------------

    def grid(self, tile: Block) -> tuple[int, int, int]:
        return math.ceil(self.columns / tile.columns), math.ceil(self.rows / tile.rows), 1

    def workspace(self, tile: Block) -> int:
        return 0

    def source(self, tile: Block, name: str) -> str:
        """Return the text of a Triton kernel that takes the parameters."""
        nest = self.nest
        shape = f"({tile.rows}, {tile.columns})"
        axes = {
            **split(self.row_axes, "rows", "[:, None]"),
            **split(self.column_axes, "columns", "[None, :]"),
        }
        masks = []
        rows = "offs_m"
        if self.rows % tile.rows:
            masks.append((frozenset(self.row_axes), f"(offs_m < {self.rows})[:, None]"))
            rows = f"tl.minimum(offs_m, {self.rows - 1})"
        if self.columns % tile.columns:
            masks.append((frozenset(self.column_axes), f"(offs_n < {self.columns})[None, :]"))
        lines = [
            f"offs_m = tl.program_id(1) * {tile.rows} + tl.arange(0, {tile.rows})",
            f"offs_n = tl.program_id(0) * {tile.columns} + tl.arange(0, {tile.columns})",
            f"rows = {rows}",
            f"columns = {consecutive('offs_n', tile.columns)}",
        ]
        for reduction in nest.reductions:
            how = "tl.static_range" if self.folded <= _MOST_UNROLLED else "range"
            scope = Scope({**axes, **split(reduction.axes, "tap", "")}, masks)
            value = widened(scope.text(reduction.value), reduction.value.dtype)
            lines += [
                f"acc = tl.full({shape}, {float_text(reduction.start)}, tl.float32)",
                f"for tap in {how}(0, {self.folded}):",
                f"    acc = {FOLDS[reduction.fold].format('acc', value)}",
            ]
        scope = Scope(axes, masks, {}, ["acc"])
        is_whole = nest.reductions or set(nest.axes) <= nest.epilogue.axes
        lines.append(scope.stored(nest, self.row_axes, shape="" if is_whole else shape))
        return kernel_text(name, [f"p{i}" for i in range(len(nest.params))], lines)
