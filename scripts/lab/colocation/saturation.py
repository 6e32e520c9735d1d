#!/usr/bin/env python3
"""Saturate one GPU with eight models of one architecture, each with weights of its own.

    PYTHONPATH=.:scripts python3 -m lab.colocation.saturation --model resnet50 --out FOLDER

Exports the model with eight seeds, tunes the first for each share with `tunerd tune`, and compiles
the others with the same winners. Then samples every way to run the eight, all in turns:

- PyTorch, one process: CUDA graphs one after another, on 2, 4 and 8 streams, in green contexts;
  with batch norms folded, and compiled by Inductor, too; batches of 8 and 32 of one model;
  all eight as one by vmap and by grouped convolutions
- the artifacts of each share in the same places
- with --together 8@100,2@25 kernels that serve several of the models in a launch, tuned as such at
  that share: on one stream, on one for each launch, and in green contexts
- eight processes of one model each, PyTorch's or an artifact: without MPS, and under MPS without a
  limit, at 100/8 and at 200/8 percent
- tunerd's engine under each policy, and space-time for each of --together, whose inputs and outputs
  are copied

A turn samples each: saturated, the queue never empty, and every second turn closed as well, with
one of each model in flight, for the latencies. Written after each turn: saturation.json, with all
samples, the GPU's clocks and the facts of the host, and saturation.txt. What was exported, tuned
and compiled into --runs before is not made again. Runs where PyTorch, torchvision and one
NVIDIA GPU are, as root.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.colocation import contenders, tenants, workers
from lab.colocation.saturation_table import table
from lab.colocation.tenants import RUNS, Kind
from lab.colocation.workers import Group, Worker, WorkerError, WorkerGone
from lab.lab import made_by
from tunerd.errors import TunerdError

TENANTS = 8
MIN_TURNS = 4
MODES = ("saturated", "closed")
POLICIES: Mapping[str, dict[str, Any]] = {
    "time": {"kind": "time"},
    "streams": {"kind": "streams"},
    "space": {"kind": "space"},
    "ordered": {"kind": "ordered"},
    "regulated": {"kind": "regulated", "lanes": TENANTS},
    "mps": {"kind": "space", "place": "mps"},  # whose runners take a while to start
}
_PREPARE_SECS = 240.0
_ENGINE_TIMES = 3  # as long a sample as others have: a load has a start and an end


@dataclass
class Contender:
    """One way: the group that runs it, and under which label it knows it."""

    group: Group
    label: str
    sample_secs: float


@dataclass
class Bench:
    """All ways that are left, and what was found so far. A group that fails is left out."""

    contenders: dict[str, Contender] = field(default_factory=dict)
    document: dict[str, Any] = field(default_factory=dict)

    def problem(self, label: str, error: object) -> None:
        self.document["problems"][label] = str(error)[:600]
        _say(f"{label}: {error}")

    def add(self, group: Group, name: Callable[[str], str], sample_secs: float) -> None:
        """Prepare a group, and take in what it can run under `name` of its own labels."""
        before = _used_bytes()
        try:
            answers = group.prepare(_PREPARE_SECS)
        except WorkerError as error:
            self.problem(name(""), error)
            return
        self.document["used_bytes"][name("")] = (_used_bytes() - before) / len(answers)
        for label, problem in answers[0]["problems"].items():
            self.problem(name(label), problem)
        for key in ("device", "torch"):
            if key in answers[0]:
                self.document[key] = answers[0][key]
        if "sms" in answers[0]:
            self.document["sms"][name("")] = [answer["sms"] for answer in answers]
        for label in answers[0]["labels"]:
            if all(label in answer["labels"] for answer in answers):
                self.contenders[name(label)] = Contender(group, label, sample_secs)

    def turn(self, number: int) -> None:
        """Sample each way once; turns have opposite orders, and every second one latencies."""
        modes = MODES[: 1 if number % 2 else 2]
        found: dict[str, Any] = {}
        for name in list(self.contenders)[:: 1 if number % 2 else -1]:
            if name not in self.contenders:
                continue  # its group has ended meanwhile
            try:
                found[name] = {mode: self._sample(self.contenders[name], mode) for mode in modes}
            except WorkerError as error:
                self._leave_out(name, error)
        self.document["turns"].append({"clock": _conditions(), "samples": found})

    def _sample(self, contender: Contender, mode: str) -> dict[str, Any]:
        answers = contender.group.sample(contender.label, mode, contender.sample_secs)
        latencies = [us for a in answers for us in a.get("latencies_us", ())]
        made = {"per_sec": sum(a["per_sec"] for a in answers)}
        return made | ({"latencies_us": latencies} if mode == "closed" else {})

    def _leave_out(self, name: str, error: WorkerError) -> None:
        self.problem(name, error)
        group = self.contenders.pop(name).group
        if isinstance(error, WorkerGone):
            self.contenders = {n: c for n, c in self.contenders.items() if c.group is not group}


def prepare(
    options: argparse.Namespace, bench: Bench
) -> tuple[contenders.Artifacts, contenders.Together]:
    """Return the tenants' artifacts by share, and by launch and share; note how long each took."""
    took: dict[str, float] = bench.document["took_secs"]
    artifacts: contenders.Artifacts = {}
    together: contenders.Together = {}
    for pct in options.shares:
        _say(f"tuning at {pct}%")
        kind = Kind(options.model, pct, options.precision)
        artifacts[pct], steps = tenants.made(kind, TENANTS, options.runs, budget=options.budget)
        took |= {f"{step} at {pct}%": secs for step, secs in steps.items()}
    for point in options.together:
        by, pct = point.split("@")
        _say(f"tuning {by} together at {pct}%")
        kind = Kind(options.model, int(pct), options.precision, by=tenants.numbers(by))
        try:
            together[point], steps = tenants.made(
                kind, TENANTS, options.runs, budget=options.budget
            )
        except (RuntimeError, TunerdError) as error:
            bench.problem(f"{by} together, tuned at {pct}%", error)
            continue
        took |= {f"{step}, {point}%": secs for step, secs in steps.items()}
    return artifacts, together


