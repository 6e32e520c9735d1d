"""Two artifacts -> samples taken in turns, in one slice of this host at one share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tunerd.artifacts.manifest import check_files, read_variants
from tunerd.errors import InputError
from tunerd.slices import require_plan
from tunerd.studies.compare.sides import Side, is_query
from tunerd.studies.timing import require_measured, started
from tunerd.vocabulary import MODEL, CapProof, SliceRequest

PROCESSES = 3  # fresh ones: what memory a process got stays for its life


@dataclass(frozen=True)
class Rounds:
    """What was measured now: for each process the samples of (base, new)."""

    pct: int
    proof: CapProof
    run_secs: tuple[tuple[tuple[float, ...], tuple[float, ...]], ...]


def measure_both(
    base: Path, new: Path, *, kind: str, pct: int, say: Callable[[str], None]
) -> Rounds:
    """Measure both in turns, in several fresh processes, and in another order in every second.

    Raises HostError where there is no such slice here, InfrastructureError where an artifact
    cannot be measured.
    """
    (spec, *_) = require_plan(SliceRequest(kind, pct, per_device=1)).slices
    rounds: list[tuple[tuple[float, ...], tuple[float, ...]]] = []
    for number in range(PROCESSES):
        say(f"measuring both in turns, process {number + 1} of {PROCESSES}")
        paths = [str(base.resolve()), str(new.resolve())]
        if number % 2:
            paths.reverse()
        with started([spec]) as (one,):
            results = one.runner.compare_models(paths, MODEL)
        samples = [result.run_secs for result in require_measured(results, paths, one.slice_id)]
        if number % 2:
            samples.reverse()
        rounds.append((samples[0], samples[1]))
    return Rounds(pct, one.proof, tuple(rounds))


def kind_of(side: Side) -> str:
    """Return the kind of slice in which a side was tuned."""
    mechanism = side.place.mechanism if side.place is not None else ""
    if mechanism == "simulated":
        return mechanism
    if side.target_kind == "cuda":
        return "whole" if mechanism == "none" else "mps"
    return "cpu"


def require_artifact(side: Side) -> Path:
    """Return the folder of a side's artifact.

    Raises LoadError unless it is there and whole, InputError for a run in a team's store.
    """
    if is_query(side.source):
        raise InputError(
            f"{side.source} has samples and no artifact to measure; name a run folder, or leave "
            "out --measure"
        )
    folder = side.artifact or Path(side.source)
    check_files(folder, read_variants(folder))
    return folder
