"""Models of one architecture, each with weights of its own: exported once, tuned once, made all.

    PYTHONPATH=.:scripts python3 -m lab.colocation.tenants --model resnet50 --share 25 --count 4

Exports one model and draws the weights of the others from it, tunes the first for the share with
`tunerd tune`, and gives its kernels the weights of the others: nothing is searched, compiled or
verified again. What is there is not made again. With --out runs/colocation it leaves

    resnet50-0.onnx, resnet50-1.onnx, ...    with a larger batch resnet50-b64-0.onnx
    resnet50-fp16-25/                        the run, and in it tenant-0, tenant-1, ...: artifacts
    resnet50-fp16-25-by-8/                   with --by 8 the run of kernels for eight at once; of
                                             --by 1,2,4,8 resnet50-fp16-25-by-1x2x4x8, whose
                                             artifact has kernels for each of these numbers. The
                                             other tenants are artifacts of another share, or
                                             weights in this folder where there are none
    resnet50-fp16-25.log                     what `tunerd tune` said
    kernels/resnet50-fp16-25/                its artifact without the weights, a MB: where this is
                                             brought along, the kernels are not tuned again

and says how many waves over the share's SMs a launch of its kernels is, on average.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lab.colocation.steps import say
from tunerd.colocation.planning.features import at_share, features_of

RUNS = Path("runs/colocation")  # where recipes/colocation look
KERNELS = "kernels"  # the folder beside runs where artifacts are without weights
TOKENS, WIDTH, HEADS, LAYERS = 128, 768, 12, 12  # of the encoder
TUNE_SECS = 120.0  # of one `tunerd tune`, at most twice as long, or so for each number of tenants
MAKE_SECS = 180.0  # of an export, or of making all artifacts of a run


def build(name: str, seed: int, batch: int = 1) -> tuple[Any, Any]:
    """Return a model of torchvision, or `encoder`, in evaluation mode, and its input."""
    import torch

    torch.manual_seed(seed)
    if name == "encoder":
        layer = torch.nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, batch_first=True, activation="gelu", dropout=0.0
        )
        encoder = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        with torch.no_grad():  # its layers are copies of one, and weights that are equal are one
            for weights in encoder.parameters():
                weights.add_(torch.randn_like(weights), alpha=0.02)
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
    Raises RuntimeError for a step that failed or took too long.
    """
    folder.mkdir(parents=True, exist_ok=True)
    took: dict[str, float] = {}
    run = kind.run(folder)

    @contextmanager
    def step(name: str) -> Iterator[None]:
        say(f"{run.name}: {name}")
        since = time.monotonic()
        yield
        took[name] = time.monotonic() - since
        say(f"{run.name}: {name} took {took[name]:.1f} s")

    with step("export"):
        files = exported(kind.model, count, folder, batch=kind.batch)
    with step("tune"):
        tuned(files[0], run, pct=kind.pct, precision=kind.precision, budget=budget, by=kind.by)
        keep(run, folder / KERNELS / run.name)
    with step("compile"):
        if kind.by:
            folders = [run / "artifact", *(_alike(kind, count, folder) or joined(files[1:], run))]
        else:
            folders = siblings(files, run)
    return folders, took


def exported(name: str, count: int, folder: Path, *, batch: int = 1) -> list[Path]:
    """Return the models as ONNX files, each with weights of its own."""
    stem = Kind(name, 100, batch=batch).stem
    first, *others = files = [folder / f"{stem}-{seed}.onnx" for seed in range(count)]
    if not first.exists():
        _all_at_once([functools.partial(export, name, 0, batch, first)])
    jobs = [
        functools.partial(redraw, first, seed, file)
        for seed, file in enumerate(others, start=1)
        if not file.exists()
    ]
    _all_at_once(jobs)
    return files


