#!/usr/bin/env python3
"""Regulate mixes of three different models, and compare with what needs no regulation.

    PYTHONPATH=.:scripts python3 -m lab.colocation.regulation --out FOLDER \
        resnet50 encoder bert=runs/bert-cuda100/artifact ...

Takes three artifacts or more, for one GPU or, with --device cpu, for this machine's cores. A name
alone is a model of lab/colocation/tenants.py, tuned at 100% into --runs where it is not there. Of
each mix of three, up to --mixes of them, it finds the best static plan: each in a share of its own,
or two of them in turns in one, at several divisions of the device. Then the best regulation, and in
the end measures all in turns: one after another, streams, that static plan, and the regulation.
All members are busy all the time, and work is what they get in seconds of each alone.

Each mix has a process of its own and takes --secs beside the loading of models, the static plans
half of it at most. Written after each: regulation.json, with the facts of the host, and of each mix
which device measured it and when, all static plans that were tried, what was measured in turns, the
plan that was found, and what failed why. The same command goes on with what the same device has
measured, and keeps the mixes of another, which it names `A+B+C on DEVICE`.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.colocation import tenants
from lab.colocation.steps import Steps, say, since_start
from lab.colocation.tenants import RUNS, Kind
from lab.colocation.workers import found_by
from lab.lab import made_by, write
from tunerd.api.colocation import without_mismatches
from tunerd.artifacts import loading
from tunerd.colocation.plan import Member, Plan, PolicyChoice
from tunerd.colocation.regulation.find import KIND, RegulatedPlan, bounds_of, outcome, regulate
from tunerd.colocation.regulation.measure import EngineMeasurer
from tunerd.colocation.regulation.values import Outcome
from tunerd.errors import HostError
from tunerd.vocabulary import to_json

OF_A_MIX = 3
_MORE_SECS = 60.0  # for loading, and for the proof where there is no time left
_SPACE, _ONE_BY_ONE = PolicyChoice(kind="space"), PolicyChoice(kind="time")
_IN_THREE = ((33, 33, 33), (50, 25, 25), (60, 20, 20))
_IN_TWO = ((50, 50), (70, 30), (30, 70))
Models = dict[str, Path]


def mixes_of(names: Sequence[str], count: int) -> list[tuple[str, ...]]:
    """Return so many mixes of three, or all there are; each model is in about as many."""
    left = list(itertools.combinations(names, OF_A_MIX))
    chosen: list[tuple[str, ...]] = []
    times = dict.fromkeys(names, 0)
    while left and len(chosen) < count:
        mix = min(left, key=lambda each: sorted((times[n] for n in each), reverse=True))
        left.remove(mix)
        chosen.append(mix)
        for name in mix:
            times[name] += 1
    return chosen


def static_members(members: Sequence[Member]) -> Iterator[tuple[Member, ...]]:
    """Yield members with shares: of their own each, or one for two of them together."""
    for shares in dict.fromkeys(s for each in _IN_THREE for s in itertools.permutations(each)):
        yield tuple(
            m.model_copy(update={"share": share}) for m, share in zip(members, shares, strict=True)
        )
    for alone in members:
        for pair, single in _IN_TWO:
            yield tuple(
                m.model_copy(
                    update={"share": single} if m is alone else {"share": pair, "lane": "pair"}
                )
                for m in members
            )


class Mix:
    """One mix: its plans, and where what was measured is kept."""

    def __init__(self, names: Sequence[str], models: Models, options: argparse.Namespace) -> None:
        self.name = "+".join(names)
        self.problems: dict[str, str] = {}
        self.static: list[dict[str, Any]] = []  # what was measured of each static plan
        self._members = tuple(Member(name=name, artifact=models[name]) for name in names)
        self._device = options.device
        self._measured_with: dict[str, Any] = {
            "probe_secs": options.probe,
            "journal": options.journal,
            "open_model": options.open_model,
        }

    def found(self, secs: float) -> RegulatedPlan:
        """Return the best regulation that is found within so many seconds."""
        until = time.monotonic() + secs
        plan = self._best_static(until - secs / 2)
        left_secs = max(0.0, until - time.monotonic())
        return regulate(plan, budget_secs=left_secs, say=self._say, **self._measured_with)

    def _best_static(self, until: float) -> Plan:
        """Return the static plan with most work within the bounds, of those that the host takes."""
        whole = Plan(device=self._device, members=self._members)
        measurer = EngineMeasurer(whole, **self._measured_with)
        alone = {kernels.name: sum(kernels.secs) for kernels in measurer.kernels()}
        bounds = bounds_of(whole, measurer.under(PolicyChoice(kind="time")))
        best: tuple[Plan, Outcome] | None = None
        for members in static_members(self._members):
            said = ", ".join(f"{m.name} {m.share}%{' in turns' if m.lane else ''}" for m in members)
            if best is not None and time.monotonic() > until:
                self.problems[said] = "no time was left to try it"
                continue
            plan = whole.model_copy(update={"members": members, "policy": _SPACE})
            try:
                busy = EngineMeasurer(plan, **self._measured_with).under(_SPACE)
            except HostError as error:
                self.problems[said] = str(error)
                continue
            got = outcome(busy, alone, bounds)
            self._say(f"{said}: work {got.work:.3f}, {100 * got.excess:.0f}% over its bound")
            self.static.append({"shares": said} | to_json(got) | to_json(busy))
            if best is None or got.is_better_than(best[1]):
                best = plan, got
        return whole.model_copy(update={"policy": _ONE_BY_ONE}) if best is None else best[0]

    def _say(self, message: str) -> None:
        say(f"{self.name}: {message}")


def factors(found: RegulatedPlan) -> dict[str, dict[str, float]]:
    """Return the regulation's work over each policy's, and the largest ratio of a member's p99."""
    measured = {m.policy: m for m in found.plan.measured}
    best = measured[KIND]
    return {
        policy: {
            "work": best.work / m.work,
            "p99": max(best.p99_ms[name] / m.p99_ms[name] for name in m.p99_ms),
        }
        for policy, m in measured.items()
        if policy != KIND and m.work
    }


