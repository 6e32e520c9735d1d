"""What an artifact's files say of a member before it is loaded: its tensors and its memory."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tunerd.artifacts.batches import batch_sizes, row_of
from tunerd.artifacts.manifest import (
    LIBRARY,
    MANIFEST,
    SAMPLE,
    SLOTS,
    WEIGHTS,
    LoadError,
    Manifest,
    read_all_variants,
    read_variants,
    sha256_of,
    stored_at,
)
from tunerd.artifacts.staging import are_large, bytes_of
from tunerd.artifacts.weights import map_weights
from tunerd.colocation.plan import Member
from tunerd.system.arrays import dtype_of, timing_values
from tunerd.vocabulary import Arrays, TensorSpec


def check(member: Member, device: str, kernels: Path | None = None) -> None:
    """Raise LoadError unless a member's artifact is the one that the plan names, for its device.

    kernels: the artifact by which it runs, where that is a group's.
    """
    path = kernels or member.artifact
    kind = _variants(path)[0]["target"]["kind"]
    if (kind == "cuda") != (device == "cuda"):
        found = "a GPU" if kind == "cuda" else "CPUs"
        raise LoadError(
            f"{member.name}: {path} is for {found}, and the plan's device is {device}; "
            "change one of the two"
        )
    found = sha256_of(member.artifact / MANIFEST)
    if member.sha256 not in (None, found):
        raise LoadError(
            f"{member.name}: the sha256 of {member.artifact / MANIFEST} is {found[:12]}..., the "
            f"plan says {str(member.sha256)[:12]}...; put the artifact back, or take over the new "
            "one in the plan"
        )


def inputs_of(path: Path) -> tuple[TensorSpec, ...]:
    """Return the inputs of a request, which all variants of an artifact have; of batches a row."""
    return _request_specs(path, "inputs")


def outputs_of(path: Path) -> tuple[TensorSpec, ...]:
    """Return the outputs of a request, which all variants of an artifact have; of batches a row."""
    return _request_specs(path, "outputs")


def tuned_for(path: Path) -> tuple[int, ...]:
    """Return the numbers of SMs, on CPUs of cores, that an artifact's kernels are tuned for."""
    counts = (count for v in _variants(path) for count in v["share"]["sm_counts"])
    return tuple(sorted(set(counts)))


def sample_inputs(path: Path) -> Arrays:
    """Return inputs to try an artifact on: those of its tuning where it has them, or seeded ones.

    A place without the model has no `timed_inputs`; these are the same.
    """
    manifest = _variants(path)[0]
    if SAMPLE in manifest["files"]:
        return map_weights(stored_at(path, manifest, SAMPLE))
    return {spec.name: timing_values(spec, seed) for seed, spec in enumerate(inputs_of(path))}


@dataclass(frozen=True)
class Needed:
    """The memory of a loaded artifact: what its seats may share, and what each has for itself."""

    shared_bytes: int  # weights and code
    each_bytes: int  # inputs, outputs, and the planned storage between kernels
    ahead_bytes: int = 0  # a further copy of the inputs, where they are large enough for one
    request_bytes: int = 0  # a further copy of the inputs and outputs
    output_bytes: int = 0  # a further copy of the outputs

    @property
    def alone_bytes(self) -> int:
        """Return the bytes of a seat that shares nothing."""
        return self.shared_bytes + self.each_bytes


def weights_bytes_of(path: Path) -> int:
    """Return the bytes of one tenant's weights, of several shares the most."""
    return max(stored_at(path, v, WEIGHTS).stat().st_size for v in _variants(path))


def needed_memory(path: Path, weights: int = 1, *, most_bytes: int | None = None) -> Needed:
    """Return what an artifact takes when it is loaded, of several shares the most.

    Of one for several tenants the kernels for each number of them are loaded, and of one of several
    batches those of each. Older manifests do not say how much lies between the kernels.

    Args:
        weights: of how many tenants.
        most_bytes: that these may have; all of them if not given.
    """
    shared: dict[Any, int] = {}  # by the size of a launch
    each: dict[Any, tuple[int, ...]] = {}  # all; further copies, as Needed has them
    variants = _variants(path)
    for variant in variants:
        count = int(variant.get("tenants", 1))
        size = count, tuple(variant.get("sizes", {}).values())
        library = stored_at(path, variant, LIBRARY).stat().st_size
        inputs = _graph_inputs(variant)
        input_bytes = sum(map(bytes_of, inputs))
        output_bytes = count * sum(map(bytes_of, _specs(variant["outputs"])))
        own = input_bytes + output_bytes + int(variant.get("storage_bytes", 0))
        ahead = input_bytes if are_large(inputs) else 0
        shared[size] = max(shared.get(size, 0), library)
        found = own, ahead, input_bytes + output_bytes, output_bytes
        each[size] = max(each.get(size, (0, 0, 0, 0)), found)
    weights_bytes = weights * weights_bytes_of(path)
    if most_bytes is not None:
        weights_bytes = min(weights_bytes, most_bytes)
    own, ahead, request, output = (sum(of) for of in zip(*each.values(), strict=True))
    return Needed(sum(shared.values()) + weights_bytes, own, ahead, request, output)


def checked_inputs(member: str, specs: Sequence[TensorSpec], inputs: Any) -> Arrays:
    """Return a request's inputs by name; TypeError or ValueError for what the member cannot take.

    `inputs` is a dict of arrays by name, or a sequence of arrays in the model's order.
    """
    if isinstance(inputs, Mapping):
        given = inputs
    else:
        given = dict(zip((spec.name for spec in specs), inputs, strict=False))
        if len(inputs) != len(specs):
            raise TypeError(f"{member} takes {len(specs)} arrays and got {len(inputs)}")
    if len(given) != len(specs) or not all(spec.name in given for spec in specs):
        names = ", ".join(spec.name for spec in specs)
        raise TypeError(f"{member} takes the inputs {names} and got {', '.join(sorted(given))}")
    arrays: Arrays = {}
    for spec in specs:
        array = np.asarray(given[spec.name])
        if array.shape != spec.shape or array.dtype != _known_dtype(spec.dtype):
            raise ValueError(
                f"input '{spec.name}' of {member} is {array.dtype}{list(array.shape)}; it takes "
                f"{spec.dtype}{list(spec.shape)}"
            )
        arrays[spec.name] = array
    return arrays


def _variants(path: Path) -> tuple[Manifest, ...]:
    """Return the variants of an artifact of one size, for however many tenants, or of batches."""
    variants = read_all_variants(path)
    takes_several = "tenants" in variants[0] or batch_sizes(variants)
    return variants if takes_several else read_variants(path)


def _request_specs(path: Path, key: str) -> tuple[TensorSpec, ...]:
    variants = _variants(path)
    specs = _specs(variants[0][key])
    return tuple(map(row_of, specs)) if batch_sizes(variants) else specs


_known_dtype = functools.cache(dtype_of)  # a request is to be checked in microseconds


def _specs(entries: Sequence[Mapping[str, Any]]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(e["name"], tuple(e["shape"]), e["dtype"]) for e in entries)


def _graph_inputs(variant: Manifest) -> tuple[TensorSpec, ...]:
    """Return what a launch takes: for several tenants a row each, and where their weights lie."""
    specs = _specs(variant["inputs"])
    if "tenants" not in variant:
        return specs
    rows = (int(variant["tenants"]),)
    wide = (replace(spec, shape=(*rows, *spec.shape)) for spec in specs)
    return (*wide, TensorSpec(SLOTS, rows, "int32"))
