"""Artifacts of several shares, or sizes -> one that picks its kernels by what it finds."""

from __future__ import annotations

import hashlib
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tunerd.artifacts.compile import write_json, write_piece, write_weights, written_beside
from tunerd.artifacts.manifest import (
    LIBRARY,
    MANIFEST,
    PACKED_VERSION,
    SIZED_VERSION,
    TENANTS_VERSION,
    WEIGHTS,
    Manifest,
    by_sizes,
    check_files,
    is_counter,
    obtained_text,
    read_all_variants,
    read_manifest,
    sealed,
    sha256_of,
    stored_at,
)
from tunerd.artifacts.weights import map_weights
from tunerd.errors import FolderError, InputError
from tunerd.records.paths import Paths
from tunerd.system.text import reason_of
from tunerd.system.version import __version__
from tunerd.vocabulary import Arrays, architecture


def pack_shares(sources: Sequence[Path], to: Path) -> tuple[Manifest, ...]:
    """Join artifacts of one model, tuned for different shares of one device, into the folder `to`.

    A source is an artifact, a packed one too, or a run folder that has one. Files with equal bytes
    are stored once. Returns the manifests of the variants, of few SMs first.

    Raises InputError where the sources do not belong together, LoadError for one that is no whole
    artifact, FolderError where `to` holds something else or cannot be written.
    """
    found = [variant for source in sources for variant in _variants_of(source)]
    _refuse_strangers(found)
    if max(map(len, by_sizes([manifest for _, manifest in found]).values())) < 2:
        raise InputError(
            f"{sources[0]} holds one share; name the runs or artifacts of two shares or more"
        )
    found.sort(key=lambda variant: min(variant[1]["share"]["sm_counts"]))
    if "tenants" in found[0][1]:
        return _written_with_one_piece(found, to)
    stored: dict[tuple[str, str], str] = {}  # (name of the file, its sha256) -> name in `to`
    variants = []
    with _written(to) as part:
        for folder, manifest in found:
            names = {}
            for name in (LIBRARY, WEIGHTS):
                key = (name, manifest["files"][name])
                if key not in stored:
                    taken = set(stored.values())
                    stored[key] = _free_name(name, manifest, taken)
                    shutil.copyfile(stored_at(folder, manifest, name), part / stored[key])
                names[name] = stored[key]
            files = {name: manifest["files"][name] for name in names}
            variants.append(manifest | {"files": files, "stored_as": names})
        _seal(part, variants)
    return tuple(variants)


def pack_tenants(sources: Sequence[Path], to: Path) -> tuple[Manifest, ...]:
    """Join artifacts of one model for several numbers of tenants into the folder `to`.

    A source is an artifact for some number of tenants, or a run folder that has one. Equal weights
    are stored once; those that one number of tenants alone needs are part of each tenant's. Returns
    the manifests of the variants, of few tenants first.

    Raises InputError where the sources do not belong together, LoadError for one that is no whole
    artifact, FolderError where `to` holds something else or cannot be written.
    """
    found = [variant for source in sources for variant in _variants_of(source)]
    for folder, manifest in found:
        if "tenants" not in manifest:
            raise InputError(f"{folder} serves one model; tune it with --tenants")
    for count in {manifest["tenants"] for _, manifest in found}:
        _refuse_strangers_of_size([each for each in found if each[1]["tenants"] == count])
    _refuse_others(found)
    found.sort(key=lambda variant: int(variant[1]["tenants"]))
    return _written_with_one_piece(found, to)


