"""What an artifact folder says of itself: read, checked, and the variant for the SMs at hand.

An artifact has one variant: a compiled model for one share of a device and one size of its inputs.
A packed artifact has several of one model, side by side, each with the manifest that it had alone:
of several shares (format 4), of several sizes (format 5), or of both. `stored_as` says under which
names the files of a variant lie; weights with equal bytes lie there once.

    format 3    manifest.json   model.so              weights.bin
    format 4    manifest.json   model-52.so           model-132.so          weights.bin
    format 5    manifest.json   model-batch1-52.so    model-batch8-52.so    weights.bin
    format 6    manifest.json   model-tenants1-52.so  model-tenants4-52.so  weights.bin

A model that serves several tenants at once, each with weights of its own, has format 6, with one
variant or several. A variant has

    tenants      4: how many lanes its kernels have. `inputs` and `outputs` are those of one request
    counters     the tensor that kernels count in, null for none: zeros before and after a call

and weights.bin is one piece of memory as `tunerd.artifacts.weights` lays it out, for any number of
tenants the same. Format 7 has the weights of one more tenant alone:

    format 7    manifest.json   weights.bin

For a GPU a variant has, where it is not older,

    launches    of one call: a list of `blocks`, `threads` of a block, and how often as `calls`

What its kernels compute in, and what was changed to get there, a variant has as

    precision    "fp16"; "as exported" where none was asked for
    notes        sentences, where it is not older: what importing and lowering changed; with fp16
                 and bf16 also how many tensors are stored so, which stay float32, and why, up to
                 three by the name of their kernel, and what is computed in float32

Of several sizes each variant has

    sizes    {"batch": 4}: the size that it was compiled for, of each dimension that has several or
             was named beside them
    axes     {"batch": {"inputs": {"x": [0]}, "outputs": {"y": [0]}, "pads": true}}: the same
             dimensions; on which axes of which inputs and outputs each lies, and whether a call
             with a smaller size is padded with zeros to the next one and its outputs are cut

and `inputs` and `outputs` in its own shapes; names, types, ranks and axes are those of all. Where
kernels call a library, each variant has

    libraries    a list with an entry for each: `name`, by which `tunerd.libraries` knows it;
                 `title`, `package` (of PyPI), `soname` and `least` (version) for people;
                 `version`, with which it was measured, null where it did not say; `calls`, the
                 texts by which kernels ask for its calls, all prepared before the first inference

Kernels for a CPU may use what others lack; a variant has, where it knows that,

    cpu_features    ["avx2", "avx512vnni", "amx-int8"]: as LLVM spells them

A manifest names the sha256 of each file, and of what it says itself; the latter is new, formats 1
and 2 are the same without it.

Imports nothing that loading does not need: the standard library alone.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from tunerd.errors import InputError
from tunerd.system.text import reason_of
from tunerd.vocabulary import unit_name

FORMAT_VERSION = 3
PACKED_VERSION = 4
SIZED_VERSION = 5
TENANTS_VERSION = 6
TENANT_VERSION = 7
MANIFEST = "manifest.json"
LIBRARY = "model.so"
WEIGHTS = "weights.bin"
SAMPLE = "sample.bin"  # inputs that were given for timing, where some were
SLOTS = "tunerd_slots"  # the tensor that says where each lane's weights lie
COUNTERS = "tunerd_counters"  # the weight that kernels count in: zeros before and after a call
MAX_JSON_BYTES = 64 << 20

_KEYS = {"files", "inputs", "outputs", "weights", "target", "share", "model"}  # what is read here
_TARGETS = ("cuda", "llvm")
_UNSEALED = {1: FORMAT_VERSION, 2: PACKED_VERSION}  # what older tunerds wrote
_SEAL = "sha256"

Manifest = dict[str, Any]


class LoadError(InputError):
    """A folder that is no artifact, was changed, or cannot run here."""


def sealed(manifest: Mapping[str, Any]) -> Manifest:
    """Return a manifest with the sha256 of everything else that it says, in any order of keys."""
    said = {key: value for key, value in manifest.items() if key != _SEAL}
    plain = json.loads(json.dumps(said))
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return said | {_SEAL: hashlib.sha256(text.encode()).hexdigest()}


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of an artifact of one share; raises LoadError where there is none."""
    variants = read_variants(folder)
    if len(variants) > 1:
        raise LoadError(
            f"{folder} holds {len(variants)} shares, {shares_text(pcts_of(variants))}, where one "
            "is needed; give the artifact of a single run"
        )
    return variants[0]


