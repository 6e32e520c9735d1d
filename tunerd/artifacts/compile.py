"""Compile a model with the winners of its tasks into an artifact folder.

What the folder holds is in `loading`, what its manifest says in `manifest`. It is written beside
its place and renamed into it: a run that is killed leaves no half artifact.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import os
import shutil
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from tunerd.artifacts.libraries import library_needs
from tunerd.artifacts.manifest import (
    COUNTERS,
    FORMAT_VERSION,
    LIBRARY,
    MANIFEST,
    SAMPLE,
    SLOTS,
    TENANTS_VERSION,
    WEIGHTS,
    read_manifest,
    sealed,
    sha256_of,
)
from tunerd.artifacts.scheduling import Scheduled, is_tuned, schedule
from tunerd.artifacts.weights import ALIGNMENT, aligned
from tunerd.builder.build import build_problem
from tunerd.builder.library import export_library, load_tvm
from tunerd.builder.lowering import tir_pipeline
from tunerd.builder.objects import OPT_LEVEL, Objects
from tunerd.candidates.registers.intrinsic import uses_tiles
from tunerd.errors import FolderError, HostError
from tunerd.frontend.relax.precision import narrowed
from tunerd.frontend.tasks import architecture_of
from tunerd.system import amx
from tunerd.system.files import write_whole
from tunerd.system.targets import cpu_features
from tunerd.system.version import __version__
from tunerd.vocabulary import (
    AS_EXPORTED,
    DEFAULT_SOURCE,
    SLOT_BYTES,
    Arrays,
    Candidate,
    CapProof,
    Model,
    TargetSpec,
    Task,
    TensorSpec,
    origin_of,
    to_json,
)
from tunerd.vocabulary.outcome import Outcome, TriedPrecision

if TYPE_CHECKING:
    from concurrent.futures import Future

    from tvm.ir import IRModule
    from tvm.tirx import PrimFunc

    from tunerd.frontend.relax.lowering import Lowered


def compile_artifact(
    lowered: Lowered,
    tasks: Sequence[Task],
    winners: Mapping[str, Candidate],
    target: TargetSpec,
    folder: Path,
    *,
    model: Model,
    pct: int,
    proofs: Sequence[CapProof] = (),
    sample: Arrays | None = None,
    tenants: int | None = None,
    objects: Objects | None = None,
) -> Path:
    """Compile `lowered` with the winner of each task, by task_id, and write the artifact folder.

    With `tenants` it serves so many at once, each with weights of its own: `artifacts.tenants` says
    how. The tasks are those for as many tenants.

    A task without a winner, or whose winner is its default, gets the default schedule; no winners
    at all give the default model. `pct` and `proofs` say which share was asked for and which was
    obtained. `sample` has inputs on which the model is to be timed, instead of random ones. Of
    several models that are compiled with the same `objects`, each kernel for CPUs is compiled once.
    An artifact that is already in `folder` is replaced.

    Raises InputError where a winner fits no kernel of the model, FolderError where `folder` holds
    something else, and HostError where this machine cannot compile for the target.
    """
    if problem := build_problem(target):
        raise HostError(problem)
    scheduled = schedule(lowered.mod, tasks, winners, target, tenants=tenants)
    hits = scheduled.hits
    with written_beside(folder) as part:
        with contextlib.ExitStack() as stack:
            objects = objects or stack.enter_context(Objects())
            storage_bytes = _compile_library(scheduled, target, part / LIBRARY, objects)
        casts = {n: narrowed(lowered.weights[o], t) for n, (o, t) in scheduled.casts.items()}
        laid_out = {n: own.of(lowered.weights[o]) for n, (o, own) in scheduled.layouts.items()}
        kept = {n: w for n, w in lowered.weights.items() if n not in scheduled.gone}
        weights = {**kept, **casts, **laid_out}
        of_tenants: dict[str, Any] = {}
        if tenants is None:
            weights |= scheduled.counters
        else:
            of_tenants = {"tenants": tenants, "counters": _counters_entry(scheduled)}
        names = _weight_names(scheduled.mod, lowered.num_inputs, weights)
        write = write_weights if tenants is None else write_piece
        write({name: weights[name] for name in names}, part / WEIGHTS)
        files = [LIBRARY, WEIGHTS]
        if sample is not None:
            write_weights(sample, part / SAMPLE)
            files.append(SAMPLE)
        manifest = {
            "format_version": FORMAT_VERSION if tenants is None else TENANTS_VERSION,
            "created_at": time.time(),
            "files": {name: sha256_of(part / name) for name in files},
            "model": {"name": model.name, "digest": model.digest},
            "precision": model.precision or AS_EXPORTED,
            "notes": list(dict.fromkeys((*model.notes, *lowered.notes))),  # a run's has both
            "inputs": to_json(model.inputs),
            "outputs": to_json(model.outputs),
            "weights": names,
            "casts": dict(scheduled.casts),
            "layouts": {
                n: {"of": o, "shape": list(lowered.weights[o].shape), **to_json(own)}
                for n, (o, own) in scheduled.layouts.items()
            },
            "architecture": architecture_of(lowered),
            **of_tenants,
            "storage_bytes": storage_bytes,
            **_launches_entry(scheduled, target),
            "target": to_json(target),
            "share": _share(pct, proofs),
            "versions": {
                "tunerd": __version__,
                "tvm": importlib.metadata.version("apache-tvm"),
                "tvm-ffi": importlib.metadata.version("apache-tvm-ffi"),
            },
            "libraries": library_needs(scheduled.calls),
            "cpu_features": [
                *cpu_features(target),
                *(amx.FEATURES if uses_tiles(scheduled.mod) else ()),
            ],
            "hit_rate": sum(is_tuned(winners.get(t.task_id)) for t in tasks) / max(len(tasks), 1),
            "tasks": [_task_entry(task, winners.get(task.task_id), hits) for task in tasks],
        }
        write_json(part / MANIFEST, sealed(manifest))
    return folder


def finish_manifest(
    folder: Path, outcome: Outcome, *, precision_tried: Sequence[TriedPrecision] = ()
) -> None:
    """Add to an artifact's manifest how the run ended: each task's medians, the verdicts.

    And, where the precision was chosen, which ones were tried.
    """
    manifest = read_manifest(folder)
    ended = {task.task_id: task for task in outcome.tasks}
    for entry in manifest["tasks"]:
        task = ended.get(entry["task_id"])
        if task is not None:
            entry |= {
                "trials": task.trials,
                "failed": task.failed,
                "default_secs": task.default_secs,
                "best_secs": task.best_secs,
                "note": task.note,
            }
    manifest["verification"] = to_json(outcome.verification)
    manifest["end_to_end"] = to_json(outcome.end_to_end)
    manifest["latencies"] = [
        {
            "name": latency.name,
            "median_secs": median(latency.run_secs) if latency.run_secs else None,
            "samples": len(latency.run_secs),
        }
        for latency in outcome.latencies
    ]
    if precision_tried:
        manifest["precision_tried"] = to_json(tuple(precision_tried))
    manifest["finished_at"] = time.time()
    write_json(folder / MANIFEST, sealed(manifest))


# --- the library --------------------------------------------------------------------------------


def _compile_library(scheduled: Scheduled, target: TargetSpec, path: Path, objects: Objects) -> int:
    """Write the library, and return the bytes of the storage between its kernels, as planned."""
    tvm = load_tvm()
    from tvm import relax

    if target.is_cuda:
        from tvm.relax.backend.cuda import pipeline
    else:
        from tvm.relax.backend.cpu_generic import pipeline
    tvm_target = tvm.target.Target(target.json)
    planned: list[int] = []
    lower: list[Any] = []
    for each in (
        *pipeline.dataflow_lower_passes(tvm_target),
        *pipeline.finalize_passes(tvm_target),
    ):
        # The frontend has made views of reshapes; TVM's pass fails on functions that call kernels.
        if str(each.info.name) != "RewriteDataflowReshape":
            lower.append(each)
        if str(each.info.name) == "StaticPlanBlockMemory":
            lower.append(_counting_storage(planned))
    # One graph launch instead of a launch per kernel: short kernels would time the host.
    config = {"relax.backend.use_cuda_graph": True} if target.is_cuda else {}
    with tvm_target, tvm.transform.PassContext(opt_level=OPT_LEVEL, config=config):
        mod = tvm.transform.Sequential(lower)(scheduled.mod)
        apart: list[Future[bytes]] = []
        if not target.is_cuda:
            mod, functions = _first_kernel_alone(mod)
            apart = objects.of(functions, tvm_target)
        executable = relax.build(
            mod,
            target=tvm_target,
            relax_pipeline=None,
            tir_pipeline=tir_pipeline() if target.is_cuda else "default",
        )
    arch = str(tvm_target.attrs["arch"]) if target.is_cuda else None
    export_library(
        executable,
        path,
        arch=arch,
        threads=len(os.sched_getaffinity(0)),
        kernels=scheduled.kernels,
        objects=[each.result() for each in apart],
    )
    return sum(planned)


def _first_kernel_alone(mod: IRModule) -> tuple[IRModule, list[PrimFunc]]:
    """Return a module with its first kernel alone, since TVM links none without, and the others."""
    import tvm
    from tvm.tirx import PrimFunc

    kept: dict[Any, Any] = {}
    others: list[PrimFunc] = []
    has_one = False
    for var, function in mod.functions_items():
        if isinstance(function, PrimFunc) and has_one:
            others.append(function)
        else:
            kept[var] = function
            has_one = has_one or isinstance(function, PrimFunc)
    return tvm.IRModule(kept, attrs=mod.attrs), others


def _counting_storage(planned: list[int]) -> Any:
    """Return a pass that changes nothing and adds the bytes of each storage to `planned`."""
    import tvm
    from tvm import relax

    alloc = tvm.ir.Op.get("relax.memory.alloc_storage")

    def visit(node: Any) -> None:
        if isinstance(node, relax.Call) and node.op.same_as(alloc):
            shape, dtype = node.args[0], np.dtype(str(node.args[3].value))
            planned.append(math.prod(map(int, shape.values)) * dtype.itemsize)

    def count(mod: IRModule, _context: Any) -> IRModule:
        for _, func in mod.functions_items():
            if isinstance(func, relax.Function):
                relax.analysis.post_order_visit(func, visit)
        return mod

    return tvm.transform.module_pass(count, opt_level=0, name="CountStorage")


# --- the folder --------------------------------------------------------------------------------


def write_weights(weights: Arrays, path: Path, *, alignment: int = ALIGNMENT) -> None:
    """Write tensors as `tunerd.artifacts.weights.map_weights` reads them.

    alignment: of each, in bytes.
    """
    entries, offset = [], 0
    for name, array in weights.items():
        entries.append(
            {
                "name": name,
                "dtype": str(array.dtype),
                "shape": list(array.shape),
                "offset": offset,
                "bytes": array.nbytes,
            }
        )
        offset += aligned(array.nbytes, alignment)
    header = json.dumps({"tensors": entries}, separators=(",", ":")).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.write(b"\0" * (aligned(8 + len(header)) - 8 - len(header)))
        for array in weights.values():
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            file.write(b"\0" * (aligned(array.nbytes, alignment) - array.nbytes))


def write_piece(weights: Arrays, path: Path) -> None:
    """Write a tenant's weights as they lie on the device: in one copy they are there."""
    write_weights(weights, path, alignment=SLOT_BYTES)


