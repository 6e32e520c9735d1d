"""What an answer of the engine takes beyond the model: its threads, queues and copies.

All models of a mix are served one after another on the whole device at their own rates; what their
requests took beyond work and waiting is the engine's. A thread that was idle wakes slowly, and one
that is busy with a model keeps another's request waiting, so that it takes the rates of all. Where
the device were too busy for these, or the engine falls behind, they are lowered, and what the
engine takes at the rates of the mix is seen when a plan has been found: it is rehearsed, and
planned again by what that showed.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from pydantic import TypeAdapter, ValidationError

from tunerd.colocation.bench import bench
from tunerd.colocation.load.generator import DONE, Sample
from tunerd.colocation.plan import LoadChoice, Member, Plan, PolicyChoice
from tunerd.colocation.planning import queueing
from tunerd.colocation.planning.curves import Origin, Point
from tunerd.errors import InputError
from tunerd.system.jsonl import Journal

if TYPE_CHECKING:
    from tunerd.colocation.planning.placement import Forecast

COSTS = "engine.jsonl"
_TAIL = 0.99
_REQUESTS = 600  # of each model, about: six of them lie beyond the tail
_ROUNDS = 3  # of which the middle one counts: a pause of the host is in one
_LEAST_SECS, _MOST_SECS = 1.0, 5.0  # of each
_BUSIEST = 0.5  # of the device: with more, waiting is what is seen
_HALVINGS = 4  # of the rates, at most
# Times the objective: nobody is refused, since what takes too long is to be seen. Without one the
# engine foresees nothing at each arrival, which takes time: medians of 1.5 ms were 1.7 ms by that
# (eight members of 600 requests/s, simulated graphs, two cores).
_PATIENCE = 1000.0
_BEHIND = 0.03  # seconds by which latencies grow in a second, where what comes is not served

Key = tuple[str, str, float, float, int]


@dataclass(frozen=True)
class EngineCost:
    """Seconds that the engine adds to a request, in the middle and in the tail.

    lanes: of the plan that was rehearsed; 0 where all were served one after another.
    """

    architecture: str
    device: str
    rate: float  # requests per second
    p50_secs: float
    tail_secs: float
    all_rate: float = 0.0  # requests per second of all models that were served
    origin: Origin | None = None  # None: this plan measured it
    lanes: int = 0

    @property
    def key(self) -> Key:
        return self.architecture, self.device, self.rate, self.all_rate, self.lanes


NO_COST = EngineCost("", "", 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Served:
    """A model as it is served for this.

    point: what it takes on the whole device. slo_ms: of its members, where they have one.
    """

    name: str
    kernels: Path
    architecture: str
    point: Point
    rate: float  # requests per second
    slo_ms: float | None = None

    @property
    def stream(self) -> queueing.Stream:
        return queueing.Stream(self.rate, self.point.secs.value)


def at_most_busy(models: Sequence[Served]) -> tuple[Served, ...]:
    """Return the models at their own rates, or at lower ones where the device were too busy."""
    busy = queueing.utilisation([each.stream for each in models])
    times = min(1.0, _BUSIEST / busy) if busy else 1.0
    return tuple(replace(each, rate=each.rate * times) for each in models)


def slower(models: Sequence[Served]) -> Iterator[tuple[Served, ...]]:
    """Yield the models at their rates, at half of them, and so on."""
    for nth in range(_HALVINGS + 1):
        yield tuple(replace(each, rate=each.rate / 2**nth) for each in models)


def key_of(model: Served, models: Sequence[Served], device: str, lanes: int = 0) -> Key:
    return model.architecture, device, model.rate, sum(each.rate for each in models), lanes


def load_secs(slowest: float) -> float:
    """Return how long models are served, the slowest with so many requests per second."""
    return _ROUNDS * _load(slowest).duration


def _load(slowest: float) -> LoadChoice:
    duration = min(_MOST_SECS, max(_LEAST_SECS, _REQUESTS / slowest))
    return LoadChoice(kind="poisson", duration=duration, rounds=_ROUNDS)


def measure(
    models: Sequence[Served], *, device: str, like: Plan, say: Callable[[str], None]
) -> dict[str, EngineCost]:
    """Serve models together, and return what the engine takes by their names.

    Of lower rates where it falls behind with these, as each cost says. Raises as Engine.start does.
    """
    found: dict[str, EngineCost] = {}
    for lowered in slower(models):
        found, is_behind = _measured(lowered, device=device, like=like, say=say)
        if not is_behind:
            break
    return found


def _measured(
    models: Sequence[Served], *, device: str, like: Plan, say: Callable[[str], None]
) -> tuple[dict[str, EngineCost], bool]:
    """Return what the engine takes, and whether it falls behind."""
    slowest = min(each.rate for each in models)
    members = [
        Member(name=e.name, artifact=e.kernels, rate=e.rate, slo_ms=_patient(e.slo_ms))
        for e in models
    ]
    plan = like.model_copy(
        update={
            "members": tuple(members),
            "order": (),
            "policy": PolicyChoice(kind="time"),
            "load": _load(slowest),
        }
    )
    rounds = _answered(plan, say)
    wait = queueing.wait_of([each.stream for each in models])
    found = {}
    for each in models:
        work = each.point
        middle = _latency(rounds, each.name, 0.5) - wait.quantile(0.5) - work.secs.value
        tail = _latency(rounds, each.name, _TAIL) - wait.quantile(_TAIL) - work.tail_secs
        found[each.name] = _cost(key_of(each, models, device), middle, tail)
    return found, statistics.median(map(_grown_by, rounds)) > _BEHIND


def rehearse(
    plan: Plan,
    forecast: Forecast,
    models: Sequence[Served],
    *,
    device: str,
    say: Callable[[str], None],
) -> dict[str, EngineCost]:
    """Serve a plan at its own rates, and return what the engine takes there by models' names.

    That is what requests took beyond what the forecast says without the engine. What neighbours do
    beyond what was measured of pairs is in it, too. Raises as Engine.start does.
    """
    members = tuple(
        member.model_copy(update={"slo_ms": _patient(member.slo_ms)}) for member in plan.members
    )
    slowest = min(each.rate for each in forecast.expected)
    changes = {"members": members, "load": _load(slowest)}
    rounds = _answered(plan.model_copy(update=changes), say)
    beyond: dict[str, list[tuple[float, float]]] = {each.name: [] for each in models}
    for each in forecast.expected:
        known = each.engine or NO_COST
        middle = _latency(rounds, each.member, 0.5) - (each.p50_secs - known.p50_secs)
        tail = _latency(rounds, each.member, each.part) - (each.tail_secs - known.tail_secs)
        beyond[each.point.of].append((middle, tail))
    lanes = len(forecast.placement.lanes)
    found = {}
    for model in models:
        middles, tails = zip(*beyond[model.name], strict=True)
        key = key_of(model, models, device, lanes)
        found[model.name] = _cost(key, statistics.fmean(middles), statistics.fmean(tails))
    return found


def _patient(slo_ms: float | None) -> float | None:
    return None if slo_ms is None else _PATIENCE * slo_ms


def _cost(key: Key, middle: float, tail: float) -> EngineCost:
    architecture, device, rate, all_rate, lanes = key
    return EngineCost(
        architecture,
        device,
        rate,
        max(0.0, middle),
        max(0.0, middle, tail),
        all_rate,
        lanes=lanes,
    )


def _answered(plan: Plan, say: Callable[[str], None]) -> list[list[Sample]]:
    """Return the requests of each round that were answered."""
    (rounds,) = bench(plan, (), say).rounds
    return [[s for s in observed.counted if s.end == DONE] for observed in rounds.together]


def _latency(rounds: Sequence[Sequence[Sample]], member: str, part: float) -> float:
    """Return a quantile of a member's latencies in seconds, that of the middle round."""
    of_each = ([s.latency_secs for s in samples if s.member == member] for samples in rounds)
    found = [float(np.quantile(secs, part)) for secs in of_each if secs]
    return statistics.median(found) if found else 0.0


def _grown_by(samples: Sequence[Sample]) -> float:
    """Return how many seconds latencies grow by in one, which they do where less is served."""
    at = [sample.meant_at for sample in samples]
    if len({*at}) < 2:
        return 0.0
    slope, _ = np.polyfit(at, [sample.latency_secs for sample in samples], 1)
    return float(slope)


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
