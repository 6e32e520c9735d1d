#!/usr/bin/env python3
"""Compare checkouts of tunerd: how their code is built, and how fast their command line works.

    scripts/lab/checkouts/compare.py MODEL.onnx --cpu-pct 50 --tree BEFORE --tree . --out FOLDER

Of each checkout: lines, rooms (entries of the package's folder), arrows between them, the largest
ring of rooms that import each other, imports inside of functions included. Then, in turns, each
time in fresh processes: `tunerd --help`, and `tunerd tune` with a fixed seed, whose store says when
the first trial ended and how many a second the search measured. Writes checkouts.json with every
time, and checkouts.txt with medians, ranges and the paired ratio to the first checkout.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import os
import shlex
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TIMES = "\N{MULTIPLICATION SIGN}"
_FAILED = 10  # exit codes from here on say that a command left no result


@dataclass(frozen=True)
class House:
    """How the package of a checkout is built."""

    lines: int
    files: int
    rooms: int  # folders and files at the top of the package, those of Python code
    arrows: int  # between rooms
    largest_ring: int  # rooms of which each reaches each other; 1: there is no ring


@dataclass(frozen=True)
class Tuned:
    """One `tunerd tune`, timed from the start of its process."""

    first_trial_secs: float
    search_secs: float
    trials: int
    whole_secs: float

    @property
    def trials_per_sec(self) -> float:
        return self.trials / self.search_secs


# --- the code ----------------------------------------------------------------------------------


def read_house(tree: Path) -> House:
    package = tree / "tunerd"
    paths = sorted(package.rglob("*.py"))
    modules = {_module_of(tree, path) for path in paths}
    arrows: dict[str, set[str]] = defaultdict(set)
    for path in paths:
        room = _room_of(_module_of(tree, path))
        for target in _imports(path, modules):
            if (other := _room_of(target)) != room and "" not in (room, other):
                arrows[room].add(other)
    rooms = {_room_of(m) for m in modules} - {""}
    return House(
        lines=sum(len(p.read_text().splitlines()) for p in paths),
        files=len(paths),
        rooms=len(rooms),
        arrows=sum(map(len, arrows.values())),
        largest_ring=_largest_ring(rooms, arrows),
    )


def _module_of(tree: Path, path: Path) -> str:
    parts = path.relative_to(tree).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _room_of(module: str) -> str:
    return module.partition(".")[2].partition(".")[0]


def _imports(path: Path, modules: set[str]) -> set[str]:
    found = set()
    for node in _running(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in modules else node.module)
    return {name for name in found if name in modules}


def _running(node: ast.AST) -> list[ast.AST]:
    """Return a tree's nodes, without what is imported for types alone."""
    found = [node]
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            found += _running(child)
    return found


def _largest_ring(rooms: set[str], arrows: dict[str, set[str]]) -> int:
    reached = {room: _reached(room, arrows) for room in rooms}
    return max(
        1 + sum(b != a and b in reached[a] and a in reached[b] for b in rooms) for a in rooms
    )


def _reached(room: str, arrows: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [room]
    while waiting:
        new = arrows.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


# --- the command line --------------------------------------------------------------------------


def _environment(tree: Path) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(tree), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path}


def time_help(tree: Path) -> float:
    started = time.perf_counter()
    command = [sys.executable, "-m", "tunerd", "--help"]
    subprocess.run(command, check=True, env=_environment(tree), capture_output=True)
    return time.perf_counter() - started


