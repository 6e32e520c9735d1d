#!/usr/bin/env python3
"""Run ONNX's own backend tests through tunerd: import, lower, compile for llvm, run, compare.

    scripts/lab/models/backend_suite.py --out FOLDER [--only PATTERN] [--again refused]

Cases are onnx.backend.test's kinds node, real and simple, compiled with default schedules. A case
is first given as it is. Where that is no success, inputs that exporters write as constants (shapes,
axes, sizes, bounds, masks that select) become constants, with the case's values. What
NonMaxSuppression selects has rows of -1 behind it, up to its bound, and all rows are compared. A
case ends as one of

    passed      the outputs agree with the case's, in its tolerances (fp16: two last
                bits, bf16: four)
    refused     tunerd said in a sentence why not
    wrong       the outputs do not agree
    exception   something else than a tunerd error
    crash       a signal ended the process
    hang        it took longer than --limit seconds

and beside it stands whether ONNX Runtime passes the case. Cases run in child processes, --batch of
them in each, one after the other. Writes backend-suite.json, with [outcome,
ONNX Runtime passes it, with constants, detail] of each case, after each child, from which the same
command goes on, and backend-suite.txt.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT)]

KINDS = ("node", "real", "simple")
OUTCOMES = ("passed", "refused", "wrong", "exception", "crash", "hang")
_MAX_DETAIL = 160  # characters
_BF16_RTOL = 2**-6  # four roundings: the values of cases were rounded at every step
_FP16_RTOL = 2**-9  # two units in the last place: sums in another order differ by one
# Inputs of operators, by their names in ONNX's schemas, that exporters write as constants.
_CONSTANTS = """
axes axis block_shape cond condition constant_value delta depth dft_length end ends frame_length
frame_step image_shape iou_threshold k like limit lower_edge_hertz M max
max_output_boxes_per_class min num_mel_bins output_shape pads ratio repeats roi sample_rate
scales score_threshold shape size sizes split start starts steps target_type training_mode
upper_edge_hertz
"""
CONSTANTS = frozenset(_CONSTANTS.split())


@dataclass(frozen=True)
class Case:
    """One case: a model, and inputs and outputs of some calls, in the order of the graph's."""

    name: str
    kind: str
    model: Any  # onnx.ModelProto
    calls: list[tuple[list[Any], list[Any]]]
    rtol: float
    atol: float


# --- cases -------------------------------------------------------------------------------------


def case_names(only: str) -> list[str]:
    return [f"{kind}/{test.name}" for kind, test in _tests() if re.search(only, test.name)]


def _tests() -> Iterator[tuple[str, Any]]:
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [(kind, test) for kind in KINDS for test in load_model_tests(kind=kind)]
    yield from sorted(found, key=lambda each: (each[0], each[1].name))


def _read(kind: str, test: Any) -> Case:
    import onnx
    from onnx import numpy_helper
    from onnx.backend.test import runner

    if test.model is not None:  # what is no array stays as it is, which tunerd never sees
        calls = [(_arrays(inputs), _arrays(outputs)) for inputs, outputs in test.data_sets]
        return Case(test.name, kind, test.model, calls, test.rtol, test.atol)
    if test.url is not None:  # a model whose weights are random, and made by the graph itself
        path = Path(onnx.__file__).parent.parent / test.url
        model = onnx.load(path)
        constants = {i.name for i in model.graph.initializer}
        inputs: list[Any] = [
            runner.Runner.generate_dummy_data(i, name=test.name)
            for i in model.graph.input
            if i.name not in constants
        ]
        outputs: list[Any] = [
            numpy_helper.to_array(onnx.load_tensor(path.with_name(f"{path.stem}_output_{i}.pb")))
            for i in range(len(model.graph.output))
        ]
        return Case(test.name, kind, model, [(inputs, outputs)], test.rtol, test.atol)
    folder = Path(test.model_dir)
    model = onnx.load(folder / "model.onnx")
    calls = []
    for data in sorted(folder.glob("test_data_set_*")):
        values = []
        for role, infos in (("input", model.graph.input), ("output", model.graph.output)):
            paths = [data / f"{role}_{i}.pb" for i in range(len(infos))]
            values.append([_value(p, i) for p, i in zip(paths, infos, strict=True) if p.exists()])
        calls.append((values[0], values[1]))
    return Case(test.name, kind, model, calls, test.rtol, test.atol)


