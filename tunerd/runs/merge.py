"""Several runs of one model on one kind of device as one run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy.exc import IntegrityError

from tunerd.errors import FolderError
from tunerd.records.facts import refuse_other_run
from tunerd.records.store import Store
from tunerd.runs.archive import require_new, written_beside
from tunerd.runs.folder import RunFolder
from tunerd.vocabulary import DEFAULT_SOURCE, TrialState

_WORTH = {
    TrialState.MEASURED: 2,
    TrialState.FAILED: 1,
    TrialState.RUNNING: 0,
    TrialState.PROPOSED: 0,
}


@dataclass(frozen=True)
class Merged:
    """What came together. `duplicates` are left out: trials of candidates of another run, too."""

    trials: int  # of the search, that ended
    open: int  # of the search, proposed or running
    default_schedules: int
    duplicates: int


def merge_runs(folders: Sequence[Path], to: Path) -> Merged:
    """Join runs into a new run folder that `tunerd tune` can go on in.

    Of a candidate that several runs have, a measurement wins over a failure and a failure over an
    open trial; of equals the first run's stays. Slices of the second run and later ones get `@2`
    and so on behind their names. Outcomes, artifacts, logs and where time went stay with each run.

    Raises FolderError where the runs are not of one model, device and share, or `to` exists.
    """
    require_new(to)
    with ExitStack() as stack:
        stores = [stack.enter_context(Store.read(folder)) for folder in folders]
        facts = [store.facts() for store in stores]
        for other in facts[1:]:
            refuse_other_run(facts[0], other, folders[0])
        keep, counts = _choose(stores)
        with written_beside(to, folders[0]) as beside:
            with RunFolder.open(beside / "whole", facts=facts[0]) as merged:
                for number, store in enumerate(stores):
                    suffix = f"@{number + 1}" if number else ""
                    _copy_around(store, merged.store, suffix)
                    try:
                        merged.store.adopt(_chosen(store, keep, number, suffix))
                    except IntegrityError as error:
                        raise FolderError(
                            f"the trials of {folders[number]} cannot be merged ({error.orig}): "
                            "they are of tasks that it has not, so leave it out"
                        ) from error
            (beside / "whole").replace(to)
    return counts


def _choose(stores: Sequence[Store]) -> tuple[dict[str, int], Merged]:
    """Return for each candidate the number of the run whose trial stays, and what that makes."""
    keep: dict[str, tuple[int, int]] = {}  # worth, run
    defaults: set[str] = set()
    total = 0
    for number, store in enumerate(stores):
        for row in store.trial_rows():
            total += 1
            worth = _WORTH[TrialState(row["state"])]
            known = keep.get(row["candidate_id"])
            if row["source"] == DEFAULT_SOURCE:
                defaults.add(row["candidate_id"])
            if known is None or worth > known[0]:
                keep[row["candidate_id"]] = (worth, number)
    ended = [worth > 0 for candidate, (worth, _) in keep.items() if candidate not in defaults]
    merged = Merged(
        trials=sum(ended),
        open=len(ended) - sum(ended),
        default_schedules=len(defaults),
        duplicates=total - len(keep),
    )
    return {candidate: number for candidate, (_, number) in keep.items()}, merged


def _copy_around(source: Store, to: Store, suffix: str) -> None:
    to.register_tasks(source.tasks())
    for proof in source.proofs():
        to.save_proof(dataclasses.replace(proof, slice_id=proof.slice_id + suffix))


def _chosen(
    store: Store, keep: Mapping[str, int], number: int, suffix: str
) -> Iterator[dict[str, Any]]:
    for found in store.trial_rows():
        if keep[found["candidate_id"]] != number:
            continue
        row = dict(found)
        if row["state"] == TrialState.RUNNING.value:
            row |= {"state": TrialState.PROPOSED.value, "started_at": None, "slice_id": None}
        if row["slice_id"] is not None:
            row["slice_id"] += suffix
        del row["trial_id"]
        yield row