def device_name(document: Mapping[str, Any]) -> str:
    """Return the name of the GPU, or of the CPU, by which a document's host measured."""
    host = document["host"]
    on_gpu = document["device"] == "cuda" and host["gpus"]
    return str(host["gpus"][0]["name"] if on_gpu else host["cpu_model"])


def kept_mixes(before: Mapping[str, Any], here: str) -> dict[str, Any]:
    """Return the mixes of an earlier document; other devices than `here` are in their names.

    A mix that does not say which device measured it is of the document's.
    """
    mixes = {}
    for name, found in before["mixes"].items():
        on = found.get("measured_on", device_name(before))
        mix = name.removesuffix(f" on {on}")
        mixes[mix if on == here else f"{mix} on {on}"] = {"measured_on": on} | found
    return mixes


def _options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+", metavar="NAME[=ARTIFACT]")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--mixes", type=int, default=5)
    parser.add_argument("--only", action="append", metavar="A+B+C", help="mixes")
    parser.add_argument("--secs", type=float, default=90.0, help="for each mix")
    parser.add_argument("--until", type=float, default=float("inf"),
                        help="seconds, after which nothing is begun")  # fmt: skip
    parser.add_argument("--probe", type=float, default=0.4, help="seconds of each measurement")
    parser.add_argument("--prepare-only", action="store_true", help="make the models")
    parser.add_argument("--budget", default="30s", help="of each search for a model")
    parser.add_argument("--runs", type=Path, default=RUNS, help="for models and artifacts")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--journal", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.out, options.runs = options.out.resolve(), options.runs.resolve()
    pairs = [each.partition("=") for each in options.models]
    options.models = {
        name: Path(path).resolve() if path else Kind(name, 100).run(options.runs) / "tenant-0"
        for name, _, path in pairs
    }
    options.to_make = [name for name, _, path in pairs if not path]
    if len(options.models) < OF_A_MIX:
        parser.error("give three different models or more, each as NAME or NAME=ARTIFACT")
    return options


def inside(options: argparse.Namespace) -> None:
    """Measure one mix in this process, and write what was found."""
    options.open_model = functools.cache(loading.load)
    mix = Mix(options.inside.split("+"), options.models, options)
    with without_mismatches():
        found = mix.found(options.secs)
    document = {
        "static": mix.static,
        "problems": mix.problems,
        "plan": found.plan.model_dump(mode="json"),
        "tried": found.tried,
        "bounds_ms": dict(found.bounds_ms),
        "pays": found.pays,
        "regulated_over": factors(found),
    }
    options.result.write_text(json.dumps(document))


def main(argv: Sequence[str] | None = None) -> None:
    options = _options(argv)
    if options.inside:
        inside(options)
        return
    since_start()
    options.out.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {**made_by(), "device": options.device, "mixes": {}}
    here = device_name(document)
    path = options.out / "regulation.json"
    if path.exists():
        document["mixes"] = kept_mixes(json.loads(path.read_text()), here)
    steps = Steps(document, lambda: write(path, document), options.until)
    for name in options.to_make:
        with steps.step(f"making {name}"):
            steps.left_secs(0.0)
            tenants.made(Kind(name, 100), 1, options.runs, budget=options.budget)
    there = {name: model for name, model in options.models.items() if model.exists()}
    mixes = ["+".join(names) for names in mixes_of([*there], options.mixes)]
    for mix in mixes if not options.prepare_only else ():
        if mix in document["mixes"] or (options.only and mix not in options.only):
            continue
        with steps.step(f"{mix}: {options.secs:g} s", mix):
            secs = steps.left_secs(options.secs)
            files = f"{mix} on {here.replace('/', '-')}"  # a journal's lines do not say which
            found = found_by(
                "regulation", *(f"{name}={model}" for name, model in there.items()),
                "--inside", mix, "--secs", secs, "--probe", options.probe,
                "--device", options.device, "--out", options.out,
                "--journal", options.out / f"{files}.jsonl",
                log=options.out / "logs" / f"{files}.txt", secs=secs + _MORE_SECS,
            )  # fmt: skip
            document["mixes"][mix] = {"measured_on": here, "measured_at": time.time()} | found
            for policy, over in found["regulated_over"].items():
                print(
                    f"{mix}: regulated over {policy}: work {over['work']:.2f} times, "
                    f"p99 {over['p99']:.2f} times at most"
                )
    for what, said in document["problems"].items():
        print(f"{what}: could not be measured, because {said}")


if __name__ == "__main__":
    main()