def read_variants(folder: Path) -> tuple[Manifest, ...]:
    """Return the manifest of each variant of an artifact of one size, of few SMs first.

    Raises LoadError where there is none of a format that this tunerd reads, or several sizes.
    """
    variants = read_all_variants(folder)
    if len(sizes := by_sizes(variants)) > 1:
        raise LoadError(
            f"{folder} holds {len(sizes)} sizes, {'; '.join(sizes)}, where one is needed; `tunerd "
            f"bench` and `tunerd compare` take {folder}#{next(iter(sizes)).replace(' ', '')}, and "
            "`tunerd tune` leaves an artifact of each under sizes/ in its run folder"
        )
    return variants


def by_sizes(variants: Sequence[Manifest]) -> dict[str, list[Manifest]]:
    """Return variants by their sizes as people say them: "batch=4, length=128"; "" for none.

    How many tenants they serve counts as a size: "tenants=4".
    """
    found: dict[str, list[Manifest]] = {}
    for variant in variants:
        sizes: dict[str, int] = dict(variant.get("sizes", {}))
        if "tenants" in variant:
            sizes["tenants"] = variant["tenants"]
        found.setdefault(", ".join(f"{n}={size}" for n, size in sizes.items()), []).append(variant)
    return found


def read_all_variants(folder: Path) -> tuple[Manifest, ...]:
    """Return the manifest of each variant of an artifact, also of several sizes.

    Raises LoadError where there is none of a format that this tunerd reads.
    """
    try:
        manifest = _read_json(folder)
        version = manifest["format_version"]
        kind = _UNSEALED.get(version, version)
        variants: tuple[Manifest, ...] = ()
        if kind in (FORMAT_VERSION, PACKED_VERSION, SIZED_VERSION, TENANTS_VERSION):
            _check_seal(manifest, is_sealed=version == kind)
            if kind == FORMAT_VERSION or (kind == TENANTS_VERSION and "variants" not in manifest):
                _check_manifest(manifest)
                variants = (_without_seal(manifest),)
            else:
                variants = _checked_variants(manifest)
            if any(("tenants" in v) != (kind == TENANTS_VERSION) for v in variants):
                raise ValueError(f"format {version} with what is of another")
    except _UNREADABLE as error:
        raise _damaged(folder, error) from None
    if kind == TENANT_VERSION:
        raise LoadError(
            f"{folder} holds the weights of one tenant and no kernels; load the artifact that it "
            "was made for, and add it there"
        )
    if not variants:
        raise LoadError(
            f"{folder} has format {str(version)[:20]}; this tunerd reads {min(_UNSEALED)} to "
            f"{TENANT_VERSION}, so use the tunerd that wrote it"
        )
    return variants


def read_tenant(folder: Path) -> Manifest:
    """Return what an artifact, or the weights of a tenant alone, say of its weights.

    Of several variants the first, by their tenants; LoadError where there is none.
    """
    try:
        manifest = _read_json(folder)
        if manifest["format_version"] == TENANT_VERSION:
            _check_seal(manifest, is_sealed=True)
            _check_tenant(manifest)
            return _without_seal(manifest)
    except _UNREADABLE as error:
        raise _damaged(folder, error) from None
    return min(read_all_variants(folder), key=lambda variant: int(variant.get("tenants", 0)))


def nearest(variants: Sequence[Manifest], sm_count: int) -> Manifest:
    """Return the variant tuned for the SMs (on CPUs: cores) nearest to `sm_count`, by their ratio.

    By the ratio, because a kernel's time goes with one over the SMs: 20 are as far from 10 as from
    40. Of two as near the one tuned for fewer: kernels tuned for few SMs lose less on many than
    the other way round (Dhakal et al., arXiv 2008.03602).
    """

    def distance(variant: Manifest) -> tuple[float, int]:
        counts = variant["share"]["sm_counts"]
        return min(
            ((abs(math.log(sm_count) - math.log(c)), c) for c in counts), default=(math.inf, 0)
        )

    return min(variants, key=distance)


def is_counter(weight: str) -> bool:
    """Whether kernels write to a weight; several of other shapes may be stored side by side."""
    return weight.partition("@")[0] == COUNTERS


