"""Figures that follow from an Outcome, computed once for the page, the table and the JSON."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tunerd.report.view import Tone
from tunerd.stats.gate import Timing, judge
from tunerd.stats.interval import median_interval
from tunerd.stats.paired import SAME_WITHIN, compare
from tunerd.system.text import TIMES, count_text, duration_text, is_known, ratio_texts, significant
from tunerd.vocabulary import unit_name
from tunerd.vocabulary.outcome import (
    BY_ONNX_RUNTIME,
    ONNX_RUNTIME,
    PYTORCH,
    TUNED_BESIDE_ONNX_RUNTIME,
    TUNED_BESIDE_PYTORCH,
    Accuracy,
    Comparison,
    Latency,
    Outcome,
    TaskOutcome,
    Verification,
)
from tunerd.vocabulary.verdict import Interval, SpeedVerdict, Verdict

if TYPE_CHECKING:
    from tunerd.report.run_view import RunView  # which needs the store, and the terminal does not

LATENCY_NAMES = {  # in the order in which they are shown
    **PYTORCH,
    TUNED_BESIDE_PYTORCH: "Tuned by tunerd, in turns with PyTorch",
    BY_ONNX_RUNTIME: ONNX_RUNTIME,
    TUNED_BESIDE_ONNX_RUNTIME: f"Tuned by tunerd, in turns with {ONNX_RUNTIME}",
    "tuned": "Tuned by tunerd",
    "default": "Default schedules",
}
_DEFAULTS = "the default schedules"


@dataclass(frozen=True)
class Headline:
    """The verdict: what is claimed, what it rests on, and whether it is good news.

    `small` is the small print: the default schedules, where a reader would otherwise run another.
    """

    claim: str
    grounds: str
    tone: Tone
    small: str = ""

    @property
    def text(self) -> str:
        """All as one sentence, without its full stop."""
        return "; ".join(filter(None, (f"{self.claim} {self.grounds}", self.small)))


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
    verdict = outcome_headline(view.outcome, share=share_words(view))
    if not view.is_stale:
        return verdict
    later = "a later session has gone on from there and has not come to its end"
    return replace(verdict, grounds=f"{verdict.grounds}; {later}")


def ordered(latencies: Sequence[Latency]) -> list[Latency]:
    """Return the latencies in the order in which they are shown."""
    order = list(LATENCY_NAMES)
    return sorted(
        latencies, key=lambda la: order.index(la.name) if la.name in order else len(order)
    )


def timing(outcome: Outcome | None, name: str) -> Timing:
    """Return one way to run the model, the default schedules being the control of the tuned one."""
    found: dict[str, list[float]] = {}
    for latency in outcome.latencies if outcome else ():
        samples = (s for s in latency.run_secs if is_known(s) and s > 0)
        found.setdefault(latency.name, []).extend(samples)
    control = found.get("default", ()) if name == "tuned" else ()
    return Timing(tuple(found.get(name, ())), tuple(control))


def not_in_turns(base: Timing, new: Timing) -> Comparison | None:
    """Compare as the gate does what was not timed in turns; None where a side has no samples."""
    if not base.run_secs or not new.run_secs:
        return None
    judged = judge(base, new, fail_above=SAME_WITHIN)
    change, verdict = judged.change, judged.verdict
    if verdict is Verdict.SAME and change.low < 1.0 - SAME_WITHIN:  # the gate asks one way alone
        verdict = Verdict.CANNOT_TELL
    return Comparison(
        verdict=verdict,
        base_secs=judged.base_secs,
        new_secs=judged.new_secs,
        ratio=1.0 / change.value,
        ratio_low=1.0 / change.high,
        ratio_high=1.0 / change.low,
    )


@dataclass(frozen=True)
class Rival:
    """What a reader would otherwise run, and how the tuned model compares with it."""

    name: str  # in words
    compared: Comparison


def rivals(outcome: Outcome) -> tuple[Rival, ...]:
    """Return those that were measured, of PyTorch's ways the fastest; the fastest of all first.

    Both were timed in turns with the tuned model; ONNX Runtime after it, where a run is older.
    """
    found = []
    beside = timing(outcome, TUNED_BESIDE_PYTORCH).run_secs
    ways = {name: secs for name in PYTORCH if (secs := timing(outcome, name).run_secs)}
    if beside and ways:
        way = min(ways, key=lambda name: statistics.median(ways[name]))
        found.append(Rival(PYTORCH[way], compare(ways[way], beside)))
    if (compared := _over_onnxruntime(outcome)) is not None:
        found.append(Rival(ONNX_RUNTIME, compared))
    return tuple(sorted(found, key=lambda rival: rival.compared.ratio))


def _over_onnxruntime(outcome: Outcome) -> Comparison | None:
    base, beside = timing(outcome, BY_ONNX_RUNTIME), timing(outcome, TUNED_BESIDE_ONNX_RUNTIME)
    if base.run_secs and beside.run_secs:
        return compare(base.run_secs, beside.run_secs)
    return not_in_turns(base, timing(outcome, "tuned"))


def share_words(view: RunView) -> str:
    """Return `40% of NVIDIA H200`, "" where no share was obtained."""
    devices = sorted({proof.device for proof in view.proofs})
    pct = view.settings.get("gpu_pct") or view.settings.get("cpu_pct")
    return f"{pct}% of {', '.join(devices)}" if devices and pct is not None else ""


def outcome_headline(outcome: Outcome, *, share: str = "") -> Headline:
    """Return the verdict on a run: against the fastest rival that was measured, else the defaults.

    share: of what it was tuned for, as `share_words` has it; PyTorch ran at that, too.
    """
    verification = outcome.verification
    compared, beside = outcome.end_to_end, next(iter(rivals(outcome)), None)
    if verification.verdict is Verdict.WRONG:
        claim = f"Wrong result: the tuned model disagrees with {verification.reference}"
        return Headline(claim, _verified(verification, compared.verdict), "bad")
    is_tuned = any(t.is_tuned for t in outcome.tasks)
    stays = ""
    if is_tuned:
        claim, inside = _claim(compared, _DEFAULTS)
        if compared.verdict in _NO_GAIN:
            claim = f"No gain: {claim[0].lower()}{claim[1:]}"
    else:  # both models are the same, whatever was timed
        ratio, interval = ratio_texts(compared.interval)
        claim, inside = (
            f"No gain: as fast as {_DEFAULTS}",
            f"ratio {ratio}, 95% interval {interval}",
        )
        stays = "every task stays at its default schedule, "
    if beside is not None:
        small = f"{claim} ({inside}){stays and ': ' + stays.removesuffix(', ')}"
        is_onnxruntime = beside.name == ONNX_RUNTIME
        at = f" at {share}" if share and not is_onnxruntime else ""
        claim, inside = _claim(beside.compared, f"{beside.name}{at}")
        stays, compared, is_tuned = "", beside.compared, True
    else:
        small = ""
    verified = _verified(verification, compared.verdict if is_tuned else None)
    is_better = is_tuned and compared.verdict is Verdict.FASTER
    good = is_better and verification.verdict is Verdict.RIGHT
    return Headline(claim, f"({inside}), {stays}{verified}", "better" if good else "neutral", small)


_NO_GAIN = (Verdict.SLOWER, Verdict.SAME)


def _claim(compared: Comparison, other: str) -> tuple[str, str]:
    """Return what is claimed of the tuned model against another, and by which interval."""
    ratio, interval = ratio_texts(compared.interval)
    inside = f"95% interval {interval}"
    match compared.verdict:
        case Verdict.FASTER:
            return f"{ratio}{TIMES} faster than {other}", inside
        case Verdict.SLOWER:
            return f"{ratio}{TIMES} the speed of {other}, slower", inside
        case Verdict.SAME:
            return f"As fast as {other}", f"ratio {ratio}, {inside}"
        case Verdict.CANNOT_TELL:
            return f"Cannot tell whether it is faster than {other}", f"ratio {ratio}, {inside}"


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


def unit(view: RunView) -> str:
    return unit_name(view.facts.target.kind)


def obtained_texts(view: RunView) -> list[str]:
    """Return `52 of 132 SMs, NVIDIA H200` for each distinct share and device obtained."""
    return sorted(
        {f"{p.sm_count} of {p.device_sm_count} {unit(view)}, {p.device}" for p in view.proofs}
    )
