#!/usr/bin/env python3
"""Compare tuned models with what people would run instead, at one share of a GPU.

    scripts/lab/tensor_cores/compare_with_pytorch.py --gpu-pct 40 --precision fp16 --out FOLDER

Exports six models of torchvision and transformers with random weights, or those that --models
names, as resnext50_32x4d and regnet_y_1_6gf with convolutions in groups, tunes each with
`tunerd tune`, and then, in one process per model under the same MPS cap, times in turns: PyTorch
eager in fp32, TF32 and fp16 in either memory layout, torch.compile (max-autotune) in fp16, each as
one CUDA graph, TensorRT where `pip install tensorrt` was done, and the tuned artifact, by plain
calls and captured as one graph. All are ready before the first sample is taken; a sample is the
mean of as many inferences in a row as fill 5 ms, with the inputs on the device.

Runs where PyTorch, torchvision, transformers and one NVIDIA GPU are. Writes comparison.json with
every sample and the seconds that tuning and compiling took, and comparison.txt. What was tuned
before, in FOLDER/runs, is not tuned again, and what was timed is timed again with --again alone: so
the command and the facts of the host stand beside each model's tuning and beside its samples.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lab.lab import made_by, ratio, table, write
from lab.tensor_cores.tensorrt_engine import engine_of
from tunerd.runner.pytorch import TimedCall, as_graph, compiled, placed

MODELS = (
    "resnet50",
    "mobilenet_v2",
    "efficientnet_b0",
    "convnext_tiny",
    "vit_b_16",
    "bert_base",
)
EAGER = ("fp32", "tf32", "fp16")
TOKENS = 128
SAMPLE_SECS = 0.005
CAPTURED = "captured"  # the artifact as one graph, as PyTorch's contenders are
TURN = "TURN "  # begins a line that names whose turn it is: who is left out if the process dies


# --- models ------------------------------------------------------------------------------------


def build(name: str, batch: int) -> tuple[Any, tuple[Any, ...], list[str]]:
    """Return a model in evaluation mode, inputs, and their names."""
    import torch

    torch.manual_seed(0)
    if name == "bert_base":
        from transformers import BertConfig, BertModel

        encoder = BertModel(BertConfig(attn_implementation="sdpa"), add_pooling_layer=False)

        class Encoder(torch.nn.Module):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.encoder = encoder

            def forward(self, input_ids: Any, attention_mask: Any) -> Any:
                found = self.encoder(input_ids=input_ids, attention_mask=attention_mask)
                return found.last_hidden_state

        ids = torch.randint(0, 30000, (batch, TOKENS))
        mask = torch.ones(batch, TOKENS, dtype=torch.long)
        return Encoder().eval(), (ids, mask), ["input_ids", "attention_mask"]
    import torchvision

    model = getattr(torchvision.models, name)(weights=None).eval()
    return model, (torch.randn(batch, 3, 224, 224),), ["images"]


def enliven(model: Any, images: Any) -> None:
    """Make outputs depend on inputs as a trained model's do, so that a wrong kernel shows.

    Norms get the statistics of what reaches them; what begins at zero or at next to nothing (the
    head of ViT, the scales of ConvNeXt's blocks) gets values that matter.
    """
    import torch

    norms = [m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    with torch.no_grad():
        for norm in norms:
            norm.momentum = None  # the mean over all calls
            norm.reset_running_stats()
            norm.train()
        if norms:
            for _ in range(2):
                model(torch.randn(8, *images.shape[1:]))
        model.eval()
        for name, parameter in model.named_parameters():
            if name.endswith("layer_scale"):
                parameter.fill_(0.1)
            elif name == "heads.head.weight":
                parameter.normal_(0, 0.02)


def export(name: str, batch: int, path: Path, *, half: bool = False) -> None:
    import torch

    model, inputs, names = build(name, batch)
    if name != "bert_base":
        enliven(model, inputs[0])
    if half:
        model = model.half()
        inputs = tuple(x.half() if x.is_floating_point() else x for x in inputs)
    with torch.no_grad():
        torch.onnx.export(
            model,
            inputs,
            str(path),
            input_names=names,
            output_names=["out"],
            dynamo=True,
            external_data=False,
            opset_version=18,
        )


def random_inputs(specs: Sequence[Any]) -> dict[str, Any]:
    """Return arrays for inputs by name: floats at random, integers of one."""
    import numpy as np

    random = np.random.default_rng(0)
    return {
        s.name: random.standard_normal(s.shape).astype(s.dtype)
        if s.dtype.startswith("float")
        else np.ones(s.shape, s.dtype)
        for s in specs
    }


# --- one model, under the cap ------------------------------------------------------------------


class Contenders:
    """Ways to run one model, each ready to be called so many times in a row."""

    def __init__(self, name: str, batch: int, without: frozenset[str]) -> None:
        import torch

        self._torch, self._name, self._batch, self._without = torch, name, batch, without
        self.runs: dict[str, Callable[[int], float]] = {}
        self.ready_secs: dict[str, float] = {}
        self.problems: dict[str, str] = {}

    def add(self, label: str, make: Callable[[], Callable[[int], float]]) -> None:
        if label in self._without:
            return
        print(TURN + label, flush=True)
        started = time.monotonic()
        try:
            run = make()
            run(3)
        except Exception as error:
            self.problems[label] = f"{type(error).__name__}: {error}"[:300]
            return
        self.ready_secs[label] = time.monotonic() - started
        self.runs[label] = run

    def eager(self, precision: str, *, channels_last: bool) -> Callable[[int], float]:
        return self._timed(as_graph(*self._placed(precision, channels_last=channels_last)))

    def compiled(self, precision: str) -> Callable[[int], float]:
        module, inputs = self._placed(precision, channels_last=True)
        return self._timed(as_graph(compiled(module), inputs))

    def tensorrt(self, path: Path, precision: str) -> Callable[[int], float]:
        _, inputs, _ = build(self._name, self._batch)
        if precision == "fp16":
            path = path.with_stem(f"{path.stem}-fp16")
            if not path.exists():
                export(self._name, self._batch, path, half=True)
        call = engine_of(path, [x.cuda() for x in inputs], tf32=precision == "tf32")
        return self._timed(as_graph(call, ()))

    def artifact(self, folder: Path) -> Callable[[int], float]:
        import tunerd

        model = tunerd.load(folder)
        inputs = random_inputs(model.inputs)
        return lambda calls: model.timed_calls(inputs, calls) / calls

    def captured(self, folder: Path) -> Callable[[int], float]:
        import tunerd

        model = tunerd.load(folder)
        graph = model.captured()
        graph.write(random_inputs(model.inputs))
        return TimedCall(graph.launch, graph.wait).secs

    def _placed(self, precision: str, *, channels_last: bool) -> tuple[Any, tuple[Any, ...]]:
        model, inputs, _ = build(self._name, self._batch)
        last = channels_last and self._name != "bert_base"
        return placed(model, inputs, precision, device="cuda", channels_last=last)

    def _timed(self, call: Callable[[], None]) -> Callable[[int], float]:
        return TimedCall(call, self._torch.cuda.synchronize).secs

    def sampled(self, rounds: int) -> dict[str, list[float]]:
        """Time all in turns; the order is turned round each time."""
        counts: dict[str, int] = {}
        for label, run in self.runs.items():
            print(TURN + label, flush=True)
            counts[label] = max(3, round(SAMPLE_SECS / max(run(20), 1e-6)))
        secs: dict[str, list[float]] = {label: [] for label in self.runs}
        for turn in range(rounds):
            for label in list(self.runs)[:: 1 if turn % 2 else -1]:
                print(TURN + label, flush=True)
                secs[label].append(self.runs[label](counts[label]))
        return secs


def inside(options: argparse.Namespace) -> None:
    """Be the process of one model."""
    import torch

    without = frozenset(filter(None, options.without.split(",")))
    contenders = Contenders(options.inside, options.batch, without)
    # The artifact first: what PyTorch keeps of the GPU's memory does not matter to it then.
    folder = run_folder(options, options.inside) / "artifact"
    contenders.add(f"tunerd {options.precision}", lambda: contenders.artifact(folder))
    contenders.add(CAPTURED, lambda: contenders.captured(folder))
    for precision in EAGER:
        for channels_last in (False, True) if options.inside != "bert_base" else (False,):
            layout = " channels last" if channels_last else ""
            make = functools.partial(contenders.eager, precision, channels_last=channels_last)
            contenders.add(f"eager {precision}{layout}", make)
    if options.compile:
        contenders.add("compiled fp16", lambda: contenders.compiled("fp16"))
    if importlib.util.find_spec("tensorrt"):
        path = exported(options, options.inside)
        for precision in EAGER:
            make = functools.partial(contenders.tensorrt, path, precision)
            contenders.add(f"TensorRT {precision}", make)
    secs = contenders.sampled(options.rounds)
    found = {
        "median_secs": {label: statistics.median(samples) for label, samples in secs.items()},
        "secs": secs,
        "ready_secs": contenders.ready_secs,
        "problems": contenders.problems,
        "sms": torch.cuda.get_device_properties(0).multi_processor_count,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    print("FOUND " + json.dumps(found), flush=True)


# --- all models --------------------------------------------------------------------------------


def run_folder(options: argparse.Namespace, name: str) -> Path:
    size = "" if options.batch == 1 else f"-batch{options.batch}"
    place = f"{name}{size}-{options.precision}-gpu{options.gpu_pct}"
    return Path(options.out).resolve() / "runs" / place


def exported(options: argparse.Namespace, name: str) -> Path:
    size = "" if options.batch == 1 else f"-batch{options.batch}"
    return Path(options.out).resolve() / f"{name}{size}.onnx"


def export_all(options: argparse.Namespace) -> None:
    """Export what was not, all at once."""
    missing = [m for m in options.models.split(",") if not exported(options, m).exists()]
    command = [sys.executable, __file__, *sys.argv[1:], "--export"]
    children = [
        subprocess.Popen([*command, name], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for name in missing
    ]
    for name, child in zip(missing, children, strict=True):
        if child.wait():
            print(f"{name} could not be exported", file=sys.stderr)


@contextlib.contextmanager
def mps(pct: int) -> Iterator[dict[str, str]]:
    """Yield the environment of clients of an MPS daemon of our own."""
    from tunerd.slices.mps.control import MpsControl, client_environment
    from tunerd.system import host

    gpu = host.facts().gpus[0]
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        control = MpsControl(Path(folder, "pipe"), Path(folder, "log"), gpu.uuid)
        control.start()
        try:
            yield os.environ | client_environment(control.pipe_folder, gpu.uuid, pct)
        finally:
            control.quit()


def tune(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """Tune a model that was not yet; return how long that took and what it says."""
    folder = run_folder(options, name)
    kept = folder / "tuning.json"
    if kept.exists():
        return dict(json.loads(kept.read_text()))
    path = exported(options, name)
    command = [sys.executable, "-m", "tunerd", "tune", str(path), "--gpu-pct", str(options.gpu_pct)]
    command += ["--precision", options.precision, "--budget", options.budget]
    command += ["--seed", str(options.seed), "--out", str(folder), "--json"]
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    secs = time.monotonic() - started
    found: dict[str, Any] = {**made_by(command), "secs": secs, "exit_code": done.returncode}
    with contextlib.suppress(ValueError):
        found |= tuned(json.loads(done.stdout))
    if not (folder / "artifact").is_dir():
        found["problem"] = done.stderr[-500:]
    else:
        kept.write_text(json.dumps(found))
    return found


def tuned(outcome: dict[str, Any]) -> dict[str, Any]:
    """Return what is kept of what `tunerd tune --json` says."""
    tasks = outcome.get("tasks", ())
    return {
        "verification": outcome.get("verification"),
        "trials": sum(t["trials"] for t in tasks),
        "kernels_secs": sum(t["weight"] * t["best_secs"] for t in tasks if t.get("best_secs")),
        "time_use": outcome.get("time_use"),
    }


def measure(options: argparse.Namespace, name: str, env: dict[str, str]) -> dict[str, Any]:
    """Time all contenders; one that ends the process is named a problem, and the others go on."""
    command = [sys.executable, __file__, *sys.argv[1:], "--inside", name]
    # What torch.compile found fastest at another share is no choice for this one.
    env = env | {"TORCHINDUCTOR_CACHE_DIR": str(run_folder(options, name) / "inductor")}
    faults: dict[str, str] = {}
    while len(faults) < len(EAGER):
        without = ",".join([*filter(None, [options.without]), *faults])
        done = subprocess.run(
            [*command, "--without", without], env=env, capture_output=True, text=True, timeout=500
        )
        lines = done.stdout.splitlines()
        for line in lines:
            if line.startswith("FOUND "):
                found = dict(json.loads(line.removeprefix("FOUND ")))
                found["problems"] |= faults
                return made_by() | found
        turns = [x.removeprefix(TURN) for x in lines if x.startswith(TURN)]
        if not turns:
            break
        said = [x for x in done.stderr.splitlines() if "Error" in x or "error" in x] or [""]
        faults[turns[-1]] = f"it ended the process ({done.returncode}): {said[0]}"
    return {**made_by(), "problem": done.stderr[-500:], "problems": faults}


def shown(document: dict[str, Any]) -> str:
    """Return medians in ms, and how many times faster tuned models are than the best others."""
    tuned = f"tunerd {document['precision']}"
    labels = ["eager fp32", "eager tf32", "eager fp16", "compiled fp16", tuned]
    measured = [found["measured"].get("secs", {}) for found in document["models"].values()]
    if any("TensorRT" in label for secs in measured for label in secs):
        labels.insert(-1, "TensorRT")
    if any(CAPTURED in secs for secs in measured):
        labels.append(CAPTURED)
    heads = ("ms", *labels, "faster than the best of the others", "tuning")
    lines = []
    for name, found in document["models"].items():
        secs = found["measured"].get("secs", {})
        best = {
            label: min(
                (statistics.median(v) for k, v in secs.items() if k.startswith(label) and v),
                default=None,
            )
            for label in labels
        }
        cells = [f"{1e3 * v:.3f}" if v else "-" for v in best.values()]
        others = [k for k in secs if k not in (tuned, CAPTURED) and secs[k]]
        times = "-"
        if tuned in secs and others:
            rival = min(others, key=lambda k: statistics.median(secs[k]))
            times = f"{ratio(secs[rival], secs[tuned])}, {rival}"
        took = found["tuning"].get("secs")
        lines.append([name, *cells, times, f"{took:.0f} s" if took else "-"])
    return table(heads, lines, numbers=range(1, len(heads))) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu-pct", type=int, default=40)
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--models", default=",".join(MODELS), help="of torchvision, or bert_base")
    parser.add_argument("--budget", default="45s", help="of each search")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--without", default="", help="contenders to leave out: eager fp32,...")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--again", action="store_true", help="time also what was timed before")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--export", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.export:
        export(options.export, options.batch, exported(options, options.export))
        return
    if options.inside:
        inside(options)
        return

    options.out.mkdir(parents=True, exist_ok=True)
    place = options.out / "comparison.json"
    document: dict[str, Any] = {
        "gpu_pct": options.gpu_pct,
        "precision": options.precision,
        "batch": options.batch,
        "models": json.loads(place.read_text())["models"] if place.exists() else {},
    }
    export_all(options)
    for name in options.models.split(","):
        if not options.again and document["models"].get(name, {}).get("measured", {}).get("secs"):
            continue
        tuning = tune(options, name)
        with mps(options.gpu_pct) as env:
            measured = measure(options, name, env)
        document["models"][name] = {"tuning": tuning, "measured": measured}
        write(place, document, indent=None)
        (options.out / "comparison.txt").write_text(shown(document))
        print(shown(document).splitlines()[-1], file=sys.stderr, flush=True)
    print(shown(document), end="")


if __name__ == "__main__":
    main()
