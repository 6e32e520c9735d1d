#!/usr/bin/env python3
"""Kill a tuning run's driver with SIGKILL, see that nothing of it is left, and let it go on.

    scripts/lab/faults/kill_and_resume.py MODEL --trials 200 --json OUT -- --gpu-pct 40

What follows `--` goes to `tunerd tune`. Fails where a runner, a guard or a daemon lives 15 s after
the kill, where the second run ends with another number of trials, or a trial was run twice.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tunerd.errors import FolderError
from tunerd.records import Store
from tunerd.system import host
from tunerd.vocabulary import to_json

GONE_SECS = 15.0
RAY_SECS = 60.0
OUTSIDE = (  # no descendants
    "tunerd.slices.mps.guard",
    "tunerd.system.fork_server",
    "tunerd.runner.process",
    "nvidia-cuda-mps",
)


def ended(folder: Path) -> int:
    """Return how many search trials of the run have ended; 0 while there is no store."""
    try:
        with Store.read(folder) as store:
            return sum(r.result is not None and not r.candidate.is_default for r in store.records())
    except (FolderError, OSError):
        return 0


def processes_of(driver: int, started_at: float) -> list[psutil.Process]:
    """Return what a run has started: the driver's descendants, and the guard's on a GPU."""
    found: list[psutil.Process] = psutil.Process(driver).children(recursive=True)
    for process in psutil.process_iter(["cmdline", "create_time"]):
        command = " ".join(process.info["cmdline"] or ())
        recent = process.info["create_time"] >= started_at - 1
        if recent and process not in found and any(word in command for word in OUTSIDE):
            found.append(process)
    return found


def living(processes: list[psutil.Process]) -> list[str]:
    """Describe those that still live."""
    found = []
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {' '.join(process.cmdline()).strip()[:120]}")
        except psutil.NoSuchProcess:
            continue
    return found


def is_ours(description: str) -> bool:
    return any(word in description for word in OUTSIDE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--json", type=Path, help="write what was found to this file")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:end])
    with tempfile.TemporaryDirectory(prefix="kill-and-resume-") as scratch:
        folder = Path(scratch, "run")
        command = [sys.executable, "-m", "tunerd", "tune", str(args.model), *sys.argv[end + 1 :]]
        command += ["--trials", str(args.trials), "--out", str(folder), "--json"]
        started_at = time.time()
        first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while ended(folder) < args.trials // 3:
            if first.poll() is not None:
                sys.exit(f"the first run ended by itself with {first.returncode}: more --trials")
            time.sleep(0.2)
        processes = processes_of(first.pid, started_at)
        first.send_signal(signal.SIGKILL)
        first.wait()
        killed_at = time.monotonic()
        gone_secs: dict[str, float] = {}
        while (left := living(processes)) and time.monotonic() - killed_at < RAY_SECS:
            if not any(is_ours(p) for p in left):
                gone_secs.setdefault("tunerd", time.monotonic() - killed_at)
            time.sleep(0.1)
        if not left:
            gone_secs["ray"] = time.monotonic() - killed_at
            gone_secs.setdefault("tunerd", gone_secs["ray"])
        after_kill = ended(folder)
        second = subprocess.run(command, capture_output=True, text=True, check=False)
        with Store.read(folder) as store:
            records = [r for r in store.records() if not r.candidate.is_default]
            sessions = len(store.sessions())
    counts = collections.Counter(r.candidate.candidate_id for r in records)
    document = json.loads(second.stdout or "{}")
    found = {
        "command": host.shown(command),
        "trials_asked": args.trials,
        "trials_ended_at_the_kill": after_kill,
        "processes_at_the_kill": len(processes),
        "processes_left_after_60_secs": left,
        "secs_until_gone": gone_secs,  # runners, guard and daemon; then Ray's own
        "second_exit_code": second.returncode,
        "trials_ended_in_all": sum(r.result is not None for r in records),
        "candidates_twice": sum(c > 1 for c in counts.values()),
        "trials_started_more_than_once": sum(r.attempts > 1 for r in records),
        "sessions": sessions,
        "verification": document.get("verification", {}).get("verdict"),
        "host": to_json(host.facts()),
    }
    good = (
        gone_secs.get("tunerd", math.inf) < GONE_SECS
        and second.returncode < 10
        and found["trials_ended_in_all"] == args.trials
        and not found["candidates_twice"]
    )
    text = json.dumps({**found, "as_promised": good}, indent=1)
    if args.json:
        args.json.write_text(text + "\n")
    print("\n".join(text.splitlines()[:40]))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
