#!/usr/bin/env python3
"""Models of one architecture, each with weights of its own: exported, tuned once, compiled all.

    PYTHONPATH=.:scripts python3 -m lab.colocation.tenants --model resnet50 --share 25 --count 4

Exports the model with so many seeds, tunes the first for the share with `tunerd tune`, and compiles
the others with the same winners. What is there is not made again. With --out runs/colocation it
leaves

    resnet50-0.onnx, resnet50-1.onnx, ...    with a larger batch resnet50-b64-0.onnx
    resnet50-fp16-25/                        the run, and in it tenant-0, tenant-1, ...: artifacts
    resnet50-fp16-25-by-8/                   with --by 8 the run of kernels for eight at once,
                                             and in it the weights of each as a tenant; of
                                             --by 1,2,4,8 resnet50-fp16-25-by-1x2x4x8, whose
                                             artifact has kernels for each of these numbers

and says how many waves over the share's SMs a launch of its kernels is, on average.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tunerd.colocation.planning.features import at_share, features_of

RUNS = Path("runs/colocation")  # where recipes/colocation look
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


def export(name: str, seed: int, batch: int, path: Path) -> None:
    import torch

    torch.set_num_threads(1)
    torch.backends.mha.set_fastpath_enabled(False)
    model, x = build(name, seed, batch)
    partial = path.with_suffix(".partial")
    with torch.no_grad():
        torch.onnx.export(
            model, (x,), str(partial), input_names=["x"], output_names=["y"], dynamo=True,
            external_data=False, opset_version=18,
        )  # fmt: skip
    partial.rename(path)


@dataclass(frozen=True)
class Kind:
    """What tenants have in common. pct: the share that they are tuned for."""

    model: str
    pct: int
    precision: str = "fp16"
    batch: int = 1
    by: tuple[int, ...] = ()  # models that one launch serves; of several numbers whichever fits

    @property
    def stem(self) -> str:
        return self.model if self.batch == 1 else f"{self.model}-b{self.batch}"

    def run(self, folder: Path) -> Path:
        name = f"{self.stem}-{self.precision}-{self.pct}"
        return folder / (f"{name}-by-{'x'.join(map(str, self.by))}" if self.by else name)


def made(
    kind: Kind, count: int, folder: Path, *, budget: str
) -> tuple[list[Path], dict[str, float]]:
    """Return the artifacts of so many tenants, and the seconds that each step took.

    Where a launch serves several, the first is that artifact, and the others are weights for it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    moments = [time.monotonic()]
    files = exported(kind.model, count, folder, batch=kind.batch)
    moments.append(time.monotonic())
    run = kind.run(folder)
    tuned(files[0], run, pct=kind.pct, precision=kind.precision, budget=budget, by=kind.by)
    moments.append(time.monotonic())
    if kind.by:
        folders = [run / "artifact", *joined(files[1:], run)]
    else:
        folders = compiled(files, run, pct=kind.pct, precision=kind.precision)
    moments.append(time.monotonic())
    took = [after - before for before, after in itertools.pairwise(moments)]
    return folders, dict(zip(("export", "tune", "compile"), took, strict=True))


def exported(name: str, count: int, folder: Path, *, batch: int = 1) -> list[Path]:
    """Return the models as ONNX files, each with a seed of its own."""
    stem = Kind(name, 100, batch=batch).stem
    files = [folder / f"{stem}-{seed}.onnx" for seed in range(count)]
    jobs = [
        functools.partial(export, name, seed, batch, file)
        for seed, file in enumerate(files)
        if not file.exists()
    ]
    _all_at_once(jobs)
    return files


def tuned(
    onnx: Path, run: Path, *, pct: int, precision: str, budget: str, by: Sequence[int] = ()
) -> None:
    """Tune a model for a share into a run folder.

    Raises RuntimeError with what tunerd said where there is no artifact then.
    """
    if (run / "artifact").is_dir():
        return
    command = ["tune", str(onnx), "--gpu-pct", str(pct), "--precision", precision]
    command += ["--budget", budget, "--out", str(run)]
    command += ["--tenants", ",".join(map(str, by))] if by else []
    done = subprocess.run(
        [sys.executable, "-m", "tunerd", *command], capture_output=True, text=True, check=False
    )
    if not (run / "artifact").is_dir():
        raise RuntimeError(f"tunerd tune ended with {done.returncode}: {done.stderr[-800:]}")


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


def joined(files: Sequence[Path], run: Path) -> list[Path]:
    """Return the weights of models as tenants of the artifact that a run left."""
    folders = [run / f"weights-{file.stem}" for file in files]
    jobs = [
        functools.partial(_join, file, run, folder)
        for file, folder in zip(files, folders, strict=True)
        if not (folder / "manifest.json").exists()
    ]
    _all_at_once(jobs)
    return folders


def _join(onnx: Path, run: Path, folder: Path) -> None:
    from tunerd.studies.tenant import make_tenant

    make_tenant(onnx, run, folder, verify=False)  # all of them on one GPU at once: afterwards


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


def numbers(text: str) -> tuple[int, ...]:
    """Read `8` or `1,2,4,8`; one model in a launch, alone, is none that serves several."""
    found = tuple(int(word) for word in text.split(","))
    return () if found == (1,) else found


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet50", help="of torchvision, or encoder")
    parser.add_argument("--share", type=int, default=25, help="to tune for, in percent")
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--count", type=int, default=1, help="of tenants")
    parser.add_argument("--by", type=numbers, default=(), help="models in a launch: 8, or 1,2,4,8")
    parser.add_argument("--budget", default="45s", help="of the search")
    parser.add_argument("--out", type=Path, default=RUNS)
    options = parser.parse_args()
    kind = Kind(options.model, options.share, options.precision, options.batch, options.by)
    folders, took = made(kind, options.count, options.out.resolve(), budget=options.budget)
    waves = at_share(features_of(folders[0]).named(), kind.pct)["waves"]
    said = [f"{step} {secs:.0f} s" for step, secs in took.items()]
    said += [f"{waves:.2g} waves a launch"] if waves else []
    print(f"{folders[0].parent}: {', '.join(said)}")


if __name__ == "__main__":
    main()