class Crew:
    """All workers, started at once: to import what they need takes seconds."""

    def __init__(
        self,
        options: argparse.Namespace,
        artifacts: contenders.Artifacts,
        together: contenders.Together,
    ) -> None:
        self._options, self._artifacts, self._together = options, artifacts, together
        self.groups: list[tuple[Group, Callable[[str], str], float]] = []

    def start_one(self, kind: str, name: str, sample_secs: float) -> None:
        group = self._started(kind, name, 1, workers.plain_environment())
        self.groups.append((group, lambda label: label or name, sample_secs))

    def start_processes(self, where: str, pct: int | None, environment: dict[str, str]) -> None:
        """Start a process for each tenant; its artifact is the one for the nearest share."""
        nearest = min(self._artifacts, key=lambda share: abs(share - (pct or 100)), default=0)
        group = self._started("process", where, TENANTS, environment, "--pct", nearest)
        names = {"tuned": f"tuned at {nearest}%, {where}", "PyTorch": f"PyTorch, {where}"}
        self.groups.append(
            (group, lambda label: names.get(label, where), self._options.sample_secs)
        )

    def close(self) -> None:
        workers.close_all([group for group, _, _ in self.groups])

    def _started(
        self, kind: str, name: str, count: int, environment: dict[str, str], *more: object
    ) -> Group:
        options = self._options
        texts, launches = (
            json.dumps({key: [str(p) for p in folders] for key, folders in each.items()})
            for each in (self._artifacts, self._together)
        )
        given = ["--worker", kind, "--model", options.model, "--precision", options.precision]
        given += ["--artifacts", texts, "--launches", launches, "--out", str(options.out)]
        given += ["--policies", ",".join(options.policies)]
        given += [] if options.compile else ["--no-compile"]
        log = options.out / "logs" / re.sub(r"\W+", "-", name)
        log.mkdir(parents=True, exist_ok=True)
        return Group(
            [
                Worker(
                    workers.here("saturation", *given, "--seed", seed, *more),
                    environment,
                    log / f"{seed}.txt",
                )
                for seed in range(count)
            ]
        )


