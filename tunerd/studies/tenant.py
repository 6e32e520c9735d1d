"""One more tenant of an artifact that serves several: the weights of another ONNX file.

The file is lowered as the artifact's own was, and is a tenant where nothing but the weights is
different: then its kernels are there already, tuned. What is left is a folder with the weights, in
the order and the types in which the device has them, that `SuperModel.add` takes.
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunerd.artifacts.compile import write_json, write_piece, written_beside
from tunerd.artifacts.loading import load
from tunerd.artifacts.manifest import (
    COUNTERS,
    LIBRARY,
    MANIFEST,
    TENANT_VERSION,
    WEIGHTS,
    Manifest,
    read_all_variants,
    sealed,
    sha256_of,
)
from tunerd.artifacts.super_model import SuperModel
from tunerd.errors import InputError, WrongResultError
from tunerd.frontend.kernels import Kernels, kernels_of
from tunerd.frontend.model import read_model
from tunerd.frontend.onnx.io_types import io_precision_of
from tunerd.frontend.relax.precision import narrowed
from tunerd.frontend.relax.relax_graph import SUFFIX
from tunerd.frontend.tasks import architecture_of
from tunerd.records.paths import Paths
from tunerd.runs.finals.verify import expected_of
from tunerd.system.version import __version__
from tunerd.vocabulary import AS_EXPORTED, Arrays, TargetSpec, to_json
from tunerd.vocabulary.outcome import Verification
from tunerd.vocabulary.verdict import Verdict

if TYPE_CHECKING:
    from tunerd.artifacts.loading import LoadedModel


@dataclass(frozen=True)
class Tenant:
    """The folder of a tenant's weights. verification: None where nobody asked for it."""

    folder: Path
    name: str
    weight_bytes: int
    verification: Verification | None


def make_tenant(model: Path, like: Path, to: Path, *, verify: bool = True) -> Tenant:
    """Write the weights of a model for an artifact; compare what it computes with its reference.

    Args:
        model: an ONNX file of the architecture of the artifact's own.
        like: the artifact, or the folder of the run that left it.
        verify: whether to run it, for which the artifact's device is to be here.

    Raises ModelError and InputError for a model that is none of the artifact's architecture,
    LoadError for an artifact that is none, or serves one model, WrongResultError where the outputs
    are wrong: then nothing is left. FolderError where `to` holds something else.
    """
    artifact = Paths(like).artifact if (Paths(like).artifact / MANIFEST).is_file() else like
    variants = read_all_variants(artifact)
    said = variants[0]
    if "tenants" not in said:
        raise InputError(
            f"{artifact} serves one model; tune its model with --tenants to have one that serves "
            "several"
        )
    kernels = _kernels_like(model, artifact, said)
    weights: Arrays = dict(kernels.lowered.weights)
    casts = {name: of for variant in variants for name, of in variant["casts"].items()}
    weights |= {name: narrowed(weights[origin], dtype) for name, (origin, dtype) in casts.items()}
    with written_beside(to) as part:
        write_piece(weights, part / WEIGHTS)
        manifest = {
            "format_version": TENANT_VERSION,
            "created_at": time.time(),
            "files": {WEIGHTS: sha256_of(part / WEIGHTS)},
            "model": {"name": kernels.model.name, "digest": kernels.model.digest},
            "precision": said["precision"],
            "architecture": said["architecture"],
            "weights": list(weights),
            "libraries": libraries_of(variants),
            "versions": {"tunerd": __version__, "tvm": importlib.metadata.version("apache-tvm")},
        }
        write_json(part / MANIFEST, sealed(manifest))
        verification = _verified(kernels, artifact, part) if verify else None
        if verification is not None:
            manifest["verification"] = to_json(verification)
            write_json(part / MANIFEST, sealed(manifest))
    size = sum(weight.nbytes for weight in weights.values())
    return Tenant(to, kernels.model.name, size, verification)


def libraries_of(variants: Sequence[Manifest]) -> dict[str, str]:
    """Return what a tenant's manifest says of the kernels that it was made like."""
    return {str(variant["tenants"]): variant["files"][LIBRARY] for variant in variants}


def _kernels_like(path: Path, artifact: Path, said: Manifest) -> Kernels:
    """Lower a model as an artifact's own was; InputError where it becomes something else."""
    precision = said["precision"] if said["precision"] != AS_EXPORTED else ""
    shapes = {spec["name"]: tuple(spec["shape"]) for spec in said["inputs"]}
    target = TargetSpec(said["target"]["kind"], said["target"]["json"])
    dtypes = [spec["dtype"] for spec in (*said["inputs"], *said["outputs"])]
    io_precision = "" if path.suffix == SUFFIX else io_precision_of(dtypes)
    model = read_model(path, shapes=shapes, precision=precision, io_precision=io_precision)
    kernels = kernels_of(model, target)
    if architecture_of(kernels.lowered) == said["architecture"]:
        return kernels
    raise InputError(
        f"{path} is not of the architecture of {artifact}: {_difference(kernels, said)}; tune it "
        "by itself"
    )


def _difference(kernels: Kernels, said: Manifest) -> str:
    """Say what makes another architecture of a model."""
    for key, specs in (("inputs", kernels.model.inputs), ("outputs", kernels.model.outputs)):
        if to_json(specs) != said[key]:
            return f"its {key} are {_listed(to_json(specs))}, and there {_listed(said[key])}"
    known = {task["task_id"] for task in said["tasks"]}
    other = [t.name for t in kernels.tasks if t.for_tenants(said["tenants"]).task_id not in known]
    if other:
        return f"{len(other)} of its kernels are others, as {other[0]}"
    count = len(kernels.lowered.weights)
    casts: Mapping[str, Any] = said["casts"]
    there = {casts[name][0] if name in casts else name for name in said["weights"]} - {COUNTERS}
    if count != len(there):
        return f"it has {count} weights and that one {len(there)}, where equal ones count once"
    return "constants inside of its kernels are others, or its kernels are called in another order"


def _listed(specs: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{s['name']} ({s['dtype']}{list(s['shape'])})" for s in specs)


def _verified(kernels: Kernels, artifact: Path, folder: Path) -> Verification:
    """Compare a tenant with its reference; WrongResultError where it disagrees."""
    loaded: LoadedModel = load(artifact)
    assert isinstance(loaded, SuperModel)
    name = f"{kernels.model.name} "  # which may be the name of the artifact's own, too
    loaded.add(name, folder)
    found = expected_of(kernels.model).verify(lambda inputs: loaded.run([(name, inputs)])[0])
    if found.verdict is Verdict.WRONG:
        raise WrongResultError(
            f"{kernels.model.name} as a tenant of {artifact} is wrong: {found.message}; nothing "
            "was written"
        )
    return found
