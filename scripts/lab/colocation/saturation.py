#!/usr/bin/env python3
"""Saturate one GPU with eight models of one architecture, each with weights of its own.

    scripts/lab/colocation/saturation.py --model resnet50 --shares 100,25,12 --out FOLDER

Exports the model with eight seeds, tunes the first for each share with `tunerd tune`, and compiles
the others with the same winners: the tasks of all are the same. Then, in one process and in turns,
counts inferences per second of PyTorch in fp16 (as CUDA graphs one after another, on 2, 4 and 8
streams, and as batches of one model), and of the artifacts captured one after another, on streams,
and in green contexts of the shares, with inputs that stay on the device. Last, the engine's
policies under a closed load of `tunerd colocate bench`, whose inputs and outputs are copied.

Runs where PyTorch, torchvision and one NVIDIA GPU are. Writes saturation.json, with every sample
and the facts of the host, and saturation.txt. What was exported and tuned before is not made again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

TENANTS = 8
ROUNDS = 12
SAMPLE_SECS = 0.25
BURST = 4  # launches of each before a wait
TOKENS, WIDTH = 128, 768


# --- models ------------------------------------------------------------------------------------


def build(name: str, seed: int, batch: int = 1) -> tuple[Any, Any]:
    """Return a model in evaluation mode and its input."""
    import torch

    torch.manual_seed(seed)
    if name == "encoder":
        layer = torch.nn.TransformerEncoderLayer(
            WIDTH, 12, 4 * WIDTH, batch_first=True, activation="gelu", dropout=0.0
        )
        encoder = torch.nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
        return encoder.eval(), torch.randn(batch, TOKENS, WIDTH)
    import torchvision

    model = getattr(torchvision.models, name)(weights=None).eval()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):  # as of a trained model: not the identity
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    return model, torch.randn(batch, 3, 224, 224)


def export(name: str, seed: int, path: str) -> None:
    import torch

    torch.set_num_threads(1)
    torch.backends.mha.set_fastpath_enabled(False)
    model, x = build(name, seed)
    with torch.no_grad():
        torch.onnx.export(
            model, (x,), path, input_names=["x"], output_names=["y"], dynamo=True,
            external_data=False, opset_version=18,
        )  # fmt: skip


def compile_tenant(onnx: Path, run: Path, pct: int, folder: Path) -> None:
    """Compile a model with the winners of the run of another with the same tasks."""
    import tunerd
    from tunerd.artifacts.compile import compile_artifact
    from tunerd.artifacts.manifest import read_manifest
    from tunerd.frontend.kernels import kernels_of
    from tunerd.frontend.model import read_model
    from tunerd.vocabulary import CapProof, TargetSpec

    said = read_manifest(run / "artifact")
    target = TargetSpec(said["target"]["kind"], said["target"]["json"])
    tuned = tunerd.open_run(run)
    trials = tuned.trials()
    recipes = dict(zip(trials["candidate_id"], trials["trace_json"], strict=True))
    winners = {
        task.task_id: replace(task.winner, recipe=recipes[task.winner.candidate_id])
        for task in tuned.tasks
        if task.is_tuned
    }
    kernels = kernels_of(read_model(onnx, precision="fp16"), target)
    proofs = [CapProof(**proof) for proof in said["share"]["proofs"]]
    compile_artifact(
        kernels.lowered, kernels.tasks, winners, target, folder,
        model=kernels.model, pct=pct, proofs=proofs,
    )  # fmt: skip


def prepare(options: argparse.Namespace) -> dict[int, list[Path]]:
    """Return the tenants' artifacts for each share; make what is missing."""
    out = options.out
    files = [out / f"{options.model}-{seed}.onnx" for seed in range(TENANTS)]
    made: dict[int, list[Path]] = {}
    with ProcessPoolExecutor(TENANTS) as pool:
        jobs = [
            pool.submit(export, options.model, seed, str(path))
            for seed, path in enumerate(files)
            if not path.exists()
        ]
        for job in jobs:
            job.result()
    for pct in options.shares:
        run = out / f"run-{options.model}-{pct}"
        if not (run / "artifact").is_dir():
            command = ["tune", str(files[0]), "--gpu-pct", str(pct), "--precision", "fp16"]
            command += ["--budget", options.budget, "--out", str(run)]
            done = subprocess.run([sys.executable, "-m", "tunerd", *command], check=False)
            if not (run / "artifact").is_dir():
                sys.exit(f"tunerd tune ended with {done.returncode}")
        made[pct] = [run / f"tenant-{seed}" for seed in range(TENANTS)]
        with ProcessPoolExecutor(TENANTS) as pool:
            jobs = [
                pool.submit(compile_tenant, file, run, pct, folder)
                for file, folder in zip(files, made[pct], strict=True)
                if not folder.exists()
            ]
            for job in jobs:
                job.result()
    return made