@contextlib.contextmanager
def started(
    options: argparse.Namespace,
    artifacts: contenders.Artifacts,
    together: contenders.Together,
    bench: Bench,
) -> Iterator[Crew]:
    """Start all workers; end them, and then the MPS daemon."""
    crew = Crew(options, artifacts, together)
    with contextlib.ExitStack() as stack:
        daemon: Callable[[int | None], dict[str, str]] | None = None
        try:
            daemon = stack.enter_context(workers.mps_daemon())
        except TunerdError as error:
            bench.problem("processes in MPS", error)
        stack.callback(crew.close)
        crew.start_one("inside", "one process", options.sample_secs)
        crew.start_processes(f"{TENANTS} processes without MPS", None, workers.plain_environment())
        if daemon is not None:
            for limit in (None, 100 // TENANTS, 200 // TENANTS):
                what = f"{limit}% each" if limit else "without a limit"
                where = f"{TENANTS} processes in MPS, {what}"
                crew.start_processes(where, limit, daemon(limit))
        if (artifacts and options.policies) or together:
            crew.start_one("engine", "engines", _ENGINE_TIMES * options.sample_secs)
        yield crew


def measure(
    options: argparse.Namespace,
    bench: Bench,
    artifacts: contenders.Artifacts,
    together: contenders.Together,
) -> None:
    with started(options, artifacts, together, bench) as crew:
        for group, name, secs in crew.groups:
            _say(f"preparing {name('')}")
            bench.add(group, name, secs)
        bench.document["took_secs"]["until the first turn"] = time.monotonic() - options.began_at
        since, number = time.monotonic(), 0
        while bench.contenders and (
            number < MIN_TURNS or time.monotonic() - since < options.secs
        ):  # fmt: skip
            bench.turn(number)
            number += 1
            _write(options.out, bench.document)
            _say(f"turn {number}: {len(bench.contenders)} ways, {time.monotonic() - since:.0f} s")


def work(options: argparse.Namespace) -> None:
    """Be a worker."""
    artifacts = contenders.read_artifacts(options.artifacts)
    body: contenders.InOneProcess | contenders.OneOfMany | contenders.InEngines
    if options.worker == "inside":
        body = contenders.InOneProcess(
            options.model,
            options.precision,
            TENANTS,
            artifacts,
            contenders.read_together(options.launches),
            compile=options.compile,
        )
    elif options.worker == "engine":
        policies = [POLICIES[name] for name in options.policies]
        together = contenders.read_together(options.launches)
        body = contenders.InEngines(artifacts, together, policies)
    else:
        mine = artifacts[options.pct][options.seed] if options.pct in artifacts else None
        body = contenders.OneOfMany(options.model, options.precision, options.seed, mine)
    workers.serve({"prepare": body.prepare, "sample": body.sample})
    if isinstance(body, contenders.InEngines):
        body.close()


def _used_bytes() -> int:
    from tunerd.system import gpus, host

    return gpus.gpu_state(host.facts().gpus[0].uuid).mem_used_bytes or 0


def _conditions() -> dict[str, Any]:
    from tunerd.system import gpus, host
    from tunerd.vocabulary import to_json

    return dict(to_json(gpus.conditions(host.facts().gpus[0].uuid)))


def _write(out: Path, document: dict[str, Any]) -> None:
    from tunerd.system.files import write_whole

    write_whole(out / "saturation.json", json.dumps(document) + "\n", sync=False)
    write_whole(out / "saturation.txt", table(document), sync=False)


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet50", help="of torchvision, or encoder")
    parser.add_argument("--precision", default="fp16", help="fp16, bf16, fp32 or tf32")
    parser.add_argument("--shares", default="100,12", help="to tune at, in percent; '' for none")
    parser.add_argument("--together", default="", help="models in a launch and share: 8@100,2@25")
    usual = ",".join(name for name in POLICIES if name != "mps")
    parser.add_argument("--policies", default=usual, help="of the engine; mps is another")
    parser.add_argument("--budget", default="45s", help="of each search")
    parser.add_argument("--secs", type=float, default=100.0, help="for the turns, four at least")
    parser.add_argument("--sample-secs", type=float, default=0.2, help="of each way")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=True, help="by Inductor, too"
    )
    parser.add_argument("--runs", type=Path, default=RUNS, help="for models and artifacts")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--artifacts", default="{}", help=argparse.SUPPRESS)
    parser.add_argument("--launches", default="{}", help=argparse.SUPPRESS)
    parser.add_argument("--pct", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.shares = [int(pct) for pct in options.shares.split(",") if pct]
    options.together = [point for point in options.together.split(",") if point]
    options.policies = [name for name in options.policies.split(",") if name]
    if unknown := set(options.policies) - set(POLICIES):
        parser.error(f"there is no policy {min(unknown)}; there are {', '.join(POLICIES)}")
    options.out, options.runs = options.out.resolve(), options.runs.resolve()
    return options


def main() -> None:
    options = _options()
    if options.worker:
        work(options)
        return

    options.began_at = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(
        document={
            **made_by(),
            "model": options.model,
            "precision": options.precision,
            "tenants": TENANTS,
            "took_secs": {},
            "sms": {},
            "used_bytes": {},
            "problems": {},
            "turns": [],
        }
    )
    artifacts, together = prepare(options, bench)
    measure(options, bench, artifacts, together)
    print(table(bench.document), end="")


if __name__ == "__main__":
    main()
