"""How a run ends: what was chosen for each task, whether the model is right, and how fast it is."""

from __future__ import annotations

from dataclasses import dataclass

from tunerd.vocabulary import (
    DEFAULT_SOURCE,
    Candidate,
    CapProof,
    Failure,
    Measurement,
    Model,
    TargetSpec,
    origin_of,
)
from tunerd.vocabulary.verdict import Correctness, Interval, SpeedVerdict

ONNX_RUNTIME = "ONNX Runtime"  # the reference of ONNX models
# Ways to run a PyTorch module, by the names of their latencies.
EAGER, CHANNELS_LAST, COMPILED = "pytorch eager", "pytorch eager channels last", "pytorch compiled"
PYTORCH = {
    EAGER: "PyTorch eager",
    CHANNELS_LAST: "PyTorch eager, channels last",
    COMPILED: "torch.compile",
}
TUNED_BESIDE_PYTORCH = "tuned beside pytorch"  # the tuned model's, in turns with these
BY_ONNX_RUNTIME, TUNED_BESIDE_ONNX_RUNTIME = "onnxruntime", "tuned beside onnxruntime"


@dataclass(frozen=True)
class Comparison:
    """`new` against `base`: the ratio is base / new, so above 1 is faster."""

    verdict: SpeedVerdict
    base_secs: float  # medians
    new_secs: float
    ratio: float
    ratio_low: float  # 95% interval
    ratio_high: float

    @property
    def interval(self) -> Interval:
        """The ratio, as stores keep it in three fields, with its interval."""
        return Interval(self.ratio, self.ratio_low, self.ratio_high)


@dataclass(frozen=True)
class Finalist:
    """One candidate measured again, in turns with its task's default."""

    candidate_id: str
    source: str
    search_secs: float | None  # its median in the search
    measurement: Measurement | Failure
    may_win: bool = True  # False: it judges the search's ranking, or is a library left out

    IN_JSON = ("origin",)

    @property
    def is_default(self) -> bool:
        return self.source == DEFAULT_SOURCE

    @property
    def origin(self) -> str:
        return origin_of(self.source)


@dataclass(frozen=True)
class Taken:
    """Where a task's outcome was taken from, instead of tuning it."""

    run: str  # the identity of the run that measured it
    saved_at: float  # seconds since the epoch


@dataclass(frozen=True)
class TaskOutcome:
    """What one task ends with: the winner, and why it stays at its default where it does.

    One that was taken from a team's store was measured by another run; `trials` and `failed` are
    this run's all the same, which are none unless it began to tune the task itself.
    """

    task_id: str
    name: str
    weight: int
    trials: int
    failed: int
    default_secs: float | None  # the search's where there was no time to measure it again
    best_secs: float | None  # of the winner, quietly measured; the default's where it stays
    winner: Candidate
    comparison: Comparison | None
    note: str  # "" or why the default stays, or what the winner was not compared with
    finalists: tuple[Finalist, ...] = ()
    taken: Taken | None = None  # None: this run measured it
    measured_as: str = ""  # the finals' profile and neighbours; other ones are measured anew

    @property
    def is_tuned(self) -> bool:
        return not self.winner.is_default

    @property
    def is_decided(self) -> bool:
        """Whether it stands: neither another's fault nor a lack of time kept one of it out.

        What does not stand is decided again by the same command, and is given to no team.
        """
        missed = {
            f.source
            for f in self.finalists
            if f.may_win
            and isinstance(f.measurement, Failure)
            and not f.measurement.kind.ends_trial
        }
        return not missed or (self.is_tuned and DEFAULT_SOURCE not in missed)

    @property
    def disturbed_by(self) -> str:
        """What disturbed the measuring of its finalists, as in Conditions."""
        results = (f.measurement for f in self.finalists)
        causes = (r.conditions.disturbed_by for r in results if isinstance(r, Measurement))
        return next(filter(None, causes), "")


@dataclass(frozen=True)
class Accuracy:
    """How near an output is to the reference's, over all inputs on which they were compared."""

    output: str
    error: float  # the largest difference, as a share of the output's largest value
    rows: int = 0  # of scores of classes; 0: it has none
    same_first: int = 0  # of these, in how many the same class is first


@dataclass(frozen=True)
class Verification:
    """Outputs against a reference, which runs the model as its author wrote it.

    `worst_error` is max |out - ref| / (atol max |ref| + rtol |ref|).
    """

    verdict: Correctness
    seeds: int
    rtol: float
    atol: float
    worst_error: float  # 1 is just at the tolerance
    message: str
    reference: str = ONNX_RUNTIME  # in words
    inputs: str = "seed"  # what each of them is: "seed", or a "sample" that the user gave
    accuracy: tuple[Accuracy, ...] = ()  # of each output of floating numbers


@dataclass(frozen=True)
class TriedPrecision:
    """A precision that `--precision auto` looked at, and what came of it."""

    precision: str
    error: float | None = None  # the largest of an `Accuracy`; None: nothing told
    refused: str = ""  # why it was not taken; "": it was


@dataclass(frozen=True)
class Latency:
    """End-to-end samples of a model: tuned and default in turns, ONNX Runtime after both.

    PyTorch comes after them all, in turns with the tuned model once more.
    """

    name: str  # "tuned", "default", or one of those above
    run_secs: tuple[float, ...]


@dataclass(frozen=True)
class Outcome:
    """The end of a run: what the report shows and the exit code says."""

    model: Model
    target: TargetSpec
    tasks: tuple[TaskOutcome, ...]
    verification: Verification
    latencies: tuple[Latency, ...]
    end_to_end: Comparison
    artifact: str  # path of the folder
    proofs: tuple[CapProof, ...] = ()
    disturbed_by: str = ""  # while the whole model was timed, as in Conditions
    # On what was timed beside it: how, or why it was not; and on what there was no time for.
    remarks: tuple[str, ...] = ()

    @property
    def hit_rate(self) -> float:
        """Share of the model's tasks, by count, that use a tuned record."""
        return sum(t.is_tuned for t in self.tasks) / len(self.tasks) if self.tasks else 0.0
