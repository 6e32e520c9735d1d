"""How a matrix measures: finalists in contests, and whole models in rounds."""

from __future__ import annotations

from dataclasses import replace

from tunerd.runner.profiles import final_profile
from tunerd.vocabulary import Profile, TargetSpec

_SAMPLES = 10  # of each artifact in a round
# With samples of 2 and 30 ms finalists and rounds were over half of what six shares cost in time on
# slices (results/h200-claims), with 0.5 and 10 ms a third to a half (results, "What it cost").
_CONTEST_SAMPLE_SECS = {"model": 0.0005, "cold": 0.0005, "warm": 0.002}
_CELL_SAMPLE_SECS = {"cuda": 0.005, "llvm": 0.03}


def contest_profile(l2: str) -> Profile:
    """Return how finalists are measured: 20 samples, which choose a winner; half of them judge.

    Ten are enough of one whose samples are all 5% slower than those of a rival: as the best of
    another share it is judged by five, and does not win here.
    """
    return replace(
        final_profile(l2),
        name=f"matrix-kernels-v7-{l2}",
        max_samples=20,
        hopeless_after=10,
        hopeless_over=1.05,
        min_sample_secs=_CONTEST_SAMPLE_SECS[l2],
        max_total_secs=1.0,
    )


def cell_profile(target: TargetSpec) -> Profile:
    """Return how whole models are measured in a round: ten samples of each, in turns."""
    return Profile(
        "matrix-v3",
        min_samples=_SAMPLES,
        max_samples=_SAMPLES,
        min_sample_secs=_CELL_SAMPLE_SECS[target.kind],
        max_total_secs=600.0,  # all of them, or there are no pairs
        hopeless_after=_SAMPLES,
    )
