"""The text of an attention's kernel."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from tunerd.candidates.nests.contraction import unwidened
from tunerd.candidates.nests.nest import Axis, Expr
from tunerd.candidates.triton.attention import Attention, Band, padded
from tunerd.candidates.triton.code import (
    Masks,
    Scope,
    float_text,
    kernel_text,
    nearest_tf32,
    split,
)
from tunerd.vocabulary import TF32


@dataclass(frozen=True)
class AttentionCode:
    """An attention, cut in one way.

    Rows and keys outside of their tensors are read as the last ones, so that no load has a mask; a
    key's weight is then 0, and a row is not stored.
    """

    attention: Attention
    tile: Band

    def text(self, name: str) -> str:
        params = [f"p{i}" for i in range(len(self.attention.nest.params))]
        return kernel_text(name, params, [*self._begin(), *self._loop(), self._end()])

    @cached_property
    def _outer(self) -> dict[Axis, str]:
        """The text of the axes that are the same in all steps."""
        attention = self.attention
        return {
            **split(attention.apart, "apart", ""),
            **split(attention.row_axes, "rows", "[:, None]"),
            **split(attention.column_axes, "columns", "[None, :]"),
        }

    def _begin(self) -> list[str]:
        attention, tile = self.attention, self.tile
        rows = "offs_m"
        if attention.rows % tile.rows:
            rows = f"tl.minimum(offs_m, {attention.rows - 1})"
        dims = {attention.dim_axis: "dims[None, :]"}
        sums = f"({tile.rows}, {padded(attention.columns)})"
        return [
            "apart = tl.program_id(1)",
            f"offs_m = tl.program_id(0) * {tile.rows} + tl.arange(0, {tile.rows})",
            f"rows = {rows}",
            f"dims = tl.arange(0, {padded(attention.depth)})",
            f"columns = tl.arange(0, {padded(attention.columns)})",
            f"q = {self._operand(attention.query, dims)}",
            f"most = tl.full(({tile.rows},), {float_text(attention.start)}, tl.float32)",
            f"total = tl.zeros(({tile.rows},), tl.float32)",
            f"acc = tl.zeros({sums}, tl.float32)",
        ]

    def _loop(self) -> list[str]:
        attention, tile = self.attention, self.tile
        keys = f"kt * {tile.columns} + tl.arange(0, {tile.columns})"
        is_ragged = attention.keys % tile.columns != 0
        across = {attention.key_axis: "keys[None, :]", attention.dim_axis: "dims[:, None]"}
        how = ', input_precision="tf32"' if attention.precision == TF32 else ""
        weight = f"tl.cast(w, tl.{attention.dtype})"
        if attention.precision == TF32:
            weight = nearest_tf32(weight)
        left = [""] * len(attention.nest.reductions)
        left[attention.product] = "s"
        scope = Scope({**self._outer, **across}, (), {}, left)
        inside = [
            f"offs_n = {keys}",
            f"keys = tl.minimum(offs_n, {attention.keys - 1})" if is_ragged else "keys = offs_n",
            f"k = {self._operand(attention.key, across)}",
            f"s = tl.dot(q, k, tl.zeros(({tile.rows}, {tile.columns}), tl.float32){how})",
            f"t = {scope.text(attention.scores)}",
        ]
        if is_ragged:
            inside.append(f"t = tl.where((offs_n < {attention.keys})[None, :], t, float('-inf'))")
        down = {attention.key_axis: "keys[:, None]"}
        return [
            f"for kt in range(0, {math.ceil(attention.keys / tile.columns)}):",
            *(f"    {line}" for line in inside),
            "    new = tl.maximum(most, tl.max(t, axis=1, keep_dims=False))",
            "    w = tl.exp(t - new[:, None])",
            "    old = tl.exp(most - new)",
            "    total = total * old + tl.sum(w, axis=1, keep_dims=False)",
            f"    v = {self._operand(attention.value, down)}",
            f"    acc = tl.dot({weight}, v, acc * old[:, None]{how})",
            "    most = new",
        ]

    def _end(self) -> str:
        attention, tile = self.attention, self.tile
        left = [""] * len(attention.nest.reductions)
        left[attention.sums] = "acc"
        for number in attention.totals:
            left[number] = "total[:, None]"
        masks = list(self._padding({**self._outer}))
        if attention.rows % tile.rows:
            own = frozenset(attention.row_axes)
            masks.append((own, f"(offs_m < {attention.rows})[:, None]"))
        return Scope(self._outer, masks, {}, left).stored(attention.nest, attention.row_axes)

    def _operand(self, operand: Expr, own: Mapping[Axis, str]) -> str:
        axes = {**self._outer, **own}
        operand = unwidened(operand)
        text = Scope(axes, self._padding(axes)).text(operand)
        if operand.dtype != self.attention.dtype:
            text = f"tl.cast({text}, tl.{self.attention.dtype})"
        return nearest_tf32(text) if self.attention.precision == TF32 else text

    def _padding(self, axes: Mapping[Axis, str]) -> Masks:
        """Return where heads whose size is no power of two end."""
        attention = self.attention
        masks = []
        if padded(attention.depth) != attention.depth and attention.dim_axis in axes:
            shape = axes[attention.dim_axis].removeprefix("dims")
            masks.append((frozenset((attention.dim_axis,)), f"(dims < {attention.depth}){shape}"))
        if padded(attention.columns) != attention.columns:
            own = frozenset(attention.column_axes)
            masks.append((own, f"(columns < {attention.columns})[None, :]"))
        return masks