def redraw(source: Path, seed: int, path: Path) -> None:
    """Write a model with other weights: those of each tensor, in another order.

    So they are distributed as they were: variances stay positive, and outputs in their range.
    """
    import onnx
    from onnx import numpy_helper

    proto, rng = onnx.load(str(source)), np.random.default_rng(seed)
    for tensor in proto.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if values.dtype.kind == "f":
            drawn = rng.permutation(values.ravel()).reshape(values.shape)
            tensor.CopyFrom(numpy_helper.from_array(drawn, tensor.name))
    partial = path.with_suffix(".partial")
    onnx.save(proto, str(partial))
    partial.rename(path)


def tuned(
    onnx: Path, run: Path, *, pct: int, precision: str, budget: str, by: Sequence[int] = ()
) -> None:
    """Tune a model for a share into a run folder, or take the kernels that were kept of it.

    Those of an earlier tunerd, which had other kernels, are left there. Raises RuntimeError with
    what tunerd said where there is no artifact then.
    """
    if (run / "artifact").is_dir():
        return
    kept = run.parent / KERNELS / run.name
    if kept.is_dir():
        try:
            unpacked(onnx, kept, run)
        except RuntimeError as error:
            say(f"{error}; it is tuned anew")
        else:
            return
    command = ["tune", str(onnx), "--gpu-pct", str(pct), "--precision", precision]
    command += ["--budget", budget, "--out", str(run)]
    command += ["--tenants", ",".join(map(str, by))] if by else []
    log = run.with_name(f"{run.name}.log")
    most_secs = TUNE_SECS * max(2, len(by))
    done = None
    with log.open("w") as said, suppress(subprocess.TimeoutExpired):  # then it can be gone on with
        done = subprocess.run(
            [sys.executable, "-m", "tunerd", *command], stdout=said, stderr=said,
            stdin=subprocess.DEVNULL, timeout=most_secs, check=False,
        )  # fmt: skip
    if not (run / "artifact").is_dir():
        ended = f"ended with {done.returncode}" if done else f"did not end in {most_secs:g} s"
        raise RuntimeError(f"tunerd tune {ended}: {log.read_text(errors='replace')[-800:]}")


def keep(run: Path, folder: Path) -> None:
    """Write a run's artifact without the weights that come with a model.

    Of one for several numbers of tenants that of each number, in a folder of its name.
    """
    from tunerd.artifacts.compile import write_weights
    from tunerd.artifacts.manifest import WEIGHTS, is_counter
    from tunerd.artifacts.weights import map_weights
    from tunerd.records.paths import Paths

    sizes = sorted(each for each in Paths(run).sizes.glob("*/") if Paths(each).artifact.is_dir())
    for of in sizes or [run]:
        to = folder / of.name if sizes else folder
        artifact = Paths(of).artifact
        shutil.copytree(artifact, to, ignore=shutil.ignore_patterns(WEIGHTS), dirs_exist_ok=True)
        weights = map_weights(artifact / WEIGHTS)
        write_weights({n: w for n, w in weights.items() if is_counter(n)}, to / WEIGHTS)


def unpacked(onnx: Path, kept: Path, run: Path) -> None:
    """Leave the artifact of a run whose kernels were kept, with a model's weights."""
    from tunerd.artifacts.manifest import MANIFEST
    from tunerd.artifacts.packing import pack_tenants
    from tunerd.records.paths import Paths

    to = Paths(run)
    if (kept / MANIFEST).exists():
        make_sibling(onnx, kept, to.artifact)
        return
    artifacts = {of: Paths(to.sizes / of.name).artifact for of in sorted(kept.glob("*/"))}
    for of, artifact in artifacts.items():
        make_sibling(onnx, of, artifact)
    pack_tenants([*artifacts.values()], to.artifact)


