"""Models of one architecture, each with weights of its own: exported, tuned once, compiled all.

Made once in a folder; what is there is not made again.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

TOKENS, WIDTH, HEADS, LAYERS = 128, 768, 12, 12  # of the encoder


def build(name: str, seed: int, batch: int = 1) -> tuple[Any, Any]:
    """Return a model of torchvision, or `encoder`, in evaluation mode, and its input."""
    import torch

    torch.manual_seed(seed)
    if name == "encoder":
        layer = torch.nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, batch_first=True, activation="gelu", dropout=0.0
        )
        encoder = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        return encoder.eval(), torch.randn(batch, TOKENS, WIDTH)
    import torchvision

    model = getattr(torchvision.models, name)(weights=None).eval()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):  # as of a trained model: not the identity
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    return model, torch.randn(batch, 3, 224, 224)


def export(name: str, seed: int, path: Path) -> None:
    import torch

    torch.set_num_threads(1)
    torch.backends.mha.set_fastpath_enabled(False)
    model, x = build(name, seed)
    partial = path.with_suffix(".partial")
    with torch.no_grad():
        torch.onnx.export(
            model, (x,), str(partial), input_names=["x"], output_names=["y"], dynamo=True,
            external_data=False, opset_version=18,
        )  # fmt: skip
    partial.rename(path)


def exported(name: str, count: int, folder: Path) -> list[Path]:
    """Return the models as ONNX files, each with a seed of its own."""
    files = [folder / f"{name}-{seed}.onnx" for seed in range(count)]
    jobs = [
        functools.partial(export, name, seed, file)
        for seed, file in enumerate(files)
        if not file.exists()
    ]
    _all_at_once(jobs)
    return files


def tuned(onnx: Path, run: Path, *, pct: int, precision: str, budget: str) -> float:
    """Tune a model for a share into a run folder; return the seconds, 0 if it was tuned before.

    Raises RuntimeError with what tunerd said where there is no artifact then.
    """
    if (run / "artifact").is_dir():
        return 0.0
    command = ["tune", str(onnx), "--gpu-pct", str(pct), "--precision", precision]
    command += ["--budget", budget, "--out", str(run)]
    since = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "tunerd", *command], capture_output=True, text=True, check=False
    )
    if not (run / "artifact").is_dir():
        raise RuntimeError(f"tunerd tune ended with {done.returncode}: {done.stderr[-800:]}")
    return time.monotonic() - since


def compiled(files: Sequence[Path], run: Path, *, pct: int, precision: str) -> list[Path]:
    """Return artifacts of all models with the winners of one's run: their tasks are the same."""
    folders = [run / f"tenant-{seed}" for seed in range(len(files))]
    jobs = [
        functools.partial(_compile, file, run, folder, pct, precision)
        for file, folder in zip(files, folders, strict=True)
        if not (folder / "manifest.json").exists()
    ]
    _all_at_once(jobs)
    return folders


def _compile(onnx: Path, run: Path, folder: Path, pct: int, precision: str) -> None:
    import tunerd
    from tunerd.artifacts.compile import compile_artifact
    from tunerd.artifacts.manifest import read_manifest
    from tunerd.frontend.kernels import kernels_of
    from tunerd.frontend.model import read_model
    from tunerd.vocabulary import CapProof, TargetSpec

    said = read_manifest(run / "artifact")
    target = TargetSpec(said["target"]["kind"], said["target"]["json"])
    tuned_run = tunerd.open_run(run)
    trials = tuned_run.trials()
    recipes = dict(zip(trials["candidate_id"], trials["trace_json"], strict=True))
    winners = {
        task.task_id: replace(task.winner, recipe=recipes[task.winner.candidate_id])
        for task in tuned_run.tasks
        if task.is_tuned
    }
    kernels = kernels_of(read_model(onnx, precision=precision), target)
    if lacking := set(winners) - {task.task_id for task in kernels.tasks}:
        raise RuntimeError(f"{onnx.name} has not the tasks of the tuned model: {sorted(lacking)}")
    proofs = [CapProof(**proof) for proof in said["share"]["proofs"]]
    compile_artifact(
        kernels.lowered, kernels.tasks, winners, target, folder,
        model=kernels.model, pct=pct, proofs=proofs,
    )  # fmt: skip


def _all_at_once(jobs: Iterable[Callable[[], None]]) -> None:
    """Run jobs in a process each: exporting and compiling hold the interpreter."""
    todo = list(jobs)
    if not todo:
        return
    with ProcessPoolExecutor(len(todo)) as pool:
        for job in [pool.submit(each) for each in todo]:
            job.result()
