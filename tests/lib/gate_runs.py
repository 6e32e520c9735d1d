"""Finished runs with made-up samples, as a machine with noise would have left them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tunerd.records import RunFacts
from tunerd.runs.folder import RunFolder
from tunerd.vocabulary import (
    DEFAULT_SOURCE,
    METASCHEDULE,
    Candidate,
    CapProof,
    Measurement,
    Model,
    TargetSpec,
    TensorSpec,
)
from tunerd.vocabulary.outcome import (
    Comparison,
    Finalist,
    Latency,
    Outcome,
    TaskOutcome,
    Verification,
)
from tunerd.vocabulary.verdict import Verdict

GPU = TargetSpec("cuda", '{"kind": "cuda", "arch": "sm_90"}')
PROOF = CapProof("mps-0-0", "NVIDIA H200", 52, 132, "mps", True, "580.159.04", "9.0", 4242)
MODEL = Model(
    name="net",
    digest="6b0e" * 16,
    inputs=(TensorSpec("images", (1, 3, 224, 224), "float32"),),
    outputs=(TensorSpec("scores", (1, 1000), "float32"),),
    graph=None,  # type: ignore[arg-type]
)
RIGHT = Verification(Verdict.RIGHT, 3, 1e-3, 1e-3, 0.1, "all outputs agree")
TUNED_SECS, DEFAULT_SECS, TASK_SECS = 5.87e-3, 12.3e-3, 200e-6


def noisy(
    secs: float,
    count: int,
    rng: np.random.Generator,
    *,
    spread: float = 0.02,
    memory: float = 0.6,
) -> tuple[float, ...]:
    """Return samples as sessions have them: each resembles the one before, some are far above.

    `memory` is the correlation of a sample with the next.
    """
    noise, last = [], rng.normal()
    for step in rng.normal(size=count):
        last = memory * last + np.sqrt(1.0 - memory**2) * step
        noise.append(last)
    spikes = rng.exponential(0.2, count) * (rng.random(count) < 0.05)
    return tuple(float(s) for s in secs * np.exp(spread * np.array(noise) + spikes))


def task(index: int, run_secs: tuple[float, ...], default_secs: tuple[float, ...]) -> TaskOutcome:
    task_id, candidate_id = f"{index:012x}", f"{index:016x}"

    def finalist(candidate: str, source: str, secs: tuple[float, ...]) -> Finalist:
        return Finalist(candidate, source, None, Measurement(secs, 9, "final-v1", "mps-0-0", 52))

    return TaskOutcome(
        task_id=task_id,
        name=f"conv{index}",
        weight=1 + index % 3,
        trials=30,
        failed=0,
        default_secs=default_secs[0],
        best_secs=run_secs[0],
        winner=Candidate(task_id, candidate_id, METASCHEDULE),
        comparison=None,
        note="",
        finalists=(
            finalist("f" * 16, DEFAULT_SOURCE, default_secs),
            finalist(candidate_id, METASCHEDULE, run_secs),
        ),
    )


def outcome(
    seed: int,
    *,
    slower: float = 1.0,
    drift: float = 1.0,
    slow_tasks: Sequence[int] = (),
    tasks: int = 8,
) -> Outcome:
    """Return a run's end: `slower` is the model's fault, `drift` the machine's."""
    rng = np.random.default_rng(seed)
    tuned = noisy(TUNED_SECS * slower * drift, 60, rng)
    default = noisy(DEFAULT_SECS * drift, 8, rng)  # as of a default that is twice as slow
    ended = tuple(
        task(
            i,
            noisy(TASK_SECS * (1.5 if i in slow_tasks else 1.0) * drift, 40, rng),
            noisy(3 * TASK_SECS * drift, 8, rng),
        )
        for i in range(tasks)
    )
    return Outcome(
        model=MODEL,
        target=GPU,
        tasks=ended,
        verification=RIGHT,
        latencies=(Latency("default", default), Latency("tuned", tuned)),
        end_to_end=Comparison(Verdict.FASTER, default[0], tuned[0], 2.0, 1.9, 2.1),
        artifact="/nowhere",
        proofs=(PROOF,),
    )


def run_of(folder: Path, ended: Outcome | None, *, precision: str | None = None) -> Path:
    """Write a run that ended so; None: one that has not ended."""
    model, proof = (ended.model, ended.proofs[0]) if ended else (MODEL, PROOF)
    facts = RunFacts(
        model_name=model.name,
        model_digest=model.digest,
        target=GPU,
        device=proof.device,
        slice_kind="mps",
        pct=40,
        tvm_version="0.27.0.post1",
        settings={"precision": precision},
    )
    with RunFolder.open(folder, facts=facts) as made:
        if ended is not None:
            made.store.save_outcome(ended)
    return folder


def on(proof: CapProof, ended: Outcome) -> Outcome:
    return dataclasses.replace(ended, proofs=(proof,))
