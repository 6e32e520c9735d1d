"""A run and its artifact, as values."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tunerd.errors import FolderError, Interrupted, WrongResultError
from tunerd.records import Store
from tunerd.records.paths import Paths
from tunerd.report.figures import Rival, rivals
from tunerd.report.run_view import RunView, run_view_of
from tunerd.studies.profile.folder import REPORT
from tunerd.system.text import reason_of
from tunerd.vocabulary.outcome import Latency, Outcome, TaskOutcome
from tunerd.vocabulary.verdict import Interval, SpeedVerdict, Verdict

if TYPE_CHECKING:
    import pandas as pd

    from tunerd.artifacts.loading import LoadedModel
    from tunerd.studies.profile.auto import Aftermath

StrPath = str | os.PathLike[str]
OnStep = Callable[[str], None]


def nothing(step: str) -> None:
    """Take what comes next, and show it nowhere."""


@contextlib.contextmanager
def keeping_nothing(say: OnStep) -> Iterator[None]:
    """End a body that keeps nothing before its end at the first SIGINT or SIGTERM, and say so.

    Raises Interrupted then.
    """
    from tunerd.system.signals import Stop

    stopping = functools.partial(say, "stopping: nothing is kept")
    try:
        with Stop(stopping, at_once=True):
            yield
    except KeyboardInterrupt:
        raise Interrupted(
            "stopped on request; nothing was kept, and the same command begins anew"
        ) from None


@dataclass(frozen=True)
class Artifact:
    """A compiled model: a folder that is loaded without a compiler, and may be copied."""

    path: Path

    def load(self, *, device: int | None = None, beside: Iterable[LoadedModel] = ()) -> LoadedModel:
        """Check and load it, as `tunerd.load` does."""
        from tunerd.artifacts.loading import load

        return load(self.path, device=device, beside=beside)


@dataclass(frozen=True)
class ReviewedShare:
    """A share that was chosen by a profile, and what the tuned artifact's profile says of it."""

    aftermath: Aftermath
    folder: Path  # of the artifact's profile

    @property
    def report(self) -> Path:
        return self.folder / REPORT


@dataclass(frozen=True)
class Run:
    """A run of `tunerd.tune`, as it was when it was opened. Times are seconds of an inference.

    `verdict`, `speedup`, `rivals`, `latencies` and `artifact` are of a run that came to its end:
    they raise FolderError while there is none.
    """

    folder: Path
    view: RunView = field(repr=False)  # all that the report shows
    share: ReviewedShare | None = None  # where `tunerd.tune` was to choose it

    @property
    def name(self) -> str:
        """The model's name."""
        return self.view.name

    @property
    def is_finished(self) -> bool:
        """Whether the run has its result, and no later session is under way or was stopped."""
        return not self.view.is_unfinished

    @property
    def outcome(self) -> Outcome:
        """How the run ended: everything below, and the verification against the reference."""
        if self.view.outcome is None:
            raise FolderError(
                f"the run in {self.folder} has not come to its end; tune with the same settings "
                "to go on"
            )
        return self.view.outcome

    @property
    def verdict(self) -> SpeedVerdict:
        """Whether the tuned model is faster than the fastest of `rivals`.

        Where none was measured, than with default schedules: SAME where no task was tuned, as both
        models are the same then, whatever was timed. CANNOT_TELL also where its results could not
        be verified. Raises WrongResultError where the tuned model disagrees with its reference.
        """
        outcome, verification = self.outcome, self.outcome.verification
        match verification.verdict:
            case Verdict.WRONG:
                raise WrongResultError(
                    f"the tuned model disagrees with {verification.reference}: "
                    f"{verification.message}; it was not kept as an artifact, see "
                    f"{self.report_path}"
                )
            case Verdict.CANNOT_TELL:
                return Verdict.CANNOT_TELL
        if self.rivals:
            return self.rivals[0].compared.verdict
        is_tuned = any(task.is_tuned for task in outcome.tasks)
        return outcome.end_to_end.verdict if is_tuned else Verdict.SAME

    @property
    def speedup(self) -> Interval:
        """Time of the fastest of `rivals` over time as tuned, above 1 is faster, and its interval.

        Where none was measured, time with default schedules over time as tuned, which
        `outcome.end_to_end` has in any case.
        """
        compared = self.rivals[0].compared if self.rivals else self.outcome.end_to_end
        return compared.interval

    @functools.cached_property
    def rivals(self) -> tuple[Rival, ...]:
        """What people would run instead and was timed in turns with the tuned model, if any.

        The fastest first: ONNX Runtime on CPUs, and of PyTorch's ways the fastest where the run
        was to be `against` a module.
        """
        return rivals(self.outcome)

    @property
    def tasks(self) -> tuple[TaskOutcome, ...]:
        """The model's tasks: what was chosen for each, or what was found so far."""
        return self.view.tasks

    @property
    def latencies(self) -> tuple[Latency, ...]:
        """Samples of the whole model: tuned, default, ONNX Runtime's on CPUs, and PyTorch's."""
        return self.outcome.latencies

    @property
    def artifact(self) -> Artifact:
        """The compiled model; WrongResultError where it is wrong, which is not kept."""
        _ = self.verdict
        return Artifact(Path(self.outcome.artifact))

    @property
    def report_path(self) -> Path:
        """Where the run keeps its page."""
        return Paths(self.folder).report

    def trials(self) -> pd.DataFrame:
        """Return a row per trial, also of default schedules, as `tunerd records export` has them.

        Seconds are in `median_secs`, raw samples in `run_secs`. Raises FolderError where the
        folder is gone.
        """
        from tunerd.records.export import trials_table

        with Store.read(self.folder) as store:
            return trials_table(store)

    def report(self, to: StrPath) -> Path:
        """Write the run's page, one self-contained HTML file, and return its path.

        Raises FolderError where the file cannot be written.
        """
        from tunerd.report.html import write_page
        from tunerd.report.page import report_page

        path = Path(to)
        try:
            write_page(path, report_page(self.view))
        except OSError as error:
            raise FolderError(
                f"{path} cannot be written: {reason_of(error)}; name another file"
            ) from error
        return path


def open_run(folder: StrPath) -> Run:
    """Read a run from its folder, also one that is alive, was stopped or was killed.

    Raises FolderError where there is none, or it is damaged.
    """
    root = Path(folder)
    with Store.read(root) as store:
        return Run(root, run_view_of(store))
