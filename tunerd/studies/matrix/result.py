"""What is kept of a matrix -> what it says, with what it has cost."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import Any, get_args

from tunerd.errors import FolderError
from tunerd.records import Store
from tunerd.studies.matrix.changes import Change, change
from tunerd.studies.matrix.claims import DEFAULT, Findings, findings
from tunerd.studies.matrix.folder import MatrixFolder
from tunerd.studies.matrix.levels import NOTHING, UNKNOWN, Cost
from tunerd.studies.matrix.records import ArtifactDone, CellDone, ContestDone, LevelDone, StageDone
from tunerd.vocabulary import finite, to_json
from tunerd.vocabulary.outcome import ONNX_RUNTIME
from tunerd.vocabulary.verdict import Answer, Verdict

_NO_LEVEL = LevelDone(0, (), 0, NOTHING, NOTHING)


@dataclass(frozen=True)
class Times:
    """One cost over another, or the least that it can be. None: cannot be told."""

    value: float | None
    is_least: bool = False


@dataclass(frozen=True)
class Costs:
    """What a matrix took, in parts that are counted alike for one share and for all.

    Over one level, in two ways. In neither do the report, the end of a cluster and the time between
    two stages count, and time on slices is what `Cost` says.

    search and finalists: what ends with chosen kernels. Of one level: start-up (Ray, tuners,
    slices, lowering the model), search, and its finalists, built and measured at its share. Of all:
    that, the other levels' start-up and search, and the finalists of all levels, built and measured
    at every share, the start of slices for that among it.

    with the artifacts: what ends with models that are verified and timed. Of one level: all of it,
    with the default and the tuned model compiled, the latter compared with ONNX Runtime, and both
    timed at the share. Of all: all of every level; the finalists; the default and each share's
    model, compiled and compared, the one that the first level has made not used again; and one
    round, the mean of all, in which all are timed at every share, which is more than tuning needs.
    """

    one: Cost  # the first level, a whole `tunerd tune` with all trials
    one_artifact: Cost  # the part of it for the whole model; unknown in what older tunerds kept
    later: Cost  # the other levels, which only search
    finalists: Cost  # of all levels, built once and measured at every share
    artifacts: Cost  # each share's, and the default; unknown where they are not all made
    rounds: Cost  # all of them
    round_count: int

    @property
    def all(self) -> Cost:
        return self.one + self.later + self.finalists + self.artifacts + self.rounds

    @property
    def kernels_over_one(self) -> dict[str, Times]:
        """Return what search and finalists of all levels took over those of the first."""
        kernels = self.one - self.one_artifact
        known = _over(kernels + self.later + self.finalists, kernels)
        # With x of both sides taken off, (a - x) / (b - x) >= a / b for a >= b > x.
        least = _over(self.one + self.later + self.finalists, self.one)
        return {
            k: Times(value) if value is not None else Times(least[k], least[k] is not None)
            for k, value in known.items()
        }

    @property
    def artifacts_over_one(self) -> dict[str, Times]:
        """Return what a verified artifact for each share took over a whole first level."""
        if not self.round_count:
            return dict.fromkeys(_over(self.one, self.one), Times(None))
        tuned = self.one + self.later + self.finalists + self.artifacts
        over = _over(tuned + self.rounds.part(1 / self.round_count), self.one)
        return {k: Times(value) for k, value in over.items()}


def _over(cost: Cost, one: Cost) -> dict[str, float | None]:
    pairs = {
        "cpu": (cost.cpu_secs, one.cpu_secs),
        "slice": (cost.slice_work_secs, one.slice_work_secs),
        "wall": (cost.wall_secs, one.wall_secs),
    }
    ratios = {k: a / b if a is not None and b else None for k, (a, b) in pairs.items()}
    # Beyond a million one of the two was not measured, but comes from a damaged file.
    return {k: r if r is not None and r < 1e6 else None for k, r in ratios.items()}


@dataclass(frozen=True)
class MatrixResult:
    """What the whole rounds of a matrix say."""

    model: str
    device: str
    unit: str  # "gpu" or "cpu"
    sms: dict[int, int]  # SMs or cores obtained, by share
    rounds: int
    trials: dict[int, int]  # by level
    learns_from: dict[int, list[int]]
    findings: Findings
    changes: tuple[Change, ...]
    names: dict[str, str]  # of tasks
    costs: Costs
    verified: dict[int, str]  # what each artifact's outputs are beside the reference's
    clocks_mhz: tuple[int, int] | None  # the least and the largest seen, where there are any
    reference: str = ONNX_RUNTIME  # that artifacts were compared with

    @property
    def changed(self) -> dict[Verdict, int]:
        """Return how many of `chosen` have another winner at another share, or not, or maybe."""
        counts = Counter(c.answer for c in self.chosen)
        return {answer: counts[answer] for answer in get_args(Answer)}

    @property
    def chosen(self) -> tuple[Change, ...]:
        """Return the changes of tasks with a candidate beside the default schedule."""
        return tuple(c for c in self.changes if c.candidates != 1)


def result_of(kept: MatrixFolder) -> MatrixResult:
    """Sum up the whole rounds of a matrix's folder; FolderError as `result_from` says."""
    asked = json.loads((kept.root / "matrix.json").read_bytes())
    with Store.read(kept.level(f"{asked['unit']}{asked['shares'][0]}")) as store:
        names = {t.task_id: t.name for t in store.tasks()}
    return result_from(kept, names, asked)