def siblings(files: Sequence[Path], run: Path) -> list[Path]:
    """Return artifacts of all models with the kernels of one's run: only the weights differ."""
    library = _library_of(run / "artifact")
    folders = [run / f"tenant-{seed}" for seed in range(len(files))]
    if not folders[0].exists():
        folders[0].symlink_to("artifact")
    jobs = [
        functools.partial(make_sibling, file, run / "artifact", folder)
        for file, folder in zip(files[1:], folders[1:], strict=True)
        if _library_of(folder) != library
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


def _alike(kind: Kind, count: int, folder: Path) -> list[Path]:
    """Return artifacts of another share that are of the architecture; none where one lacks."""
    from tunerd.artifacts.manifest import read_all_variants, read_tenant

    architecture = read_all_variants(kind.run(folder) / "artifact")[0]["architecture"]
    for run in sorted(folder.glob(f"{kind.stem}-{kind.precision}-*/")):
        found = [run / f"tenant-{seed}" for seed in range(1, count)]
        if all((one / "manifest.json").exists() for one in found) and all(
            read_tenant(one).get("architecture") == architecture for one in found
        ):
            return found
    return []


def _join(onnx: Path, run: Path, folder: Path) -> None:
    from tunerd.studies.tenant import make_tenant

    make_tenant(onnx, run, folder, verify=False)  # all of them on one GPU at once: afterwards


def make_sibling(onnx: Path, like: Path, folder: Path) -> None:
    """Write the artifact of a model that has another's kernels, whose weights need not be there.

    Raises RuntimeError for one that is not of its architecture.
    """
    from tunerd.artifacts.compile import write_json, write_piece, write_weights, written_beside
    from tunerd.artifacts.manifest import (
        MANIFEST,
        WEIGHTS,
        read_manifest,
        sealed,
        sha256_of,
    )
    from tunerd.artifacts.weights import map_weights
    from tunerd.frontend.kernels import kernels_of
    from tunerd.frontend.model import read_model
    from tunerd.frontend.relax.precision import narrowed
    from tunerd.frontend.tasks import architecture_of
    from tunerd.vocabulary import AS_EXPORTED, TargetSpec

    said = read_manifest(like)
    precision = said["precision"] if said["precision"] != AS_EXPORTED else ""
    target = TargetSpec(said["target"]["kind"], said["target"]["json"])
    kernels = kernels_of(read_model(onnx, precision=precision), target)
    if architecture_of(kernels.lowered) != said["architecture"]:
        raise RuntimeError(f"{onnx.name} is not of the architecture of {like}")
    own = kernels.lowered.weights
    weights = map_weights(like / WEIGHTS) | own  # counters are as they were
    weights |= {n: narrowed(own[of], dtype) for n, (of, dtype) in said["casts"].items()}
    with written_beside(folder) as part:
        for name in said["files"]:
            if name != WEIGHTS:
                shutil.copyfile(like / name, part / name)
        wrote = write_piece if "tenants" in said else write_weights
        wrote({name: weights[name] for name in said["weights"]}, part / WEIGHTS)
        manifest = said | {
            "created_at": time.time(),
            "files": said["files"] | {WEIGHTS: sha256_of(part / WEIGHTS)},
            "model": {"name": kernels.model.name, "digest": kernels.model.digest},
        }
        for of_the_other in ("verification", "end_to_end", "latencies"):
            manifest.pop(of_the_other, None)
        write_json(part / MANIFEST, sealed(manifest))


def _library_of(artifact: Path) -> str | None:
    """Return the sha256 of an artifact's kernels; None where there is none."""
    from tunerd.artifacts.manifest import LIBRARY, read_manifest

    if not (artifact / "manifest.json").exists():
        return None
    return str(read_manifest(artifact)["files"][LIBRARY])


def _all_at_once(jobs: Iterable[Callable[[], None]]) -> None:
    """Run jobs in a process each: exporting and lowering hold the interpreter.

    Raises what one of them does, and RuntimeError where they do not end.
    """
    todo = list(jobs)
    if not todo:
        return
    deadline = time.monotonic() + MAKE_SECS
    # What is left when one has failed is ended with the pool.
    spawning = multiprocessing.get_context("spawn")  # libraries that are loaded may have threads
    with spawning.Pool(min(len(todo), len(os.sched_getaffinity(0)))) as pool:
        for job in [pool.apply_async(each) for each in todo]:
            try:
                job.get(max(0.0, deadline - time.monotonic()))
            except multiprocessing.TimeoutError:
                raise RuntimeError(f"a process needed over {MAKE_SECS:g} s") from None


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
