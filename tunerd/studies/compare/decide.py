"""Two sides -> a GateResult.

The gate decides by the one number that is served, end to end. A model has dozens of tasks: a gate
that failed for any of them would fail often by chance alone. They explain, and what is said of them
holds for all together with the same confidence: each is judged with 1 - 0.05 / tasks (Bonferroni;
Dunn, J. Am. Stat. Assoc. 56, 1961).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tunerd.stats.gate import Judgement, judge, judge_rounds
from tunerd.studies.compare.measuring import Rounds
from tunerd.studies.compare.sides import Side, differences
from tunerd.vocabulary.verdict import SpeedVerdict

CONFIDENCE = 0.95


@dataclass(frozen=True)
class TaskJudgement:
    """One task of both sides. `same_kernel`: both run the same schedule of it."""

    task_id: str
    name: str
    weight: int
    same_kernel: bool
    judgement: Judgement

    @property
    def added_secs(self) -> float:
        """Return how much longer an inference takes by this task."""
        return self.weight * (self.judgement.new_secs - self.judgement.base_secs)


@dataclass(frozen=True)
class GateResult:
    """What a gate says; `tasks` are those that both sides have, the most time lost first."""

    verdict: SpeedVerdict | None  # None where the sides are not comparable
    fail_above: float  # a fraction
    base: Side
    new: Side
    end_to_end: Judgement | None = None  # likewise
    tasks: tuple[TaskJudgement, ...] = ()
    differences: tuple[str, ...] = ()  # why they are not comparable
    notes: tuple[str, ...] = ()
    measured: Rounds | None = None  # None: the samples that the runs stored


def decide(base: Side, new: Side, *, fail_above: float) -> GateResult:
    """Decide by the samples that two runs stored."""
    found = tuple(differences(base, new, measured=False))
    if found:
        return not_comparable(base, new, found, fail_above=fail_above)
    if base.timing is None or new.timing is None:
        raise ValueError("a side without samples is to be measured")
    end_to_end = judge(base.timing, new.timing, fail_above=fail_above, confidence=CONFIDENCE)
    tasks = _tasks(base, new, fail_above)
    return GateResult(
        verdict=end_to_end.verdict,
        fail_above=fail_above,
        base=base,
        new=new,
        end_to_end=end_to_end,
        tasks=tasks,
        notes=tuple(_notes(base, new, end_to_end, tasks)),
    )


def decide_measured(base: Side, new: Side, rounds: Rounds, *, fail_above: float) -> GateResult:
    """Decide by what was measured now, in turns; stored samples of tasks are left out."""
    end_to_end = judge_rounds(rounds.run_secs, fail_above=fail_above, confidence=CONFIDENCE)
    return GateResult(
        verdict=end_to_end.verdict,
        fail_above=fail_above,
        base=base,
        new=new,
        end_to_end=end_to_end,
        notes=tuple(_notes_of_place(base, new, rounds)),
        measured=rounds,
    )


def not_comparable(
    base: Side, new: Side, found: tuple[str, ...], *, fail_above: float
) -> GateResult:
    """Return the result for sides of which one says nothing about the other."""
    return GateResult(None, fail_above, base, new, differences=found)


def _tasks(base: Side, new: Side, fail_above: float) -> tuple[TaskJudgement, ...]:
    known = {task.task_id: task for task in base.tasks}
    pairs = [(known[task.task_id], task) for task in new.tasks if task.task_id in known]
    confidence = 1.0 - (1.0 - CONFIDENCE) / max(1, len(pairs))
    judged = [
        TaskJudgement(
            task_id=task.task_id,
            name=task.name,
            weight=task.weight,
            same_kernel=earlier.candidate_id == task.candidate_id,
            judgement=judge(
                earlier.timing, task.timing, fail_above=fail_above, confidence=confidence
            ),
        )
        for earlier, task in pairs
    ]
    return tuple(sorted(judged, key=lambda task: -task.added_secs))


def _notes(
    base: Side, new: Side, end_to_end: Judgement, tasks: tuple[TaskJudgement, ...]
) -> Iterator[str]:
    other = [
        f"{name} {version} and {new.versions.get(name)}"
        for name, version in base.versions.items()
        if version != new.versions.get(name)
    ]
    if other:
        yield (
            f"the two were made by different versions ({', '.join(other)}): their default "
            "schedules may differ, and what the control did need not be the machine alone"
        )
    if end_to_end.control is None:
        yield "there is no control: a machine that changed in between looks like a changed model"
    if tasks and all(task.same_kernel for task in tasks):
        yield "both run the same schedules: a difference is the machine's or the compiler's"
    shared = {task.task_id for task in tasks}
    for side, what in ((base, "BASE"), (new, "NEW")):
        if alone := len([t for t in side.tasks if t.task_id not in shared]):
            yield f"{alone} task{'s' if alone > 1 else ''} only {what} measured"


def _notes_of_place(base: Side, new: Side, rounds: Rounds) -> Iterator[str]:
    for side, what in ((base, "BASE"), (new, "NEW")):
        if side.place is None:
            continue
        if side.place.device and side.place.device != rounds.proof.device:
            yield f"{what} was tuned on a {side.place.device}, this is a {rounds.proof.device}"
        if side.place.sm_counts and rounds.proof.sm_count not in side.place.sm_counts:
            counts = " or ".join(map(str, side.place.sm_counts))
            yield (
                f"{what} was tuned for {counts} {side.unit}, and the slice has "
                f"{rounds.proof.sm_count}"
            )