# --- contenders --------------------------------------------------------------------------------


class Contenders:
    """Ways to run eight models, each a function that queues one inference of every one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._kept: list[Any] = []
        self.queue: dict[str, Callable[[], None]] = {}
        self.wait: dict[str, Callable[[], None]] = {}
        self.inferences: dict[str, int] = {}
        self.problems: dict[str, str] = {}

    def add(
        self, label: str, queue: Callable[[], None], wait: Callable[[], None], inferences: int
    ) -> None:
        self.queue[label], self.wait[label], self.inferences[label] = queue, wait, inferences

    def pytorch(self) -> None:
        import torch

        torch.backends.cudnn.benchmark = True
        graphs = [self._graph(seed, 1) for seed in range(TENANTS)]

        def on(streams: int) -> Callable[[], None]:
            def queue() -> None:
                for i, (graph, _) in enumerate(graphs):
                    with torch.cuda.stream(graphs[i % streams][1]):
                        graph.replay()

            return queue

        for streams in (1, 2, 4, 8):
            label = f"PyTorch, {streams} streams" if streams > 1 else "PyTorch, one after another"
            self.add(label, on(streams), torch.cuda.synchronize, TENANTS)
        for batch in (8, 32):
            graph, stream = self._graph(0, batch)

            def queue(graph: Any = graph, stream: Any = stream) -> None:
                with torch.cuda.stream(stream):
                    graph.replay()

            label = f"PyTorch, batch {batch} of one model"
            self.add(label, queue, torch.cuda.synchronize, batch)

    def _graph(self, seed: int, batch: int) -> tuple[Any, Any]:
        import torch

        model, x = build(self._name, seed, batch)
        model, x = model.cuda().half(), x.cuda().half()
        if x.ndim == 4:
            model = model.to(memory_format=torch.channels_last)
            x = x.contiguous(memory_format=torch.channels_last)
        stream = torch.cuda.Stream()
        with torch.no_grad(), torch.cuda.stream(stream):
            for _ in range(4):
                model(x)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                model(x)
        self._kept.append((model, x))
        return graph, stream

    def artifacts(self, pct: int, folders: list[Path]) -> None:
        """One after another, on streams, and where the share is a part, in green contexts."""
        import tunerd
        from tunerd.colocation.places.green_contexts import GreenContexts

        models = [tunerd.load(folder) for folder in folders]
        first = models[0].captured()
        ones = [first, *(m.captured(first.stream) for m in models[1:])]
        self._captures(f"tuned at {pct}%, one after another", ones)
        apart = [m.captured() for m in models]
        self._captures(f"tuned at {pct}%, {TENANTS} streams", apart)
        count = min(TENANTS, 100 // pct)
        if count > 1:
            contexts = GreenContexts()
            parts = contexts.cut([(f"part {i}", pct) for i in range(count)])
            self._kept.append(contexts)
            placed = [m.captured(contexts.stream(parts[i % count])) for i, m in enumerate(models)]
            label = f"tuned at {pct}%, {count} green contexts of {parts[0].sm_count} SMs"
            self._captures(label, placed)

    def _captures(self, label: str, captures: list[Any]) -> None:
        def queue() -> None:
            for capture in captures:
                capture.launch()

        def wait() -> None:
            for capture in captures:
                capture.wait()

        self.add(label, queue, wait, len(captures))

    def sampled(self) -> dict[str, list[float]]:
        """Return inferences per second, of each in turns; the order is turned round each time."""
        found: dict[str, list[float]] = {label: [] for label in self.queue}
        for turn in range(ROUNDS):
            for label in list(self.queue)[:: 1 if turn % 2 else -1]:
                found[label].append(self._rate(label))
        return found

    def _rate(self, label: str) -> float:
        queue, wait = self.queue[label], self.wait[label]
        queue()
        wait()
        bursts, since = 0, time.perf_counter()
        while time.perf_counter() - since < SAMPLE_SECS:
            for _ in range(BURST):
                queue()
            wait()
            bursts += 1
        return bursts * BURST * self.inferences[label] / (time.perf_counter() - since)


def engine(folders: list[Path], share: int, secs: float, out: Path) -> dict[str, Any]:
    """Bench the engine's policies under a closed load."""
    plan = {
        "device": "cuda",
        "policy": {"kind": "streams"},
        "load": {"kind": "closed", "duration": secs, "clients": 2},
        "members": [
            {"name": f"m{i}", "artifact": str(f)}
            | ({"share": share} if share * len(folders) <= 100 else {})
            for i, f in enumerate(folders)
        ],
    }
    path = out / f"plan-{share}.yaml"
    path.write_text(json.dumps(plan))  # which is YAML
    command = ["colocate", "bench", str(path), "--json", "--out", str(out / f"bench-{share}")]
    for policy in ("time", "streams", "space"):
        command += ["--policy", policy]
    done = subprocess.run(
        [sys.executable, "-m", "tunerd", *command], capture_output=True, text=True, check=False
    )
    try:
        return dict(json.loads(done.stdout))
    except ValueError:
        return {"problem": done.stderr[-500:]}


