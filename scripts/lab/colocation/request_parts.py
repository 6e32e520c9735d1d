#!/usr/bin/env python3
"""Where the time of a request goes: between two threads, in the engine, and on the device.

    PYTHONPATH=.:scripts python3 -m lab.colocation.request_parts \
        recipes/colocation/short-beside-long.yaml --policy space --policy ordered --out FOLDER

Runs the load of a plan under each policy, and that of each of its members in `alone` by itself, in
turns: once where a request that comes by itself is decided about in the thread of who sends it, and
once where the engine's thread is always woken for it. The parts of each answered request are

    submit   to check it, and to have its inputs where the device reads them
    wait     until it is started
    start    the host's calls for that
    device   what it had of its lane, by the device's clock: copies on its stream are in it
    seen     from its start to the moment at which its end was seen, beside `device`
    answer   until its caller has it

Written: request_parts.json, with the parts of every request in microseconds, and request_parts.txt:
p50 / p90 / p99 of each, of all turns together. What takes the moments costs some 5 us a request.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from lab.colocation.steps import say, since_start
from lab.lab import made_by, table, write
from tunerd.colocation import Engine, Plan
from tunerd.colocation.bench import sample_inputs
from tunerd.colocation.dispatcher import Dispatcher
from tunerd.colocation.load.generator import run_load
from tunerd.colocation.places.base import Place
from tunerd.colocation.plan import PolicyChoice
from tunerd.colocation.work import Request

PARTS = ("submit", "wait", "start", "device", "seen", "answer", "all")
WAYS = {"by who sends": True, "by the engine's thread": False}
_MOMENTS = ("submitted", "taken", "starting", "started", "ended", "answered")


@dataclass
class Moments:
    """Of each request, by its number: when what happened to it."""

    of: dict[int, dict[str, float]] = field(default_factory=dict)
    members: dict[int, str] = field(default_factory=dict)
    answering: Any = field(default_factory=threading.RLock)

    def taken(self) -> dict[str, list[dict[str, float]]]:
        """Return `parts`, and forget them. Callers have their answers before these are noted."""
        with self.answering:
            parts = self._parts()
            self.of.clear()
            self.members.clear()
        return parts

    def _parts(self) -> dict[str, list[dict[str, float]]]:
        """Return by member the parts of those that have all moments, in microseconds."""
        found: dict[str, list[dict[str, float]]] = {}
        for request_id, at in self.of.items():
            if any(name not in at for name in _MOMENTS):
                continue
            submitted, taken, starting, started, ended, answered = (at[n] for n in _MOMENTS)
            secs = {
                "submit": taken - submitted,
                "wait": starting - taken,
                "start": started - starting,
                "device": at["device"],
                "seen": ended - started - at["device"],
                "answer": answered - ended,
                "all": answered - submitted,
            }
            each = {part: round(value * 1e6, 1) for part, value in secs.items()}
            found.setdefault(self.members[request_id], []).append(each)
        return found


@contextmanager
def noted(*, by_sender: bool) -> Iterator[Moments]:
    """Note the moments of all requests of engines in this block."""
    moments, here, now = Moments(), threading.local(), time.monotonic

    def around(name: str, of: type, call: Callable[..., Any]) -> Any:
        usual = getattr(of, name)
        return mock.patch.object(of, name, lambda *given, **said: call(usual, *given, **said))

    def submit(usual: Any, *given: Any, **said: Any) -> Any:
        here.at = now()
        return usual(*given, **said)

    def take(usual: Any, dispatcher: Dispatcher, request: Request, *given: Any) -> None:
        moments.members[request.request_id] = request.member
        moments.of[request.request_id] = {"submitted": here.at, "taken": now()}
        usual(dispatcher, request, *given)

    def start(usual: Any, dispatcher: Dispatcher, instruction: Any) -> None:
        since = now()
        usual(dispatcher, instruction)
        for request_id in instruction.request_ids:
            if instruction.segment == 0:
                moments.of[request_id] |= {"starting": since, "started": now()}

    def done(usual: Any, dispatcher: Dispatcher, *given: Any) -> Any:
        _, _, asked, answer, at = given
        for each in asked:
            seen = moments.of[each.request.request_id]
            seen["device"] = seen.get("device", 0.0) + answer.secs
            seen["ended"] = at
        return usual(dispatcher, *given)

    def answered(usual: Any, dispatcher: Dispatcher) -> None:
        with moments.answering:
            ids = [asked.request.request_id for asked, _ in dispatcher._answers]
            usual(dispatcher)
            for request_id in ids:
                moments.of[request_id]["answered"] = now()

    def decided(usual: Any, dispatcher: Dispatcher, request: Request) -> bool:
        return by_sender and bool(usual(dispatcher, request))

    with (
        around("submit", Engine, submit),
        around("take", Dispatcher, take),
        around("_start", Dispatcher, start),
        around("_done", Dispatcher, done),
        around("_answer", Dispatcher, answered),
        around("_is_decided", Dispatcher, decided),
    ):
        yield moments


def measured(
    plan: Plan, *, secs: float, turns: int, place: Callable[[], Place | None] = lambda: None
) -> dict[str, dict[str, list[Any]]]:
    """Return by load and way, and by member, the parts of its requests, of all turns.

    place: makes one for each engine, instead of the plan's.
    """
    alone = {name: [m for m in plan.members if m.name == name] for name in plan.load.alone}
    loads: dict[str, Any] = {"all": None} | {f"{name} alone": of for name, of in alone.items()}
    found: dict[str, dict[str, list[Any]]] = {}
    load = plan.load.model_copy(update={"duration": secs})
    for turn in range(turns):
        for way in list(WAYS)[:: 1 if turn % 2 else -1]:
            with noted(by_sender=WAYS[way]) as moments, Engine(plan, place=place()) as engine:
                inputs = sample_inputs(plan)
                for name, members in loads.items():
                    run_load(engine, load, inputs, members=members)
                    mine = found.setdefault(f"{name}, {way}", {})
                    for member, parts in moments.taken().items():
                        mine.setdefault(member, []).extend(parts)
    return found


def shown(found: Mapping[str, Mapping[str, Mapping[str, Sequence[Mapping[str, float]]]]]) -> str:
    """Return a table: p50 / p90 / p99 of each part."""
    rows = []
    for policy, loads in found.items():
        for load, members in loads.items():
            for member, requests in members.items():
                cells = [_quantiles([each[part] for each in requests]) for part in PARTS]
                rows.append((policy, load, member, str(len(requests)), *cells))
    return str(table(("policy", "load", "member", "requests", *(f"{p}, us" for p in PARTS)), rows))


def _quantiles(values: Sequence[float]) -> str:
    if len(values) < 2:
        return "-"
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return " / ".join(f"{cuts[at - 1]:.0f}" for at in (50, 90, 99))


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plan", type=Path)
    parser.add_argument("--policy", action="append", help="the plan's if not given")
    parser.add_argument("--secs", type=float, default=2.0, help="of each load")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    since_start()
    plan = Plan.read(options.plan)
    document = made_by() | {"found": {}}
    for kind in options.policy or [plan.policy.kind]:
        say(kind)
        chosen = plan.model_copy(update={"policy": PolicyChoice(kind=kind)})
        document["found"][kind] = measured(chosen, secs=options.secs, turns=options.turns)
        write(options.out / "request_parts.json", document, indent=None)
        (options.out / "request_parts.txt").write_text(shown(document["found"]) + "\n")
    print(shown(document["found"]))


if __name__ == "__main__":
    main()
