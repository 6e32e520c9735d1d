"""Take models through tunerd as far as verifying them, each in a process of its own.

A model is read, lowered and compiled with default schedules for one core, and verified. It ends as
one of

    right, cannot tell, wrong    what verification said
    refused                      tunerd said in a sentence why not
    exception                    something else than a tunerd error
    crash                        a signal ended the process
    hang                         it took longer than the limit

with the seconds until it was lowered, and the most memory of its process, beside the file's size.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]

OUTCOMES = ("right", "cannot tell", "refused", "wrong", "exception", "crash", "hang")
_BLOCK = 8  # elements along an axis
_MAX_DETAIL = 900  # characters


@dataclass(frozen=True)
class Given:
    """A model, and what a user would say of it on the command line."""

    path: Path
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # --shape
    constants: Mapping[str, float] = field(default_factory=dict)  # --constant
    blocks: float = 0.0  # --inputs: arrays of equal blocks up to so much; 0: random values


def add_check(commands: Any) -> None:
    """Add the command that checks a folder of models to argparse's subparsers."""
    checking = commands.add_parser("check")
    checking.add_argument("models", type=Path)
    checking.add_argument("--out", type=Path, required=True)
    checking.add_argument("--only", default="", help="models whose name holds this pattern")
    checking.add_argument("--limit", type=float, default=600.0, help="seconds of a model")


def check(models: Mapping[str, Given], kept: Path, *, only: str, limit_secs: float) -> Any:
    """Check what `kept`, a JSON file, does not hold yet; write it after each; return all."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    done: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    for name, given in sorted(models.items()):
        if name in done or not re.search(only, name):
            continue
        done[name] = _checked(given, limit_secs)
        print(name, *done[name].values(), flush=True)
        kept.write_text(json.dumps(done, indent=0, sort_keys=True) + "\n")
    return done


def table(done: Mapping[str, Any], names: Iterable[str]) -> str:
    counts = Counter(found["outcome"] for found in done.values())
    lines = ["| outcome | models |", "|---|--:|"]
    lines += [f"| {outcome} | {counts[outcome]} |" for outcome in OUTCOMES]
    if missing := sorted(set(names) - done.keys()):
        lines += [f"| not checked | {len(missing)} |"]
    lines += ["", "| model | MiB | lowered, s | memory, MiB | outcome |", "|---|--:|--:|--:|---|"]
    for name, found in sorted(done.items()):
        values = (found.get(key, "") for key in ("file_mib", "lowered_secs", "lowered_mib"))
        said = (
            found["outcome"]
            if found["outcome"] == "right"
            else ": ".join((found["outcome"], found["detail"]))
        )
        lines.append(f"| {name} | {' | '.join(map(str, values))} | {said} |")
    return "\n".join(lines) + "\n"


def _checked(given: Given, limit_secs: float) -> dict[str, Any]:
    asked = json.dumps([str(given.path), dict(given.shapes), dict(given.constants), given.blocks])
    with tempfile.TemporaryFile("w+") as told:
        try:
            code = subprocess.run(
                [sys.executable, __file__, asked],
                stdout=told,
                stderr=subprocess.DEVNULL,
                timeout=limit_secs,
            ).returncode
        except subprocess.TimeoutExpired:
            return {"outcome": "hang", "detail": f"longer than {limit_secs:g} s"}
        told.seek(0)
        lines = told.read().splitlines()
    if code or not lines:
        return {"outcome": "crash", "detail": f"exit code {code}"}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def check_one(given: Given) -> dict[str, Any]:
    """Take one model through tunerd, in a process that ends afterwards."""
    from tunerd.artifacts.compile import compile_artifact
    from tunerd.artifacts.loading import load
    from tunerd.errors import TunerdError
    from tunerd.frontend.kernels import kernels_of
    from tunerd.frontend.model import read_model
    from tunerd.runs.finals.verify import verify
    from tunerd.system.targets import cpu_target_json

    target = cpu_target_json(1)
    started = time.monotonic()
    found: dict[str, Any] = {"file_mib": round(given.path.stat().st_size / 2**20, 1)}
    try:
        fixed = read_model(given.path, shapes=given.shapes, constants=given.constants)
        samples = [
            blocks_of(fixed.inputs, given.blocks, seed) for seed in range(3 * bool(given.blocks))
        ]
        kernels = kernels_of(fixed, target)
        found["lowered_secs"] = round(time.monotonic() - started, 1)
        found["lowered_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        found["tasks"] = len(kernels.tasks)
        with tempfile.TemporaryDirectory(prefix="checked-models-") as scratch:
            artifact = Path(scratch) / "artifact"
            compile_artifact(
                kernels.lowered,
                kernels.tasks,
                {},
                target,
                artifact,
                model=kernels.model,
                pct=100,
            )
            verified = verify(load(artifact), kernels.model, samples)
    except TunerdError as error:
        said = " ".join(str(error).replace(f"{given.path.parent}/", "").split())
        return found | {"outcome": "refused", "detail": said[:_MAX_DETAIL]}
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        return found | {"outcome": "exception", "detail": said[-_MAX_DETAIL:]}
    outcome = verified.verdict.value.replace("-", " ").replace("_", " ")
    return found | {"outcome": outcome, "detail": verified.message[:_MAX_DETAIL]}


def blocks_of(inputs: Iterable[Any], most: float, seed: int) -> dict[str, Any]:
    """Return inputs of equal blocks, as letters and words are and noise is not."""
    import numpy as np

    rng = np.random.default_rng(seed)
    found = {}
    for spec in inputs:
        coarse = rng.uniform(0, most, [-(-size // _BLOCK) for size in spec.shape])
        for axis, size in enumerate(spec.shape):
            coarse = np.repeat(coarse, _BLOCK, axis).take(range(size), axis)
        found[spec.name] = coarse.astype(spec.dtype)
    return found


def main() -> None:
    sys.path[:0] = [str(ROOT)]
    path, shapes, constants, blocks = json.loads(sys.argv[1])
    given = Given(
        Path(path), {name: tuple(shape) for name, shape in shapes.items()}, constants, blocks
    )
    print(json.dumps(check_one(given)), flush=True)
    os._exit(0)  # TVM takes its time to throw everything away


if __name__ == "__main__":
    main()
