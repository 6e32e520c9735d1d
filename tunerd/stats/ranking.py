"""Finals -> how far the search's measurements can be trusted.

The search measures beside neighbours with few samples; the finals measure some of its candidates
again, as they are chosen. How well the two agree on the order is said by Kendall's tau-b (Kendall,
1945): 1 for the same order, 0 for none. The best few alone tell little, because the search could
hardly tell them apart: ask for more candidates, spread over the ranking. Candidates that are far
apart are easy to order, so the span is told with it, and the tau of those close to the fastest.

What is chosen is judged by samples that did not choose it. A task's winner is chosen once more, by
the rule of the finals, from every other sample of each candidate; `excess` is its median in the
remaining samples over the least median that any candidate has there, also one that may not win. It
is never below zero. Both halves choose once, and the larger of the two figures counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from tunerd.stats.paired import fastest
from tunerd.vocabulary import Measurement
from tunerd.vocabulary.outcome import Finalist, TaskOutcome
from tunerd.vocabulary.verdict import Verdict

TOP_K = 3  # how many the finals take from the search
NEAR = 0.25  # over the fastest: what is close to it
_LEAST = 3  # candidates of which an order says anything
_LEAST_NEAR = 5  # the same close to the fastest, where an exchange is more likely

_Samples = Mapping[str, Sequence[float]]  # by candidate


@dataclass(frozen=True)
class TaskFidelity:
    """One task. None: too few candidates to tell."""

    task_id: str
    name: str
    candidates: int  # searched and measured again
    tau: float | None  # Kendall's tau-b of the medians
    span: float | None  # the slowest candidate's median over the fastest's, in the finals
    near: int  # candidates within NEAR of the fastest
    tau_near: float | None  # of these
    recall: float | None  # of the finals' best TOP_K, the part that is among the search's
    excess: float | None  # of what is chosen over the fastest, held out; 0.01 is 1%


@dataclass(frozen=True)
class Fidelity:
    """All tasks, and medians over those that can tell."""

    tasks: tuple[TaskFidelity, ...]
    told: int  # tasks with a tau
    median_candidates: float | None  # of those
    median_tau: float | None
    median_span: float | None
    told_near: int  # tasks with a tau of the candidates close to the fastest
    median_tau_near: float | None
    median_recall: float | None
    mean_recall: float | None
    full_recall: int  # tasks with a recall of 1
    median_excess: float | None
    worst_excess: float | None


def fidelity(outcomes: Iterable[TaskOutcome]) -> Fidelity:
    """Compare each task's ranking in the search with that of its finals."""
    tasks = tuple(_of_task(outcome) for outcome in outcomes)
    excess = [t.excess for t in tasks if t.excess is not None]
    told = [t for t in tasks if t.tau is not None]
    near = [t.tau_near for t in tasks if t.tau_near is not None]
    recall = [t.recall for t in tasks if t.recall is not None]
    return Fidelity(
        tasks=tasks,
        told=len(told),
        median_candidates=_median([t.candidates for t in told]),
        median_tau=_median([t.tau for t in told if t.tau is not None]),
        median_span=_median([t.span for t in told if t.span is not None]),
        told_near=len(near),
        median_tau_near=_median(near),
        median_recall=_median(recall),
        mean_recall=fmean(recall) if recall else None,
        full_recall=recall.count(1.0),
        median_excess=_median(excess),
        worst_excess=max(excess, default=None),
    )


def _of_task(outcome: TaskOutcome) -> TaskFidelity:
    pairs = [
        (f.search_secs, f.measurement.median_secs)
        for f in outcome.finalists
        if not f.is_default and f.search_secs is not None and isinstance(f.measurement, Measurement)
    ]
    fastest = min((f for _, f in pairs), default=0.0)
    near = [pair for pair in pairs if pair[1] <= (1 + NEAR) * fastest]
    return TaskFidelity(
        task_id=outcome.task_id,
        name=outcome.name,
        candidates=len(pairs),
        tau=_tau(pairs, _LEAST),
        span=max(f for _, f in pairs) / fastest if pairs else None,
        near=len(near),
        tau_near=_tau(near, _LEAST_NEAR),
        recall=_recall(pairs),
        excess=_excess(outcome.finalists),
    )


def _tau(pairs: Sequence[tuple[float, float]], least: int) -> float | None:
    if len(pairs) < least:
        return None
    # Kendall's tau-b; scipy.stats has it, and takes half a second of every run to import.
    searched, found = (np.sign(np.subtract.outer(secs, secs)) for secs in zip(*pairs, strict=True))
    of_all = math.sqrt((searched**2).sum() * (found**2).sum())
    return float((searched * found).sum()) / of_all if of_all else None  # all equal on one side


def _recall(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return the recall at TOP_K; None where there are no more candidates than that."""
    if len(pairs) <= TOP_K:
        return None
    ids = range(len(pairs))
    searched = set(sorted(ids, key=lambda i: pairs[i][0])[:TOP_K])
    final = set(sorted(ids, key=lambda i: pairs[i][1])[:TOP_K])
    return len(searched & final) / TOP_K


def _excess(finalists: Sequence[Finalist]) -> float | None:
    """Return the excess held out; None without a choice or without samples for two halves."""
    measured = {
        f.candidate_id: f.measurement.run_secs
        for f in finalists
        if isinstance(f.measurement, Measurement)
    }
    able = [f for f in finalists if f.may_win and f.candidate_id in measured]
    if not able or len(finalists) < 2 or min(map(len, measured.values())) < 2:
        return None
    halves = [{name: secs[first::2] for name, secs in measured.items()} for first in (0, 1)]
    return max(_judged(able, by, other) for by, other in (halves, halves[::-1]))


def _judged(able: Sequence[Finalist], by: _Samples, other: _Samples) -> float:
    """Return the excess in `other` of what `by` chooses of those that may win."""
    return median(other[_chosen(able, by)]) / min(median(secs) for secs in other.values()) - 1


def _chosen(able: Sequence[Finalist], samples: _Samples) -> str:
    """Return the winner by the finals' rule, but for what only runs can tell: right results."""
    ids = [f.candidate_id for f in able if not f.is_default]
    default = next((f.candidate_id for f in able if f.is_default), "")
    if not ids:
        return default
    best, compared = fastest(samples.get(default), {name: samples[name] for name in ids})
    return best if compared is None or compared.verdict is Verdict.FASTER else default


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None
