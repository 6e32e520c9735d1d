#!/usr/bin/env python3
"""How many models one GPU serves, each asked 30 times a second, with 99 of 100 answers in 10 ms.

    PYTHONPATH=.:scripts python3 -m lab.colocation.capacity --model resnet50 --out FOLDER

Each model has weights of its own in the GPU's memory, and its requests come at random (Poisson),
from and to the memory of the host. What is refused or fails is late. The ways, the most important
first; --list prints them, and --only chooses:

- PyTorch's CUDA graphs in one process: one after another, and on eight streams, where a request
  goes to the stream with the fewest before it; the same compiled by Inductor
- tunerd's engine: one after another, streams, and lanes of a part of the GPU each, by the artifacts
  of --shares; and space-time by the kernels of --together, as 8@100 or, of several numbers,
  1x2x4x8@100

The number of models is doubled and then halved between the last that was served and the first that
was not; what is found has further rounds with other arrivals, and fewer models until they hold.
Each way has a process of its own and --secs. Written after each: capacity.json, with every try, the
facts of the host, the seconds of each step and what failed why, and capacity.txt. The same command
goes on with what is there; --prepare-only makes the artifacts alone (lab/colocation/tenants.py).
Of more than 16 models some have equal weights, and none the same memory. Runs where
PyTorch, torchvision and one NVIDIA GPU are.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from lab.colocation import capacity_table, contenders, tenants, torch_models
from lab.colocation.open_loop import StreamLane, served
from lab.colocation.steps import Steps, say, since_start
from lab.colocation.tenants import RUNS, Kind
from lab.colocation.workers import exempt_from_collections, found_by
from lab.lab import made_by
from tunerd.colocation import Engine, Plan
from tunerd.colocation.bench import sample_inputs
from tunerd.colocation.load.arrivals import arrivals_of
from tunerd.colocation.load.generator import DONE, TRIM, run_load
from tunerd.colocation.plan import LoadChoice, Member
from tunerd.runner.pytorch import Graph, as_graph

PART = 0.99  # of the requests, that are to be in time
DISTINCT = 16  # models with weights that no other has
STREAMS = 8
_FIRST = 8  # models of the first try
_FINE = 32  # a step is this part of the models, or one model
_ROUNDS = 3  # of what was found, with other arrivals


@dataclass(frozen=True)
class Way:
    """streams: of PyTorch's graphs. policy: of the engine, whose members take turns in `lanes`
    of equal parts, by what was tuned at `pct` for a launch of each number of `by`."""

    label: str
    streams: int = 0
    compiled: bool = False
    policy: dict[str, Any] = field(default_factory=dict)
    lanes: int = 0
    pct: int = 0
    by: tuple[int, ...] = ()


@dataclass(frozen=True)
class Try:
    """One load on so many models.

    cpu_us: what the process took of its cores for each request, looks at the device included.
    late_ms: by which 99 of 100 requests were sent too late at most, where a thread sends them.
    """

    count: int
    asked: int
    in_time: int
    per_sec: float  # answered
    p99_ms: float | None  # of what was answered
    cpu_us: float | None = None
    late_ms: float | None = None

    @property
    def is_kept(self) -> bool:
        return self.in_time >= PART * self.asked


Serve = Callable[[int, int], Try]  # of a number of models and a seed


def ways_of(shares: Sequence[int], points: Sequence[str]) -> Iterator[Way]:
    """Yield all ways, the most important first."""
    streams = f"{STREAMS} streams"
    yield Way("PyTorch, one after another", streams=1)
    yield Way(f"PyTorch, {streams}", streams=STREAMS)
    for point in points:
        by, _, pct = point.partition("@")
        counts = tuple(int(number) for number in by.split("x"))
        slices = max(1, 100 // int(pct))
        policy = {"kind": "space-time", "slices": slices, "together": max(counts)}
        yield Way(f"engine, space-time, {point}%", policy=policy, pct=int(pct), by=counts)
    if shares:
        whole, part = max(shares), min(shares)
        at = f"tuned at {part}%"
        yield Way(
            f"engine, streams, {at}", policy={"kind": "streams", "streams": STREAMS}, pct=part
        )
        yield Way(
            f"engine, one after another, tuned at {whole}%", policy={"kind": "time"}, pct=whole
        )
        lanes = max(1, 100 // part)
        for kind in ("space", "ordered"):
            policy = {"kind": kind} | ({"borrow": False} if kind == "ordered" else {})
            yield Way(f"engine, {kind}, {lanes} lanes, {at}", policy=policy, lanes=lanes, pct=part)
    yield Way("PyTorch compiled, one after another", streams=1, compiled=True)
    yield Way(f"PyTorch compiled, {streams}", streams=STREAMS, compiled=True)


def most_served(serve: Serve, most: int, *, until: float = float("inf")) -> dict[str, Any]:
    """Return the most models that are served, 0 for none, the first number that was not, and tries.

    until: the moment of time.monotonic() after which no try is begun; what is known then counts.
    """
    tries: list[Try] = []
    served_, missed = 0, most + 1

    def is_kept(count: int, seed: int) -> bool:
        tries.append(serve(count, seed))
        say(f"{count} models: {tries[-1].in_time} of {tries[-1].asked} in time")
        return tries[-1].is_kept

    while missed - served_ > max(1, served_ // _FINE) and time.monotonic() < until:
        count = (served_ + missed) // 2 if missed <= most else max(_FIRST, 2 * served_)
        count = min(count, most)
        if is_kept(count, seed=0):
            served_ = count
        else:
            missed = count
    while served_ and time.monotonic() < until:
        if all(is_kept(served_, seed) for seed in range(1, _ROUNDS + 1)):
            break
        missed, served_ = served_, max(0, served_ - max(1, served_ // _FINE))
    return {"most": served_, "missed": missed, "tries": [asdict(each) for each in tries]}


# --- inside a process --------------------------------------------------------------------------


class InEngine:
    """An engine with all models; a try sends requests to the first of them."""

    def __init__(self, way: Way, folders: Sequence[Path], options: argparse.Namespace) -> None:
        first, *others = folders
        member: dict[str, Any] = {"rate": options.rate, "slo_ms": options.within_ms}
        members = []
        for nth in range(options.most):
            # The first of a group has its kernels, and only others have memory of their own.
            folder = first if nth == 0 or not others else others[(nth - 1) % len(others)]
            made = {"name": f"m{nth}", "artifact": folder} | member
            if way.lanes:
                made |= {"lane": f"lane{nth % way.lanes}", "share": 100 // way.lanes}
            members.append(made)
        plan = Plan.model_validate(
            {"device": options.device, "policy": way.policy, "members": members}
        )
        self._engine = Engine(plan, on_step=say).start()
        self._inputs, self._options = sample_inputs(plan), options

    def serve(self, count: int, seed: int) -> Try:
        load = LoadChoice(kind="poisson", duration=self._options.load_secs, seed=seed)
        members = self._engine.plan.members[:count]
        before_secs = time.process_time()
        observed = run_load(self._engine, load, self._inputs, members=members)
        cpu_secs = time.process_time() - before_secs
        first, last = observed.window
        latencies = [s.latency_secs for s in observed.counted if s.end == DONE]
        late = [s.sent_at - s.meant_at for s in observed.counted]
        made = _try(count, len(observed.counted), latencies, last - first, self._options)
        cpu_us = 1e6 * cpu_secs / len(observed.samples)
        return replace(made, cpu_us=cpu_us, late_ms=1e3 * float(np.percentile(late, 99)))

    def close(self) -> None:
        self._engine.close()


class InPyTorch:
    """Graphs of PyTorch that begin and end in the memory of the host, made as they are needed."""

    def __init__(self, way: Way, options: argparse.Namespace) -> None:
        import torch

        self._model, self._x = torch_models.placed(options.model, 0, precision=options.precision)
        self._host = self._x.float().cpu().pin_memory()
        self._call = torch_models.compiled_call(self._model) if way.compiled else None
        self._streams = [torch.cuda.Stream() for _ in range(way.streams)]
        self._graphs: list[Graph] = []
        self._options = options

    def serve(self, count: int, seed: int) -> Try:
        self._graphs += [self._made() for _ in range(count - len(self._graphs))]
        lanes = []
        for stream in self._streams:
            launches = [torch_models.slot(graph, stream).launch for graph in self._graphs[:count]]
            lanes.append(StreamLane(launches, int(stream.cuda_stream)))
        secs = self._options.load_secs
        arrivals = poisson(count, self._options.rate, secs, seed)
        before_secs = time.process_time()
        found = served(arrivals, lanes)
        cpu_secs = time.process_time() - before_secs
        counted = [late for at, late in found if TRIM * secs <= at < (1 - TRIM) * secs]
        made = _try(count, len(counted), counted, (1 - 2 * TRIM) * secs, self._options)
        return replace(made, cpu_us=1e6 * cpu_secs / len(found))

    def close(self) -> None:
        pass

    def _made(self) -> Graph:
        """Return the graph of a model whose weights have memory of their own."""
        import copy

        import torch

        model = copy.deepcopy(self._model)
        out = torch.empty_like(model(self._x), device="cpu").pin_memory()

        def call(host: Any) -> Any:
            # A copy that converts would do so on the host, which no graph can.
            x = torch.empty_like(self._x, dtype=host.dtype)
            x = x.copy_(host, non_blocking=True).to(self._x.dtype)
            made = model(x) if self._call is None else self._call(state, x)
            return out.copy_(made, non_blocking=True)

        state = torch_models.state_of(model)
        return as_graph(call, (self._host,))


def poisson(count: int, rate: float, secs: float, seed: int) -> list[tuple[float, int]]:
    """Return when so many models are asked, and which: what the engine's load is, too."""
    members = tuple(
        Member(name=f"m{nth}", artifact=Path("none"), rate=rate) for nth in range(count)
    )
    load = LoadChoice(kind="poisson", duration=secs, seed=seed)
    return [(each.at_secs, int(each.member[1:])) for each in arrivals_of(members, load)]


