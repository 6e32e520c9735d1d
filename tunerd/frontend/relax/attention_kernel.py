"""What an attention computes, as one function of several loops."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import te, tirx

_WIDE = "float32"


@dataclass(frozen=True)
class Access:
    """Where a tensor lies in a flat one: at an offset, and at its indices times strides."""

    offset: int
    strides: tuple[int, ...]

    def of(self, flat: te.Tensor, indices: Sequence[Any]) -> Any:
        place: Any = _int(self.offset)
        for index, stride in zip(indices, self.strides, strict=True):
            if stride:
                place = place + index * _int(stride)
        return flat[place]


@dataclass(frozen=True)
class Step:
    """What happens to scores before softmax, in the order of the graph.

    "scale" multiplies with `value`; the others read a mask: "add" adds it, "keep" puts `value`
    where it is false, "replace" where it is true.
    """

    kind: str
    value: float = 0.0


@dataclass(frozen=True)
class AttentionKernel:
    """An attention with its operands' places in the tensors that hold them."""

    lead: tuple[int, ...]  # dimensions, as of batch and heads, of which each has its own scores
    rows: int
    keys: int
    dims: int  # of Q and K
    columns: int  # of V
    operands: tuple[Access, ...]  # Q [*lead, row, dim], K [*lead, key, dim], V [*lead, key, column]
    masks: tuple[Access, ...]  # [*lead, row, key], of the steps that read one
    steps: tuple[Step, ...]
    factor: float  # of V
    is_guarded: bool  # rows without any key are 0; else they are not a number
    order: tuple[int, ...]  # of the dimensions [*lead, row, column] in the result

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        whole = (*self.lead, self.rows, self.columns)
        return tuple(whole[i] for i in self.order)

    def computed(self, tensors: Sequence[te.Tensor], numbers: Sequence[int]) -> te.Tensor:
        """Return the computation; the operands and masks are the flat tensors of these numbers."""
        q, k, v, *masks = (tensors[int(n)] for n in numbers)
        at_q, at_k, at_v = self.operands
        rows = (*self.lead, self.rows)
        dim, key = _axis(self.dims, "dim"), _axis(self.keys, "key")
        scores = _compute(
            (*rows, self.keys),
            lambda *i: te.sum(
                at_q.of(q, (*i[:-1], dim)) * at_k.of(k, (*i[:-2], i[-1], dim)), axis=dim
            ),
            "attention_scores",
        )
        masked = _compute(scores.shape, lambda *i: self._masked(scores(*i), masks, i), "masked")
        most = _compute(rows, lambda *i: te.max(masked(*i, key), axis=key), "most")
        # The maximum is finite, so that the weights of a row without any key are 0.
        weights = _compute(
            scores.shape, lambda *i: te.exp(masked(*i) - most(*i[:-1])), "attention_weights"
        )
        key = _axis(self.keys, "key")
        total = _compute(rows, lambda *i: te.sum(weights(*i, key), axis=key), "total")
        key_of_v = _axis(self.keys, "key")
        summed = _compute(
            (*rows, self.columns),
            lambda *i: te.sum(
                weights(*i[:-1], key_of_v) * at_v.of(v, (*i[:-2], key_of_v, i[-1])), axis=key_of_v
            ),
            "attention_sums",
        )

        def result(*out: Any) -> Any:
            i = [out[self.order.index(n)] for n in range(len(out))]
            whole = total(*i[:-1])
            if self.is_guarded:
                whole = tirx.Select(whole > _float(0.0), whole, _float(1.0))
            value = summed(*i) / whole
            return value if self.factor == 1.0 else value * _float(self.factor)

        return _compute(self.shape, result, "attention")

    def _masked(self, score: Any, masks: Sequence[te.Tensor], indices: Sequence[Any]) -> Any:
        read = (at.of(mask, indices) for at, mask in zip(self.masks, masks, strict=True))
        for step in self.steps:
            value = _float(step.value)
            if step.kind == "scale":
                score = score * value
            elif step.kind == "add":
                score = score + next(read)
            else:
                chosen = (score, value) if step.kind == "keep" else (value, score)
                score = tirx.Select(next(read), *chosen)
        return score


def _compute(shape: Sequence[Any], of: Callable[..., Any], name: str) -> te.Tensor:
    return te.compute([_int(n) if isinstance(n, int) else n for n in shape], of, name=name)


def _axis(extent: int, name: str) -> Any:
    return te.reduce_axis(tvm.ir.Range(_int(0), _int(extent)), name=name)


_int = functools.partial(tirx.IntImm, "int64")
_float = functools.partial(tirx.FloatImm, _WIDE)
