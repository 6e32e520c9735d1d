#!/usr/bin/env python3
"""Saturate one GPU with eight models of one architecture, each with weights of its own.

    PYTHONPATH=.:scripts python3 -m lab.colocation.saturation --model resnet50 --out FOLDER

Makes the models and their artifacts (lab/colocation/tenants.py) for each share, and with --together
8@100,2@25 kernels that serve several of the models in a launch, tuned as such at that share. Then
samples every way to run the eight, all in turns. They are in lab/colocation/ways.py, --list prints
them, and --only chooses:

- the artifacts of each share, and PyTorch's CUDA graphs, in one process: one after another, on
  streams, in green contexts; PyTorch with batch norms folded, compiled by Inductor, with batches of
  one model, and with all eight as one by vmap and by grouped convolutions, too
- eight processes of one model each, PyTorch's or an artifact: without MPS, and under MPS without a
  limit, at 100/8 and at 200/8 percent
- launches of several models: on one stream, on one for each launch, and in green contexts
- tunerd's engine under each policy, and space-time for each of --together, whose inputs and outputs
  are copied

Processes are started in the order of importance, and may take --secs to prepare; what fails or
takes longer is in the table with the reason. Each way is sampled once when it is ready, and in
turns when all are, or when the turns need what is left of --until. A turn samples each: saturated,
the queue never empty, and every second turn closed as well, with one of each model in flight, for
the latencies; the last one has longer samples as well, for what the GPU draws (NVML's counter of
energy). Written after each step: saturation.json, with all samples, the GPU's clocks, the
facts of the host and the seconds of each step, and saturation.txt. What was exported, tuned and
made in --runs before is not made again; --prepare-only does no more than that. Runs where PyTorch,
torchvision and one NVIDIA GPU are, as root.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.colocation import contenders, tenants, workers
from lab.colocation.saturation_table import table
from lab.colocation.steps import Steps, say, since_start
from lab.colocation.tenants import RUNS, Kind
from lab.colocation.ways import POLICIES, TENANTS, Ways, all_ways, chosen, split, together_label
from lab.colocation.workers import Group, Worker, WorkerError, WorkerGone
from lab.lab import made_by

MODES = ("saturated", "closed")
POWER = "power"  # a mode: saturated, with the joules of each inference
_POWER_TIMES = 5  # as long a sample: NVML's counter moves in steps of some dozen milliseconds
_ENGINE_TIMES = 3  # as long a sample as others have: a load has a start and an end

Environment = Callable[[int | None], dict[str, str]]
Sample = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass
class Contender:
    """One way that is ready: the group that runs it, and how long a sample is."""

    group: Group
    sample_secs: float
    took_secs: float = 0.0  # both of its first samples


@dataclass
class Bench:
    """All ways that are left, and what was found so far. A group that fails is left out."""

    document: dict[str, Any]
    steps: Steps
    contenders: dict[str, Contender] = field(default_factory=dict)

    def add(self, ways: Ways, group: Group, secs: float, sample_secs: float) -> None:
        """Prepare a group, and sample each of its ways once. Raises WorkerError."""
        before = _used_bytes()
        answers = group.prepare(secs)
        self.document["used_bytes"][ways.name] = (_used_bytes() - before) / len(answers)
        for label, problem in answers[0]["problems"].items():
            self.steps.problem(label, problem)
        if "torch" in answers[0]:
            self.document["torch"] = answers[0]["torch"]
        if "sms" in answers[0]:
            self.document["sms"][ways.name] = [answer.get("sms") for answer in answers]
        for label in ways.labels:
            if all(label in answer["labels"] for answer in answers):
                made = self.contenders[label] = Contender(group, sample_secs)
                since = time.monotonic()
                self._look(label, MODES, self.document["first"])
                made.took_secs = time.monotonic() - since

    def turns_secs(self, count: int) -> float:
        """How long turns of what is ready may take: every second one has one sample of each."""
        contenders = self.contenders.values()
        each = sum(contender.took_secs for contender in contenders)
        return count * each + sum(_POWER_TIMES * made.sample_secs for made in contenders)

    def turn(self, number: int, *, is_last: bool = False) -> None:
        """Sample each way once; turns have opposite orders, and every second one latencies."""
        modes = (*MODES[: 1 if number % 2 else 2], *([POWER] if is_last else []))
        found: dict[str, Any] = {}
        for label in list(self.contenders)[:: 1 if number % 2 else -1]:
            if label in self.contenders:  # its group may have ended meanwhile
                self._look(label, modes, found)
        self.document["turns"].append({"clock": _conditions(), "samples": found})

    def _look(self, label: str, modes: Sequence[str], found: dict[str, Any]) -> None:
        try:
            found[label] = {mode: self._sample(label, mode) for mode in modes}
        except WorkerError as error:
            self._leave_out(label, error)

    def _sample(self, label: str, mode: str) -> dict[str, Any]:
        contender = self.contenders[label]
        secs = contender.sample_secs * (_POWER_TIMES if mode == POWER else 1)
        answers = contender.group.sample(label, mode, secs)
        made: dict[str, Any] = {"per_sec": sum(a["per_sec"] for a in answers)}
        if mode == "closed":
            made["latencies_us"] = sorted(us for a in answers for us in a["latencies_us"])
        if mode == POWER:  # of the whole GPU, whoever reads it
            watts = [a["watts"] for a in answers if a["watts"] is not None]
            made["watts"] = statistics.mean(watts) if watts else None
        return made

    def _leave_out(self, label: str, error: WorkerError) -> None:
        self.steps.problem(label, error)
        group = self.contenders.pop(label).group
        if isinstance(error, WorkerGone):
            self.contenders = {n: c for n, c in self.contenders.items() if c.group is not group}


# --- what is measured --------------------------------------------------------------------------


def prepare(
    options: argparse.Namespace, ways: Sequence[Ways], bench: Bench
) -> tuple[contenders.Artifacts, contenders.Together]:
    """Return the tenants' artifacts by share, and by launch and share, that ways need."""
    if options.artifacts or options.launches:
        return (
            contenders.read_artifacts(options.artifacts or "{}"),
            contenders.read_together(options.launches or "{}"),
        )
    artifacts: contenders.Artifacts = {}
    together: contenders.Together = {}

    def made(kind: Kind) -> list[Path]:
        bench.steps.left_secs(0.0)
        folders, took = tenants.made(kind, TENANTS, options.runs, budget=options.budget)
        name = kind.run(options.runs).name
        bench.document["took_secs"] |= {f"{name}: {step}": secs for step, secs in took.items()}
        return folders

    for pct in sorted({pct for each in ways for pct in each.shares}, reverse=True):
        with bench.steps.step(f"tuned at {pct}%"):
            artifacts[pct] = made(Kind(options.model, pct, options.precision))
    for point in dict.fromkeys(point for each in ways for point in each.points):
        with bench.steps.step(together_label(point)):
            by, pct = split(point)
            numbers = tenants.numbers(str(by))
            together[point] = made(Kind(options.model, pct, options.precision, by=numbers))
    return artifacts, together


