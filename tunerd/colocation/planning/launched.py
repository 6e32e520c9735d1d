"""What a launch of several requests takes in one slice, measured by the engine under load.

As many members as the launch has lanes, each with two requests always under way, or one member with
as many where the launch is a batch: while one launch runs the next is full, so that a launch takes
its requests over the answers per second. That is the engine's work between launches, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tunerd.artifacts.batches import batch_sizes
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
_CLIENTS = 2  # for each request of a launch
_TAIL = 95


class Launchable(NamedTuple):
    """An artifact whose launches take several requests, and how many there may be.

    is_batch: they are of one model; else of as many tenants.
    """

    kernels: Path
    counts: tuple[int, ...]
    is_batch: bool = False


def lanes_of(artifacts: Sequence[Path]) -> Launchable | None:
    """Return the artifact that has kernels for several tenants, or the only one if it has batches.

    None without, and where no batch is of 1. Those beside that of tenants may be the weights of
    tenants alone.
    """
    for path in artifacts:
        try:
            variants = read_all_variants(path)
        except LoadError:  # it has no kernels, or is none, which loading it says
            continue
        if "tenants" in variants[0]:
            return Launchable(path, tuple(sorted({int(v["tenants"]) for v in variants})))
        if len(artifacts) == 1 and 1 in (sizes := batch_sizes(variants)):
            return Launchable(path, sizes, is_batch=True)
    return None


def measure(
    of: str,
    artifacts: Sequence[Path],
    share: int,
    *,
    count: int,
    like: Plan,
    rounds: int,
    round_secs: float,
    say: Callable[[str], None],
) -> Point:
    """Run members in launches of `count` requests; raises as Engine.start does.

    Args:
        artifacts: of one architecture, one for each lane; or one that has batches.
        like: a plan whose place and device are taken.
    """
    clients = _CLIENTS * count // len(artifacts)
    members = tuple(Member(name=f"lane-{n}", artifact=path) for n, path in enumerate(artifacts))
    policy = {"kind": "space-time", "slices": [share], "together": count}
    plan = like.model_copy(
        update={
            "members": members,
            "order": (),
            "policy": PolicyChoice.model_validate(policy),
            "load": LoadChoice(kind="closed", duration=round_secs, clients=clients, rounds=rounds),
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
