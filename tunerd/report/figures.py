"""Figures that follow from an Outcome, computed once for the page, the table and the JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tunerd.stats.interval import median_interval
from tunerd.system.text import TIMES, count_text, duration_text, is_known, ratio_texts, significant
from tunerd.vocabulary.outcome import Accuracy, Latency, Outcome, TaskOutcome, Verification
from tunerd.vocabulary.verdict import Interval, SpeedVerdict, Verdict

if TYPE_CHECKING:
    from tunerd.report.run_view import RunView  # which needs the store, and the terminal does not

Tone = Literal["better", "neutral", "bad"]

LATENCY_NAMES = {
    "default": "Default schedules",
    "tuned": "Tuned by tunerd",
    "onnxruntime": "ONNX Runtime",
}


@dataclass(frozen=True)
class Headline:
    """The verdict: what is claimed, what it rests on, and whether it is good news."""

    claim: str
    grounds: str
    tone: Tone

    @property
    def text(self) -> str:
        """Both as one sentence, without its full stop."""
        return f"{self.claim} {self.grounds}"


@dataclass(frozen=True)
class TaskShare:
    """A task and its part of the model's time with the schedules that are shipped."""

    task: TaskOutcome
    secs: float | None  # per inference: calls times the seconds of one
    share: float | None  # of the sum over all tasks, 0..1


def by_share(tasks: Sequence[TaskOutcome]) -> tuple[TaskShare, ...]:
    """Return the tasks with their shares of the model's time, the heaviest first."""
    secs = [_known(t.best_secs if is_known(t.best_secs) else t.default_secs, t) for t in tasks]
    total = sum(s for s in secs if s is not None)
    shares = [
        TaskShare(task, s, None if s is None or total <= 0 else s / total)
        for task, s in zip(tasks, secs, strict=True)
    ]
    return tuple(sorted(shares, key=lambda s: -1.0 if s.share is None else s.share, reverse=True))


def _known(secs: float | None, task: TaskOutcome) -> float | None:
    return secs * task.weight if secs is not None and is_known(secs) else None


def median_of(latency: Latency) -> Interval | None:
    """Return the median of the samples that are numbers; None where there are none."""
    return median_interval([s for s in latency.run_secs if is_known(s)])


def weighted_secs(tasks: Sequence[TaskOutcome]) -> tuple[float | None, float | None]:
    """Return the sums of calls times seconds with the defaults and with what is shipped.

    None where a task lacks the number.
    """
    default = [_known(t.default_secs, t) for t in tasks]
    best = [_known(t.best_secs, t) for t in tasks]
    return _sum(default), _sum(best)


def _sum(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) if known and len(known) == len(values) else None


def headline(view: RunView) -> Headline:
    """Return the verdict on a run; of one without a result, how far it got."""
    if view.outcome is None:
        got = f"{count_text(view.trials, 'trial')} of {count_text(len(view.tasks), 'task')}"
        return Headline(
            "No result yet", f"(the run has not come to its end), with {got}", "neutral"
        )
    verdict = outcome_headline(view.outcome)
    if not view.is_stale:
        return verdict
    later = "a later session has gone on from there and has not come to its end"
    return Headline(verdict.claim, f"{verdict.grounds}; {later}", verdict.tone)


def outcome_headline(outcome: Outcome) -> Headline:
    """Return the verdict on a run."""
    verification = outcome.verification
    compared = outcome.end_to_end
    verified = _verified(verification, compared.verdict)
    if verification.verdict is Verdict.WRONG:
        claim = f"Wrong result: the tuned model disagrees with {verification.reference}"
        return Headline(claim, verified, "bad")
    ratio, interval = ratio_texts(compared.interval)
    inside = f"95% interval {interval}"
    tone: Tone = "neutral"
    match compared.verdict:
        case Verdict.FASTER:
            claim = f"{ratio}{TIMES} faster than the default schedules"
            tone = "better" if verification.verdict is Verdict.RIGHT else "neutral"
        case Verdict.SLOWER:
            claim = f"No gain: {ratio}{TIMES} the speed of the default schedules, slower"
        case Verdict.SAME:
            claim = "No gain: as fast as the default schedules"
            inside = f"ratio {ratio}, {inside}"
        case Verdict.CANNOT_TELL:
            claim = "Cannot tell whether it is faster than the default schedules"
            inside = f"ratio {ratio}, {inside}"
    if not any(t.is_tuned for t in outcome.tasks):  # both models are the same, whatever was timed
        claim, tone = "No gain: as fast as the default schedules", "neutral"
        inside = f"ratio {ratio}, 95% interval {interval}"
        verified = f"every task stays at its default schedule, {_verified(verification, None)}"
    return Headline(claim, f"({inside}), {verified}", tone)


def _verified(verification: Verification, speed: SpeedVerdict | None) -> str:
    seeds = count_text(verification.seeds, verification.inputs)
    match verification.verdict:
        case Verdict.RIGHT:
            return f"verified against {verification.reference} on {seeds}"
        case Verdict.CANNOT_TELL:
            if speed is Verdict.CANNOT_TELL:  # the sentence began with that
                return "nor whether its results are right"
            return "but tunerd cannot tell whether its results are right"
        case Verdict.WRONG:
            return f"on {seeds}, by {error_text(verification)}"


def accuracy_text(accuracy: Accuracy) -> str:
    """Say how near an output is to the reference's."""
    said = f"off by at most {accuracy.error:.2g} of its largest value"
    if not accuracy.rows:
        return said
    return f"{said}; the same class is first in {accuracy.same_first} of {accuracy.rows} rows"


def error_text(verification: Verification) -> str:
    """Return the worst error in units of the tolerance."""
    worst = verification.worst_error
    return f"{significant(worst)} {TIMES} the tolerance" if is_known(worst) else "no finite number"


def limits_asked(settings: Mapping[str, Any]) -> str:
    """Return when the search was to stop, in words."""
    trials, budget = settings.get("trials"), settings.get("budget_secs")
    limits = [count_text(trials, "trial")] if isinstance(trials, int) else []
    limits += [f"{duration_text(budget)} of search"] if isinstance(budget, int | float) else []
    return " or ".join(limits) or "until little more can be gained"


def share_asked(settings: Mapping[str, Any]) -> str:
    """Return the share that the settings ask for, in words."""
    chosen = ", chosen by tunerd" if settings.get("share_from") == "auto" else ""
    if settings.get("gpu_pct") is not None:
        return f"{settings['gpu_pct']}% of a GPU{chosen}"
    if settings.get("cpu_pct") is not None:
        return f"{settings['cpu_pct']}% of the CPU cores{chosen}"
    return "a share that the settings do not name"