class Crew:
    """Starts workers for the ways, and ends them."""

    def __init__(
        self,
        options: argparse.Namespace,
        artifacts: contenders.Artifacts,
        together: contenders.Together,
    ) -> None:
        self._options, self._artifacts, self._together = options, artifacts, together
        self._groups: list[Group] = []

    def lacks(self, ways: Ways) -> str:
        """Return what it has not of what ways need."""
        lacking = [f"tuned at {pct}%" for pct in ways.shares if pct not in self._artifacts]
        lacking += [together_label(p) for p in ways.points if p not in self._together]
        return ", ".join(lacking)

    def start(self, ways: Ways, environment: dict[str, str]) -> Group:
        options = self._options
        artifacts = {pct: [str(p) for p in self._artifacts[pct]] for pct in ways.shares}
        together = {point: [str(p) for p in self._together[point]] for point in ways.points}
        given: list[object] = ["--worker", ways.kind, "--labels", json.dumps(ways.labels)]
        given += ["--artifacts", json.dumps(artifacts), "--launches", json.dumps(together)]
        given += ["--policies", ways.policy]
        given += ["--model", options.model, "--precision", options.precision]
        given += ["--device", options.device, "--out", options.out]
        log = options.out / "logs" / re.sub(r"\W+", "-", ways.name)
        log.mkdir(parents=True, exist_ok=True)
        group = Group(
            [
                Worker(
                    workers.here("saturation", *given, "--seed", seed),
                    environment,
                    log / f"{seed}.txt",
                )
                for seed in range(ways.count)
            ]
        )
        self._groups.append(group)
        return group

    def end(self, group: Group) -> None:
        """End one that is of no use, so that it keeps nothing busy."""
        self._groups.remove(group)
        workers.close_all([group], timeout_secs=10.0)

    def close(self) -> None:
        workers.close_all(self._groups)


