"""Artifacts of several shares -> one that picks its kernels by the SMs that it finds."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tunerd.artifacts.compile import write_json, written_beside
from tunerd.artifacts.manifest import (
    LIBRARY,
    MANIFEST,
    PACKED_VERSION,
    WEIGHTS,
    Manifest,
    check_files,
    obtained_text,
    read_variants,
    sealed,
    stored_at,
)
from tunerd.errors import FolderError, InputError
from tunerd.records.paths import Paths
from tunerd.system.version import __version__
from tunerd.vocabulary import architecture


def pack_shares(sources: Sequence[Path], to: Path) -> tuple[Manifest, ...]:
    """Join artifacts of one model, tuned for different shares of one device, into the folder `to`.

    A source is an artifact, a packed one too, or a run folder that has one. Files with equal bytes
    are stored once. Returns the manifests of the variants, of few SMs first.

    Raises InputError where the sources do not belong together, LoadError for one that is no whole
    artifact, FolderError where `to` holds something else or cannot be written.
    """
    found = [variant for source in sources for variant in _variants_of(source)]
    if len(found) < 2:
        raise InputError(
            f"{sources[0]} holds one share; name the runs or artifacts of two shares or more"
        )
    _refuse_strangers(found)
    found.sort(key=lambda variant: min(variant[1]["share"]["sm_counts"]))
    stored: dict[tuple[str, str], str] = {}  # (name of the file, its sha256) -> name in `to`
    variants = []
    try:
        with written_beside(to) as part:
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
            packed = {
                "format_version": PACKED_VERSION,
                "created_at": time.time(),
                "versions": {"tunerd": __version__},
                "variants": variants,
            }
            write_json(part / MANIFEST, sealed(packed))
            check_files(part, variants)  # a source may have changed while it was copied
    except OSError as error:
        raise FolderError(
            f"{to} cannot be written: {error.strerror or error}; choose another place with --to"
        ) from error
    return tuple(variants)


def _variants_of(source: Path) -> list[tuple[Path, Manifest]]:
    """Return the variants of a source, each with the folder of its files, all of them whole."""
    artifact = Paths(source).artifact
    try:
        folder = artifact if (artifact / MANIFEST).is_file() else source
    except (OSError, ValueError):
        folder = source  # which says why below
    variants = read_variants(folder)
    check_files(folder, variants)
    return [(folder, variant) for variant in variants]


def _refuse_strangers(found: Sequence[tuple[Path, Manifest]]) -> None:
    """Raise InputError unless the variants are of one model and device, for other SMs each."""
    first_folder, first = found[0]
    is_cuda = first["target"]["kind"] == "cuda"
    seen: dict[int, Path] = {}
    for folder, manifest in found:
        for what, of in _IDENTITY.items():
            if of(manifest) != of(first):
                raise InputError(
                    f"{folder} is of another {what} than {first_folder} ({_said(of(manifest))}, "
                    f"not {_said(of(first))}); pack artifacts of one model for shares of one device"
                )
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
    counts = "-".join(str(count) for count in manifest["share"]["sm_counts"][:4])
    tries = [name] if name == WEIGHTS else []
    tries += [f"{stem}-{counts}{suffix}"]
    tries += [f"{stem}-{counts}-{number}{suffix}" for number in range(2, len(taken) + 3)]
    return next(each for each in tries if each not in taken)
