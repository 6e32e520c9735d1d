"""Records -> winners: the quiet second look at each task's best candidates.

Search may be noisy, the result may not: the best few candidates of a task are measured again, many
samples, in turns with its default, while nothing runs but the neighbours that were asked for. The
one with the smallest median wins if the interval of its ratio to the default lies above one, and
only if it computes what the default computes.

Where there is no time for all of it, tasks have fewer finalists and turns, or are not measured
again: `allowance` says which. Of these the search's best wins where the search found it clearly
faster and where it computes what the default computes; else the default stays.

A trial that others disturbed looks slower than it is. Where a task has such trials beside quiet
ones, the best few of both are measured again.

Where the search's own ranking is to be judged, more candidates are measured with them, spread
evenly over the ranks that follow. They never win: the artifact is the same with them and without,
and they tell what the choice of the best few has missed. Each costs its build and 40 samples of
2 ms, with a warm cache 5 ms, or, where its calls take longer, 20 at least.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from tunerd.records import Store
from tunerd.runs.finals.allowance import FINALISTS_PART, Allowance, Contest, Share, Shares
from tunerd.runs.finals.quiet_slice import QuietSlice
from tunerd.stats.paired import fastest
from tunerd.vocabulary import (
    LIBRARIES,
    Build,
    Candidate,
    Failure,
    Kind,
    Measurement,
    Record,
    Stage,
    Task,
    default_candidate,
)
from tunerd.vocabulary.outcome import Comparison, Finalist, TaskOutcome
from tunerd.vocabulary.verdict import Verdict

# Of each task, besides its default; of disturbed trials as many more, and each library's best.
FINALISTS = 3
CLEARLY = 1.25  # times as fast in the search: more than chance, since trials are not in turns
_SPENT = Failure(Stage.RUN, Kind.INTERRUPTED, "the time for finalists was spent")
_MORE_HEATS = 3  # of as many of the next best, where all finalists turned out to be wrong
_T = TypeVar("_T")


class Say(Protocol):
    """Shows what is being done next; may raise Interrupted instead."""

    def __call__(self, message: str, /) -> None: ...


def choose_winners(
    tasks: Sequence[Task],
    store: Store,
    quiet: QuietSlice,
    *,
    say: Say,
    unsearched: Mapping[str, str],
    built: Iterable[Build] = (),
    libraries: Collection[str] = (),
    allowance: Allowance | None = None,
) -> tuple[TaskOutcome, ...]:
    """Choose a winner for each task, in order; outcomes are stored, and not decided twice.

    A stored outcome counts while no trial of its task has ended since, if it is decided and was
    measured like these. `unsearched` says of tasks by their ids why they have no trials. What is
    not in `built` is built. A candidate that faulted in earlier finals of this run is never run
    again. Of sources that are libraries only those of `libraries` count. A part of the allowance is
    for this, without one there is time for all; a task that is left out has what the search says of
    it, and is not decided.
    """
    allowance = allowance or Allowance()
    refused = set(LIBRARIES) - set(libraries)
    trials = list(store.records())
    searched, records = _search_secs(trials), _ended(trials)
    disturbed = {
        r.candidate.candidate_id
        for r in trials
        if isinstance(r.result, Measurement) and r.result.conditions.is_disturbed
    }
    finals = quiet.finals
    stored = store.task_outcomes()
    known = {
        o.task_id: o
        for o in stored
        if o.trials == len(records.get(o.task_id, ()))
        and o.is_decided
        and finals.accept(o)
        and o.winner.source not in refused
    }
    todo = [t for t in tasks if t.task_id not in known]
    allowed = {
        name: [r for r in of if r.candidate.source not in refused] for name, of in records.items()
    }
    entries = {t.task_id: _entries(t, allowed.get(t.task_id, ()), finals.fidelity) for t in todo}
    wanted = [c for t in todo for c in entries[t.task_id].all]
    builds: dict[str, Build | Failure] = {b.candidate.candidate_id: b for b in built}
    builds |= faults_of(stored)
    if missing := [c for c in wanted if c.candidate_id not in builds]:
        say(f"building {len(missing)} of the {len(wanted)} finalists of {len(todo)} tasks")
        found = quiet.cluster.build_all(missing)
        builds |= {c.candidate_id: b for c, b in zip(missing, found, strict=True)}
    shares = Shares(
        [_contest(t, entries[t.task_id], searched) for t in todo],
        allowance.part(FINALISTS_PART),
        profile=finals.profile,
        at_once=quiet.at_once,
        decided_secs=sum(o.weight * (o.default_secs or 0.0) for o in known.values()),
    )
    by_id = {t.task_id: t for t in todo}
    todo = [by_id[task_id] for task_id in shares.order]
    for first in range(0, len(todo), quiet.at_once):
        part = todo[first : first + quiet.at_once]
        shared = shares.take([t.task_id for t in part])
        briefly = _in_turns(quiet, shared.values())
        contests = {name: entries[name].best(share.finalists) for name, share in shared.items()}
        measured: dict[str, Measurement | Failure] = {}
        if contests:
            names = ", ".join(t.name for t in part if t.task_id in contests)
            say(f"measuring finalists, task {first + 1} of {len(todo)}: {names}")
            measured = _measure(list(contests.values()), builds, briefly)
        for task in part:
            own = records.get(task.task_id, ())
            if (entry := contests.get(task.task_id)) is None:
                left = entries[task.task_id]
                outcome = _left_out(task, own, left, builds, searched, disturbed, quiet)
            else:
                outcome = _decide(task, own, entry, builds, measured, quiet)
            for _ in range(_MORE_HEATS if entry and not shares.is_spent else 0):
                assert entry is not None
                more = _next_best(allowed.get(task.task_id, ()), entry, measured)
                if outcome.is_tuned or not more:
                    break
                say(f"all finalists of {task.name} are wrong: measuring the next {len(more)}")
                found = quiet.cluster.build_all(more)
                builds |= {c.candidate_id: b for c, b in zip(more, found, strict=True)}
                measured |= _measure([_Entries(entry.default, more, ())], builds, briefly)
                entry, refused_before = entry.with_more(more), outcome.note
                outcome = _decide(task, own, entry, builds, measured, quiet)
                outcome = replace(outcome, note=outcome.note or refused_before)
            if entry is not None:
                cut = [c for c in entries[task.task_id].finalists if c not in entry.all]
                outcome = _with_libraries(outcome, cut, searched)
            if not outcome.trials:
                outcome = replace(outcome, note=unsearched.get(task.task_id, outcome.note))
            store.propose([outcome.winner])  # the outcome refers to its trial
            store.save_task_outcome(outcome)
            known[task.task_id] = outcome
    allowance.cut(shares.said())
    return tuple(known[t.task_id] for t in tasks)


@dataclass(frozen=True)
class _Entries:
    """The candidates of a task's finals."""

    default: Candidate
    finalists: tuple[Candidate, ...]
    others: tuple[Candidate, ...]  # that judge the ranking

    @property
    def all(self) -> tuple[Candidate, ...]:
        return (self.default, *self.finalists, *self.others)

    def best(self, count: int) -> _Entries:
        """Return the same with so many finalists, the best of the search."""
        return replace(self, finalists=self.finalists[:count])

    def with_more(self, finalists: Sequence[Candidate]) -> _Entries:
        others = tuple(c for c in self.others if c not in finalists)
        return replace(self, finalists=(*self.finalists, *finalists), others=others)