@contextlib.contextmanager
def environments(ways: Sequence[Ways], steps: Steps) -> Iterator[Environment]:
    """Yield what makes the environment of a worker; end the MPS daemon where one was needed."""
    with contextlib.ExitStack() as stack:
        daemon: Environment | None = None
        if any(each.mps for each in ways):
            with steps.step("starting an MPS daemon"):
                daemon = stack.enter_context(workers.mps_daemon())

        def environment(pct: int | None) -> dict[str, str]:
            if pct is None:
                return workers.plain_environment()
            if daemon is None:
                raise WorkerError("there is no MPS daemon")
            return daemon(pct if pct < 100 else None)

        yield environment


def measure(
    options: argparse.Namespace,
    ways: Sequence[Ways],
    bench: Bench,
    artifacts: contenders.Artifacts,
    together: contenders.Together,
) -> None:
    steps, crew = bench.steps, Crew(options, artifacts, together)
    with environments(ways, steps) as environment, contextlib.closing(crew):
        for each in ways:
            with steps.step(f"{each.name}: {each.count} workers, {options.secs:g} s at most"):
                _measure_first(options, each, bench, crew, environment)
        for number in range(options.turns):
            if not bench.contenders or steps.is_late:
                break
            with steps.step(f"turn {number + 1} of {len(bench.contenders)} ways"):
                bench.turn(number, is_last=number == options.turns - 1)


def _measure_first(
    options: argparse.Namespace, ways: Ways, bench: Bench, crew: Crew, environment: Environment
) -> None:
    group = None
    try:
        if lacking := crew.lacks(ways):
            raise WorkerError(f"there is nothing {lacking}")
        secs = bench.steps.left_secs(options.secs, keep=bench.turns_secs(options.turns))
        times = _ENGINE_TIMES if ways.kind == "engine" else 1
        group = crew.start(ways, environment(ways.mps))
        bench.add(ways, group, secs, times * options.sample_secs)
    except (WorkerError, TimeoutError) as error:
        for label in ways.labels:
            bench.steps.problem(label, error)
        if group is not None:
            crew.end(group)


# --- a worker ----------------------------------------------------------------------------------


def work(options: argparse.Namespace) -> None:
    """Be a worker."""
    artifacts = contenders.read_artifacts(options.artifacts)
    together = contenders.read_together(options.launches)
    labels = json.loads(options.labels)
    body: contenders.InOneProcess | contenders.OneOfMany | contenders.InEngine
    if options.worker == "inside":
        body = contenders.InOneProcess(
            options.model, options.precision, TENANTS, artifacts, together, labels
        )
    elif options.worker == "engine":
        ways = Ways("", "engine", labels, (), tuple(together), policy="".join(options.policies))
        plan = contenders.engine_plan(ways, options.device)
        (folders,) = (*artifacts.values(), *together.values())
        body = contenders.InEngine(labels[0], plan, folders)
    else:
        mine = next((folders[options.seed] for folders in artifacts.values()), None)
        body = contenders.OneOfMany(options.model, options.precision, options.seed, mine, labels)
    workers.serve({"prepare": body.prepare, "sample": with_watts(body.sample)})
    if isinstance(body, contenders.InEngine):
        body.close()