def _arrays(values: Sequence[Any]) -> list[Any]:
    from onnx import TensorProto, numpy_helper

    tensors = [numpy_helper.to_array(v) if isinstance(v, TensorProto) else v for v in values]
    return [np.asarray(v) if isinstance(v, np.generic) else v for v in tensors]


def _value(path: Path, info: Any) -> Any:
    import onnx
    from onnx import numpy_helper

    kind = info.type.WhichOneof("value")
    if kind == "tensor_type":
        return numpy_helper.to_array(onnx.load_tensor(path))
    if kind == "sequence_type":
        return numpy_helper.to_list(onnx.SequenceProto.FromString(path.read_bytes()))
    return numpy_helper.to_optional(onnx.OptionalProto.FromString(path.read_bytes()))


def _with_constants(case: Case) -> Case | None:
    """Return the case with the inputs that are parameters as constants; None where it has none."""
    import onnx
    from onnx import numpy_helper

    roles: dict[str, set[str]] = {}
    for node in case.model.graph.node:
        for name, role in zip(node.input, _roles(node), strict=False):
            roles.setdefault(name, set()).add(role)
    (inputs, outputs), *more = case.calls
    names = [i.name for i in case.model.graph.input]
    bound = {
        i
        for i, (name, value) in enumerate(zip(names, inputs, strict=False))
        if isinstance(value, np.ndarray)
        and (name in CONSTANTS or (name in roles and roles[name] <= CONSTANTS))
    }
    if len(bound) == len(names):  # some by what reads them alone
        bound = {i for i in bound if names[i] in CONSTANTS}
    if more or not bound or len(bound) == len(names):
        return None
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    for i in sorted(bound, reverse=True):
        del model.graph.input[i]
        model.graph.initializer.append(numpy_helper.from_array(inputs[i], names[i]))
    left = [value for i, value in enumerate(inputs) if i not in bound]
    return Case(case.name, case.kind, model, [(left, outputs)], case.rtol, case.atol)


def _roles(node: Any) -> list[str]:
    from onnx import defs

    if not defs.has(node.op_type, domain=node.domain):
        return []
    return [str(i.name) for i in defs.get_schema(node.op_type, domain=node.domain).inputs]


# --- a case ------------------------------------------------------------------------------------


def run_case(case: Case) -> dict[str, Any]:
    """Return the outcome of a case, its detail, and whether ONNX Runtime passes it."""
    found = _through_tunerd(case)
    if found["outcome"] != "passed" and (bound := _with_constants(case)) is not None:
        again = _through_tunerd(bound)
        if again["outcome"] != "refused" or found["outcome"] == "refused":
            found = again | {"bound": True}
    return found | {"onnxruntime": _passes_in_onnxruntime(case)}


def _through_tunerd(case: Case) -> dict[str, Any]:
    import tunerd
    from tunerd.artifacts.compile import compile_artifact
    from tunerd.errors import TunerdError
    from tunerd.frontend.kernels import kernels_of
    from tunerd.frontend.model import read_model
    from tunerd.system.targets import cpu_target_json

    target = cpu_target_json(1)
    with tempfile.TemporaryDirectory(prefix="backend-suite-") as scratch:
        path = Path(scratch) / "model.onnx"
        path.write_bytes(case.model.SerializeToString())
        try:
            kernels = kernels_of(read_model(path, shapes=_open_shapes(case)), target)
            compile_artifact(
                kernels.lowered,
                kernels.tasks,
                {},
                target,
                Path(scratch) / "artifact",
                model=kernels.model,
                pct=100,
            )
            model = tunerd.load(Path(scratch) / "artifact")
            calls = [[_widened(value) for value in inputs] for inputs, _ in case.calls]
            results = [list(model(*inputs).values()) for inputs in calls]
        except TunerdError as error:
            return _ended("refused", str(error).replace(str(path), "model.onnx"))
        except Exception as error:
            return _ended("exception", f"{type(error).__name__}: {_last_line(error)}")
    return _compared(case, results)


def _widened(value: Any) -> Any:
    """Return bfloat16 as float32, which tunerd makes of it."""
    is_short = getattr(getattr(value, "dtype", None), "name", "") == "bfloat16"
    return value.astype(np.float32) if is_short else value