def _try(
    count: int, asked: int, latencies: Sequence[float], secs: float, options: argparse.Namespace
) -> Try:
    in_time = sum(each <= options.within_ms / 1e3 for each in latencies)
    p99_ms = float(np.percentile(latencies, 99)) * 1e3 if latencies else None
    return Try(count, asked, in_time, len(latencies) / secs, p99_ms)


def inside(options: argparse.Namespace) -> None:
    """Measure one way in this process, and write what was found."""
    until = time.monotonic() + options.secs - options.load_secs - 5.0
    way = next(each for each in _ways(options) if each.label == options.inside)
    since = time.monotonic()
    body = (
        InPyTorch(way, options)
        if way.streams
        else InEngine(way, contenders.read_together(options.artifacts)[_key(way)], options)
    )
    ready_secs = time.monotonic() - since
    exempt_from_collections()
    try:
        found = most_served(body.serve, options.most, until=until)
    finally:
        body.close()
    options.result.write_text(json.dumps(found | {"ready_secs": ready_secs}))


# --- the whole ---------------------------------------------------------------------------------


def _ways(options: argparse.Namespace) -> list[Way]:
    return list(ways_of(options.shares, options.together))


def _key(way: Way) -> str:
    """Return for what a way's artifacts are tuned: `12`, or `1x8@100`."""
    return f"{'x'.join(map(str, way.by))}@{way.pct}" if way.by else str(way.pct)