def with_watts(sample: Sample) -> Sample:
    """Return what answers the mode POWER, too: saturated, and what the GPU drew on average."""
    from tunerd.colocation.load.energy import EnergyMeter
    from tunerd.system import host

    uuids = [gpu.uuid for gpu in host.facts().gpus]
    EnergyMeter(uuids[0] if uuids else None).start()  # NVML's start takes a while

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        if asked["mode"] != POWER:
            return sample(asked)
        meter = EnergyMeter(uuids[0] if uuids else None)
        workers.wait_until(asked["at"])
        since = time.monotonic()
        meter.start()
        said = sample(asked | {"mode": "saturated"})
        meter.stop()
        secs = time.monotonic() - since
        return said | {"watts": None if meter.joules is None else meter.joules / secs}

    return answer


# --- the whole ---------------------------------------------------------------------------------


def _used_bytes() -> int:
    from tunerd.system import gpus, host

    found = host.facts().gpus
    return (gpus.gpu_state(found[0].uuid).mem_used_bytes or 0) if found else 0


def _conditions() -> Any:
    from tunerd.system import gpus, host
    from tunerd.vocabulary import to_json

    found = host.facts().gpus
    return to_json(gpus.conditions(found[0].uuid)) if found else None


def _device() -> str:
    from tunerd.system import host

    found = host.facts().gpus
    return found[0].name if found else host.facts().cpu_model


def _write(out: Path, document: dict[str, Any]) -> None:
    from tunerd.system.files import write_whole

    write_whole(out / "saturation.json", json.dumps(document) + "\n", sync=False)
    write_whole(out / "saturation.txt", table(document), sync=False)


def _options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet50", help="of torchvision, or encoder")
    parser.add_argument("--precision", default="fp16", help="fp16, bf16, fp32 or tf32")
    parser.add_argument("--shares", default="100,12", help="to tune at, in percent; '' for none")
    parser.add_argument("--together", default="", help="models in a launch and share: 8@100,2@25")
    usual = ",".join(name for name in POLICIES if name != "mps")
    parser.add_argument("--policies", default=usual, help="of the engine; mps is another")
    parser.add_argument("--only", action="append", default=[], help="rows that contain this text")
    parser.add_argument("--list", action="store_true", help="print the rows, and end")
    parser.add_argument("--prepare-only", action="store_true", help="make what the rows need")
    parser.add_argument("--budget", default="30s", help="of each search")
    parser.add_argument("--secs", type=float, default=90.0, help="to prepare a way, at most")
    parser.add_argument("--turns", type=int, default=6, help="in which each way is sampled")
    parser.add_argument(
        "--until", type=float, default=float("inf"), help="seconds, after which nothing is begun"
    )
    parser.add_argument("--sample-secs", type=float, default=0.2, help="of each way")
    parser.add_argument("--no-compile", action="store_true", help="nothing by Inductor")
    parser.add_argument("--runs", type=Path, default=RUNS, help="for models and artifacts")
    parser.add_argument("--out", type=Path, required=True)
    for name in ("--worker", "--labels", "--artifacts", "--launches"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.shares = [int(pct) for pct in options.shares.split(",") if pct]
    options.together = [point for point in options.together.split(",") if point]
    options.policies = [name for name in options.policies.split(",") if name]
    if unknown := set(options.policies) - set(POLICIES):
        parser.error(f"there is no policy {min(unknown)}; there are {', '.join(POLICIES)}")
    options.out, options.runs = options.out.resolve(), options.runs.resolve()
    return options


def main(argv: Sequence[str] | None = None) -> None:
    options = _options(argv)
    if options.worker:
        work(options)
        return

    made = all_ways(
        options.model,
        options.shares,
        options.together,
        options.policies,
        compile=not options.no_compile,
    )
    ways = chosen(made, options.only)
    if options.list:
        print("\n".join(label for each in ways for label in each.labels))
        return
    since_start()
    options.out.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {
        **made_by(),
        "model": options.model,
        "precision": options.precision,
        "tenants": TENANTS,
        "device": _device(),
        "sms": {},
        "used_bytes": {},
        "first": {},
        "turns": [],
    }
    steps = Steps(document, lambda: _write(options.out, document), options.until)
    bench = Bench(document, steps)
    artifacts, together = prepare(options, ways, bench)
    if not options.prepare_only:
        measure(options, ways, bench, artifacts, together)
    say("done")
    print(table(document), end="")


if __name__ == "__main__":
    main()
