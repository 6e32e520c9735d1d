"""What the cost model knows of a way to cut a template: as many numbers for each of them."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Of a cut and of the work that it cuts, in elements, steps, warps and blocks of threads."""

    rows: float
    columns: float
    depth: float
    splits: int
    warps: int
    stages: int
    all_rows: int
    all_columns: int
    all_depth: int
    batch: int
    steps: int  # of a block of threads
    blocks: int
    shared_bytes: int = 1
    each: float = 1.0  # elements of a thread
    wasted: float = 1.0  # elements computed over those that are wanted


def features(
    template: int, sizes: Sizes, *, sms: float, estimated_secs: float
) -> tuple[float, ...]:
    """Return sizes as logarithms, how they fill the SMs, and the estimate."""
    waves = sizes.blocks / sms
    return (
        float(template),
        *(math.log2(max(x, 1e-6)) for x in vars(sizes).values()),
        waves,
        math.ceil(waves) / waves,
        math.log2(estimated_secs * 1e6),
    )