def _open_shapes(case: Case) -> dict[str, tuple[int, ...]]:
    """Return the shapes of inputs that the model leaves open, as a user would give them."""
    shapes = {}
    constants = {i.name for i in case.model.graph.initializer}
    infos = [i for i in case.model.graph.input if i.name not in constants]
    for info, value in zip(infos, case.calls[0][0], strict=False):
        tensor = info.type.tensor_type
        is_open = not tensor.HasField("shape") or any(d.dim_value < 1 for d in tensor.shape.dim)
        if is_open and isinstance(value, np.ndarray) and all(value.shape):
            shapes[info.name] = value.shape
    return shapes


def _compared(case: Case, results: list[list[Any]]) -> dict[str, Any]:
    from onnx.backend.test.runner import Runner

    is_bounded = any(node.op_type == "NonMaxSuppression" for node in case.model.graph.node)
    for (_, expected), got in zip(case.calls, results, strict=True):
        try:
            for one, other in zip(expected, got, strict=True):
                if is_bounded and (more := len(other) - len(one)) > 0:
                    one = np.pad(one, [(0, more), (0, 0)], constant_values=-1)
                is_half = getattr(one, "dtype", None) == np.float16
                rtol = max(case.rtol, _FP16_RTOL) if is_half else case.rtol
                if (wide := _widened(one)) is not one:
                    one, other, rtol = wide, _widened(other), _BF16_RTOL
                Runner.assert_similar_outputs([one], [other], rtol, case.atol)
        except (AssertionError, TypeError, ValueError) as error:
            return _ended("wrong", " ".join(str(error).split()))
    return _ended("passed", "")


