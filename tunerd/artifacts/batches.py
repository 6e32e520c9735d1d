"""Batches of one model: requests of a row each, in one call of the smallest size that holds them.

An artifact of several sizes offers that where these are sizes of the first axis of every input and
output, and where this may be padded: there no row changes the results of another one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tunerd.artifacts.lanes import Request, StagedRows, smallest
from tunerd.artifacts.loading import LoadedModel
from tunerd.artifacts.manifest import LoadError, Manifest
from tunerd.artifacts.sized import SizedModel
from tunerd.system.arrays import dtype_of
from tunerd.vocabulary import Arrays, TensorSpec


def batch_sizes(variants: Sequence[Manifest]) -> tuple[int, ...]:
    """Return the batches for which an artifact was compiled, the smallest first.

    Nothing where it has one size, or sizes of something else than a batch.
    """
    axes: Mapping[str, Any] = variants[0].get("axes", {})
    if len(axes) != 1:
        return ()
    ((dim, of),) = axes.items()
    ends = [(of[key], spec["name"]) for key in ("inputs", "outputs") for spec in variants[0][key]]
    if not of["pads"] or any(places.get(name) != [0] for places, name in ends):
        return ()
    return tuple(sorted({int(variant["sizes"][dim]) for variant in variants}))


def row_of(spec: TensorSpec) -> TensorSpec:
    """Return one row of a batch, which has a first axis of 1."""
    return replace(spec, shape=(1, *spec.shape[1:]))


class BatchedModel:
    """An artifact of batches, which takes requests as a SuperModel does: all are of one tenant.

    own: the name of that tenant. counts: the batches, the smallest first. `inputs` and `outputs`
    are those of one request: a row. Calls from several threads take turns.
    """

    def __init__(self, model: SizedModel) -> None:
        """Take a loaded artifact; ValueError for one that has no batches."""
        if not batch_sizes([model.manifest]):
            raise ValueError("the sizes of this artifact are none of a batch that may be padded")
        (dim,) = model.manifest["axes"]
        self._of: dict[int, LoadedModel] = {s[dim]: model.at(**s) for s in model.sizes}
        self.own = str(model.manifest["model"]["name"])
        self.counts = tuple(self._of)
        self.inputs = tuple(map(row_of, model.inputs))
        self.outputs = tuple(map(row_of, model.outputs))

    def add(self, name: str, source: str | os.PathLike[str] | Mapping[str, Any]) -> None:
        """Raise LoadError: a batch has weights of one model."""
        raise LoadError(
            f"{name} cannot be served by batches of {self.own}, whose rows have its weights; tune "
            "with --tenants for models with weights of their own"
        )

    @property
    def brought(self) -> int:
        """0: the weights are where they are read."""
        return 0

    def limit_weights(self, size_bytes: int) -> None:
        """Do nothing: there are those of one model."""

    def bring(self, names: Iterable[str]) -> None:
        """Do nothing: the weights are where they are read."""

    def run(self, requests: Sequence[Request]) -> list[Arrays]:
        """Return the outputs by name of each request, a row each.

        The smallest batch that holds all is run, and of more requests than the largest holds
        several in turn; rows that are left over are zeros. Raises ValueError for inputs of another
        shape, and TypeError for those of another type.
        """
        outputs: list[Arrays] = []
        while left := requests[len(outputs) :]:
            size = smallest(self.counts, len(left))
            outputs += self._launched(self._of[size], [given for _, given in left[:size]])
        return outputs

    def staged_lanes(self, stream: Any, count: int = 1) -> dict[int, tuple[StagedBatch, ...]]:
        """Return CUDA graphs of each batch, `count` of each, as engines use them.

        They run on `stream` one after the other. Raises what `LoadedModel.captured` does.
        """
        recorders = {size: model.recorder(stream) for size, model in self._of.items()}
        return {
            size: tuple(StagedBatch(recorder, is_ahead=count > 1) for _ in range(count))
            for size, recorder in recorders.items()
        }

    def _launched(self, model: LoadedModel, requests: Sequence[Mapping[str, Any]]) -> list[Arrays]:
        batch = {spec.name: np.zeros(spec.shape, dtype_of(spec.dtype)) for spec in model.inputs}
        for row, given in enumerate(requests):
            for spec in self.inputs:
                if np.shape(given[spec.name]) != spec.shape:
                    raise ValueError(
                        f"input '{spec.name}' of a request has the shape "
                        f"{list(np.shape(given[spec.name]))}; a row has {list(spec.shape)}"
                    )
                np.copyto(batch[spec.name][row : row + 1], given[spec.name], casting="no")
        outputs = model(batch)
        return [
            {name: array[row : row + 1].copy() for name, array in outputs.items()}
            for row in range(len(requests))
        ]


class StagedBatch(StagedRows):
    """A StagedModel of a batch that takes requests of a row each; the others keep what they had."""

    def _as_held(self, specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        return tuple(replace(s, shape=(s.shape[0], 1, *s.shape[1:])) for s in specs)
