"""Runs of a recipe that this machine cannot make, said before it is looked at."""

from __future__ import annotations

from collections.abc import Sequence

from tunerd.cluster.job import cluster_address
from tunerd.settings import TuneSettings
from tunerd.slices import member
from tunerd.studies.recipes.recipe import PlannedRun


def impossible_runs(runs: Sequence[PlannedRun]) -> dict[str, str]:
    """Return by name why this machine cannot make a run, as far as its kind of slice tells."""
    asked = {run.name: run.command.settings for run in runs}
    here = {
        name: each.slice_kind
        for name, each in asked.items()
        if isinstance(each, TuneSettings) and cluster_address(each.address) is None
    }
    usable = {kind: member(kind).usability() for kind in set(here.values())}
    return {name: usable[kind].why for name, kind in here.items() if not usable[kind].ok}