def made(options: argparse.Namespace, ways: Sequence[Way], steps: Steps) -> dict[str, list[str]]:
    """Return the artifacts that ways need, made where they are not there."""
    if options.artifacts:
        return dict(json.loads(options.artifacts))
    found: dict[str, list[str]] = {}
    # Those of one model first: launches of several take their weights.
    for way in sorted((each for each in ways if each.pct), key=lambda each: bool(each.by)):
        if (key := _key(way)) not in found:
            with steps.step(f"tuned: {key}"):
                steps.left_secs(0.0)
                kind = Kind(options.model, way.pct, options.precision, by=way.by)
                folders, _ = tenants.made(kind, DISTINCT, options.runs, budget=options.budget)
                found[key] = [str(folder) for folder in folders]
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the ways that are not in the folder yet; return the document."""
    path = options.out / "capacity.json"
    said = ("model", "precision", "rate", "within_ms", "most", "device")
    asked = {name: getattr(options, name) for name in said}
    document: dict[str, Any] = {**made_by(), "asked": asked, "found": {}}
    if path.exists() and (before := json.loads(path.read_text()))["asked"] == asked:
        document |= {key: before[key] for key in ("found", "took_secs", "problems")}
    steps = Steps(document, functools.partial(_write, options.out, document), options.until)
    ways = [
        each
        for each in _ways(options)
        if each.label not in document["found"]
        and (not options.only or any(o.lower() in each.label.lower() for o in options.only))
    ]
    artifacts = made(options, ways, steps)
    for way in ways if not options.prepare_only else ():
        with steps.step(f"{way.label}: {options.secs:g} s at most", way.label):
            if way.pct and _key(way) not in artifacts:
                raise RuntimeError(f"there is nothing tuned: {_key(way)}")
            secs = steps.left_secs(options.secs)
            given = [f"--{name.replace('_', '-')}={asked[name]}" for name in said]
            document["found"][way.label] = found_by(
                "capacity", "--inside", way.label, "--secs", secs, "--load-secs",
                options.load_secs, "--artifacts", json.dumps(artifacts), "--out", options.out,
                "--shares", ",".join(map(str, options.shares)),
                "--together", ",".join(options.together), *given,
                log=options.out / "logs" / f"{way.label.replace(' ', '-')}.txt", secs=secs,
            )  # fmt: skip
            document["problems"].pop(way.label, None)
    return document


def _write(out: Path, document: dict[str, Any]) -> None:
    from tunerd.system.files import write_whole

    write_whole(out / "capacity.json", json.dumps(document, indent=1) + "\n", sync=False)
    write_whole(out / "capacity.txt", capacity_table.table(document), sync=False)


def main(argv: Sequence[str] | None = None) -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet50", help="of torchvision, or encoder")
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--rate", type=float, default=30.0, help="requests a second of each model")
    parser.add_argument("--within-ms", type=float, default=10.0, help="that 99 of 100 are to take")
    parser.add_argument("--most", type=int, default=256, help="models that are tried")
    parser.add_argument("--shares", default="100,12", help="to tune at, in percent; '' for none")
    parser.add_argument("--together", default="1x2x4x8@100", help="models in a launch and share")
    parser.add_argument("--only", action="append", default=[], help="ways that contain this text")
    parser.add_argument("--list", action="store_true", help="print the ways, and end")
    parser.add_argument("--prepare-only", action="store_true", help="make what the ways need")
    parser.add_argument("--budget", default="30s", help="of each search")
    parser.add_argument("--load-secs", type=float, default=3.0, help="of a try")
    parser.add_argument("--secs", type=float, default=150.0, help="of a way, at most")
    parser.add_argument(
        "--until", type=float, default=float("inf"), help="seconds, after which nothing is begun"
    )
    parser.add_argument("--runs", type=Path, default=RUNS, help="for models and artifacts")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--artifacts", default="", help=argparse.SUPPRESS)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.shares = [int(pct) for pct in options.shares.split(",") if pct]
    options.together = [point for point in options.together.split(",") if point]
    options.out, options.runs = options.out.resolve(), options.runs.resolve()
    if options.inside:
        inside(options)
        return
    if options.list:
        print("\n".join(each.label for each in _ways(options)))
        return
    since_start()
    options.out.mkdir(parents=True, exist_ok=True)
    print(capacity_table.table(measure(options)), end="")


if __name__ == "__main__":
    main()