def time_tune(tree: Path, flags: Sequence[str]) -> tuple[dict[str, Any], Tuned]:
    """Return the host as the run saw it, and how the run went."""
    with tempfile.TemporaryDirectory(prefix="checkouts-") as scratch:
        out = Path(scratch) / "run"
        command = [sys.executable, "-m", "tunerd", "tune", *flags, "--out", str(out), "--json"]
        started_at = time.time()
        ended = subprocess.run(command, env=_environment(tree), capture_output=True, text=True)
        whole_secs = time.time() - started_at
        if ended.returncode >= _FAILED:
            sys.exit(f"{tree}: {shlex.join(command)} ended with {ended.returncode}: {ended.stderr}")
        store = sqlite3.connect(out / "store.sqlite")
        ends = [e for (e,) in store.execute("SELECT ended_at FROM trials WHERE ended_at > 0")]
        ((start, end),) = store.execute(
            'SELECT MIN("start"), MAX("end") FROM phases WHERE phase = ?', ["search"]
        )
        store.close()
        host = json.loads((out / "host.json").read_text())
    return host, Tuned(min(ends) - started_at, end - start, len(ends), whole_secs)


# --- tables ------------------------------------------------------------------------------------


def table(trees: Sequence[str], document: dict[str, Any]) -> str:
    rows = [["", *trees], ["---", *["--:"] * len(trees)]]
    rows += [
        [name.replace("_", " "), *(f"{document['houses'][t][name]:,}" for t in trees)]
        for name in ("lines", "files", "rooms", "arrows", "largest_ring")
    ]
    timed = [
        ("tunerd --help", document["help_secs"], "s"),
        *(
            (label, {t: [run[key] for run in document["tuned"][t]] for t in trees}, unit)
            for label, key, unit in (
                ("start to first trial", "first_trial_secs", "s"),
                ("trials a second", "trials_per_sec", ""),
                ("the whole command", "whole_secs", "s"),
            )
        ),
    ]
    for label, values, unit in timed:
        if all(values[t] for t in trees):
            cells = [_spread(values[t], unit) for t in trees]
            base = values[trees[0]]
            for i, tree in enumerate(trees[1:], 1):
                ratios = [new / old for old, new in zip(base, values[tree], strict=False)]
                cells[i] += f"; {_spread(ratios, TIMES)}"
            rows.append([label, *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def _spread(values: Sequence[float], unit: str) -> str:
    unit = f" {unit}" if unit == "s" else unit
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.3g}{unit} ({low:.3g} to {high:.3g})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    shares = parser.add_mutually_exclusive_group(required=True)
    shares.add_argument("--cpu-pct", type=int)
    shares.add_argument("--gpu-pct", type=int)
    parser.add_argument("--tree", type=Path, action="append", required=True, dest="trees")
    parser.add_argument("--trials", type=int, default=120)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--helps", type=int, default=20, help="runs of --help of each checkout")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    trees = {
        ("before", "now")[i] if len(options.trees) == 2 else p.name: p.resolve()
        for i, p in enumerate(options.trees)
    }
    share = ["--cpu-pct", str(options.cpu_pct)]
    if options.gpu_pct is not None:
        share = ["--gpu-pct", str(options.gpu_pct)]
    flags = [str(options.model.resolve()), *share, "--trials", str(options.trials), "--seed", "0"]
    document: dict[str, Any] = {
        "command": shlex.join(sys.argv),
        "commits": {name: _commit(tree) for name, tree in trees.items()},
        "houses": {name: asdict(read_house(tree)) for name, tree in trees.items()},
        "help_secs": {name: [] for name in trees},
        "tuned": {name: [] for name in trees},
    }

    def save() -> None:
        text = json.dumps(document, indent=1) + "\n"
        (options.out / "checkouts.json").write_text(text)
        (options.out / "checkouts.txt").write_text(table(list(trees), document))

    for _, (name, tree) in itertools.product(range(options.helps), trees.items()):
        document["help_secs"][name].append(time_help(tree))
    save()
    for _, (name, tree) in itertools.product(range(options.repeats), trees.items()):
        document["host"], tuned = time_tune(tree, flags)
        one = asdict(tuned) | {"trials_per_sec": tuned.trials_per_sec}
        document["tuned"][name].append(one)
        print(f"{name}: {json.dumps(one)}", file=sys.stderr, flush=True)
        save()
    print((options.out / "checkouts.txt").read_text(), end="")


def _commit(tree: Path) -> str:
    command = ["git", "-C", str(tree), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