def faults_of(outcomes: Iterable[TaskOutcome]) -> dict[str, Failure]:
    """Return by id the candidates of the search that faulted in finals."""
    return {
        f.candidate_id: f.measurement
        for outcome in outcomes
        for f in outcome.finalists
        if not f.is_default and isinstance(f.measurement, Failure) and f.measurement.kind.is_fault
    }


def _ended(found: Iterable[Record]) -> dict[str, list[Record]]:
    by_task: dict[str, list[Record]] = {}
    for record in found:
        if not record.candidate.is_default and record.result is not None:
            by_task.setdefault(record.candidate.task_id, []).append(record)
    return by_task


def _search_secs(records: Iterable[Record]) -> dict[str, float]:
    """Return the median that each candidate had in the search, by id."""
    return {
        r.candidate.candidate_id: r.result.median_secs
        for r in records
        if isinstance(r.result, Measurement)
    }


def _contest(task: Task, entries: _Entries, searched: Mapping[str, float]) -> Contest:
    rivals = tuple(searched[c.candidate_id] for c in (*entries.finalists, *entries.others))
    # A default that the search could not measure is at least as slow as what it could.
    default = searched.get(entries.default.candidate_id, max(rivals, default=0.0))
    return Contest(task.task_id, task.weight, (default, *rivals))