def _weight_names(mod: IRModule, num_inputs: int, weights: Arrays) -> list[str]:
    names = [str(param.name) for param in mod["main"].params[num_inputs:]]
    names = [name for name in names if name in weights or name not in (SLOTS, COUNTERS)]
    if sorted(names) != sorted(weights):
        raise ValueError(f"parameters {names} are not the weights {sorted(weights)}")
    return names


def _counters_entry(scheduled: Scheduled) -> Any:
    """Return what a manifest says of the tensor that kernels count in."""
    found = scheduled.counters.get(COUNTERS)
    if found is None:
        return None
    return to_json(TensorSpec(COUNTERS, found.shape, str(found.dtype)))


def _launches_entry(scheduled: Scheduled, target: TargetSpec) -> dict[str, Any]:
    """Return what a manifest says of the launches on a GPU."""
    if not target.is_cuda:
        return {}
    from tunerd.artifacts.launches import launches_of

    symbols = {kernel.symbol for kernel in scheduled.kernels}
    return {"launches": launches_of(scheduled.mod, symbols)}


def _share(pct: int, proofs: Sequence[CapProof]) -> dict[str, Any]:
    first = proofs[0] if proofs else None
    return {
        "pct": pct,
        "sm_counts": sorted({proof.sm_count for proof in proofs}),
        "device_sm_count": first.device_sm_count if first else None,
        "mechanism": first.mechanism if first else None,
        "device": first.device if first else None,
        "driver": first.driver if first else None,
        "proofs": to_json(tuple(proofs)),
    }