def pcts_of(variants: Sequence[Manifest]) -> tuple[int, ...]:
    """Return the share that each variant was tuned for."""
    return tuple(int(variant["share"]["pct"]) for variant in variants)


def shares_text(pcts: Sequence[int]) -> str:
    """Return shares as people say them: "25% and 50%"."""
    texts = [f"{pct}%" for pct in pcts]
    return " and ".join(filter(None, (", ".join(texts[:-1]), texts[-1])))


def obtained_text(sm_counts: Sequence[int], *, is_cuda: bool) -> str:
    """Return what was obtained as people say it: "1 core", "50 or 52 SMs"."""
    unit = unit_name("cuda" if is_cuda else "llvm", 1 if list(sm_counts) == [1] else None)
    return f"{' or '.join(map(str, sm_counts))} {unit}"


def stored_at(folder: Path, manifest: Mapping[str, Any], name: str) -> Path:
    """Return where a variant's file lies: LIBRARY, WEIGHTS."""
    return folder / str(manifest.get("stored_as", {}).get(name, name))


def check_files(
    folder: Path,
    variants: Sequence[Mapping[str, Any]],
    *,
    unread: Container[str] = (),
    needed: Sequence[str] = (LIBRARY, WEIGHTS),
) -> None:
    """Raise LoadError unless every file is there with the sha256 that the manifest names.

    The manifest is to name those that are needed. Weights of a sha256 in `unread` are not looked
    at, since nobody is going to read them.
    """
    found: dict[Path, str] = {}
    for variant in variants:
        files: Mapping[str, str] = variant["files"]
        for name in needed:
            if name not in files:
                raise LoadError(f"the manifest of {folder} has no sha256 of {name}; it was changed")
        for name, expected in files.items():
            if name == WEIGHTS and expected in unread:
                continue
            path = stored_at(folder, variant, name)
            if path not in found:
                found[path] = _sha256_or_refuse(path)
            if found[path] != expected:
                raise LoadError(
                    f"{path} was changed: its sha256 is {found[path][:12]}..., the manifest says "
                    f"{expected[:12]}...; nothing of it was loaded, so copy the folder again"
                )


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sha256_or_refuse(path: Path) -> str:
    try:
        if path.exists() and not path.is_file():
            raise OSError(0, "no plain file")  # a pipe would wait for its writer
        return sha256_of(path)
    except (OSError, ValueError) as error:
        reason = reason_of(error)
        raise LoadError(f"{path} cannot be read ({reason}); copy the whole folder") from None


_UNREADABLE = (OSError, ValueError, TypeError, KeyError, RecursionError)


def _read_json(folder: Path) -> Any:
    path = folder / MANIFEST
    if not path.is_file():
        found = f"{folder} holds no {MANIFEST}"
        if not folder.is_dir():
            found = f"{folder} is no folder" if folder.exists() else f"there is no folder {folder}"
        raise LoadError(f"{found}; give the artifact folder that `tunerd tune` names")
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ValueError(f"over {MAX_JSON_BYTES >> 20} MiB")
    return json.loads(path.read_bytes())


def _damaged(folder: Path, error: BaseException) -> LoadError:
    reason = reason_of(error)
    return LoadError(
        f"{folder / MANIFEST} cannot be read ({reason}); it is damaged, so tune again or copy the "
        "folder again"
    )


def _without_seal(manifest: Manifest) -> Manifest:
    return {key: value for key, value in manifest.items() if key != _SEAL}


def _check_seal(manifest: Manifest, *, is_sealed: bool) -> None:
    if manifest.get(_SEAL) != (sealed(manifest)[_SEAL] if is_sealed else None):
        raise ValueError("what it says does not fit its sha256")


def _checked_variants(packed: Any) -> tuple[Manifest, ...]:
    variants = packed["variants"]
    if not (_is(variants, list) and variants and all(_is(v, dict) for v in variants)):
        raise ValueError("without variants")
    for variant in variants:
        _check_manifest(variant)
        if not variant["share"]["sm_counts"]:
            raise ValueError("a variant without its SMs")
        if _interface(variant) != _interface(variants[0]):
            raise ValueError("its variants are of several models")
    for same in by_sizes(variants).values():
        if any(each[key] != same[0][key] for each in same for key in ("inputs", "outputs")):
            raise ValueError("its variants are of several models")
    return tuple(sorted(map(dict, variants), key=lambda v: min(v["share"]["sm_counts"])))


