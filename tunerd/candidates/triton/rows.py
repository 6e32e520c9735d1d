"""Kernels that reduce a row and then use all of it again: softmax, layer norm.

A block of threads holds some rows in its registers, each as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from tunerd.candidates.nests.nest import Axis, Nest, NotANest, Reduction, linear
from tunerd.candidates.triton.code import (
    WHOLE,
    Scope,
    float_text,
    is_small,
    kernel_text,
    split,
    widened,
)
from tunerd.candidates.triton.features import Sizes, features
from tunerd.candidates.triton.launch import OneLaunch

_MOST_COLUMNS = 16384


@dataclass(frozen=True, order=True)
class Strip:
    """How many rows a block of threads holds."""

    rows: int
    warps: int = 4

    @property
    def stages(self) -> int:
        return 1


@dataclass(frozen=True)
class Rows(OneLaunch):
    """A nest whose reductions all go over the columns of its rows."""

    nest: Nest
    row_axes: tuple[Axis, ...]
    column_axes: tuple[Axis, ...]

    @staticmethod
    def of(nest: Nest) -> Rows:
        """Return a nest as rows; raises NotANest with the reason where it is none."""
        if not nest.reductions:
            raise NotANest("it reduces nothing")
        if not is_small(nest.params):
            raise NotANest("a tensor has more than 2^31 elements")
        extents = {tuple(a.extent for a in r.axes) for r in nest.reductions}
        if len(extents) != 1:
            raise NotANest("its reductions go over different axes")
        (columns,) = extents
        if not 1 < math.prod(columns) <= _MOST_COLUMNS:
            raise NotANest("a row is too long for the registers of a block of threads")
        if not any(_lies_together(r) for r in nest.reductions):
            raise NotANest("the values of a row do not lie together")
        inside = {a for r in nest.reductions for a in r.value.axes}
        rows = tuple(a for a in nest.axes if a in inside)
        rest = tuple(a for a in nest.axes if a not in inside)
        if rest and tuple(a.extent for a in rest) != columns:
            raise NotANest("the axes that it reduces are not those of its result")
        return Rows(nest, rows, rest)

    @cached_property
    def rows(self) -> int:
        return math.prod(a.extent for a in self.row_axes)

    @cached_property
    def columns(self) -> int:
        return math.prod(a.extent for a in self.nest.reductions[0].axes)

    @property
    def _width(self) -> int:
        return 1 << (self.columns - 1).bit_length()

    # --- the space -----------------------------------------------------------------------------

    def tiles(self) -> Iterator[Strip]:
        for rows in (1, 2, 4, 8, 16, 32, 64):
            if rows >= 2 * self.rows:
                continue
            for warps in (1, 2, 4, 8, 16):
                each = rows * self._width / (32 * warps)
                if min(1, self._width / 32) <= each <= 64:
                    yield Strip(rows, warps)

    def estimated_secs(self, tile: Strip, sms: float) -> float:
        """Estimate a call: waves over the SMs, and in each the bytes that a block moves."""
        blocks = math.ceil(self.rows / tile.rows)
        live = max(1, min(16, 64 // tile.warps))
        waves = max(1.0, blocks / (sms * live))
        busy = min(live, math.ceil(blocks / sms))
        moved = tile.rows * self._width * 6 / 60e9 * busy
        each = tile.rows * self._width / (32 * tile.warps)
        latency = 0.3e-6 * (1 + len(self.nest.reductions)) + 0.02e-6 * each
        return waves * max(latency, moved) + 2e-6

    def features(self, tile: Strip, sms: float) -> tuple[float, ...]:
        sizes = Sizes(
            rows=tile.rows,
            columns=self._width,
            depth=1,
            splits=1,
            warps=tile.warps,
            stages=1,
            all_rows=self.rows,
            all_columns=self.columns,
            all_depth=len(self.nest.reductions),
            batch=1,
            steps=1,
            blocks=math.ceil(self.rows / tile.rows),
            each=tile.rows * self._width / (32 * tile.warps),
        )
        return features(3, sizes, sms=sms, estimated_secs=self.estimated_secs(tile, sms))

    # --- the kernel ----------------------------------------------------------------------------

    def grid(self, tile: Strip) -> tuple[int, int, int]:
        return math.ceil(self.rows / tile.rows), 1, 1

    def workspace(self, tile: Strip) -> int:
        return 0

    def source(self, tile: Strip, name: str) -> str:
        """Return the text of a Triton kernel that takes the parameters."""
        nest, width = self.nest, self._width
        shape = f"({tile.rows}, {width})"
        rows, masks = "offs_m", []
        if self.rows % tile.rows:
            rows = f"tl.minimum(offs_m, {self.rows - 1})"
            masks.append((frozenset(self.row_axes), f"(offs_m < {self.rows})[:, None]"))
        lines = [
            f"offs_m = tl.program_id(0) * {tile.rows} + tl.arange(0, {tile.rows})",
            f"columns = tl.arange(0, {width})",
            f"rows = {rows}",
        ]
        row_axes = split(self.row_axes, "rows", "[:, None]")
        is_ragged = width != self.columns
        held = f"(columns < {self.columns})[None, :]"
        left: list[str] = []
        for number, reduction in enumerate(nest.reductions):
            axes = {**row_axes, **split(reduction.axes, "columns", "[None, :]")}
            within = [(frozenset(reduction.axes), held)] if is_ragged else []
            value = Scope(axes, [*masks, *within], {}, left).text(reduction.value)
            whole = f"tl.broadcast_to({widened(value, reduction.value.dtype)}, {shape})"
            start = float_text(reduction.start)
            if is_ragged:
                neutral = "0.0" if reduction.fold == "add" else start
                whole = f"tl.where({held}, {whole}, {neutral})"
            name_of_it = f"left{number}"
            lines.append(f"{name_of_it} = {WHOLE[reduction.fold]}({whole}, axis=1, keep_dims=True)")
            if reduction.fold == "add" and reduction.start:
                lines.append(f"{name_of_it} = {name_of_it} + {start}")
            left.append(name_of_it)
        if is_ragged and self.column_axes:
            masks.append((frozenset(self.column_axes), held))
        axes = {**row_axes, **split(self.column_axes, "columns", "[None, :]")}
        scope = Scope(axes, masks, {}, left)
        own = self.row_axes or (Axis("one", 1),)
        lines.append(scope.stored(nest, own, shape=shape if self.column_axes else ""))
        return kernel_text(name, [f"p{i}" for i in range(len(nest.params))], lines)


def _lies_together(reduction: Reduction) -> bool:
    """Whether a tensor is read along its last axis."""
    places = (linear(e.args[0]) for e in reduction.value.walk() if e.op == "load")
    return any(p is not None and p.factors.get(reduction.axes[-1]) == 1 for p in places)
