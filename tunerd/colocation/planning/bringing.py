"""What it takes to bring a member's weights to the device, measured by the engine.

Members whose weights have one piece less than they are take turns, one request at a time, so that
each has its weights brought; what such a request takes beyond one that finds them is a cold start.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from tunerd.colocation import artifacts
from tunerd.colocation.engine import Engine
from tunerd.colocation.plan import Member, Plan, PolicyChoice
from tunerd.errors import InputError
from tunerd.system.jsonl import Journal

BRINGS = "brings.jsonl"
_REQUESTS = 30  # of each sort, at least
_WAIT_SECS = 60.0  # for one


def measure(kernels: Path, others: Sequence[Path], *, like: Plan) -> float | None:
    """Return by how many seconds a cold start is longer; None where weights were not brought.

    Raises as Engine.start does.

    Args:
        kernels: the artifact for several tenants, whose own weights stay.
        others: of its architecture, at least as many as launches may have weights at a time.
        like: a plan whose place and device are taken.
    """
    one = artifacts.weights_bytes_of(kernels)
    names = [f"other-{nth}" for nth in range(len(others))]
    members = [Member(name="own", artifact=kernels)]
    members += [Member(name=n, artifact=of) for n, of in zip(names, others, strict=True)]
    plan = like.model_copy(
        update={
            "members": tuple(members),
            "order": (),
            "policy": PolicyChoice(kind="time"),
            "weights_gib": (len(others) + 0.5) * one / (1 << 30),  # the kernels' own among them
        }
    )
    inputs = artifacts.sample_inputs(kernels)
    with Engine(plan) as engine:

        def secs_of(name: str) -> float:
            since = time.perf_counter()
            engine.submit(name, inputs).result(_WAIT_SECS)
            return time.perf_counter() - since

        def brought() -> int:
            return sum(group.brought for group in engine.stats().groups.values())

        for name in names * 2:
            secs_of(name)
        before = brought()
        turns = -(-_REQUESTS // len(names))
        cold = [secs_of(name) for _ in range(turns) for name in names]
        if brought() - before < len(cold):
            return None
        warm = [secs_of(names[-1]) for _ in range(_REQUESTS)]
    return max(0.0, statistics.median(cold) - statistics.median(warm))


def append(path: Path, digest: str, device: str, secs: float) -> None:
    Journal(path).append(json.dumps({"digest": digest, "device": device, "secs": secs}))


def read_brings(path: Path, digest: str, device: str) -> float | None:
    """Read what was measured last of an artifact on a device; None where nothing was.

    InputError for a line that is none.
    """
    found = None
    try:
        for line in map(json.loads, Journal(path).read().splitlines()):
            if (line["digest"], line["device"]) == (digest, device):
                found = float(line["secs"])
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"{path} holds a line that is none: {error}; remove it") from None
    return found