def _written_with_one_piece(
    found: Sequence[tuple[Path, Manifest]], to: Path
) -> tuple[Manifest, ...]:
    """Write variants for tenants, whose weights are one piece that all of them take theirs from."""
    tensors: Arrays = {}
    for folder, manifest in found:
        for name, values in map_weights(stored_at(folder, manifest, WEIGHTS)).items():
            known = tensors.setdefault(name, values)
            if known is not values and not np.array_equal(_bytes(known), _bytes(values)):
                raise InputError(
                    f"{folder} has other weights than {found[0][0]}; pack artifacts of one model"
                )
    taken: set[str] = set()
    variants = []
    with _written(to) as part:
        write_piece(tensors, part / WEIGHTS)
        weights_sha256 = sha256_of(part / WEIGHTS)
        for folder, manifest in found:
            name = _free_name(LIBRARY, manifest, taken)
            taken.add(name)
            shutil.copyfile(stored_at(folder, manifest, LIBRARY), part / name)
            files = {LIBRARY: manifest["files"][LIBRARY], WEIGHTS: weights_sha256}
            stored = {LIBRARY: name, WEIGHTS: WEIGHTS}
            variants.append(manifest | {"files": files, "stored_as": stored})
        _seal(part, variants)
    return tuple(variants)


def _bytes(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def pack_sizes(
    sources: Sequence[tuple[Mapping[str, int], Path]], axes: Mapping[str, Any], to: Path
) -> tuple[Manifest, ...]:
    """Join artifacts of one model, tuned at one share for different sizes, into the folder `to`.

    Equal tensors are stored once; what a size folded otherwise is added. Returns the manifests of
    the variants, in the order of the sources.

    Args:
        sources: the sizes by dimension, and the artifact of one share that has them.
        axes: what `manifest` says of each of these dimensions.

    Raises LoadError for a source that is no whole artifact, FolderError where `to` holds something
    else or cannot be written.
    """
    variants: list[Manifest] = []
    tensors: Arrays = {}
    names: dict[Any, str] = {}  # by type, shape and content
    with _written(to) as part:
        for sizes, folder in sources:
            manifest = read_manifest(folder)
            check_files(folder, [manifest])
            weights = map_weights(stored_at(folder, manifest, WEIGHTS))
            own = [_kept(name, weights[name], tensors, names) for name in manifest["weights"]]
            variants.append(manifest | {"weights": own, "sizes": dict(sizes), "axes": dict(axes)})
        write_weights(tensors, part / WEIGHTS)
        weights_sha256 = sha256_of(part / WEIGHTS)
        for manifest, (_, folder) in zip(variants, sources, strict=True):
            taken = {v["stored_as"][LIBRARY] for v in variants if "stored_as" in v}
            name = _free_name(LIBRARY, manifest, taken)
            shutil.copyfile(stored_at(folder, manifest, LIBRARY), part / name)
            files = {LIBRARY: manifest["files"][LIBRARY], WEIGHTS: weights_sha256}
            manifest |= {"files": files, "stored_as": {LIBRARY: name, WEIGHTS: WEIGHTS}}
        _seal(part, variants)
    return tuple(variants)


def _kept(name: str, values: np.ndarray[Any, Any], tensors: Arrays, names: dict[Any, str]) -> str:
    """Return the name under which a tensor is stored, beside others of that name if need be."""
    key = (
        str(values.dtype),
        values.shape,
        hashlib.sha256(_bytes(values).data).digest(),
        is_counter(name),
    )
    if key not in names:
        tries = (name, *(f"{name}@{number}" for number in range(2, len(tensors) + 3)))
        names[key] = next(each for each in tries if each not in tensors)
        tensors[names[key]] = values
    return names[key]


@contextmanager
def _written(to: Path) -> Iterator[Path]:
    try:
        with written_beside(to) as part:
            yield part
    except OSError as error:
        raise FolderError(
            f"{to} cannot be written: {reason_of(error)}; choose another place with --to"
        ) from error


def _seal(part: Path, variants: Sequence[Manifest]) -> None:
    version = SIZED_VERSION if variants[0].get("sizes") else PACKED_VERSION
    packed = {
        "format_version": TENANTS_VERSION if "tenants" in variants[0] else version,
        "created_at": time.time(),
        "versions": {"tunerd": __version__},
        "variants": list(variants),
    }
    write_json(part / MANIFEST, sealed(packed))
    check_files(part, variants)  # a source may have changed while it was copied


def _variants_of(source: Path) -> list[tuple[Path, Manifest]]:
    """Return the variants of a source, each with the folder of its files, all of them whole."""
    artifact = Paths(source).artifact
    try:
        folder = artifact if (artifact / MANIFEST).is_file() else source
    except (OSError, ValueError):
        folder = source  # which says why below
    variants = read_all_variants(folder)
    check_files(folder, variants)
    return [(folder, variant) for variant in variants]


def _refuse_strangers(found: Sequence[tuple[Path, Manifest]]) -> None:
    """Raise InputError unless the variants are of one model and device, for other SMs each."""
    sizes = by_sizes([manifest for _, manifest in found])
    for folder in {folder: None for folder, _ in found}:
        own = by_sizes([manifest for of, manifest in found if of == folder])
        if own.keys() != sizes.keys():
            raise InputError(
                f"{folder} has not the sizes of the others ({'; '.join(filter(None, sizes))}); "
                "pack artifacts of the same sizes"
            )
    for said in sizes:
        _refuse_strangers_of_size([each for each in found if said in by_sizes([each[1]])])


def _refuse_strangers_of_size(found: Sequence[tuple[Path, Manifest]]) -> None:
    _refuse_others(found)
    is_cuda = found[0][1]["target"]["kind"] == "cuda"
    seen: dict[int, Path] = {}
    for folder, manifest in found:
        counts = manifest["share"]["sm_counts"]
        if not counts:
            raise InputError(
                f"{folder} does not say for how many SMs or cores it was tuned; tune again"
            )
        for count in counts:
            if count in seen:
                raise InputError(
                    f"{seen[count]} and {folder} were both tuned for "
                    f"{obtained_text([count], is_cuda=is_cuda)}; leave one of them out"
                )
            seen[count] = folder


def _refuse_others(found: Sequence[tuple[Path, Manifest]]) -> None:
    """Raise InputError unless all are of one model and device."""
    first_folder, first = found[0]
    for folder, manifest in found:
        for what, of in _IDENTITY.items():
            if of(manifest) != of(first):
                raise InputError(
                    f"{folder} is of another {what} than {first_folder} ({_said(of(manifest))}, "
                    f"not {_said(of(first))}); pack artifacts of one model for shares of one device"
                )


_IDENTITY: dict[str, Any] = {
    "model": lambda m: (m["model"]["name"], m["model"].get("digest")),
    "set of inputs": lambda m: m["inputs"],
    "set of outputs": lambda m: m["outputs"],
    "kind of target": lambda m: m["target"]["kind"],
    # A CPU's target has the number of cores, which follows the share.
    "architecture": lambda m: architecture(m["target"].get("json")),
    "device": lambda m: m["share"].get("device"),
}


def _said(value: Any) -> str:
    text = " ".join(str(v)[:40] for v in value) if isinstance(value, tuple) else str(value)[:100]
    return text or "nothing"


def _free_name(name: str, manifest: Manifest, taken: set[str]) -> str:
    """Return `model-52.so` for the library of 52 SMs, `weights.bin` for the first weights."""
    stem, suffix = Path(name).stem, Path(name).suffix
    said = [f"tenants{manifest['tenants']}"] if "tenants" in manifest else []
    said += [f"{dim}{size}" for dim, size in manifest.get("sizes", {}).items()]
    said += [str(count) for count in manifest["share"]["sm_counts"][:4]]
    own = re.sub(r"[^\w.-]+", "_", "-".join((stem, *said)))[:200]
    tries = [name] if name == WEIGHTS else []
    tries += [f"{own}{suffix}"]
    tries += [f"{own}-{number}{suffix}" for number in range(2, len(taken) + 3)]
    return next(each for each in tries if each not in taken)
