"""Several sizes of one model: a call takes the compiled size that fits, or pads to the next one.

Of sizes that are as large as what is given in every dimension the one with the fewest elements is
taken. Inputs are padded with zeros, and outputs cut to what was given, only in dimensions that the
manifest allows: `tunerd.frontend.onnx.padding` found there that it changes no result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tunerd.artifacts.loading import LoadedModel
from tunerd.artifacts.manifest import WEIGHTS, Manifest, by_sizes, is_counter
from tunerd.vocabulary import Arrays

Sizes = Mapping[str, int]  # of named dimensions


class SizedModel(LoadedModel):
    """A loaded artifact of several sizes. Those at one share have one copy of the weights.

    It is called as a `LoadedModel` is, with inputs of any size that it has or may be padded to.
    `inputs`, `outputs`, `manifest`, `weights`, `timed_calls`, `captured` and `staged` are of its
    largest size; `at` returns the model of a single one.
    """

    def __init__(
        self,
        folder: Path,
        variants: Sequence[Manifest],
        *,
        device: int | None,
        known: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Load the variants of each size, whose files were checked; as `LoadedModel` does."""
        groups = sorted(by_sizes(variants).values(), key=lambda group: _elements(group[0]["sizes"]))
        super().__init__(folder, groups[-1], device=device, known=known)
        shared: dict[str, dict[str, Any]] = {}
        _share(self, shared)
        self._models: list[LoadedModel] = []
        for group in groups[:-1]:
            model = LoadedModel(folder, group, device=device, known=known, own=shared)
            _share(model, shared)
            self._models.append(model)
        self._models.append(self)

    @property
    def weights_of_files(self) -> dict[str, dict[str, Any]]:
        """All weights that it has on the device, by the sha256 of their file and by name."""
        found: dict[str, dict[str, Any]] = {}
        for model in self._models:
            found.setdefault(model.manifest["files"][WEIGHTS], {}).update(model.weights)
        return found

    @property
    def sizes(self) -> tuple[dict[str, int], ...]:
        """The compiled sizes by dimension, of few elements first."""
        return tuple(dict(model.manifest["sizes"]) for model in self._models)

    @property
    def padded_dims(self) -> tuple[str, ...]:
        """The dimensions in which smaller inputs are padded."""
        return tuple(name for name, of in self.manifest["axes"].items() if of["pads"])

    def at(self, **sizes: int) -> LoadedModel:
        """Return the model of one compiled size; ValueError where there is none."""
        for model in self._models:
            if model.manifest["sizes"] == sizes:
                return model
        raise ValueError(f"there is no size {_text(sizes)}; there are {self._listed()}")

    def run_dlpack(self, *inputs: Any, stream: Any = None) -> dict[str, Any]:
        """Return the outputs by name as tensors on the device, as a `LoadedModel` does.

        Where inputs are padded, they and the outputs are copied through the host's memory, and the
        call waits for them. Raises ValueError where no size fits.
        """
        given = self._by_name(inputs)
        sizes = self._sizes_of(given)
        model = self._fitting(sizes)
        if model.manifest["sizes"] == sizes:
            return LoadedModel.run_dlpack(model, given, stream=stream)
        outputs = LoadedModel.run_dlpack(model, self._padded(given, model), stream=stream)
        self._device.sync(self._handle_of(stream))
        return {name: self._cut(name, output, sizes) for name, output in outputs.items()}

    def _sizes_of(self, given: Mapping[str, Any]) -> dict[str, int]:
        """Return the size that the inputs have in each dimension."""
        found: dict[str, int] = {}
        for dim, of in self.manifest["axes"].items():
            for name, axes in of["inputs"].items():
                shape = tuple(getattr(given[name], "shape", ()))
                for axis in axes:
                    size = shape[axis] if axis < len(shape) else 0
                    if found.setdefault(dim, size) != size:
                        raise ValueError(
                            f"input '{name}' has the shape {list(shape)}, and another input has "
                            f"{found[dim]} of '{dim}'; give both the same size"
                        )
        return found

    def _fitting(self, sizes: Sizes) -> LoadedModel:
        pads = set(self.padded_dims)
        for model in self._models:
            has: Sizes = model.manifest["sizes"]
            if all(
                has[dim] == size or (dim in pads and 0 < size < has[dim])
                for dim, size in sizes.items()
            ):
                return model
        may = f"padded in {', '.join(sorted(pads))}" if pads else "no dimension is padded"
        raise ValueError(
            f"the inputs have {_text(sizes)}; the artifact was compiled for {self._listed()} "
            f"({may}): give one of these sizes, or tune with another in --dim"
        )

    def _padded(self, given: Mapping[str, Any], model: LoadedModel) -> Arrays:
        padded = {}
        for spec in model.inputs:
            value = self._on_host(given[spec.name])
            if value.ndim != len(spec.shape):
                raise ValueError(
                    f"input '{spec.name}' has the shape {list(value.shape)}; the model takes "
                    f"{list(spec.shape)}"
                )
            dims = self.manifest["axes"].values()
            axes = {axis for of in dims for axis in of["inputs"].get(spec.name, ())}
            widths = [
                (0, size - had if axis in axes else 0)
                for axis, (size, had) in enumerate(zip(spec.shape, value.shape, strict=True))
            ]
            padded[spec.name] = np.pad(value, widths)
        return padded

    def _cut(self, name: str, output: Any, sizes: Sizes) -> Any:
        axes = {
            axis: sizes[dim]
            for dim, of in self.manifest["axes"].items()
            for axis in of["outputs"].get(name, ())
        }
        values = output.numpy()
        kept = tuple(slice(axes.get(axis)) for axis in range(values.ndim))
        return self._to_device(np.asarray(values[kept], order="C"))

    def _listed(self) -> str:
        return "; ".join(map(_text, self.sizes))


def _share(model: LoadedModel, shared: dict[str, dict[str, Any]]) -> None:
    """Add a model's weights to those of other sizes, by the sha256 of their file and by name.

    Calls may be at once, on streams of their own: each size counts for itself.
    """
    of_file = shared.setdefault(model.manifest["files"][WEIGHTS], {})
    of_file |= {name: w for name, w in model.weights.items() if not is_counter(name)}


def _elements(sizes: Sizes) -> int:
    return math.prod(sizes.values())


def _text(sizes: Sizes) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())
