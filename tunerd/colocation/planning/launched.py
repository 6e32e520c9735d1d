"""What a launch of several tenants takes in one slice, measured by the engine under load.

As many members as the launch has lanes, each with two requests always under way: while one launch
runs the next is full, so that a launch takes its lanes over the answers per second. That is the
engine's work between launches, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from tunerd.artifacts.manifest import LoadError, read_all_variants
from tunerd.colocation.bench import bench
from tunerd.colocation.load.generator import DONE
from tunerd.colocation.plan import LoadChoice, Member, Plan, PolicyChoice
from tunerd.colocation.planning.curves import Point, point_json, point_of, with_ends
from tunerd.errors import InputError
from tunerd.stats.rounds import mean_over_rounds
from tunerd.system.jsonl import Journal

LAUNCHES = "launches.jsonl"
SOURCE = "the engine, saturated"
_CLIENTS = 2  # of each member
_TAIL = 95


def lanes_of(artifacts: Sequence[Path]) -> tuple[Path, tuple[int, ...]] | None:
    """Return the artifact that has kernels for several tenants, and for how many; None without.

    The others may be the weights of tenants alone.
    """
    for path in artifacts:
        try:
            variants = read_all_variants(path)
        except LoadError:  # it has no kernels, or is none, which loading it says
            continue
        if "tenants" in variants[0]:
            return path, tuple(sorted({int(variant["tenants"]) for variant in variants}))
    return None


def measure(
    of: str,
    artifacts: Sequence[Path],
    share: int,
    *,
    like: Plan,
    rounds: int,
    round_secs: float,
    say: Callable[[str], None],
) -> Point:
    """Run members in launches of all of them; raises as Engine.start does.

    Args:
        artifacts: of one architecture, one for each lane.
        like: a plan whose place and device are taken.
    """
    count = len(artifacts)
    members = tuple(Member(name=f"lane-{n}", artifact=path) for n, path in enumerate(artifacts))
    policy = {"kind": "space-time", "slices": [share], "together": count}
    plan = like.model_copy(
        update={
            "members": members,
            "order": (),
            "policy": PolicyChoice.model_validate(policy),
            "load": LoadChoice(kind="closed", duration=round_secs, clients=_CLIENTS, rounds=rounds),
        }
    )
    (ran,) = bench(plan, (), say).rounds
    secs: list[float] = []
    latencies: list[float] = []
    for observed in ran.together:
        done = [s.latency_secs for s in observed.counted if s.end == DONE]
        if not done:
            raise InputError(
                f"{of} answered nothing in {round_secs:g} s with {count} in a launch at {share}%; "
                "give a longer `visit` under `search`"
            )
        secs.append(count * (observed.window[1] - observed.window[0]) / len(done))
        latencies += done
    taken = with_ends(mean_over_rounds(np.log(np.array(secs))))
    spread = float(np.percentile(latencies, _TAIL) / np.median(latencies))
    return Point(of, share, count, 0, taken, taken.value * max(1.0, spread), SOURCE)


def append(path: Path, digest: str, point: Point) -> None:
    Journal(path).append(json.dumps({"digest": digest} | point_json(point)))


def read_launches(path: Path, digest: str) -> list[Point]:
    """Read the points of an artifact, none where there are none; InputError for what is none."""
    try:
        lines = [json.loads(line) for line in Journal(path).read().splitlines()]
        return [point_of(line) for line in lines if line.get("digest") == digest]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{path} holds a line that is no point: {error}; remove it") from None
