"""A run's store -> everything that a report says about the run, finished or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tunerd.records import RunFacts, Store
from tunerd.records.outcome import outcome_from_json
from tunerd.records.tally import Disturbed
from tunerd.stats.drift import SliceDrift, drift
from tunerd.telemetry.history import (
    ConditionPoint,
    FailureKind,
    HistoryPoint,
    RunTime,
    conditions_of,
    failures_of,
    history_of,
)
from tunerd.telemetry.time_use import TimeUse, time_use
from tunerd.vocabulary import (
    DEFAULT_SOURCE,
    Candidate,
    CapProof,
    Failure,
    Record,
    SliceSpec,
    Task,
    TrialState,
)
from tunerd.vocabulary.outcome import Outcome, TaskOutcome


@dataclass(frozen=True)
class SliceView:
    """A slice as planned, as last proved, and what it did. `proofs` above one: it was restarted."""

    slice_id: str
    spec: SliceSpec | None  # None: of a run that was merged from others
    proof: CapProof | None  # None: it never proved its cap, and nothing was measured in it
    proofs: int
    trials: int  # that ended measured there


@dataclass(frozen=True)
class RunView:
    """A run. `outcome` is None while it has no result; its tasks are then as far as they got."""

    facts: RunFacts  # of the last session
    began_at: float  # seconds since the epoch
    sessions: int
    outcome: Outcome | None
    is_stale: bool  # a session that began after the outcome has not ended
    tasks: tuple[TaskOutcome, ...]
    undecided: frozenset[str]  # task ids: their best is the search's, not measured again
    open_trials: int  # proposed or running
    repeated: int  # attempts beyond each trial's first: interrupted or collateral
    history: tuple[HistoryPoint, ...]
    conditions: tuple[ConditionPoint, ...]
    failures: tuple[FailureKind, ...]
    slices: tuple[SliceView, ...]
    time_use: TimeUse | None
    drift: tuple[SliceDrift, ...] = ()
    disturbed: Disturbed = field(default_factory=Disturbed)

    @property
    def name(self) -> str:
        return self.facts.model_name

    @property
    def is_cuda(self) -> bool:
        return self.facts.target.is_cuda

    @property
    def is_unfinished(self) -> bool:
        """Say whether the last session ended before the result, or has not ended yet."""
        return self.outcome is None or self.is_stale

    @property
    def trials(self) -> int:
        """Trials of the search that ended."""
        return sum(t.trials for t in self.tasks)

    @property
    def failed(self) -> int:
        return sum(t.failed for t in self.tasks)

    @property
    def tuning_secs(self) -> float | None:
        """How long the run took, less the pauses between its sessions; None: nobody noted it."""
        if self.time_use is not None:
            return sum(self.time_use.phases.values())
        return self.history[-1].elapsed_secs if self.history else None

    @property
    def model_disturbed_by(self) -> str:
        """What disturbed the timing of the whole model, as in Conditions."""
        return self.outcome.disturbed_by if self.outcome is not None else ""

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.facts.settings)

    @property
    def host(self) -> dict[str, Any]:
        return dict(self.facts.host)

    @property
    def proofs(self) -> tuple[CapProof, ...]:
        return tuple(s.proof for s in self.slices if s.proof is not None)


def run_view_of(store: Store) -> RunView:
    """Read a run from its store, whatever it holds.

    Raises FolderError where no session has begun in it, or it is damaged.
    """
    store.facts()  # says what a folder is that holds no session
    sessions = store.sessions()
    began_at = sessions[0][0]
    tasks = store.tasks()
    records = [_light(record) for record in store.records()]
    found = store.outcome()
    outcome = _outcome(store, found) if found is not None else None
    saved_at = store.outcome_saved_at()
    is_stale = saved_at is not None and sessions[-1][0] > saved_at
    lines, undecided = _tasks(store, tasks, records)
    spans, phases = store.spans(), store.phases()
    ends = [*(r.ended_at for r in records), *(s.end for s in spans), *(p.end for p in phases)]
    run_time = RunTime.of((at for at, _ in sessions), (at for at in ends if at is not None))
    if outcome is not None and not is_stale:
        lines, undecided = outcome.tasks, frozenset()
    return RunView(
        facts=sessions[-1][1],
        began_at=began_at,
        sessions=len(sessions),
        outcome=outcome,
        is_stale=is_stale,
        tasks=lines,
        undecided=undecided,
        open_trials=sum(r.result is None for r in records),
        repeated=sum(max(0, r.attempts - 1) for r in records),
        history=tuple(history_of(tasks, records, run_time)),
        conditions=tuple(conditions_of(records, run_time)),
        failures=tuple(failures_of(records)),
        slices=_slices(store, records),
        time_use=time_use(spans, phases),
        drift=tuple(drift(store.baseline_checks())),
        disturbed=store.disturbed(),
    )


def _outcome(store: Store, found: dict[str, Any]) -> Outcome:
    try:
        return outcome_from_json(found)
    except (ValueError, LookupError) as error:
        raise store.damaged(f"an outcome: {error}") from error


def _light(record: Record) -> Record:
    """Return a record without its trace: of many trials that would be most of the memory."""
    return replace(record, candidate=replace(record.candidate, recipe=""))


def _tasks(
    store: Store, tasks: Sequence[Task], records: Sequence[Record]
) -> tuple[tuple[TaskOutcome, ...], frozenset[str]]:
    """Return each task as decided or, where its finalists were not measured, as searched."""
    by_task: dict[str, list[Record]] = {}
    for record in records:
        if record.state in (TrialState.MEASURED, TrialState.FAILED):
            by_task.setdefault(record.candidate.task_id, []).append(record)
    decided = {o.task_id: o for o in store.task_outcomes()}
    lines, undecided = [], set()
    for task in tasks:
        searched = _searched(task, by_task.get(task.task_id, []))
        known = decided.get(task.task_id)
        # As winners.choose_winners has it: a decision counts while no later trial has ended.
        if known is None or known.trials != searched.trials:
            undecided.add(task.task_id)
            known = searched
        lines.append(known)
    return tuple(lines), frozenset(undecided)


def _searched(task: Task, records: Sequence[Record]) -> TaskOutcome:
    defaults = [r.run_secs for r in records if r.candidate.is_default]
    trials = [r for r in records if not r.candidate.is_default]
    known = [r.run_secs for r in records if r.run_secs is not None]
    return TaskOutcome(
        task_id=task.task_id,
        name=task.name,
        weight=task.weight,
        trials=len(trials),
        failed=sum(isinstance(r.result, Failure) for r in trials),
        default_secs=defaults[0] if defaults else None,
        best_secs=min(known, default=None),
        winner=Candidate(task.task_id, "", DEFAULT_SOURCE),
        comparison=None,
        note="the run did not come to measure its finalists",
    )


def _slices(store: Store, records: Sequence[Record]) -> tuple[SliceView, ...]:
    specs = {spec.slice_id: spec for spec in store.slices()}
    last: dict[str, CapProof] = {}
    proofs: Counter[str] = Counter()
    for proof in store.proofs():
        last[proof.slice_id] = proof
        proofs[proof.slice_id] += 1
    trials = Counter(r.slice_id for r in records if r.state is TrialState.MEASURED)
    return tuple(
        SliceView(name, specs.get(name), last.get(name), proofs[name], trials[name])
        for name in dict.fromkeys([*specs, *last])
    )
