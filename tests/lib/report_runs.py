"""Runs as a report sees them, made up: outcomes, views, and stores on disk."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

from tests.lib.store_places import proposed
from tunerd.records import RunFacts, Store
from tunerd.report.run_view import RunView, SliceView
from tunerd.telemetry.history import ConditionPoint, FailureKind, HistoryPoint
from tunerd.telemetry.time_use import time_use
from tunerd.vocabulary import (
    DEFAULT_SOURCE,
    METASCHEDULE,
    Activity,
    Candidate,
    CapProof,
    Conditions,
    Failure,
    Kind,
    Measurement,
    Model,
    Phase,
    PhaseTime,
    SliceSpec,
    Span,
    Stage,
    TargetSpec,
    Task,
    TensorSpec,
)
from tunerd.vocabulary.outcome import Comparison, Latency, Outcome, TaskOutcome, Verification
from tunerd.vocabulary.verdict import Verdict

HOSTILE = "<script>alert('x')</script>\x1b[31m&\"\u202e"


def comparison(base: float, new: float, verdict: Verdict = Verdict.FASTER) -> Comparison:
    ratio = base / new
    return Comparison(verdict, base, new, ratio, ratio * 0.98, ratio * 1.02)


def task(index: int, *, tuned: bool = True, rng: random.Random) -> TaskOutcome:
    default = rng.uniform(20e-6, 900e-6)
    best = default / rng.uniform(1.1, 9) if tuned else default
    origin = METASCHEDULE if tuned else DEFAULT_SOURCE
    name = f"fused_conv2d_add_relu{index}"
    unsure = comparison(default, default / 1.01, Verdict.CANNOT_TELL)
    return TaskOutcome(
        task_id=f"{index:012x}",
        name=name,
        weight=rng.choice((1, 1, 2, 3, 6)),
        trials=rng.randrange(16, 90),
        failed=rng.randrange(0, 12),
        default_secs=default,
        best_secs=best,
        winner=Candidate(f"{index:012x}", f"{index * 7919:016x}", origin),
        comparison=comparison(default, best) if tuned else unsure,
        note="" if tuned else "no finalist is faster than the default by an interval",
    )


def untried(index: int) -> TaskOutcome:
    """A task for which the search found no candidate, so that nothing is known but its default."""
    return TaskOutcome(
        task_id=f"{index:012x}",
        name=f"stem_conv2d{index}",
        weight=1,
        trials=0,
        failed=0,
        default_secs=None,
        best_secs=None,
        winner=Candidate(f"{index:012x}", f"{index:016x}", DEFAULT_SOURCE),
        comparison=None,
        note="the search found no candidate",
    )


def sampled(median: float, rng: random.Random, size: int = 31) -> tuple[float, ...]:
    """Return samples whose median is `median` exactly, with a tail above it as latencies have."""
    half = [rng.expovariate(1) * 0.012 for _ in range(size // 2)]
    around = (*(median * (1 - 0.4 * h) for h in half), median, *(median * (1 + h) for h in half))
    return tuple(rng.sample(around, len(around)))


def gpu_outcome(tasks: int = 43, seed: int = 1) -> Outcome:
    """What a run of a ResNet at 40% of a GPU could end with."""
    rng = random.Random(seed)
    done = tuple(task(i, tuned=i % 11 != 5, rng=rng) for i in range(max(0, tasks - 1)))
    default, tuned = 12.34e-3, 5.87e-3
    return Outcome(
        model=Model(
            name="light_resnet50",
            digest="6b0e" * 16,
            inputs=(TensorSpec("gpu_0/data_0", (1, 3, 224, 224), "float32"),),
            outputs=(TensorSpec("gpu_0/softmax_1", (1, 1000), "float32"),),
            graph=None,  # type: ignore[arg-type]
            notes=("53 batch norms folded into convolutions",),
        ),
        target=TargetSpec("cuda", "{}"),
        tasks=(*done, untried(tasks)) if tasks else (),
        verification=Verification(Verdict.RIGHT, 3, 1e-3, 1e-4, 0.118, "3 of 3 seeds agree"),
        latencies=(
            Latency("default", sampled(default, rng)),
            Latency("tuned", sampled(tuned, rng)),
        ),
        end_to_end=Comparison(Verdict.FASTER, default, tuned, 2.102, 2.053, 2.158),
        artifact="/home/someone/runs/resnet/artifact",
        proofs=tuple(
            CapProof(f"mps-0-{i}", "NVIDIA H200", 52, 132, "mps", True, "580.159.04", "9.0", 4242)
            for i in range(2)
        ),
    )


def cpu_outcome() -> Outcome:
    """What a run of a SqueezeNet on half the cores could end with: ONNX Runtime stays ahead."""
    rng = random.Random(3)
    outcome = gpu_outcome(tasks=20)
    return dataclasses.replace(
        outcome,
        model=dataclasses.replace(outcome.model, name="light_squeezenet"),
        target=TargetSpec("llvm", "{}"),
        latencies=(
            Latency("default", sampled(588e-3, rng)),
            Latency("tuned", sampled(66.1e-3, rng)),
            Latency("onnxruntime", sampled(34.2e-3, rng)),
        ),
        end_to_end=Comparison(Verdict.FASTER, 0.588, 0.0661, 8.896, 8.71, 9.02),
        proofs=(CapProof("cpu-0-0", "AMD EPYC 9354", 1, 2, "affinity", True),),
    )


def history() -> list[HistoryPoint]:
    rng = random.Random(5)
    best, points = 12.1e-3, [HistoryPoint(1.5, None, 0)]
    for step in range(1, 900):
        best *= 1 - 0.02 * rng.random() ** 6 if best > 5.6e-3 else 1
        points.append(HistoryPoint(6 + step / 3, best, 3 * step))
    return points


def spans_of(worker: str, role: str, *parts: tuple[Activity, float]) -> list[Span]:
    """Return spans one after the other, each as long as it says."""
    spans, at = [], 0.0
    for activity, secs in parts:
        spans.append(Span(worker, activity, at, at + secs, role))
        at += secs
    return spans


SEARCHED = PhaseTime(Phase.SEARCH, 0.0, 300.0, 1, tuple((c, 280.0 + c) for c in range(16)))
TIME_USE = time_use(
    [
        *spans_of(
            "tuner-0",
            "tuner",
            (Activity.WAIT, 12.5),
            (Activity.SEARCH, 61.0),
            (Activity.BUILD, 190.2),
        ),
        *spans_of("mps-0-0", "slice", (Activity.IDLE, 131.5), (Activity.MEASURE, 151.0)),
        *spans_of("mps-0-1", "slice", (Activity.IDLE, 139.0), (Activity.MEASURE, 144.4)),
    ],
    [SEARCHED],
)
FAILURES = (
    FailureKind(
        "build: compile", 118, "error: ptxas: too much shared data (0x1a000 bytes)", trial_id=901
    ),
    FailureKind("run: timeout", 4, "no answer within 10 s", trial_id=77),
)
SETTINGS = {"model": "light_resnet50.onnx", "gpu_pct": 40, "trials": None, "seed": 0}
HOST = {
    "cores": 16,
    "packages": [["apache-tvm", "0.27.0.post1"], ["ray", "2.60.0"]],
    "gpus": [{"name": "NVIDIA H200", "sm_count": 132}],
}


def conditions(gpus: int = 1) -> tuple[ConditionPoint, ...]:
    """Clocks of slices of some GPUs that get warm and slow down a little."""
    rng = random.Random(7)
    return tuple(
        ConditionPoint(
            5 + i / 4,
            f"mps-{i % gpus}-0",
            Conditions(1980 - 15 * (i // 90), 31 + i // 60, rng.uniform(130, 180), 1),
        )
        for i in range(400)
    )


def view(outcome: Outcome | None, **changes: Any) -> RunView:
    """Return the view of a run that ended with this outcome; changes are of any field of it.

    `settings`, `host` and `model` change its facts.
    """
    model = outcome.model if outcome else gpu_outcome(tasks=0).model
    facts = RunFacts(
        model_name=changes.pop("model", model.name),
        model_digest=model.digest,
        target=outcome.target if outcome else TargetSpec("cuda", "{}"),
        device=outcome.proofs[0].device if outcome and outcome.proofs else "NVIDIA H200",
        slice_kind="mps" if outcome is None or outcome.target.is_cuda else "cpu",
        pct=40,
        tvm_version="0.27.0.post1",
        settings=changes.pop("settings", SETTINGS),
        host=changes.pop("host", HOST),
    )
    told = RunView(
        facts=facts,
        began_at=1.8e9,
        sessions=1,
        outcome=outcome,
        is_stale=False,
        tasks=outcome.tasks if outcome else (),
        undecided=frozenset(),
        open_trials=0,
        repeated=0,
        history=tuple(history()),
        conditions=conditions() if facts.target.is_cuda else (),
        failures=FAILURES,
        slices=tuple(
            SliceView(p.slice_id, SliceSpec(p.slice_id, facts.slice_kind, 40), p, 1, 250)
            for p in (outcome.proofs if outcome else ())
        ),
        time_use=TIME_USE,
    )
    return dataclasses.replace(told, **changes)


# --- stores ------------------------------------------------------------------------------------

CPU = TargetSpec("llvm", '{"kind": "llvm", "mcpu": "znver4"}')
PROOF = CapProof("cpu-0-0", "AMD EPYC 9354", 1, 2, "affinity", True)


def run_facts(name: str = "net", **changes: Any) -> RunFacts:
    facts = RunFacts(
        model_name=name,
        model_digest="ab" * 32,
        target=CPU,
        device="AMD EPYC 9354",
        slice_kind="cpu",
        pct=50,
        tvm_version="0.27.0.post1",
        settings={"cpu_pct": 50, "trials": 6, "seed": 0},
        host={"hostname": "here", "packages": [["ray", "2.60.0"]]},
    )
    return dataclasses.replace(facts, **changes)


def searched_run(folder: Path, facts: RunFacts | None = None, *, at: float = 1000.0) -> Path:
    """Make the run folder of a run that was killed in its search, after seven trials."""
    folder.mkdir(exist_ok=True)
    tasks = [Task(f"{n:012x}", f"task{n}", n + 1, 1e6, (), (), CPU, "{}") for n in range(2)]
    with Store.create_or_open(folder, facts=facts or run_facts(), now=at) as store:
        store.register_tasks(tasks)
        store.save_slices(
            [SliceSpec("cpu-0-0", "cpu", 50, cores=(0,)), SliceSpec("cpu-0-1", "cpu", 50)]
        )
        store.save_proof(PROOF, now=at)
        for number in range(8):
            task = tasks[number % 2]
            origin = METASCHEDULE if number > 1 else DEFAULT_SOURCE
            candidate = Candidate(
                task.task_id, f"{number:016x}", origin, "[]" if number > 1 else ""
            )
            (trial,) = proposed(store, [candidate], now=at + number)
            if number == 7:
                break
            store.start([trial], "cpu-0-0", now=at + number)
            result: Measurement | Failure = Measurement(
                (1e-3 / (number + 1),) * 5, 3, "search-v1", "cpu-0-0", 1
            )
            if number == 5:
                result = Failure(Stage.BUILD, Kind.COMPILE, "one\n\ntwo\n")
            store.finish(trial, result, now=at + number + 0.5)
        store.add_spans(
            [Span("cpu-0-0", Activity.MEASURE, at, at + 7, "slice", store.session, items=7)]
        )
    return folder


def finished_run(
    folder: Path,
    facts: RunFacts | None = None,
    *,
    tuned_secs: float = 2e-3,
    at: float = 1000.0,
    name: str = "net",
) -> Path:
    """Make the run folder of a run that came to its end, with task0 tuned."""
    facts = facts or run_facts(name)
    searched_run(folder, facts, at=at)
    rng = random.Random(11)
    with Store.create_or_open(folder, facts=facts, now=at + 20) as store:
        outcomes = []
        for number, known in enumerate(store.tasks()):
            origin = DEFAULT_SOURCE if number else METASCHEDULE
            winner = Candidate(known.task_id, f"{1 if number else 6:016x}", origin)
            outcomes.append(
                TaskOutcome(
                    known.task_id, known.name, known.weight, 3 - number, number, 1e-3,
                    1e-3 if number else 2e-4, winner,
                    None if number else comparison(1e-3, 2e-4),
                    "the best candidate against the default: slower" if number else "",
                )
            )  # fmt: skip
            store.save_task_outcome(outcomes[-1], now=at + 25)
        default = sampled(4e-3, rng)
        tuned = sampled(tuned_secs, rng)
        store.save_outcome(
            dataclasses.replace(
                cpu_outcome(),
                model=dataclasses.replace(
                    cpu_outcome().model, name=facts.model_name, digest=facts.model_digest
                ),
                tasks=tuple(outcomes),
                latencies=(Latency("default", default), Latency("tuned", tuned)),
                end_to_end=comparison(4e-3, tuned_secs),
                proofs=(PROOF,),
            ),
            now=at + 30,
        )
        store.add_phase(PhaseTime(Phase.MODEL, at + 25, at + 30, store.session))
    return folder