def result_from(kept: MatrixFolder, names: dict[str, str], asked: dict[str, Any]) -> MatrixResult:
    """Sum up the whole rounds of a matrix.

    Raises FolderError where there is none, or what is kept lacks a level or a cell.

    Args:
        names: of tasks, by id.
        asked: what matrix.json holds.
    """
    samples: dict[tuple[int, int], list[tuple[float, ...]]] = {}
    clocks: list[int] = []
    cells = whole_rounds(kept, set(asked["shares"]))
    for line in cells:
        for result in line.results:
            samples.setdefault((result.tuned_at, line.run_at), []).append(result.run_secs)
            if result.conditions.sm_clock_mhz is not None:
                clocks.append(result.conditions.sm_clock_mhz)
    levels = list(kept.of(LevelDone))
    try:
        if missing := set(asked["shares"]) - {x.pct for x in levels}:
            raise ValueError(f"the matrix lacks the levels {sorted(missing)}")
        found = findings(samples)
    except ValueError as error:
        path = kept.root / "done.jsonl"
        raise FolderError(f"{path} is damaged: {error}; name a new folder") from None
    verified = {x.tuned_at: x.verification for x in kept.of(ArtifactDone)}
    return MatrixResult(
        model=asked["model"]["name"],
        device=cells[0].proof.device if cells else "",
        unit=asked["unit"],
        sms={line.run_at: line.proof.sm_count for line in cells},
        rounds=len({line.round for line in cells}),
        trials={x.pct: x.trials for x in levels},
        learns_from={x.pct: list(x.learns_from) for x in levels},
        findings=found,
        changes=changes_of(kept.of(ContestDone)),
        names=names,
        costs=costs_of(kept),
        verified={pct: v.verdict for pct, v in verified.items()},
        clocks_mhz=(min(clocks), max(clocks)) if clocks else None,
        reference=next((v.reference for v in verified.values()), ONNX_RUNTIME),
    )


def changes_of(contests: Iterable[ContestDone]) -> tuple[Change, ...]:
    """Return whether each task's best candidate changes, by its contests."""
    found: dict[str, dict[int, dict[str, tuple[float, ...]]]] = {}
    for line in contests:
        found.setdefault(line.task_id, {})[line.run_at] = line.times
    return tuple(change(task_id, times) for task_id, times in found.items())


def whole_rounds(kept: MatrixFolder, shares: Set[int]) -> list[CellDone]:
    """Return the cells of the rounds in which all shares were measured, round after round."""
    rounds: dict[int, list[CellDone]] = {}
    for line in kept.of(CellDone):
        rounds.setdefault(line.round, []).append(line)
    whole = (of for _, of in sorted(rounds.items()) if {x.run_at for x in of} >= shares)
    return list(itertools.chain.from_iterable(whole))


def costs_of(kept: MatrixFolder) -> Costs:
    """Return what the stages that have ended took.

    Lines of older tunerds hold no part for the first level's whole model, count what a slice waited
    for as its time, and name artifacts and rounds alike.
    """
    first, *later = list(kept.of(LevelDone)) or [_NO_LEVEL]
    stages = {"finalists": NOTHING, "artifacts": NOTHING, "rounds": NOTHING}
    made: set[int] = set()
    before = 0  # artifacts, at the line of a cost before
    for line in kept.lines:
        if isinstance(line, ArtifactDone):
            made.add(line.tuned_at)
        elif isinstance(line, StageDone):
            stage = line.stage
            if stage == "models":
                stage = "rounds" if made and len(made) == before else "artifacts"
            stages[stage] += line.cost
            before = len(made)
    shares = {line.pct for line in kept.of(LevelDone)}
    if not made >= {DEFAULT, *shares}:
        stages["artifacts"] = UNKNOWN
    rounds = {line.round for line in whole_rounds(kept, shares)}
    return Costs(
        first.cost,
        first.artifact_cost,
        sum((line.cost for line in later), NOTHING),
        **stages,
        round_count=len(rounds),
    )


def result_json(result: MatrixResult) -> dict[str, Any]:
    """Return the document of a matrix."""
    costs, found = result.costs, result.findings
    parts = {
        "one_level": costs.one,
        "one_level_artifact": costs.one_artifact,
        "later_levels": costs.later,
        "finalists": costs.finalists,
        "artifacts": costs.artifacts,
        "rounds": costs.rounds,
        "all": costs.all,
    }
    claims = [
        {"name": c.name, "text": c.text, "answer": c.answer, "why": c.why}
        | {"ratio": to_json(c.ratio)}
        for c in found.claims
    ]
    return {
        "model": result.model,
        "device": result.device,
        "unit": result.unit,
        "sms": result.sms,
        "rounds": result.rounds,
        "trials": result.trials,
        "learns_from": result.learns_from,
        "verified": result.verified,
        "clocks_mhz": result.clocks_mhz,
        "findings": finite(to_json(found) | {"claims": claims}),
        "changed_tasks": {str(k): v for k, v in result.changed.items()}
        | {"default_alone": len(result.names) - len(result.chosen)},
        "changes": [
            to_json(c) | {"name": result.names.get(c.task_id, c.task_id)} for c in result.changes
        ],
        "costs": to_json(parts)
        | {
            "over_one_level": {
                "search_and_finalists": to_json(costs.kernels_over_one),
                "with_artifacts": to_json(costs.artifacts_over_one),
            }
        },
    }
