"""Records -> Outcome: the quiet second look, the artifact, and whether it is right and faster.

Search may be noisy, the result may not: the best few candidates of each task are measured again,
many samples, in turns with the task's default, while nothing else runs. A candidate wins only by an
interval. Then the whole model is compiled twice, with the winners and with the defaults, checked
against ONNX Runtime and timed in turns on the slice.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tunerd.actors import Cluster
from tunerd.artifact import compile_artifact, finish_manifest
from tunerd.compare import compare
from tunerd.errors import InfrastructureError
from tunerd.preparation import Kernels, Layout
from tunerd.run_folder import RunFolder
from tunerd.search import default_candidate
from tunerd.settings import TuneSettings
from tunerd.verify import onnxruntime_latency, verify
from tunerd.vocabulary import (
    FINAL,
    MODEL,
    Arrays,
    Build,
    Candidate,
    CapProof,
    Comparison,
    Correctness,
    Failure,
    Finalist,
    Latency,
    Measurement,
    Model,
    Origin,
    Outcome,
    Record,
    Task,
    TaskOutcome,
    Verdict,
    Verification,
)

log = logging.getLogger(__name__)

FINALISTS = 3  # of each task, besides its default

Say = Callable[[str], None]  # shows what is being done


@dataclass(frozen=True)
class Ending:
    """What the end of a run works with."""

    settings: TuneSettings
    folder: RunFolder
    model: Model
    layout: Layout
    kernels: Kernels
    cluster: Cluster
    proofs: tuple[CapProof, ...]
    say: Say

    @property
    def quiet_slice(self) -> str:
        return self.layout.slices[0][0].slice_id


def finish(ending: Ending) -> Outcome:
    """Choose the winners, compile, verify and time the model; store and return the outcome."""
    outcomes = choose_winners(ending)
    winners = {o.task_id: o.winner for o in outcomes if o.is_tuned}
    ending.say("compiling the model with its default schedules")
    default_folder = ending.folder.paths.root / "default"
    _compile(ending, {}, default_folder)
    try:
        ending.say("compiling the model with the tuned schedules")
        artifact = ending.folder.paths.artifact
        _compile(ending, winners, artifact)
        verification = _verify(ending, str(artifact))
        tuned, default = _end_to_end(ending, str(artifact), str(default_folder))
        end_to_end = compare(default.run_secs, tuned.run_secs)
        latencies = [default, tuned]
        if end_to_end.verdict is Verdict.SLOWER and winners:
            # Kernels that win alone may lose together. What ships is never slower.
            outcomes = tuple(_stay(o, "the whole model is slower with it") for o in outcomes)
            _compile(ending, {}, artifact)
            verification = _verify(ending, str(artifact))
            tuned, default = _end_to_end(ending, str(artifact), str(default_folder))
            end_to_end = compare(default.run_secs, tuned.run_secs)
            latencies = [default, tuned]
    finally:
        shutil.rmtree(default_folder, ignore_errors=True)
    spec = ending.layout.slices[0][0]
    if spec.cores:
        ending.say("timing ONNX Runtime on the same cores")
        latencies.append(
            onnxruntime_latency(
                ending.model, threads=len(spec.cores), cores=spec.cores, profile=MODEL
            )
        )
    outcome = Outcome(
        model=ending.model,
        target=ending.layout.target,
        tasks=outcomes,
        verification=verification,
        latencies=tuple(latencies),
        end_to_end=end_to_end,
        artifact=str(artifact),
        proofs=ending.proofs,
    )
    if verification.verdict is Correctness.WRONG:
        rejected = artifact.with_name("artifact.rejected")
        shutil.rmtree(rejected, ignore_errors=True)
        artifact.rename(rejected)
    else:
        finish_manifest(artifact, outcome)
    ending.folder.store.save_outcome(outcome)
    return outcome


def choose_winners(ending: Ending) -> tuple[TaskOutcome, ...]:
    """Measure each task's finalists beside its default and let an interval decide."""
    store = ending.folder.store
    known = {o.task_id: o for o in store.task_outcomes()}
    records = _ended(store.records())
    todo = []
    for task in ending.kernels.tasks:
        before = known.get(task.task_id)
        if before is None or before.trials != len(records.get(task.task_id, ())):
            known.pop(task.task_id, None)
            todo.append(task)
    chosen = {t.task_id: _finalists(records.get(t.task_id, ())) for t in todo}
    wanted = [
        c for t in todo for c in (default_candidate(t), *(r.candidate for r in chosen[t.task_id]))
    ]
    ending.say(f"building the finalists of {len(todo)} tasks")
    builds = {
        c.candidate_id: b for c, b in zip(wanted, ending.cluster.build_all(wanted), strict=True)
    }
    for number, task in enumerate(todo, 1):
        ending.say(f"measuring finalists quietly, task {number} of {len(todo)}: {task.name}")
        mine = records.get(task.task_id, ())
        outcome = _decide(ending, task, chosen[task.task_id], mine, builds)
        store.propose([outcome.winner])  # the outcome refers to its trial
        store.save_task_outcome(outcome)
        known[task.task_id] = outcome
    return tuple(known[t.task_id] for t in ending.kernels.tasks)