def _interface(variant: Manifest) -> Any:
    """Return what variants of other sizes have in common; ValueError where its axes are none."""
    sizes, axes = variant.get("sizes", {}), variant.get("axes", {})
    ranks = {spec["name"]: len(spec["shape"]) for spec in variant["inputs"] + variant["outputs"]}
    is_whole = (
        _is(sizes, dict)
        and all(_is(size, int) for size in sizes.values())
        and _is(axes, dict)
        and axes.keys() == sizes.keys()
        and all(isinstance(of["pads"], bool) for of in axes.values())
        and all(
            _is(axis, int) and 0 <= axis < ranks[name]
            for of in axes.values()
            for name, places in (*of["inputs"].items(), *of["outputs"].items())
            for axis in places
        )
    )
    if not is_whole:
        raise ValueError("a variant whose sizes are none")
    ends = [
        [(spec["name"], spec["dtype"], len(spec["shape"])) for spec in variant[key]]
        for key in ("inputs", "outputs")
    ]
    tenants = (
        (variant["architecture"], variant["files"].get(WEIGHTS)) if "tenants" in variant else None
    )
    return ends, sorted(sizes), axes, variant["target"]["kind"], tenants


def _check_manifest(manifest: Any) -> None:
    """Raise ValueError where a manifest has not what loading takes from it."""
    if missing := _KEYS - manifest.keys():
        raise ValueError(f"without {', '.join(sorted(missing))}")
    files, share, stored_as = manifest["files"], manifest["share"], manifest.get("stored_as", {})
    libraries = manifest.get("libraries", [])
    ok = {
        "cpu_features": _are(manifest.get("cpu_features", []), str),
        "files": _is(files, dict) and all(_is(sha, str) for sha in files.values()),
        "inputs": _is(manifest["inputs"], list) and all(map(_is_spec, manifest["inputs"])),
        "outputs": _is(manifest["outputs"], list) and all(map(_is_spec, manifest["outputs"])),
        "weights": _are(manifest["weights"], str),
        "target": _is(manifest["target"], dict) and manifest["target"].get("kind") in _TARGETS,
        "model": _is(manifest["model"], dict) and _is(manifest["model"].get("name"), str),
        "share": _is(share, dict)
        and _is(share.get("pct"), int)
        and 1 <= share["pct"] <= 100
        and _are(share.get("sm_counts"), int)
        and all(count > 0 for count in share["sm_counts"])
        and _is(share.get("device", 0), str | None),
        "libraries": _is(libraries, list) and all(map(_is_library, libraries)),
        "stored_as": _is(stored_as, dict) and all(_is(name, str) for name in stored_as.values()),
    }
    if "tenants" in manifest:
        counters = manifest.get("counters")
        ok |= {
            "tenants": _is(manifest["tenants"], int) and manifest["tenants"] > 0,
            "counters": counters is None or _is_spec(counters),
            "architecture": _is(manifest.get("architecture"), str),
        }
    if wrong := [key for key, is_right in ok.items() if not is_right]:
        raise ValueError(f"what it says of {', '.join(wrong)} cannot be")
    for name in (*files, *stored_as.values()):
        if Path(name).name != name or name == MANIFEST:
            raise ValueError(f"it names the file '{name[:100]}', which is none of an artifact")


def _check_tenant(manifest: Any) -> None:
    """Raise ValueError where a manifest does not say what the weights of a tenant are."""
    files, model = manifest["files"], manifest["model"]
    if not (
        _is(files, dict)
        and _is(files.get(WEIGHTS), str)
        and files.keys() == {WEIGHTS}
        and _is(model, dict)
        and _is(model.get("name"), str)
        and _is(manifest["architecture"], str)
        and _are(manifest["weights"], str)
    ):
        raise ValueError("what it says of a tenant cannot be")


def _is(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _are(values: Any, kind: Any) -> bool:
    return _is(values, list) and all(_is(value, kind) for value in values)


def _is_spec(entry: Any) -> bool:
    return (
        _is(entry, dict)
        and _is(entry.get("name"), str)
        and _are(entry.get("shape"), int)
        and _is(entry.get("dtype"), str)
    )


def _is_library(entry: Any) -> bool:
    return (
        _is(entry, dict)
        and all(_is(entry.get(key), str) for key in ("name", "title"))
        and _is(entry.get("version"), str | None)
        and _are(entry.get("calls"), str)
    )
