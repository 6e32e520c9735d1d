"""One model at several sizes: a run for each, one after another, and one artifact of them all.

For several numbers of tenants, too: a run for each number, which is its size.

sizes/batch1/        the run folder of a size, with its report and its own artifact
sizes/store.sqlite   what these runs share: a task of several sizes is searched once
artifact/            of all sizes, with one set of weights
report.html          a line for each size
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from tunerd.artifacts.packing import pack_sizes, pack_tenants
from tunerd.errors import FolderError, InputError
from tunerd.frontend.padding import axes_of
from tunerd.records.paths import Paths
from tunerd.runs.folder import locked, names_in
from tunerd.settings import TuneSettings
from tunerd.settings.texts import BATCH, TENANTS, sizes_label, sizes_text
from tunerd.telemetry.progress import Progress, ProgressState

_STORE = "store.sqlite"
_Run = TypeVar("_Run")


@dataclass(frozen=True)
class SizeRun:
    """What is to be tuned for one size."""

    sizes: dict[str, int]  # by dimension
    settings: TuneSettings

    @property
    def name(self) -> str:
        return sizes_text(self.sizes)


def runs_of(settings: TuneSettings) -> tuple[SizeRun, ...]:
    """Return the run of each size. It learns from the runs before it that are there, and takes
    equal tasks from the store that all share: the settings' own, or one in the folder.
    """
    root = Paths(settings.out).sizes
    folders = [root / sizes_label(sizes) for sizes in settings.sizes]
    store = settings.store or f"sqlite:///{(root / _STORE).absolute()}"
    found = []
    for number, sizes in enumerate(settings.sizes):
        earlier = [folder for folder in folders[:number] if Paths(folder).store.is_file()]
        changed = _of_one(settings, sizes) | {
            "sizes": (),
            "batches": (),
            "out": folders[number],
            "warm_start": (*settings.warm_start, *earlier),
            "store": store,
        }
        found.append(SizeRun(sizes, settings.model_copy(update=changed)))
    return tuple(found)


def carry_out_each(
    settings: TuneSettings, progress: Progress, tune: Callable[[TuneSettings, Progress], _Run]
) -> tuple[_Run, ...]:
    """Tune each size with `tune`, and return what that returns; raises as it does.

    Raises FolderError where the folder is of something else, or in use.
    """
    with _own_folder(settings.out):
        ended = []
        for number in range(len(settings.sizes)):
            run = runs_of(settings)[number]  # the runs before it are there now
            said = f"{run.name} ({number + 1} of {len(settings.sizes)})"
            ended.append(tune(run.settings, _Named(progress, said)))
        return tuple(ended)


def pack(settings: TuneSettings) -> tuple[str, ...]:
    """Join the artifacts of all sizes, and return the dimensions that may be padded."""
    runs = [(run.sizes, Paths(run.settings.out).artifact) for run in runs_of(settings)]
    if settings.tenants:
        pack_tenants([artifact for _, artifact in runs], Paths(settings.out).artifact)
        return (TENANTS,)
    axes = axes_of(
        settings.model,
        settings.sizes,
        shapes=settings.shapes,
        batch=settings.batch,
        leading=BATCH if settings.batches else "",
        constants=settings.constants,
    )
    pack_sizes(runs, axes, Paths(settings.out).artifact)
    return tuple(dim for dim, of in axes.items() if of["pads"])


@contextmanager
def _own_folder(root: Path) -> Iterator[None]:
    """Hold the folder of all sizes; FolderError where it is a run's, or of something else."""
    paths = Paths(root)
    own = {paths.sizes, paths.artifact, paths.report, paths.model, paths.lock}
    if foreign := sorted(names_in(root) - {path.name for path in own}):
        raise FolderError(
            f"{root} holds '{foreign[0]}', and a model of several sizes needs a folder that is "
            "new, empty or its own: choose another one with --out"
        )
    with locked(root):
        yield


class _Named(Progress):
    """Says of which size a run is, before what it says itself. Closes nothing: others follow."""

    def __init__(self, shown: Progress, name: str) -> None:
        self._shown, self._name = shown, name

    def update(self, state: ProgressState) -> None:
        said = f"{self._name}: {state.message}" if state.message else self._name
        self._shown.update(replace(state, message=said))

    def warn(self, sentence: str) -> None:
        self._shown.warn(f"{self._name}: {sentence}")

    def close(self) -> None:
        pass


def _of_one(settings: TuneSettings, sizes: dict[str, int]) -> dict[str, Any]:
    """Return what the settings of one size have of it: its batch, its dimensions, its inputs."""
    if settings.tenants:
        return {"tenants": (sizes[TENANTS],)}
    dims = {name: size for name, size in sizes.items() if not settings.batches or name != BATCH}
    found: dict[str, Any] = {"dims": dims}
    if settings.batches:
        found["batch"] = sizes[BATCH]
    if settings.inputs is not None:
        found["inputs"] = _inputs_of(settings.inputs, sizes)
    return found


def _inputs_of(root: Path, sizes: dict[str, int]) -> Path:
    """Return where the samples of one size are: a file or a folder in `root` that is named so."""
    label = sizes_label(sizes)
    for path in (root / f"{label}.npz", root / label):
        if path.exists():
            return path
    raise InputError(
        f"--inputs {root} has no {label}.npz, and no folder {label}, for {sizes_text(sizes)}; of "
        "several sizes it is a folder with samples of each"
    )
