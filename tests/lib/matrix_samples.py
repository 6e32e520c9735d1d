"""Samples of a matrix, by hand: of its cells, and of the kernels of a task."""

from __future__ import annotations

from collections.abc import Mapping

from tunerd.studies.matrix.claims import Findings
from tunerd.vocabulary import CapProof, Conditions, Failure, Kind, Measurement, Stage
from tunerd.vocabulary.outcome import Verification
from tunerd.vocabulary.verdict import Answer, Verdict

SHARES = (10, 40, 100)
Cells = dict[tuple[int, int], list[list[float]]]


def samples_of(times: Mapping[tuple[int, int], float], *, noise: float = 1e-4) -> Cells:
    """Return three rounds of eight samples around each time, alike for all cells."""
    spread = [1 + noise * (i % 5 - 2) for i in range(8)]
    return {cell: [[secs * s for s in spread] for _ in range(3)] for cell, secs in times.items()}


def losses(table: Mapping[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    """Return times of cells: a loss of the table, else none, over 1 ms at 100% and more below."""
    return {(a, b): 0.1 / b * table.get((a, b), 1.0) for a in SHARES for b in SHARES}


def answers(found: Findings) -> dict[str, Answer]:
    return {claim.name: claim.answer for claim in found.claims}


OFF = {(a, b): 1.2 for a in SHARES for b in SHARES if a != b}


def noisy(secs: float, count: int = 20) -> list[float]:
    return [secs * (1 + 0.001 * (i % 3)) for i in range(count)]


def measured(secs: float) -> Measurement:
    return Measurement(tuple(noisy(secs)), 1, "p", "cpu-0-0", 1, Conditions(sm_clock_mhz=1980))


PROOF = CapProof("cpu-0-0", "CPU", 1, 2, "affinity", True)
RIGHT = Verification(Verdict.RIGHT, 3, 1e-3, 1e-5, 0.1, "")
FAILED = Failure(Stage.RUN, Kind.CRASH, "gone")