def _task_entry(task: Task, winner: Candidate | None, hits: Mapping[str, int]) -> dict[str, Any]:
    tuned = winner if winner is not None and is_tuned(winner) else None
    source = tuned.source if tuned else DEFAULT_SOURCE
    return {
        "task_id": task.task_id,
        "name": task.name,
        "weight": task.weight,
        "flops": task.flops,  # of one call; 0 where TVM cannot tell
        "source": source,
        "origin": origin_of(source),
        "candidate_id": tuned.candidate_id if tuned else None,
        "kernels": hits[task.task_id],  # functions of the model that are this task
    }


def write_json(path: Path, value: Any) -> None:
    """Write a manifest, on the disk when this returns."""
    write_whole(path, json.dumps(value, indent=1) + "\n")


@contextmanager
def written_beside(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that takes the place of `folder` when the block ends well.

    An artifact that is there is replaced; raises FolderError where something else is.
    """
    if folder.exists() and not (folder / MANIFEST).is_file() and any(folder.iterdir()):
        raise FolderError(
            f"{folder} holds files that are no artifact; name an empty or a new folder"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    part, old = (folder.with_name(f".{folder.name}.{end}") for end in ("part", "old"))
    for left_over in (part, old):  # of a run that was killed
        shutil.rmtree(left_over, ignore_errors=True)
    part.mkdir(mode=0o700)
    try:
        yield part
        if folder.exists():
            folder.rename(old)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
