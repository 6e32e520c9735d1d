"""What is kept of a matrix -> what it says, with what it has cost."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

from tunerd.matrix.changes import Change, change
from tunerd.matrix.claims import Answer, Findings, findings
from tunerd.matrix.kept import Kept, result_of
from tunerd.matrix.levels import NOTHING, Cost
from tunerd.vocabulary import Measurement, to_json


@dataclass(frozen=True)
class Costs:
    """What the matrix took. `one` is the first level, a whole `tunerd tune` with all trials."""

    one: Cost
    levels: Cost  # all of them, the first too
    finalists: Cost  # of all levels, built once and measured at every share
    models: Cost  # compiled, verified and run at every share

    @property
    def tuning(self) -> Cost:
        """Return what tuning at all shares took: its end is an artifact for each."""
        return self.levels + self.finalists

    def over_one(self, cost: Cost) -> dict[str, float | None]:
        """Return a cost in units of one level."""
        pairs = {
            "wall": (cost.wall_secs, self.one.wall_secs),
            "cpu": (cost.cpu_secs, self.one.cpu_secs),
            "slice": (cost.slice_secs, self.one.slice_secs),
        }
        return {k: a / b if a is not None and b else None for k, (a, b) in pairs.items()}


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
    verified: dict[int, str]  # what each artifact's outputs are beside ONNX Runtime's
    clocks_mhz: tuple[int, int] | None  # the least and the largest seen, where there are any

    @property
    def changed(self) -> dict[Answer, int]:
        """Return how many of `chosen` have another winner at another share, or not, or maybe."""
        counts = Counter(c.answer for c in self.chosen)
        return {answer: counts[answer] for answer in Answer}

    @property
    def chosen(self) -> tuple[Change, ...]:
        """Return the changes of tasks with a candidate beside the default schedule."""
        return tuple(c for c in self.changes if c.candidates != 1)


def result_from(kept: Kept, names: dict[str, str], asked: dict[str, Any]) -> MatrixResult:
    """Sum up the whole rounds of a matrix; ValueError where there is none.

    Args:
        names: of tasks, by id.
        asked: what matrix.json holds.
    """
    samples: dict[tuple[int, int], list[tuple[float, ...]]] = {}
    clocks: list[int] = []
    cells = whole_rounds(kept, set(asked["shares"]))
    for line in cells:
        for each in line["results"]:
            row = each["tuned_at"]
            result = result_of({k: v for k, v in each.items() if k != "tuned_at"})
            assert isinstance(result, Measurement)  # nothing else is kept of a cell
            samples.setdefault((row, line["run_at"]), []).append(result.run_secs)
            if result.conditions.sm_clock_mhz is not None:
                clocks.append(result.conditions.sm_clock_mhz)
    levels = list(kept.of("level"))
    return MatrixResult(
        model=asked["model"]["name"],
        device=cells[0]["proof"]["device"] if cells else "",
        unit=asked["unit"],
        sms={line["run_at"]: line["proof"]["sm_count"] for line in cells},
        rounds=len({line["round"] for line in cells}),
        trials={x["pct"]: x["trials"] for x in levels},
        learns_from={x["pct"]: x["learns_from"] for x in levels},
        findings=findings(samples, seed=asked["settings"]["seed"]),
        changes=changes_of(kept.of("contest")),
        names=names,
        costs=costs_of(kept),
        verified={x["tuned_at"]: x["verification"]["verdict"] for x in kept.of("artifact")},
        clocks_mhz=(min(clocks), max(clocks)) if clocks else None,
    )


def changes_of(contests: Iterable[dict[str, Any]]) -> tuple[Change, ...]:
    """Return whether each task's best candidate changes, by the lines of its contests."""
    found: dict[str, dict[int, dict[str, Sequence[float]]]] = {}
    for line in contests:
        times = {c: r["run_secs"] for c, r in line["results"].items() if "run_secs" in r}
        found.setdefault(line["task_id"], {})[line["run_at"]] = times
    return tuple(change(task_id, times) for task_id, times in found.items())


def whole_rounds(kept: Kept, shares: Set[int]) -> list[dict[str, Any]]:
    """Return the cells of the rounds in which all shares were measured, round after round."""
    rounds: dict[int, list[dict[str, Any]]] = {}
    for line in kept.of("cell"):
        rounds.setdefault(int(line["round"]), []).append(line)
    whole = (of for _, of in sorted(rounds.items()) if {x["run_at"] for x in of} >= shares)
    return list(itertools.chain.from_iterable(whole))


def costs_of(kept: Kept) -> Costs:
    """Return what the stages that have ended took."""
    levels = [(line["learns_from"], Cost(**line["cost"])) for line in kept.of("level")]
    stages = {"finalists": NOTHING, "models": NOTHING}
    for line in kept.of("cost"):
        stages[line["stage"]] += Cost(**line["cost"])
    one = next((cost for learns_from, cost in levels if not learns_from), NOTHING)
    return Costs(one, sum((cost for _, cost in levels), NOTHING), **stages)


def result_json(result: MatrixResult) -> dict[str, Any]:
    """Return the document of a matrix."""
    costs, found = result.costs, result.findings
    parts = {
        "one_level": costs.one,
        "levels": costs.levels,
        "finalists": costs.finalists,
        "models": costs.models,
        "tuning": costs.tuning,
        "all": costs.tuning + costs.models,
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
        "findings": to_json(found) | {"claims": claims},
        "changed_tasks": {str(k): v for k, v in result.changed.items()}
        | {"default_alone": len(result.names) - len(result.chosen)},
        "changes": [
            to_json(c) | {"name": result.names.get(c.task_id, c.task_id)} for c in result.changes
        ],
        "costs": {
            name: to_json(cost) | {"over_one_level": costs.over_one(cost)}
            for name, cost in parts.items()
        },
    }
