"""Tune a model at each of several shares, and run what comes out at all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict, Unpack

from tunerd.api.run import OnStep, StrPath, nothing
from tunerd.api.studies import as_path
from tunerd.api.tuning import Callbacks, OnProgress, SliceKind, require_known, require_no_ray
from tunerd.errors import Interrupted

if TYPE_CHECKING:
    from tunerd.frontend.given import Given
    from tunerd.settings.studies import MatrixSettings
    from tunerd.studies.matrix.execute import Showing
    from tunerd.studies.matrix.result import MatrixResult


class MatrixOptions(TypedDict, total=False):
    """What may be said of a matrix.

    out: a folder for all of it, in which the same call goes on; runs/MODEL-matrix if not given.
    slice_kind: mps for shares of a GPU, cpu for shares of the cores; mps where it works if not
        given, else cpu.
    trials: of the first level; a later one has 15% of them, an independent one all. 1000 where
        neither this nor `budget_secs` is given.
    budget_secs: how long the first level searches.
    rounds: how often every model is run at every share; 8 if not given.
    shapes, dims, batch: of the inputs, by input name, by dimension name, and the leading dimension.
    precision: what kernels compute in; as exported if not given.
    inputs, values: inputs to verify and time on, as of `tune`.
    independent: tune at each share as if it were the only one, with all trials.
    seed: of the searches and of the order.
    tuners: search and build processes; by the cores if not given.
    l2: what of their weights finalists find in the cache.
    """

    out: StrPath
    slice_kind: SliceKind
    trials: int
    budget_secs: float
    rounds: int
    shapes: Mapping[str, Sequence[int]]
    dims: Mapping[str, int]
    batch: int
    precision: Literal["fp32", "tf32", "fp16", "bf16"]
    inputs: StrPath
    values: Mapping[str, float]
    independent: bool
    seed: int
    tuners: int
    l2: Literal["model", "cold", "warm"]


@dataclass(frozen=True)
class Matrix:
    """What a matrix says, and the folder that keeps its samples, models and page."""

    folder: Path
    result: MatrixResult
    report: Path


def matrix(
    model: Given,
    *,
    shares: Sequence[int],
    on_progress: OnProgress | None = None,
    on_warning: OnStep | None = None,
    on_step: OnStep | None = None,
    **options: Unpack[MatrixOptions],
) -> Matrix:
    """Tune a model at each share, run what comes out at every share, and say what that is worth.

    The same call in the same folder goes on where it stopped, after any kill.

    Args:
        model: as `tune` takes it.
        shares: in percent; two at least.
        on_progress: is given the state of the level that is tuned, as often as it changes.
        on_warning: is told what a person should know of a level.
        on_step: is told what comes next.
        options: `MatrixOptions` says what there is.

    Raises TunerdError as `tunerd.tune` does, and Interrupted after SIGINT or SIGTERM, with what
    was measured kept.
    """
    require_known(options, MatrixOptions, "a matrix")
    with as_path(model) as path:
        settings = _settings(path, shares, options)
        callbacks = Callbacks(on_progress, on_warning)
        return carry_out_matrix(
            settings, lambda: contextlib.nullcontext(callbacks), on_step or nothing
        )


def carry_out_matrix(settings: MatrixSettings, showing: Showing, say: OnStep) -> Matrix:
    """Make the matrix that settings say, and its report; raises as `matrix` does.

    Args:
        showing: shows one level's progress.
    """
    from tunerd.report.matrix_page import write_matrix
    from tunerd.studies.matrix.asked import asked_of
    from tunerd.studies.matrix.execute import carry_out
    from tunerd.studies.matrix.folder import read
    from tunerd.studies.matrix.result import result_of, whole_rounds

    require_no_ray()
    asked = asked_of(settings)
    try:
        kept = carry_out(asked, showing, say)
    except Interrupted as stopped:
        kept = read(asked.base.out)
        if not whole_rounds(kept, set(settings.shares)):
            raise
        result = result_of(kept)
        write_matrix(result, kept.root)
        there = f"{result.rounds} of {settings.rounds} rounds are in {kept.report}"
        raise Interrupted(f"{stopped}; {there}") from None
    say("resampling")
    result = result_of(kept)
    write_matrix(result, kept.root)
    return Matrix(kept.root, result, kept.report)


def _settings(path: Path, shares: Sequence[int], options: MatrixOptions) -> MatrixSettings:
    from tunerd.settings.option import checked
    from tunerd.settings.studies import MatrixSettings

    values: dict[str, object] = {"model": path, "shares": ",".join(map(str, shares)), **options}
    if "out" in options:
        values["out"] = Path(options["out"])
    values["shapes"] = {name: tuple(of) for name, of in options.get("shapes", {}).items()}
    values["dims"] = dict(options.get("dims", {}))
    values["values"] = dict(options.get("values", {}))
    if "inputs" in options:
        values["inputs"] = Path(options["inputs"])
    return checked(MatrixSettings, values)
