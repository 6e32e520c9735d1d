"""How long a change of shares takes while members serve: a part of latency.py."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

CHANGES = 60
_PAUSE_SECS = 0.05  # between two changes
_LEAD_SECS = 0.5  # of load before the first


def reshares(recipe: Path) -> dict[str, Any]:
    """Change the shares of a recipe's plan to and fro under its load.

    Returns the seconds of each change, and how the requests ended.
    """
    from tunerd.colocation import Engine, Plan
    from tunerd.colocation.bench import sample_inputs
    from tunerd.colocation.load.generator import run_load

    plan = Plan.read(recipe)
    layouts = [{m.name: m.share or 0 for m in members} for members in plan.layouts]
    ends: dict[str, int] = {}
    latencies_us: list[int] = []
    with Engine(plan) as engine:
        inputs = sample_inputs(plan)

        def serve() -> None:
            for sample in run_load(engine, plan.load, inputs).samples:
                ends[sample.end] = ends.get(sample.end, 0) + 1
                latencies_us.append(round(sample.latency_secs * 1e6))

        thread = threading.Thread(target=serve)
        thread.start()
        time.sleep(_LEAD_SECS)
        secs = []
        for number in range(CHANGES):
            secs.append(engine.reshare(layouts[(number + 1) % len(layouts)], timeout_secs=30.0))
            time.sleep(_PAUSE_SECS)
        is_under_load = thread.is_alive()
        thread.join()
    return {
        "change_secs": secs,
        "is_under_load": is_under_load,
        "ends": ends,
        "latencies_us": latencies_us,
        "problems": {},
    }
