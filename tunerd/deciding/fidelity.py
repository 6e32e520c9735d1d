"""Finals -> how far the search's measurements can be trusted.

The search measures beside neighbours with few samples; the finals measure some of its candidates
again, as they are chosen. How well the two agree on the order is said by Kendall's tau-b (Kendall,
1945): 1 for the same order, 0 for none. The best few alone tell little, because the search could
hardly tell them apart: ask for more candidates, spread over the ranking.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from tunerd.outcome import Finalist, TaskOutcome
from tunerd.vocabulary import Measurement, Origin

TOP_K = 3  # how many the finals take from the search
_LEAST = 3  # candidates of which an order says anything


@dataclass(frozen=True)
class TaskFidelity:
    """One task. None: too few candidates to tell."""

    task_id: str
    name: str
    candidates: int  # searched and measured again
    tau: float | None  # Kendall's tau-b of the medians
    recall: float | None  # of the finals' best TOP_K, the part that is among the search's
    excess: float | None  # of what was chosen over the fastest that was measured; 0.01 is 1%


@dataclass(frozen=True)
class Fidelity:
    """All tasks, and medians over those that can tell."""

    tasks: tuple[TaskFidelity, ...]
    told: int  # tasks with a tau
    median_candidates: float | None  # of those
    median_tau: float | None
    median_recall: float | None
    median_excess: float | None
    worst_excess: float | None


def fidelity(outcomes: Iterable[TaskOutcome]) -> Fidelity:
    """Compare each task's ranking in the search with that of its finals."""
    tasks = tuple(_of_task(outcome) for outcome in outcomes)
    excess = [t.excess for t in tasks if t.excess is not None]
    told = [t for t in tasks if t.tau is not None]
    return Fidelity(
        tasks=tasks,
        told=len(told),
        median_candidates=_median([t.candidates for t in told]),
        median_tau=_median([t.tau for t in told if t.tau is not None]),
        median_recall=_median([t.recall for t in tasks if t.recall is not None]),
        median_excess=_median(excess),
        worst_excess=max(excess, default=None),
    )


def _of_task(outcome: TaskOutcome) -> TaskFidelity:
    pairs = [
        (f.search_secs, f.measurement.median_secs)
        for f in outcome.finalists
        if f.origin is Origin.SEARCH
        and f.search_secs is not None
        and isinstance(f.measurement, Measurement)
    ]
    return TaskFidelity(
        task_id=outcome.task_id,
        name=outcome.name,
        candidates=len(pairs),
        tau=_tau(pairs),
        recall=_recall(pairs),
        excess=_excess(outcome.best_secs, outcome.finalists),
    )


def _tau(pairs: Sequence[tuple[float, float]]) -> float | None:
    if len(pairs) < _LEAST:
        return None
    from scipy.stats import kendalltau  # takes half a second

    tau = float(kendalltau([s for s, _ in pairs], [f for _, f in pairs], variant="b").statistic)
    return None if math.isnan(tau) else tau  # all equal on one side


def _recall(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return the recall at TOP_K; None where there are no more candidates than that."""
    if len(pairs) <= TOP_K:
        return None
    ids = range(len(pairs))
    searched = set(sorted(ids, key=lambda i: pairs[i][0])[:TOP_K])
    final = set(sorted(ids, key=lambda i: pairs[i][1])[:TOP_K])
    return len(searched & final) / TOP_K


def _excess(chosen_secs: float | None, finalists: Sequence[Finalist]) -> float | None:
    results = [f.measurement for f in finalists]
    measured = [r.median_secs for r in results if isinstance(r, Measurement)]
    if chosen_secs is None or not measured or len(finalists) < 2:
        return None
    return chosen_secs / min(measured) - 1


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None
