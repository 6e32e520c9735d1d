"""Other runs' folders -> TransferredResults: what other shares and models teach a search.

Those runs measured at another share or on another device. Their times are therefore no records of
this run: they rank their own run's candidates, and whatever looks good is measured here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tunerd.errors import InputError
from tunerd.records import RunFacts, Store
from tunerd.vocabulary import TargetSpec, Task, TransferredResults

# Each tuner trains on all of them with every batch: 0.2 s of one core for this many.
_MOST_RESULTS = 2048
_MOST_OF_A_TASK = 512  # half of them its best
_LEAST_OF_A_TASK = 8
_T = TypeVar("_T")


@dataclass(frozen=True)
class WarmStart:
    """What one other run teaches: of each of its tasks, each source's trials."""

    folder: Path
    transferred: tuple[TransferredResults, ...]

    @property
    def results(self) -> int:
        return sum(len(past.results) for past in self.transferred)

    @property
    def task_ids(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(past.task.task_id for past in self.transferred))

    def shared(self, task_ids: Collection[str]) -> list[str]:
        """Return which of these tasks the run had, too: their best is measured first."""
        return [each for each in self.task_ids if each in task_ids]

    def sentence(self, task_ids: Collection[str]) -> str:
        """Say what a run of these tasks learns."""
        shared, count = len(self.shared(task_ids)) or "none", len(self.task_ids)
        return (
            f"{self.results} results of {count} {'task' if count == 1 else 'tasks'} from "
            f"{self.folder}, {shared} of them of this model"
        )


def read_warm_starts(
    folders: Sequence[Path], *, out: Path, target: TargetSpec, slice_kind: str, tenants: int = 1
) -> tuple[WarmStart, ...]:
    """Read the best and some others of what each run measured, of each of its tasks.

    What was measured of other numbers of models is told as of tasks of `tenants`.

    Raises FolderError where a folder holds no run or a damaged one, and InputError where its run
    cannot teach one in `out` for this target on these slices.
    """
    distinct = {folder.resolve(): folder for folder in folders}
    if out.resolve() in distinct:
        raise InputError(
            f"--warm-start {distinct[out.resolve()]} is the folder of this run, which goes on with "
            "its own trials anyway; give another run's folder, or leave the flag out"
        )
    with ExitStack() as stack:
        stores = [stack.enter_context(Store.read(folder)) for folder in distinct.values()]
        for folder, store in zip(distinct.values(), stores, strict=True):
            _require_teachable(store.facts(), folder, target, slice_kind)
        ranked = [
            [(task, ranks) for task in store.tasks() if (ranks := _ranked(store, task))]
            for store in stores
        ]
        tasks = sum(len(of_store) for of_store in ranked)
        most = min(_MOST_OF_A_TASK, max(_LEAST_OF_A_TASK, _MOST_RESULTS // max(1, tasks)))
        return tuple(
            WarmStart(
                folder,
                tuple(
                    TransferredResults(
                        number,
                        _of_tenants(task, tenants),
                        results,
                        _sms(store, task, tenants),
                        source,
                    )
                    for task, ranks in of_store
                    for source, results in _results(store, chosen(ranks, most)).items()
                ),
            )
            for number, (folder, store, of_store) in enumerate(
                zip(distinct.values(), stores, ranked, strict=True), start=1
            )
        )


def chosen(ranks: Sequence[_T], most: int) -> list[_T]:
    """Return at most so many of what is ranked: the first half of them, and of the rest evenly."""
    best, rest = ranks[: most - most // 2], ranks[most - most // 2 :]
    others = min(most // 2, len(rest))
    return [*best, *(rest[i * len(rest) // others] for i in range(others))]


def _ranked(store: Store, task: Task) -> list[tuple[int, float | None]]:
    """Rank a task's trials, less those that took no time: by ratios all others would be nothing."""
    return [(i, secs) for i, secs in store.ranked(task.task_id) if secs is None or secs > 0]


def _results(
    store: Store, trials: Sequence[tuple[int, float | None]]
) -> dict[str, tuple[tuple[str, float | None], ...]]:
    """Return recipes and their seconds by the sources that know what they say."""
    found: dict[str, list[tuple[str, float | None]]] = {}
    recipes = store.recipes([trial_id for trial_id, _ in trials])
    for (source, recipe), (_, secs) in zip(recipes, trials, strict=True):
        found.setdefault(source, []).append((recipe, secs))
    return {source: tuple(results) for source, results in found.items()}


def _require_teachable(facts: RunFacts, folder: Path, target: TargetSpec, slice_kind: str) -> None:
    if facts.target.kind != target.kind:
        raise InputError(
            f"--warm-start {folder} holds a run for {facts.target.kind}, and this one is for "
            f"{target.kind}, whose kernels are made by other rules; give a run for {target.kind}"
        )
    if facts.slice_kind == "simulated" and slice_kind != "simulated":
        raise InputError(
            f"--warm-start {folder} holds a run on simulated slices, which measure nothing; give a "
            "run that was measured"
        )


def _of_tenants(task: Task, tenants: int) -> Task:
    try:
        return task.for_tenants(tenants)
    except ValueError:  # an id that is none of ours
        return task


def _sms(store: Store, task: Task, tenants: int) -> int | None:
    """Return how many SMs give each of `tenants` models what those of the run's slices had."""
    proofs = store.proofs()
    if not proofs or not store.facts().target.is_cuda:
        return None
    return max(1, proofs[0].sm_count * tenants // task.tenants)
