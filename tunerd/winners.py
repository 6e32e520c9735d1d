"""Records -> winners: the quiet second look at each task's best candidates.

Search may be noisy, the result may not: the best few candidates of a task are measured again, many
samples, in turns with its default, while nothing else runs. A candidate wins by an interval of
those samples alone, and only if it computes what the default computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from tunerd.actors import Cluster
from tunerd.compare import compare
from tunerd.coordinator import MAX_ATTEMPTS
from tunerd.records import Store
from tunerd.search import default_candidate
from tunerd.vocabulary import (
    FINAL,
    Build,
    Candidate,
    Comparison,
    Failure,
    Finalist,
    Measurement,
    Origin,
    Record,
    Task,
    TaskOutcome,
    Verdict,
)

FINALISTS = 3  # of each task, besides its default


class Say(Protocol):
    """Shows what is being done next; may raise Interrupted instead."""

    def __call__(self, message: str, /) -> None: ...


@dataclass(frozen=True)
class QuietSlice:
    """The slice in which everything is decided, while nothing else runs."""

    cluster: Cluster
    slice_id: str

    def compare(self, builds: Sequence[Build]) -> list[Measurement | Failure]:
        """Measure builds in turns, again where somebody else's fault came between."""
        for _ in range(MAX_ATTEMPTS):
            results: list[Measurement | Failure] = self.cluster.call(
                self.slice_id, "compare", tuple(builds), FINAL
            )
            if all(isinstance(r, Measurement) or r.kind.ends_trial for r in results):
                break
        return results

    def agree(self, reference: Build, build: Build) -> Failure | None:
        """Say how the results of a build differ from those of its task's default."""
        for _ in range(MAX_ATTEMPTS):
            failure: Failure | None = self.cluster.call(self.slice_id, "agree", reference, build)
            if failure is None or failure.kind.ends_trial:
                break
        return failure


def choose_winners(
    tasks: Sequence[Task],
    store: Store,
    quiet: QuietSlice,
    *,
    say: Say,
    unsearched: Mapping[str, str],
) -> tuple[TaskOutcome, ...]:
    """Choose a winner for each task, in order; outcomes are stored, and not decided twice.

    A stored outcome counts while no trial of its task has ended since. `unsearched` says of tasks
    by their ids why they have no trials.
    """
    records = _ended(store.records())
    known = {
        o.task_id: o for o in store.task_outcomes() if o.trials == len(records.get(o.task_id, ()))
    }
    todo = [t for t in tasks if t.task_id not in known]
    finalists = {t.task_id: _finalists(records.get(t.task_id, ())) for t in todo}
    wanted = [c for t in todo for c in (default_candidate(t), *finalists[t.task_id])]
    if wanted:
        say(f"building the finalists of {len(todo)} tasks")
    built = quiet.cluster.build_all(wanted) if wanted else []
    builds = {c.candidate_id: b for c, b in zip(wanted, built, strict=True)}
    for number, task in enumerate(todo, 1):
        say(f"measuring finalists quietly, task {number} of {len(todo)}: {task.name}")
        entries = [default_candidate(task), *finalists[task.task_id]]
        outcome = _decide(task, records.get(task.task_id, ()), entries, builds, quiet)
        if not outcome.trials:
            outcome = replace(outcome, note=unsearched.get(task.task_id, outcome.note))
        store.propose([outcome.winner])  # the outcome refers to its trial
        store.save_task_outcome(outcome)
        known[task.task_id] = outcome
    return tuple(known[t.task_id] for t in tasks)


def _ended(found: Iterable[Record]) -> dict[str, list[Record]]:
    by_task: dict[str, list[Record]] = {}
    for record in found:
        if record.candidate.origin is Origin.SEARCH and record.result is not None:
            by_task.setdefault(record.candidate.task_id, []).append(record)
    return by_task


def _finalists(records: Sequence[Record]) -> list[Candidate]:
    measured = [(secs, r.candidate) for r in records if (secs := r.run_secs) is not None]
    return [candidate for _, candidate in sorted(measured, key=lambda m: m[0])[:FINALISTS]]


def _decide(
    task: Task,
    records: Sequence[Record],
    entries: Sequence[Candidate],
    builds: Mapping[str, Build | Failure],
    quiet: QuietSlice,
) -> TaskOutcome:
    """Decide between the entries, the first of which is the default."""
    ready = [b for c in entries if isinstance(b := builds[c.candidate_id], Build)]
    measured: dict[str, Measurement | Failure] = {
        c.candidate_id: b for c in entries if isinstance(b := builds[c.candidate_id], Failure)
    }
    if ready:
        results = quiet.compare(ready)
        measured |= {b.candidate.candidate_id: r for b, r in zip(ready, results, strict=True)}
    winner, comparison, note = _winner(entries, builds, measured, quiet)
    searched = {r.candidate.candidate_id: r.run_secs for r in records}
    return TaskOutcome(
        task_id=task.task_id,
        name=task.name,
        weight=task.weight,
        trials=len(records),
        failed=sum(isinstance(r.result, Failure) for r in records),
        default_secs=_secs(measured[entries[0].candidate_id]),
        best_secs=_secs(measured[winner.candidate_id]),
        winner=winner,
        comparison=comparison,
        note=note,
        finalists=tuple(
            Finalist(
                c.candidate_id, c.origin, searched.get(c.candidate_id), measured[c.candidate_id]
            )
            for c in entries
        ),
    )


def _winner(
    entries: Sequence[Candidate],
    builds: Mapping[str, Build | Failure],
    measured: dict[str, Measurement | Failure],
    quiet: QuietSlice,
) -> tuple[Candidate, Comparison | None, str]:
    """Return the winner, how it compares with the default, and why the default stays.

    A candidate that would win and computes something else becomes a failure in `measured`.
    """
    default, *candidates = entries
    base, reference = measured[default.candidate_id], builds[default.candidate_id]
    wrong = ""
    while rivals := [
        (r.median_secs, c, r)
        for c in candidates
        if isinstance(r := measured[c.candidate_id], Measurement)
    ]:
        _, best, result = min(rivals, key=lambda rival: rival[0])
        if isinstance(base, Failure) or isinstance(reference, Failure):
            why = base.message[-200:] if isinstance(base, Failure) else ""
            return best, None, f"its default schedule does not run: {why}"
        comparison = compare(base.run_secs, result.run_secs)
        if comparison.verdict is not Verdict.FASTER:
            note = f"the best candidate against the default: {comparison.verdict}"
            return default, comparison, "; ".join(filter(None, (wrong, note)))
        build = builds[best.candidate_id]
        assert isinstance(build, Build)  # it was measured
        failure = quiet.agree(reference, build)
        if failure is None:
            return best, comparison, wrong
        measured[best.candidate_id] = failure
        wrong = f"a faster candidate was refused: {failure.message[-200:]}"
    if wrong:
        return default, None, wrong
    why = "no candidate could be measured" if candidates else "no trial was measured"
    return default, None, why


def _secs(result: Measurement | Failure) -> float | None:
    return result.median_secs if isinstance(result, Measurement) else None