# --- the table ---------------------------------------------------------------------------------


def table(samples: Mapping[str, list[float]]) -> str:
    """Return rates, and how many times that of the best of PyTorch with eight models."""
    rivals = [x for x in samples if x.startswith("PyTorch") and "batch" not in x]
    best = max(rivals, key=lambda label: statistics.median(samples[label]))
    lines = [f"| inferences/s | median | over '{best}' |", "|---|--:|--:|"]
    for label, rates in samples.items():
        ratios = sorted(a / b for a, b in zip(rates, samples[best], strict=True))
        shown = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        lines.append(f"| {label} | {statistics.median(rates):.0f} | {shown} |")
    return "\n".join(lines) + "\n"


def inside(options: argparse.Namespace, made: dict[int, list[Path]]) -> None:
    import torch

    contenders = Contenders(options.model)
    for pct, folders in made.items():
        try:
            contenders.artifacts(pct, folders)
        except Exception as error:
            contenders.problems[f"tuned at {pct}%"] = f"{type(error).__name__}: {error}"[:400]
    contenders.pytorch()
    found = {
        "per_sec": contenders.sampled(),
        "problems": contenders.problems,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    print("FOUND " + json.dumps(found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet50", help="of torchvision, or encoder")
    parser.add_argument("--shares", default="100,25,12", help="to tune at, in percent")
    parser.add_argument("--budget", default="45s", help="of each search")
    parser.add_argument("--engine-secs", type=float, default=4.0, help="of each policy")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.shares = [int(pct) for pct in options.shares.split(",")]
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    made = prepare(options)
    if options.inside:
        inside(options, made)
        return
    from tunerd.system import host
    from tunerd.vocabulary import to_json

    done = subprocess.run(
        [sys.executable, __file__, *sys.argv[1:], "--inside"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = [x for x in done.stdout.splitlines() if x.startswith("FOUND ")]
    if not lines:
        sys.exit(done.stderr[-2000:])
    document = {"command": host.shown(sys.argv), "host": to_json(host.facts())}
    document |= json.loads(lines[0].removeprefix("FOUND "))
    text = table(document["per_sec"])
    (options.out / "saturation.txt").write_text(text)
    print(text, end="")
    document["engine"] = {
        pct: engine(folders, pct, options.engine_secs, options.out) for pct, folders in made.items()
    }
    (options.out / "saturation.json").write_text(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
