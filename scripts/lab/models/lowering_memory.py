#!/usr/bin/env python3
"""How much memory and time reading and lowering a model takes, in all processes together.

    scripts/lab/models/lowering_memory.py MODEL.onnx [MODEL.onnx ...] [--tree CHECKOUT ...] \
        --out FOLDER

Each model is read and lowered for two cores, as a run does it: in this process's child and in the
process that lowers. Every 20 ms the resident memory of both is added up; the most counts, beside
the file's size. What the processes take for a model of one operator is measured, too: the last
column is without it. Seconds of cores are what it costs beside other work, too. Checkouts take
turns, `--tree .` if none is given. Writes lowering-memory.json and lowering-memory.txt.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import onnx
import psutil
from onnx import helper

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lab.lab import table, write

STEP_SECS = 0.02
_CHILD = """
import sys
from pathlib import Path
from tunerd.frontend.model import read_model
from tunerd.frontend.process import Lowering
from tunerd.system.targets import cpu_target_json
Lowering(read_model(Path(sys.argv[1])), cpu_target_json(2)).result()
"""


def measure(model: Path, tree: Path) -> dict[str, Any]:
    """Return the most memory in MiB, and the seconds and those of cores, of one lowering."""
    started, before = time.monotonic(), _core_secs()
    process = psutil.Popen(
        [sys.executable, "-c", _CHILD, str(model.resolve())],
        cwd=tree,
        env={"PYTHONPATH": str(tree.resolve()), "PATH": "/usr/bin:/bin"},
        stderr=subprocess.DEVNULL,
    )
    most = 0
    while process.poll() is None:
        most = max(most, _resident(process))
        time.sleep(STEP_SECS)
    if process.returncode:
        raise SystemExit(f"{model} cannot be lowered in {tree}")
    secs = time.monotonic() - started
    core_secs = _core_secs() - before
    return {"mib": most >> 20, "secs": round(secs, 1), "core_secs": round(core_secs, 1)}


def _core_secs() -> float:
    """Return what ended children have used, theirs included."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _resident(process: psutil.Process) -> int:
    total = 0
    try:
        for each in (process, *process.children(recursive=True)):
            total += each.memory_info().rss
    except psutil.NoSuchProcess:  # one that has just ended
        pass
    return total


def smallest(folder: Path) -> Path:
    """Write a model of one operator."""
    x, y = (helper.make_tensor_value_info(name, 1, (1, 4)) for name in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "empty", [x], [y])
    opset = helper.make_opsetid("", 17)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=8), folder / "empty.onnx")
    return folder / "empty.onnx"


def commit_of(tree: Path) -> str:
    command = ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def shown(document: dict[str, Any]) -> str:
    heads = ["model", "checkout", "file, MiB", "memory, MiB", "of the file"]
    heads += ["beyond an empty one", "seconds", "of cores"]
    lines = []
    for name, found in document["models"].items():
        for tree, got in found["trees"].items():
            size, least = found["file_mib"], document["empty"][tree]["mib"]
            parts = f"{got['mib'] / size:.1f}", f"{(got['mib'] - least) / size:.1f}"
            took = got["secs"], got["core_secs"]
            lines.append([name, tree, *map(str, (size, got["mib"], *parts, *took))])
    return table(heads, lines, numbers=range(2, 8)) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--tree", type=Path, action="append", dest="trees")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    trees = given.trees or [Path(".")]
    document: dict[str, Any] = {"cores": psutil.cpu_count(), "empty": {}, "models": {}}
    with tempfile.TemporaryDirectory() as folder:
        for tree in trees:
            document["empty"][commit_of(tree)] = measure(smallest(Path(folder)), tree)
    for model in given.models:
        found = {"file_mib": model.stat().st_size >> 20, "trees": {}}
        document["models"][model.stem] = found
        for tree in trees:
            found["trees"][commit_of(tree)] = measure(model, tree)
            print(model.stem, tree, found["trees"][commit_of(tree)], flush=True)
            write(given.out / "lowering-memory.json", document)
    (given.out / "lowering-memory.txt").write_text(shown(document))


if __name__ == "__main__":
    main()