def _passes_in_onnxruntime(case: Case) -> bool:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    results = []
    try:
        session = ort.InferenceSession(
            case.model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        names = [i.name for i in session.get_inputs()]
        for inputs, _ in case.calls:
            results.append(session.run(None, dict(zip(names, inputs, strict=False))))
        return bool(_compared(case, results)["outcome"] == "passed")
    except Exception:  # ONNX Runtime's exceptions have no public base class
        return False


def _ended(outcome: str, detail: str) -> dict[str, Any]:
    text = " ".join(detail.split())
    return {"outcome": outcome, "detail": text[:_MAX_DETAIL]}


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else ""


# --- children ----------------------------------------------------------------------------------


def child(out: int) -> None:
    """Run the cases whose names come on standard input; write a line to `out` about each."""
    wanted = set(sys.stdin.read().split())
    tests = {f"{kind}/{test.name}": (kind, test) for kind, test in _tests()}
    with os.fdopen(out, "w", buffering=1) as told:
        for name in sorted(wanted):
            told.write(json.dumps({"begun": name}) + "\n")
            with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = run_case(_read(*tests[name]))
            told.write(json.dumps({"name": name} | found) + "\n")
    os._exit(0)  # TVM takes its time to throw everything away


def run_batch(names: Sequence[str], limit_secs: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each case with its outcome; a child that ends is followed by another."""
    left = sorted(names)
    while left:
        begun, how = "", "crash"
        for line in _lines(left, limit_secs):
            if line is None:
                how = "hang"
            elif "begun" in line:
                begun = line["begun"]
            else:
                name = line.pop("name")
                left.remove(name)
                begun = ""
                yield name, line
        if left:
            name = begun or left[0]
            left.remove(name)
            yield name, {"outcome": how, "detail": "", "onnxruntime": False}


def _lines(names: Sequence[str], limit_secs: float) -> Iterator[dict[str, Any] | None]:
    """Yield what a child says, and None where it says nothing for too long."""
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__)), "--child", str(writer)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[writer],
        text=True,
    )
    os.close(writer)
    assert process.stdin is not None
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        process.stdin.write("\n".join(names))
        process.stdin.close()
        held = b""
        while True:
            if not select.select([pipe], [], [], limit_secs)[0]:
                process.send_signal(signal.SIGKILL)
                process.wait()
                yield None
                return
            if not (more := pipe.read(1 << 16)):
                break
            *whole, held = (held + more).split(b"\n")
            yield from map(json.loads, whole)
    process.wait()


# --- results -----------------------------------------------------------------------------------


def summary(cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return how many cases ended how: all, and those that ONNX Runtime passes."""
    known = {n: c for n, c in cases.items() if c["onnxruntime"]}
    passed = sum(c["outcome"] == "passed" for c in known.values())
    return {
        "cases": len(cases),
        "by_outcome": _counts(cases),
        "passed_with_constants": sum(
            bool(c.get("bound")) for c in cases.values() if c["outcome"] == "passed"
        ),
        "onnxruntime_passes": len(known),
        "of_these": _counts(known),
        "of_these_passed_pct": round(100 * passed / max(1, len(known)), 1),
    }


def _counts(cases: dict[str, dict[str, Any]]) -> dict[str, int]:
    found = Counter(c["outcome"] for c in cases.values())
    return {outcome: found[outcome] for outcome in OUTCOMES}


def table(cases: dict[str, dict[str, Any]]) -> str:
    """Return how many cases of each operator ended how, and all that did not pass, with why."""
    found = summary(cases)
    lines = [
        "| | cases | " + " | ".join(OUTCOMES) + " |",
        "|---|--:|" + "--:|" * len(OUTCOMES),
    ]
    for label, total, counts in (
        ("all", found["cases"], found["by_outcome"]),
        ("that ONNX Runtime passes", found["onnxruntime_passes"], found["of_these"]),
    ):
        lines.append(f"| {label} | {total:,} | {' | '.join(f'{n:,}' for n in counts.values())} |")
    lines += ["", f"passed of these: {found['of_these_passed_pct']}%", ""]
    for outcome in OUTCOMES[1:]:
        listed = {n: c for n, c in cases.items() if c["outcome"] == outcome}
        if listed:
            lines.append(f"{outcome} (* ONNX Runtime passes it):")
        groups: dict[str, list[str]] = {}
        for name, case in sorted(listed.items()):
            text = re.sub(r"'[^']*'", "'...'", case["detail"]) if outcome == "refused" else ""
            groups.setdefault(text, []).append(("*" if case["onnxruntime"] else "") + name)
        for text, names in sorted(groups.items(), key=lambda each: -len(each[1])):
            lines.append(f"  {len(names)}: {text}" if text else f"  {len(names)}:")
            lines += [f"    {name.removeprefix('node/')}" for name in names]
    return "\n".join(lines) + "\n"


def save(out: Path, cases: dict[str, dict[str, Any]]) -> None:
    """Write the JSON, a case a line, and the table."""
    rows = [f"{json.dumps(name)}: {json.dumps(_row(cases[name]))}" for name in sorted(cases)]
    head = {"command": "scripts/lab/models/backend_suite.py", "versions": _versions()}
    text = json.dumps(head | {"summary": summary(cases)}, indent=1).removesuffix("\n}")
    text += ',\n "cases": {\n' + ",\n".join(rows) + "\n}\n}\n"
    part = out / "backend-suite.json.part"
    part.write_text(text)
    part.replace(out / "backend-suite.json")
    (out / "backend-suite.txt").write_text(table(cases))


def load(out: Path) -> dict[str, dict[str, Any]]:
    """Return the cases of a folder; none where it has none."""
    path = out / "backend-suite.json"
    if not path.exists():
        return {}
    rows = json.loads(path.read_text())["cases"]
    return {name: dict(zip(_FIELDS, row, strict=True)) for name, row in rows.items()}


_FIELDS = ("outcome", "onnxruntime", "bound", "detail")


def _row(case: dict[str, Any]) -> list[Any]:
    return [case["outcome"], case["onnxruntime"], case.get("bound", False), case["detail"]]


def _versions() -> dict[str, str]:
    return {n: importlib.metadata.version(n) for n in ("onnx", "onnxruntime", "apache-tvm")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="where the results are, and go")
    parser.add_argument("--only", default="", metavar="PATTERN", help="of names of cases")
    parser.add_argument("--again", action="append", choices=OUTCOMES, default=[])
    parser.add_argument("--batch", type=int, default=200, help="cases of a child process")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for a case")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        child(options.child)
    if options.out is None:
        parser.error("--out is needed")
    options.out.mkdir(parents=True, exist_ok=True)
    cases = load(options.out)
    known = {name for name, case in cases.items() if case["outcome"] not in options.again}
    todo = [name for name in case_names(options.only) if name not in known]
    for start in range(0, len(todo), options.batch):
        for name, found in run_batch(todo[start : start + options.batch], options.limit):
            cases[name] = found
            if found["outcome"] != "passed":
                print(f"{name}: {found['outcome']}: {found['detail']}", file=sys.stderr, flush=True)
        save(options.out, cases)
    print((options.out / "backend-suite.txt").read_text(), end="")


if __name__ == "__main__":
    main()
