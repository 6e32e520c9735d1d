"""A task's candidates, measured at each share -> whether its best one changes with the share.

The candidate that is best at a share is chosen by the samples at even positions, and compared by
those at odd ones: judged by the samples that chose it, a best candidate would be too good. There
is one comparison for each ordered pair of shares, and their confidence is raised accordingly
(Bonferroni), so that a task whose best does not change is said to change in 5% of cases at most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tunerd.stats.interval import MIN_SAMPLES
from tunerd.stats.paired import compare
from tunerd.studies.matrix.claims import MARGIN
from tunerd.vocabulary.outcome import Comparison
from tunerd.vocabulary.verdict import Answer, Verdict

Times = Mapping[str, Sequence[float]]  # samples in turns, by candidate


@dataclass(frozen=True)
class Change:
    """Whether a task's best candidate is another one at another share."""

    task_id: str
    answer: Answer
    best: Mapping[int, str]  # candidate_id by share
    tuned_at: int | None = None  # the pair with the largest gain: this share's best one, run at
    run_at: int | None = None  # this share, against the best one there
    comparison: Comparison | None = None  # of that pair
    candidates: int = 0  # that were measured at every share, the default schedule among them


def change(task_id: str, times: Mapping[int, Times], *, seed: int = 0) -> Change:
    """Say whether the best of a task's candidates changes with the share.

    YES: at some share, the best one there is faster than the best one of another share, by more
    than MARGIN. NO: at no share is it, by all intervals. Candidates without times at some share
    take no part.
    """
    known = sorted(set.intersection(*(set(t) for t in times.values()))) if times else []
    if not known:
        return Change(task_id, Verdict.CANNOT_TELL, {})
    best = {
        share: min(known, key=lambda c, of=of: (float(np.median(of[c][::2])), c))  # type: ignore[misc]
        for share, of in times.items()
    }
    pairs = [(a, b) for a in times for b in times if best[a] != best[b]]
    total = max(1, len(times) * (len(times) - 1))
    found = [(_compared(times[b][best[a]], times[b][best[b]], total, seed), a, b) for a, b in pairs]
    faster = [(c, a, b) for c, a, b in found if c is not None and c.ratio_low > 1 + MARGIN]
    if faster:
        compared, a, b = max(faster, key=lambda f: f[0].ratio_low)
        return Change(task_id, Verdict.YES, best, a, b, compared, len(known))
    is_same = all(c is not None and c.ratio_high < 1 + MARGIN for c, _, _ in found)
    answer: Answer = Verdict.NO if is_same else Verdict.CANNOT_TELL
    return Change(task_id, answer, best, candidates=len(known))


def _compared(
    base: Sequence[float], new: Sequence[float], total: int, seed: int
) -> Comparison | None:
    length = min(len(base), len(new))
    base, new = base[1:length:2], new[1:length:2]
    if len(base) < MIN_SAMPLES:
        return None
    return compare(base, new, confidence=1 - 0.05 / total, seed=seed)