def _in_turns(quiet: QuietSlice, shares: Collection[Share]) -> QuietSlice:
    """Have the finals of some tasks, measured at once, take as many turns as all have time for."""
    turns = min((share.turns for share in shares), default=None)
    return replace(quiet, finals=replace(quiet.finals, turns=turns))


def _by_rank(records: Iterable[Record]) -> list[tuple[Measurement, Candidate]]:
    measured = [(r.result, r.candidate) for r in records if isinstance(r.result, Measurement)]
    return sorted(measured, key=lambda m: m[0].median_secs)


def _entries(task: Task, records: Sequence[Record], fidelity: int) -> _Entries:
    measured = _by_rank(records)
    quiet = [c for result, c in measured if not result.conditions.is_disturbed]
    disturbed = [c for result, c in measured if result.conditions.is_disturbed]
    ranked = [candidate for _, candidate in measured]
    # Of each library its best: the report says what it would take where it does not win.
    of_libraries = {c.source: c for c in reversed(ranked) if c.source in LIBRARIES}.values()
    taken = (*quiet[:FINALISTS], *disturbed[:FINALISTS], *of_libraries)
    chosen = {c.candidate_id for c in taken}
    best = [c for c in ranked if c.candidate_id in chosen]
    rest = [c for c in ranked if c.candidate_id not in chosen]
    return _Entries(default_candidate(task), tuple(best), tuple(spread_over(rest, fidelity)))


