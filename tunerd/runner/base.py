"""The contract of a runner: it measures builds and models in one slice.

Members: RunnerClient, whose work is done by a process at the other end of a socket, and the runner
of simulated slices. `Slice.launch` returns one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tunerd.runner.load import Load, Repeats
from tunerd.vocabulary import Arrays, Build, Conditions, Failure, Measurement, Profile


@dataclass(frozen=True)
class Company:
    """What else works on the device meanwhile, as far as whoever asks for work knows.

    neighbours: other slices that work; None leaves what the slice sees: those that live.
    is_alone: no other slice of the device begins any work: a fault that all of them see is then
        this one's.
    """

    neighbours: int | None = None
    is_alone: bool = False

    def seen_in(self, conditions: Conditions) -> Conditions:
        """Return the conditions of a measurement that was taken in this company."""
        if self.neighbours is None:
            return conditions
        return replace(conditions, neighbours=self.neighbours)


UNKNOWN = Company()
ALONE = Company(neighbours=0, is_alone=True)


@dataclass(frozen=True)
class TorchModule:
    """A PyTorch module, and what makes sure that it is the model."""

    made_by: str  # FILE.py:FUNCTION
    precision: str
    inputs: Arrays  # by name, in the order in which it takes them
    outputs: Arrays  # of the model's reference, likewise


class Runner(ABC):
    """What works in a slice, one request after the other. Paths that it gets are absolute."""

    @abstractmethod
    def measure(
        self,
        builds: Sequence[Build],
        profile: Profile,
        *,
        best_secs: Sequence[float | None] = (),
        company: Company = UNKNOWN,
    ) -> list[Measurement | Failure]:
        """Measure each build on its own, in order. A fault is the Failure of the build it hit.

        What keeps a runner from measuring is raised, unless some of the builds have results: then
        the rest are COLLATERAL, and the next call raises.

        Args:
            best_secs: the best time known of each build's task, None where none is: what is far
                slower may be ended early. Of no task where nothing is given.
        """

    @abstractmethod
    def compare(
        self, builds: Sequence[Build], profile: Profile, *, company: Company = UNKNOWN
    ) -> list[Measurement | Failure]:
        """Measure the builds interleaved: sample i of each is taken before sample i + 1 of any."""

    @abstractmethod
    def agree(
        self, reference: Build, build: Build, *, company: Company = UNKNOWN
    ) -> Failure | None:
        """Run two builds of a task on equal random arguments; None where their results agree."""

    @abstractmethod
    def run_model(
        self, artifact: str, inputs: Arrays, *, alone: str = "", company: Company = UNKNOWN
    ) -> Arrays:
        """Load an artifact folder and return its outputs by name for these inputs by name.

        alone: an artifact of one model, where `artifact` serves several tenants: what comes back
            are outputs of lanes and of their tenants alone, as `lane_check.outputs_of` has them.
        """

    @abstractmethod
    def compare_models(
        self, artifacts: Sequence[str], profile: Profile, *, company: Company = UNKNOWN
    ) -> list[Measurement | Failure]:
        """Measure whole models end to end, interleaved, on seeded random inputs."""

    @abstractmethod
    def prepare_pytorch(
        self, way: str, module: TorchModule, *, anew: bool, limit_secs: float
    ) -> str | Failure:
        """Make a way to run a PyTorch module ready to be timed; return how, for people.

        Args:
            way: a key of `vocabulary.outcome.PYTORCH`.
            anew: in a process of its own, to which nothing was asked before.
        """

    @abstractmethod
    def compare_with_pytorch(
        self, artifact: str, ways: Sequence[str], profile: Profile
    ) -> list[Measurement | Failure]:
        """Measure an artifact and the ways that are ready interleaved, the artifact first."""

    @abstractmethod
    def load(self, load: Load) -> float | Failure:
        """Make something ready to be repeated, and run it; return the seconds of a repeat.

        It replaces what was loaded before.
        """

    @abstractmethod
    def repeat(self, start_at: float, stop_at: float | None = None) -> None:
        """Repeat what was loaded between two moments of time.monotonic(); do not wait.

        Without `stop_at` it goes on until `stop`. Nothing else is asked of the runner before that.
        """

    @abstractmethod
    def stop(self) -> Repeats | Failure:
        """Wait for `stop_at`, or stop the load where there is none; return how it went."""