def _ended(found: object) -> dict[str, list[Record]]:
    by_task: dict[str, list[Record]] = {}
    for record in found:  # type: ignore[attr-defined]
        if record.candidate.origin is Origin.SEARCH and record.result is not None:
            by_task.setdefault(record.candidate.task_id, []).append(record)
    return by_task


def _finalists(records: Sequence[Record]) -> list[Record]:
    measured = [r for r in records if r.run_secs is not None]
    return sorted(measured, key=lambda r: r.run_secs or 0.0)[:FINALISTS]


def _decide(
    ending: Ending,
    task: Task,
    finalists: Sequence[Record],
    records: Sequence[Record],
    builds: Mapping[str, Build | Failure],
) -> TaskOutcome:
    default = default_candidate(task)
    searched = {r.candidate.candidate_id: r.run_secs for r in finalists}
    entries = [default, *(r.candidate for r in finalists)]
    ready = [b for c in entries if isinstance(b := builds[c.candidate_id], Build)]
    measured: dict[str, Measurement | Failure] = {
        c.candidate_id: b for c in entries if isinstance(b := builds[c.candidate_id], Failure)
    }
    if ready:
        results = ending.cluster.call(ending.quiet_slice, "compare", tuple(ready), FINAL)
        measured |= {b.candidate.candidate_id: r for b, r in zip(ready, results, strict=True)}
    winner, comparison, note = _winner(default, entries[1:], measured)
    base = measured[default.candidate_id]
    best = measured[winner.candidate_id]
    return TaskOutcome(
        task_id=task.task_id,
        name=task.name,
        weight=task.weight,
        trials=len(records),
        failed=sum(isinstance(r.result, Failure) for r in records),
        default_secs=base.median_secs if isinstance(base, Measurement) else None,
        best_secs=best.median_secs if isinstance(best, Measurement) else None,
        winner=winner,
        comparison=comparison,
        note=note or ("" if finalists or winner is not default else "no trial was measured"),
        finalists=tuple(
            Finalist(
                c.candidate_id, c.origin, searched.get(c.candidate_id), measured[c.candidate_id]
            )
            for c in entries
        ),
    )


def _winner(
    default: Candidate,
    candidates: Sequence[Candidate],
    measured: Mapping[str, Measurement | Failure],
) -> tuple[Candidate, Comparison | None, str]:
    rivals = [
        (r.median_secs, c)
        for c in candidates
        if isinstance(r := measured[c.candidate_id], Measurement)
    ]
    base = measured[default.candidate_id]
    if not rivals:
        return default, None, "no candidate could be measured" if candidates else "no candidates"
    _, best = min(rivals, key=lambda rival: rival[0])
    new = measured[best.candidate_id]
    assert isinstance(new, Measurement)
    if isinstance(base, Failure):
        return best, None, f"its default schedule does not run: {base.message[-200:]}"
    comparison = compare(base.run_secs, new.run_secs)
    if comparison.verdict is Verdict.FASTER:
        return best, comparison, ""
    return default, comparison, f"the best candidate against the default: {comparison.verdict}"


def _stay(outcome: TaskOutcome, why: str) -> TaskOutcome:
    from dataclasses import replace

    if not outcome.is_tuned:
        return outcome
    default = Candidate(
        outcome.task_id,
        next(f.candidate_id for f in outcome.finalists if f.origin is Origin.DEFAULT),
        Origin.DEFAULT,
    )
    return replace(outcome, winner=default, best_secs=outcome.default_secs, note=why)


def _compile(ending: Ending, winners: Mapping[str, Candidate], folder: object) -> None:
    compile_artifact(
        ending.kernels.lowered,
        ending.kernels.tasks,
        winners,
        ending.layout.target,
        folder,  # type: ignore[arg-type]
        model=ending.model,
        pct=ending.settings.pct,
        proofs=ending.proofs,
    )


def _verify(ending: Ending, artifact: str) -> Verification:
    ending.say("comparing outputs with ONNX Runtime")

    def run(inputs: Arrays) -> Arrays:
        outputs: Arrays = ending.cluster.call(ending.quiet_slice, "run_model", artifact, inputs)
        return outputs

    return verify(run, ending.model)


def _end_to_end(ending: Ending, tuned: str, default: str) -> tuple[Latency, Latency]:
    ending.say("timing the whole model, tuned and default in turns")
    results = ending.cluster.call(ending.quiet_slice, "compare_models", (default, tuned), MODEL)
    found = []
    for name, result in zip(("default", "tuned"), results, strict=True):
        if isinstance(result, Failure):
            raise InfrastructureError(f"the {name} model could not be timed: {result.message}")
        found.append(Latency(name, result.run_secs))
    return found[1], found[0]