def spread_over(ranked: Sequence[_T], count: int) -> list[_T]:
    """Return `count` of them at even distances, the first and the last among them.

    >>> spread_over("abcdefg", 3)
    ['a', 'd', 'g']
    """
    if count >= len(ranked):
        return list(ranked)
    if count < 2:
        return [ranked[len(ranked) // 2]] if count else []
    return [ranked[round(i * (len(ranked) - 1) / (count - 1))] for i in range(count)]


def _next_best(
    records: Sequence[Record], entries: _Entries, measured: Mapping[str, Measurement | Failure]
) -> tuple[Candidate, ...]:
    """Return the finalists of another heat, where the last one was lost by wrong answers alone."""
    results = [measured[c.candidate_id] for c in entries.finalists]
    wrong = [isinstance(r, Failure) and r.kind is Kind.WRONG_ANSWER for r in results]
    if not wrong or not all(wrong):
        return ()
    ranked = [candidate for _, candidate in _by_rank(records)]
    return tuple([c for c in ranked if c not in entries.finalists][:FINALISTS])


def _measure(
    contests: Sequence[_Entries], builds: Mapping[str, Build | Failure], quiet: QuietSlice
) -> dict[str, Measurement | Failure]:
    """Measure what was built of some tasks, each task's candidates in turns; results by id."""
    built = [[builds[c.candidate_id] for c in contest.all] for contest in contests]
    ready = [found for each in built if (found := [b for b in each if isinstance(b, Build)])]
    measured: dict[str, Measurement | Failure] = {
        c.candidate_id: b
        for contest in contests
        for c in contest.all
        if isinstance(b := builds[c.candidate_id], Failure)
    }
    if ready:
        for of, results in zip(ready, quiet.compare(ready), strict=True):
            measured |= {b.candidate.candidate_id: r for b, r in zip(of, results, strict=True)}
    return measured


def _decide(
    task: Task,
    records: Sequence[Record],
    entries: _Entries,
    builds: Mapping[str, Build | Failure],
    measured: dict[str, Measurement | Failure],
    quiet: QuietSlice,
) -> TaskOutcome:
    """Decide between the default and the finalists."""
    may_win = (entries.default, *entries.finalists)
    winner, comparison, note = _winner(may_win, builds, measured, quiet)
    searched = {r.candidate.candidate_id: r.run_secs for r in records}
    finalists = [
        Finalist(
            c.candidate_id,
            c.source,
            searched.get(c.candidate_id),
            measured[c.candidate_id],
            may_win=c in may_win,
        )
        for c in entries.all
    ]
    default_secs = _secs(measured[entries.default.candidate_id])
    return replace(
        _kept(task, records, entries.default, default_secs, note, finalists, quiet),
        best_secs=_secs(measured[winner.candidate_id]),
        winner=winner,
        comparison=comparison,
    )


def _left_out(
    task: Task,
    records: Sequence[Record],
    entries: _Entries,
    builds: Mapping[str, Build | Failure],
    searched: Mapping[str, float],
    disturbed: Collection[str],
    quiet: QuietSlice,
) -> TaskOutcome:
    """Decide by what the search knows of a task that there was no time for.

    disturbed: candidates by id that others disturbed in the search: such a default may be faster.
    """
    note = f"not measured again: {_SPENT.message}"
    winner, results = entries.default, {}
    default_secs = searched.get(winner.candidate_id)
    known_secs = 0.0 if winner.candidate_id in disturbed else default_secs or 0.0
    reference = builds[winner.candidate_id]
    for candidate in entries.finalists:
        build = builds[candidate.candidate_id]
        if (
            known_secs > CLEARLY * searched[candidate.candidate_id]
            and isinstance(reference, Build)
            and isinstance(build, Build)
        ):
            failure = quiet.agree(reference, build)
            if failure is None:
                winner, note = candidate, f"by the search's times, {note}"
                break
            results[candidate.candidate_id] = failure
    finalists = [
        Finalist(
            c.candidate_id,
            c.source,
            searched.get(c.candidate_id),
            results.get(c.candidate_id, _SPENT),
        )
        for c in (entries.default, *entries.finalists)
    ]
    kept = _kept(task, records, entries.default, default_secs, note, finalists, quiet)
    return replace(kept, winner=winner, best_secs=searched.get(winner.candidate_id))


def _with_libraries(
    outcome: TaskOutcome, cut: Iterable[Candidate], searched: Mapping[str, float]
) -> TaskOutcome:
    """Add what the search knows of libraries that there was no time for; they do not win."""
    added = [
        Finalist(c.candidate_id, c.source, searched.get(c.candidate_id), _SPENT, may_win=False)
        for c in cut
        if c.source in LIBRARIES
    ]
    return replace(outcome, finalists=(*outcome.finalists, *added))


def _kept(
    task: Task,
    records: Sequence[Record],
    default: Candidate,
    default_secs: float | None,
    note: str,
    finalists: Sequence[Finalist],
    quiet: QuietSlice,
) -> TaskOutcome:
    """Return the outcome of a task that keeps its default."""
    return TaskOutcome(
        task_id=task.task_id,
        name=task.name,
        weight=task.weight,
        trials=len(records),
        failed=sum(isinstance(r.result, Failure) for r in records),
        default_secs=default_secs,
        best_secs=default_secs,
        winner=default,
        comparison=None,
        note=note,
        finalists=tuple(finalists),
        measured_as=quiet.finals.measured_as,
    )


def _winner(
    entries: Sequence[Candidate],
    builds: Mapping[str, Build | Failure],
    measured: dict[str, Measurement | Failure],
    quiet: QuietSlice,
) -> tuple[Candidate, Comparison | None, str]:
    """Return the winner, how it compares with the default, and the note of the outcome.

    A candidate that would win and computes something else becomes a failure in `measured`. Nothing
    wins against a default that another's fault ended. Against one that does not run, the fastest
    candidate wins, compared with nothing.
    """
    default, *candidates = entries
    base = measured[default.candidate_id]
    if isinstance(base, Failure) and not base.kind.ends_trial:
        why = f"another's fault kept the default from being measured: {base.message[-200:]}"
        return default, None, f"not settled, {why}"
    wrong = ""
    by_id = {c.candidate_id: c for c in candidates}
    while rivals := {
        name: r.run_secs for name in by_id if isinstance(r := measured[name], Measurement)
    }:
        name, comparison = fastest(None if isinstance(base, Failure) else base.run_secs, rivals)
        best = by_id[name]
        if isinstance(base, Failure):
            note = "neither its speed nor its results were compared with anything"
            return best, None, f"{note}: its default schedule does not run: {base.message[-200:]}"
        assert comparison is not None
        if comparison.verdict is not Verdict.FASTER:
            note = f"the best candidate against the default: {comparison.verdict}"
            return default, comparison, "; ".join(filter(None, (wrong, note)))
        reference, build = builds[default.candidate_id], builds[best.candidate_id]
        assert isinstance(reference, Build)  # both were measured
        assert isinstance(build, Build)
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
