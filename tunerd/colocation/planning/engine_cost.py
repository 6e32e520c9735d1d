"""What an answer of the engine takes beyond the model: its threads, queues and copies.

Each model is served alone on the whole device at its own rate; what its requests took beyond work
and waiting is the engine's. A thread that was idle wakes slowly, so that this depends on the rate.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter, ValidationError

from tunerd.colocation.bench import bench
from tunerd.colocation.load.generator import DONE
from tunerd.colocation.plan import LoadChoice, Member, Plan, PolicyChoice
from tunerd.colocation.planning import queueing
from tunerd.colocation.planning.curves import Origin, Point
from tunerd.errors import InputError
from tunerd.system.jsonl import Journal

COSTS = "engine.jsonl"
_TAIL = 0.95
_REQUESTS = 200  # in the load, about
_LEAST_SECS, _MOST_SECS = 1.0, 10.0
_BUSIEST = 0.5  # of the device: with more, waiting is what is seen


@dataclass(frozen=True)
class EngineCost:
    """Seconds that the engine adds to a request, in the middle and in the tail."""

    architecture: str
    device: str
    rate: float  # requests per second
    p50_secs: float
    tail_secs: float
    origin: Origin | None = None  # None: this plan measured it

    @property
    def key(self) -> tuple[str, str, float]:
        return self.architecture, self.device, self.rate


NO_COST = EngineCost("", "", 0.0, 0.0, 0.0)


def rate_of(rate: float, point: Point) -> float:
    """Return the rate at which a model is served for it: its own, where that is not too much."""
    return min(rate, _BUSIEST / point.secs.value)


def measure(
    artifact: Path,
    point: Point,
    *,
    architecture: str,
    device: str,
    rate: float,
    like: Plan,
    say: Callable[[str], None],
) -> EngineCost:
    """Serve an artifact alone on the whole device; raises as Engine.start does.

    point: what it takes there.
    """
    duration = min(_MOST_SECS, max(_LEAST_SECS, _REQUESTS / rate))
    plan = like.model_copy(
        update={
            "members": (Member(name="alone", artifact=artifact, rate=rate),),
            "order": (),
            "policy": PolicyChoice(kind="time"),
            "load": LoadChoice(kind="poisson", duration=duration),
        }
    )
    benched = bench(plan, (), say)
    (rounds,) = benched.rounds
    secs = [s.latency_secs for o in rounds.together for s in o.counted if s.end == DONE]
    if not secs:
        return EngineCost(architecture, device, rate, 0.0, 0.0)
    wait = queueing.wait_of([queueing.Stream(rate, point.secs.value)])
    middle = float(np.median(secs)) - wait.quantile(0.5) - point.secs.value
    tail = float(np.quantile(secs, _TAIL)) - wait.quantile(_TAIL) - point.tail_secs
    return EngineCost(architecture, device, rate, max(0.0, middle), max(0.0, middle, tail))


def append(path: Path, cost: EngineCost) -> None:
    Journal(path).append(json.dumps(asdict(cost)))


_COST = TypeAdapter(EngineCost)


def read_costs(path: Path) -> Iterable[EngineCost]:
    """Read a file of costs, none where there is none yet; InputError where a line is none."""
    try:
        return [_COST.validate_json(line) for line in Journal(path).read().splitlines()]
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise InputError(f"{path} holds a line that is none: {first['msg']}; remove it") from None
