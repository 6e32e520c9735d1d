"""What is profiled: a model with its default schedules, or the artifact of a run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tunerd.artifacts.manifest import MANIFEST, Manifest, check_files, read_variants
from tunerd.errors import InputError
from tunerd.frontend.model import FixedModel, read_model
from tunerd.frontend.onnx.shapes import Shape
from tunerd.records.schema import STORE_NAME
from tunerd.studies.profile.folder import ARTIFACTS
from tunerd.vocabulary import TargetSpec, TensorSpec


@dataclass(frozen=True)
class Subject:
    """A model for some batches. Of a model the artifacts are compiled when they are needed."""

    name: str
    digest: str  # of the model's file, or of the artifact's files
    is_tuned: bool
    target_kind: str  # "" for a model, which is compiled for any
    models: tuple[tuple[int, FixedModel], ...] = ()  # by batch
    artifact: tuple[int, Path] | None = None
    tuned_for: tuple[int, ...] = ()  # shares, of an artifact

    @property
    def batches(self) -> tuple[int, ...]:
        if self.artifact is not None:
            return (self.artifact[0],)
        return tuple(batch for batch, _ in self.models)

    @property
    def schedules(self) -> str:
        """Return which kernels are measured, in words."""
        if not self.is_tuned:
            return "default schedules"
        return "tuned at " + " and ".join(f"{pct}%" for pct in self.tuned_for)

    def facts(self) -> dict[str, Any]:
        return {"name": self.name, "digest": self.digest, "schedules": self.schedules}


def subject_of(
    path: Path,
    batches: Sequence[int] = (),
    *,
    shapes: Mapping[str, Shape] = MappingProxyType({}),
    dims: Mapping[str, int] = MappingProxyType({}),
) -> Subject:
    """Read an ONNX file, or take a run's artifact or an artifact folder, whichever `path` is.

    Raises as `subject_of_model` and `subject_of_artifact` do, and InputError for shapes of what
    has fixed ones.
    """
    if not (path.is_dir() or is_artifact(path)):
        return subject_of_model(path, batches, shapes=shapes, dims=dims)
    if shapes or dims:
        raise InputError(
            f"--shape and --dim fix the inputs of an ONNX file, and {path} has fixed ones; leave "
            "them out"
        )
    return subject_of_artifact(path, batches)


def subject_of_model(
    path: Path,
    batches: Sequence[int] = (),
    *,
    shapes: Mapping[str, Shape] = MappingProxyType({}),
    dims: Mapping[str, int] = MappingProxyType({}),
    precision: str = "",
    io_precision: str = "",
    constants: Mapping[str, float] = MappingProxyType({}),
) -> Subject:
    """Read an ONNX file for each batch, the exported one if none is named.

    precision: fp32, tf32, fp16 or bf16, that kernels compute in; "": as exported.
    io_precision: fp32 or fp16, that inputs and outputs have; "": the file's.
    constants: numbers of inputs that always have them.

    Raises ModelError where the file cannot be used, also where its graph does not allow a batch.
    """
    models = []
    wanted: list[int | None] = [*sorted(set(batches))] or [None]
    for batch in wanted:
        model = read_model(
            path,
            shapes=shapes,
            dims=dims,
            batch=batch,
            precision=precision,
            io_precision=io_precision,
            constants=constants,
        )
        models.append((batch_of(model.inputs) if batch is None else batch, model))
    # One digest for any batches: another call may add one.
    with path.open("rb") as file:
        content = hashlib.file_digest(file, "sha256")
    content.update(repr((sorted(shapes.items()), sorted(dims.items()))).encode())
    # Nothing where they are as exported, as in older profiles.
    io = f" io {io_precision}" if io_precision else ""
    content.update(f"{precision}{io}{sorted(constants.items()) or ''}".encode())
    return Subject(models[0][1].name, content.hexdigest(), False, "", tuple(models))


def subject_of_artifact(folder: Path, batches: Sequence[int] = ()) -> Subject:
    """Take a run's artifact or an artifact folder; it has the one batch that it was compiled for.

    Raises LoadError where it is not whole, and InputError where another batch is wanted.
    """
    if (folder / STORE_NAME).is_file():
        folder = folder / "artifact"
    variants = read_variants(folder)
    check_files(folder, variants)
    first = variants[0]
    batch = batch_of(
        [TensorSpec(**{**spec, "shape": tuple(spec["shape"])}) for spec in first["inputs"]]
    )
    if set(batches) - {batch}:
        raise InputError(
            f"--batches: {folder} is compiled for batch {batch} and has no other; profile the ONNX "
            "file, or tune at each batch and profile each run"
        )
    return Subject(
        name=str(first["model"]["name"]),
        digest=_digest(variants),
        is_tuned=any(t.get("origin") != "default" for v in variants for t in v.get("tasks", ())),
        target_kind=str(first["target"]["kind"]),
        artifact=(batch, folder.resolve()),
        tuned_for=tuple(int(v["share"]["pct"]) for v in variants),
    )


def is_artifact(path: Path) -> bool:
    """Say whether a path is a run or an artifact, and no model."""
    return (path / STORE_NAME).is_file() or (path / MANIFEST).is_file()


def artifacts_of(
    subject: Subject, target: TargetSpec, root: Path, *, say: Callable[[str], None]
) -> dict[int, Path]:
    """Return an artifact for each batch; a model is compiled, once, with its default schedules."""
    if subject.artifact is not None:
        return dict([subject.artifact])
    compiled = {}
    for batch, model in subject.models:
        folder = root.resolve() / ARTIFACTS / f"batch-{batch}"
        if not (folder / MANIFEST).is_file():
            say(f"compiling {subject.name} for batch {batch} with its default schedules")
            _compile_default(model, target, folder)
        check_files(folder, read_variants(folder))
        compiled[batch] = folder
    return compiled


def batch_of(inputs: Sequence[TensorSpec]) -> int:
    """Return the leading dimension of the first input that has one."""
    return next((spec.shape[0] for spec in inputs if spec.shape), 1)


def _compile_default(fixed: FixedModel, target: TargetSpec, folder: Path) -> None:
    from tunerd.artifacts.compile import compile_artifact
    from tunerd.frontend.model import simplified
    from tunerd.frontend.relax.lowering import lower
    from tunerd.frontend.tasks import extract_tasks

    model = simplified(fixed)
    lowered = lower(model, target)
    tasks = extract_tasks(lowered, target)
    compile_artifact(lowered, tasks, {}, target, folder, model=model, pct=100)


def _digest(variants: Sequence[Manifest]) -> str:
    files = [sorted(v["files"].items()) for v in variants]
    return hashlib.sha256(repr(files).encode()).hexdigest()
