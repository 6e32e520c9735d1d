"""What an artifact's manifest says of its work and its memory, before it is loaded."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tunerd.artifacts.batches import batch_sizes
from tunerd.artifacts.manifest import (
    LIBRARY,
    WEIGHTS,
    Manifest,
    nearest,
    read_all_variants,
    read_variants,
    stored_at,
)
from tunerd.system.arrays import dtype_of

# Of an SM, at once, from compute capability 8.0 on but for 8.6 to 8.9 and 12.0, which hold 1536
# (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability").
_THREADS_PER_SM = 2048


@dataclass(frozen=True)
class Features:
    """Of one inference at a share. flops: 0 where the manifest does not say."""

    weight_bytes: float
    storage_bytes: float  # between kernels
    io_bytes: float
    footprint_bytes: float  # all of these: what a cache would have to hold
    flops: float
    intensity: float  # flops per byte of the footprint
    kernels: float
    # By how many of its launches the whole device would be full once, on average over them: below 1
    # they leave SMs to others. By threads alone; 0 on CPUs, and where the manifest does not say.
    waves: float = 0.0

    def named(self) -> dict[str, float]:
        return asdict(self)


def features_of(folder: Path, units: int = 0) -> Features:
    """Return the features of an artifact, of several shares those of the one nearest to `units`.

    Raises LoadError where it is no artifact.
    """
    variants = _of_one_request(folder)
    variant = nearest(variants, units) if units else variants[-1]
    weights = float(stored_at(folder, variant, WEIGHTS).stat().st_size)
    storage = float(variant.get("storage_bytes", 0))
    io = float(sum(map(_bytes_of, (*variant["inputs"], *variant["outputs"]))))
    tasks = variant.get("tasks", ())
    flops = math.fsum(float(t.get("flops", 0)) * t["weight"] for t in tasks)
    footprint = weights + storage + io
    return Features(
        weight_bytes=weights,
        storage_bytes=storage,
        io_bytes=io,
        footprint_bytes=footprint,
        flops=flops,
        intensity=flops / footprint,
        kernels=float(sum(t["weight"] for t in tasks)),
        waves=_waves(variant),
    )


def at_share(features: Mapping[str, float], share: int) -> dict[str, float]:
    """Return the features of a member at so many percent: there its launches are more waves."""
    found = dict(features)
    if "waves" in found:
        found["waves"] *= 100 / share
    return found


def _waves(variant: Manifest) -> float:
    launches = variant.get("launches", ())
    calls = sum(launch["calls"] for launch in launches)
    units = variant["share"].get("device_sm_count")
    if not calls or not units:
        return 0.0
    threads = sum(each["calls"] * each["blocks"] * each["threads"] for each in launches)
    return float(threads / calls / (units * _THREADS_PER_SM))


def architecture_of(folder: Path) -> str:
    """Return what artifacts of one architecture, with the same kernels, have in common."""
    variants = read_all_variants(folder)
    libraries = sorted(variant["files"][LIBRARY] for variant in variants)
    return hashlib.sha256(" ".join(libraries).encode()).hexdigest()[:16]


def _of_one_request(folder: Path) -> tuple[Manifest, ...]:
    """Return the variants of an artifact, of one for several requests those for the fewest."""
    variants = read_all_variants(folder)
    if sizes := batch_sizes(variants):
        return tuple(v for v in variants if min(v["sizes"].values()) == sizes[0])
    if "tenants" not in variants[0]:
        return read_variants(folder)
    fewest = min(int(variant["tenants"]) for variant in variants)
    return tuple(variant for variant in variants if variant["tenants"] == fewest)


def _bytes_of(entry: Manifest) -> int:
    return math.prod(map(int, entry["shape"])) * dtype_of(entry["dtype"]).itemsize
