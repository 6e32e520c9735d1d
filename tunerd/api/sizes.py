"""One model tuned at several sizes."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from tunerd.api.run import Artifact, OnStep, Run
from tunerd.api.tuning import Callbacks, OnProgress, TuneOptions, carry_out, settings_for
from tunerd.errors import InputError
from tunerd.records.paths import Paths
from tunerd.telemetry.progress import Progress
from tunerd.vocabulary.verdict import SpeedVerdict, Verdict

if TYPE_CHECKING:
    from tunerd.frontend.given import Given
    from tunerd.report.run_view import RunView
    from tunerd.settings import TuneSettings
    from tunerd.vocabulary.outcome import Outcome


@dataclass(frozen=True)
class SizedRun:
    """A run for each size of a model, and the artifact of all of them."""

    folder: Path
    sizes: tuple[dict[str, int], ...]  # by dimension
    runs: tuple[Run, ...]  # in the order of `sizes`
    padded_dims: tuple[str, ...]  # in which inputs of other sizes are padded

    @property
    def artifact(self) -> Artifact:
        """The compiled model, which takes inputs of each size; one set of weights is in it."""
        return Artifact(Paths(self.folder).artifact)

    @property
    def report_path(self) -> Path:
        return Paths(self.folder).report

    @property
    def verdict(self) -> SpeedVerdict:
        """FASTER where any size is, then CANNOT_TELL where one cannot be told, then SAME."""
        found = {run.verdict for run in self.runs}
        first = (v for v in (Verdict.FASTER, Verdict.CANNOT_TELL, Verdict.SAME) if v in found)
        return next(first, Verdict.SLOWER)


def tune_sizes(
    model: Given,
    *,
    on_progress: OnProgress | None = None,
    on_warning: OnStep | None = None,
    **options: Unpack[TuneOptions],
) -> SizedRun:
    """Tune a model at the sizes that `dims` or `batch` lists, one after another, into one artifact;
    or for the numbers of models that `tenants` lists.

        run = tunerd.tune_sizes("model.onnx", cpu_pct=50, dims={"batch": (1, 4, 8)})
        y = run.artifact.load()(x)  # three rows of x are padded to four

    Lists of several dimensions are read side by side: `{"batch": (1, 8), "length": (128, 32)}` are
    two sizes; `batch=(1, 4, 8)` are sizes of the first dimension of all inputs. `inputs` is a
    folder with samples of each, batch1.npz or a folder batch1. Takes and raises what `tune` does;
    `trials` and `budget_secs` are of each size. A task that several sizes have is searched once.
    The same call goes on where it stopped.
    """
    settings = settings_for(model, options)
    if not settings.sizes:
        raise InputError(
            "dims, batch and tenants list one size each: give several, or call tunerd.tune"
        )
    return carry_out_sizes(settings, Callbacks(on_progress, on_warning))


def carry_out_sizes(settings: TuneSettings, progress: Progress) -> SizedRun:
    """Tune as settings say that list several sizes; raises as `tune_sizes` does."""
    from tunerd.report.html import write_page
    from tunerd.report.sizes_page import sizes_page
    from tunerd.runs.shared import SharedCluster
    from tunerd.studies.sizes import carry_out_each, pack

    with SharedCluster() as private:  # a size is often seconds of search
        runs = carry_out_each(settings, progress, functools.partial(carry_out, private=private))
    for run in runs:
        _ = run.verdict  # a wrong one is in no artifact
    found = SizedRun(settings.out, settings.sizes, runs, pack(settings))
    write_page(found.report_path, sizes_page(runs[0].name, results_of(found), found.padded_dims))
    return found


def results_of(run: SizedRun) -> list[tuple[str, RunView, Outcome, Path]]:
    """Return what the report shows of each size."""
    from tunerd.settings.texts import sizes_text

    return [
        (sizes_text(sizes), each.view, each.outcome, each.folder)
        for sizes, each in zip(run.sizes, run.runs, strict=True)
    ]
