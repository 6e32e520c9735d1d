#!/usr/bin/env python3
"""Let the candidates of a search fault, and see who is blamed and what is left.

    scripts/lab/faults/fault_after_fault.py MODEL --trials 100 --json OUT -- --gpu-pct 25
    scripts/lab/faults/fault_after_fault.py MODEL --trials 200 --one-in 40 --json OUT \
        -- --gpu-pct 25
    scripts/lab/faults/fault_after_fault.py MODEL --one-in 40 --fault "misaligned access" \
        -- --gpu-pct 25

What follows `--` goes to `tunerd tune`. Its search is handed kernels that fault (on cores: that end
their process) in place of what it proposed, for all candidates or for one in so many, by their
hashes. Then the same command runs as it is.

Where all fault, the device is to be given up: fails where the first run does not end with 20. Where
some do, it is to end well: fails where a candidate is blamed that did not fault, or one is not that
did. In both cases fails where anything lives 15 s later, or where the second run replays a
candidate that faulted or does not end all trials.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import math
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lab.lab import made_by
from tunerd.errors import ExitCode
from tunerd.records import Store
from tunerd.records.schema import STORE_NAME
from tunerd.vocabulary import Failure, Record, Stage, to_json

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from tests.lib.build_fixtures import FAULTS
from tests.lib.faulty_tuner import KIND, ONE_IN, is_faulty
from tests.lib.tune_process import is_alive, started_with

ROOT = Path(__file__).resolve().parents[3]
GONE_SECS = 15.0
MARK = "FAULT_AFTER_FAULT"  # in the environment of all that a command starts


def run(
    command: Sequence[str], scratch: Path, *, one_in: int = 0, kind: str = "trap"
) -> dict[str, Any]:
    """Run a command, one candidate in so many faulty or none, and say what is left of it."""
    mark = f"{scratch}-{one_in}"
    environment = {**os.environ, MARK: mark}
    if one_in:
        path = os.pathsep.join([str(scratch), os.environ.get("PYTHONPATH", "")])
        environment |= {"PYTHONPATH": path, ONE_IN: str(one_in), KIND: kind}
    started = time.monotonic()
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    ended_at = time.monotonic()
    while (left := started_with(MARK, mark)) and time.monotonic() - ended_at < GONE_SECS:
        time.sleep(0.2)
    return {
        "exit_code": ended.returncode,
        "secs": ended_at - started,
        "said": ended.stderr[-2000:],
        "left": [f"{p.pid} {p.name()}" for p in left if is_alive(p)],
        "left_secs": time.monotonic() - ended_at,
        "verification": json.loads(ended.stdout or "{}").get("verification", {}).get("verdict"),
    }


def trials_of(folder: Path) -> dict[str, Record]:
    """Return the search's trials by candidate."""
    with Store.read(folder) as store:
        found = [r for r in store.records() if not r.candidate.is_default]
    assert len({r.candidate.candidate_id for r in found}) == len(found), "a candidate twice"
    return {r.candidate.candidate_id: r for r in found}


def recoveries(folder: Path, struck: Sequence[str]) -> list[dict[str, float | None]]:
    """Say of each candidate that faulted how long it took, from its first loss: in seconds.

    `blamed_secs` until it had faulted alone and was taken for the cause, `all_back_secs` until each
    slice that measured at all had measured a trial that began after that. None: it never did.
    """
    of_run = f"file:{folder}/{STORE_NAME}?mode=ro"
    with contextlib.closing(sqlite3.connect(of_run, uri=True)) as raw:
        first = "SELECT candidate_id, MIN(at) FROM setbacks JOIN trials USING (trial_id) GROUP BY 1"
        lost_at = dict(raw.execute(first))
        ended_at = dict(raw.execute("SELECT candidate_id, ended_at FROM trials"))
        measured = raw.execute(
            "SELECT slice_id, started_at, ended_at FROM trials WHERE state = 'measured'"
        ).fetchall()

    def all_back(after: float) -> float | None:
        ends = {slice_id: math.inf for slice_id, _, _ in measured}
        for slice_id, started, ended in measured:
            if started >= after:
                ends[slice_id] = min(ends[slice_id], ended)
        last = max(ends.values(), default=math.inf)
        return last if math.isfinite(last) else None

    found = []
    for candidate_id in struck:
        blamed = ended_at[candidate_id]
        since, back = lost_at.get(candidate_id, blamed), all_back(blamed)
        back_secs = None if back is None else back - since
        found.append({"blamed_secs": blamed - since, "all_back_secs": back_secs})
    return found


def counts(trials: Mapping[str, Record]) -> dict[str, int]:
    """Return how many trials ended how."""
    ends = [r.result for r in trials.values()]
    names = [
        f"{e.kind} in {e.stage}" if isinstance(e, Failure) else "open" if e is None else "measured"
        for e in ends
    ]
    return dict(collections.Counter(names))


def faults(trials: Mapping[str, Record]) -> dict[str, Record]:
    """Return those whose kernel was the fault of what came of it."""
    return {
        key: record
        for key, record in trials.items()
        if isinstance(record.result, Failure) and record.result.stage is not Stage.BUILD
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--one-in", type=int, default=1, help="so many fault; 1: all do")
    parser.add_argument("--fault", choices=FAULTS, default="trap", help="of a kernel on a GPU")
    parser.add_argument("--json", type=Path, help="write what was found to this file")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:end])
    with tempfile.TemporaryDirectory(prefix="fault-after-fault-") as name:
        scratch = Path(name)
        lines = ["import sys", f"sys.path.append({str(ROOT)!r})", "import tests.lib.faulty_tuner"]
        (scratch / "sitecustomize.py").write_text("\n".join(lines) + "\n")
        command = [sys.executable, "-m", "tunerd", "tune", str(args.model), *sys.argv[end + 1 :]]
        command += ["--trials", str(args.trials), "--out", str(scratch / "run"), "--json"]
        first = run(command, scratch, one_in=args.one_in, kind=args.fault)
        before = trials_of(scratch / "run")
        first["trials"] = counts(before)
        first["started_more_than_once"] = sum(r.attempts > 1 for r in before.values())
        first["recoveries"] = recoveries(scratch / "run", list(faults(before)))
        second = run(command, scratch)
        after = trials_of(scratch / "run")
        second["trials"] = counts(after)
    struck = faults(before)
    ended = {key: r for key, r in before.items() if r.result is not None}
    guilty = {key for key, r in ended.items() if is_faulty(r.candidate, args.one_in)}
    found = {
        **made_by(command),
        "fault": args.fault,
        "faulty": first,
        "sound": second,
        "faults": [to_json(r.result) for r in struck.values()],
        "blamed_and_innocent": len(struck.keys() - guilty),
        "guilty_and_not_blamed": len(guilty - struck.keys()),
        "replayed": sum(after[key] != record for key, record in struck.items()),
    }
    well = (ExitCode.BETTER, ExitCode.NO_GAIN, ExitCode.CANNOT_TELL)
    good = (
        first["exit_code"] in ((ExitCode.FAULTY_DEVICE,) if args.one_in == 1 else well)
        and not first["left"]
        and struck.keys() == guilty
        and second["exit_code"] in well
        and second["trials"].get("open", 0) == found["replayed"] == 0
    )
    text = json.dumps({**found, "as_promised": good}, indent=1)
    if args.json:
        args.json.write_text(text + "\n")
    shown = {key: value for key, value in found.items() if key != "faults"}
    print(json.dumps({**shown, "as_promised": good}, indent=1))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
