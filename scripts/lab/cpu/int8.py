#!/usr/bin/env python3
"""Compare a model quantized to int8 with itself in float32: tuned, and in ONNX Runtime.

    scripts/lab/cpu/int8.py MODEL.onnx ... --runs RUNS --out FOLDER [--dynamic NAME ...] [--cores N]

Quantizes each model by onnxruntime.quantization: QDQ nodes, weights of int8 by channel, values of
uint8, calibrated with seeded normal inputs; those that --dynamic names get MatMulInteger instead.
Tunes both models for one core, or several, with `tunerd tune`, in RUNS, where the same command goes
on, and then times four in turns on those cores: tunerd and ONNX Runtime, int8 and float32. With
--measure-only it takes what is tuned. Writes int8.json, with the host and the command, and the
table as int8.txt.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lab.lab import made_by, ratio, spread, table, write

ROOT = Path(__file__).resolve().parents[3]
CALIBRATED, ROUNDS = 8, 25
ROUND_SECS = 0.1  # of calls of each, at least
REST_SECS = 0.3  # between them on several cores: threads spin behind a call, on the others'
HEADS = (
    "model",
    "tunerd int8, ms",
    "ONNX Runtime int8, ms",
    "tunerd fp32, ms",
    "ONNX Runtime fp32, ms",
    "int8: tunerd over ONNX Runtime",
    "tunerd: int8 over fp32",
)


def quantized(model: Path, folder: Path, *, is_dynamic: bool) -> Path:
    """Return the file of a model in int8, which is made once."""
    import numpy as np
    import onnx
    from onnx import version_converter
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    target = folder / f"{model.stem}-int8.onnx"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    prepared = folder / f"{model.stem}-prepared.onnx"
    proto = onnx.load(model)
    if max(o.version for o in proto.opset_import) < 13:  # scales by channel came with it
        proto = version_converter.convert_version(proto, 13)
    onnx.save(proto, prepared)
    quant_pre_process(prepared, prepared, skip_symbolic_shape=True)
    if is_dynamic:
        quantization.quantize_dynamic(prepared, target, weight_type=quantization.QuantType.QInt8)
        return target
    constants = {tensor.name for tensor in proto.graph.initializer}
    specs = [v for v in proto.graph.input if v.name not in constants]
    random = np.random.default_rng(0)

    class Samples(quantization.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._left = CALIBRATED

        def get_next(self) -> dict[str, Any] | None:
            self._left -= 1
            if self._left < 0:
                return None
            shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in specs}
            return {
                name: random.standard_normal(shape).astype(np.float32)
                for name, shape in shapes.items()
            }

    quantization.quantize_static(
        prepared,
        target,
        Samples(),
        quant_format=quantization.QuantFormat.QDQ,
        per_channel=True,
        activation_type=quantization.QuantType.QUInt8,
        weight_type=quantization.QuantType.QInt8,
    )
    return target


def tuned(model: Path, run: Path, budget: str, cores: int) -> None:
    """Tune for so many cores."""
    pct = 100 * cores // len(os.sched_getaffinity(0))
    command = [sys.executable, "-m", "tunerd", "tune", str(model), "--cpu-pct", str(pct)]
    subprocess.run(
        [*command, "--budget", budget, "--out", str(run)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )


def run_of(model: Path, options: argparse.Namespace) -> Path:
    run: Path = options.runs / f"{model.stem}-{options.cores}"
    if not options.measure_only:
        tuned(model, run, options.budget, options.cores)
    if not (run / "artifact").exists():
        sys.exit(f"{model.name}: there is no artifact in {run}")
    return run


def calls_of(model: Path, run: Path, cores: int) -> dict[str, Callable[[], Any]]:
    """Return what runs a model once, tuned and in ONNX Runtime, with the same inputs."""
    import numpy as np
    import onnxruntime as ort

    import tunerd

    artifact = tunerd.load(run / "artifact")
    random = np.random.default_rng(1)
    inputs = {s.name: random.standard_normal(s.shape).astype(s.dtype) for s in artifact.inputs}
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = cores, 1
    session = ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    return {
        "tunerd": lambda: artifact.timed_calls(inputs, 1),
        "ONNX Runtime": lambda: session.run(None, inputs),
    }


def in_turns(calls: dict[str, Callable[[], Any]], cores: int) -> dict[str, list[float]]:
    """Return seconds of a call of each, by rounds."""
    counts = {}
    for name, call in calls.items():
        call()
        since = time.perf_counter()
        call()
        counts[name] = max(1, round(ROUND_SECS / (time.perf_counter() - since)))
    secs: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            if cores > 1:
                time.sleep(REST_SECS)
                call()
            since = time.perf_counter()
            for _ in range(counts[name]):
                call()
            secs[name].append((time.perf_counter() - since) / counts[name])
    return secs


def shown(models: dict[str, Any]) -> str:
    lines = []
    for name, each in models.items():
        secs = each["secs"]
        ms = [spread([1e3 * s for s in secs[n]], "{:.2f}").split(" ")[0] for n in NAMES]
        over = ratio(secs["ONNX Runtime int8"], secs["tunerd int8"])
        lines.append([name, *ms, over, ratio(secs["tunerd fp32"], secs["tunerd int8"])])
    return table(HEADS, lines, numbers=range(1, len(HEADS)))


NAMES = ("tunerd int8", "ONNX Runtime int8", "tunerd fp32", "ONNX Runtime fp32")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dynamic", nargs="*", default=[], help="names of models")
    parser.add_argument("--budget", default="90s", help="of each search")
    parser.add_argument("--cores", type=int, default=1, help="for both")
    parser.add_argument("--measure-only", action="store_true", help="tune nothing again")
    options = parser.parse_args(arguments)
    artifacts = {}
    for model in options.models:
        is_dynamic = model.stem in options.dynamic
        narrow = quantized(model, options.runs / "models", is_dynamic=is_dynamic)
        both = {"int8": narrow, "fp32": model}
        artifacts[model.stem] = {kind: (path, run_of(path, options)) for kind, path in both.items()}
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    document: dict[str, Any] = {
        **made_by(), "budget": options.budget, "cores": options.cores, "models": {},
    }  # fmt: skip
    for name, each in artifacts.items():
        calls: dict[str, Callable[[], Any]] = {}
        for kind, (path, run) in each.items():
            calls |= {
                f"{who} {kind}": call for who, call in calls_of(path, run, options.cores).items()
            }
        secs = in_turns(calls, options.cores)
        document["models"][name] = {
            "is_dynamic": name in options.dynamic,
            "load": statistics.fmean(os.getloadavg()),
            "median_secs": {who: statistics.median(each) for who, each in secs.items()},
            "secs": secs,
        }
        print(shown(document["models"]), flush=True)
    write(options.out / "int8.json", document, indent=None)
    (options.out / "int8.txt").write_text(shown(document["models"]))


if __name__ == "__main__":
    main()
