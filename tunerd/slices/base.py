"""The contract of a slice: a share of a device in which builds are measured.

A family member says whether it is usable here, plans its slices, starts one, proves what it
obtained, measures in it, and stops it. Members: mps, cpu, whole, simulated.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from tunerd.runner.work import Ran, Work
from tunerd.vocabulary import (
    Arrays,
    Build,
    CapProof,
    Conditions,
    Failure,
    Measurement,
    Profile,
    SliceRequest,
    SliceSpec,
    TargetSpec,
)


@dataclass(frozen=True)
class Usability:
    """Whether slices of a kind work on this host; `why` says what is missing and how to get it."""

    ok: bool
    why: str


@dataclass(frozen=True)
class Plan:
    """The slices of one host, and which bound limited their number."""

    slices: tuple[SliceSpec, ...]
    target: TargetSpec  # what to generate code for, of this host's device
    bound: str  # "2 slices of 40% fit into each GPU"
    problem: str = ""  # why the plan cannot be had; then `slices` is empty


class Slice(ABC):
    """One slice, in the process that talks to its runner. close() is idempotent."""

    kind: ClassVar[str]

    def __init__(self, spec: SliceSpec) -> None:
        self.spec = spec

    @classmethod
    @abstractmethod
    def usability(cls) -> Usability:
        """Say whether this kind works on this host. Creates no CUDA context."""

    @classmethod
    @abstractmethod
    def plan(cls, request: SliceRequest) -> Plan:
        """Cut this host's devices into the slices that are asked for."""

    @classmethod
    @contextlib.contextmanager
    def early(cls, specs: Sequence[SliceSpec], run: str) -> Iterator[None]:
        """Begin, without waiting, what slices that others will start on this host begin with.

        Args:
            run: the one that they will be part of.
        """
        yield

    @abstractmethod
    def start(self) -> CapProof:
        """Start the runner and prove the cap inside it; HostError where it is not obtained."""

    # Whoever asks for work may say that no other slice of the device works meanwhile: a fault that
    # all of them see is then this one's.
    is_alone = False

    @abstractmethod
    def measure(
        self, builds: Sequence[Build], profile: Profile, best_secs: Sequence[float | None] = ()
    ) -> list[Measurement | Failure]:
        """Measure each build on its own, in order. A fault is the Failure of the build it hit.

        What keeps a slice from measuring is raised, unless some of the builds have results: then
        the rest are COLLATERAL, and the next call raises.

        Args:
            best_secs: the best time known of each build's task, None where none is: what is far
                slower may be ended early. Of no task where nothing is given.
        """

    @abstractmethod
    def compare(self, builds: Sequence[Build], profile: Profile) -> list[Measurement | Failure]:
        """Measure the builds interleaved: sample i of each is taken before sample i + 1 of any."""

    @abstractmethod
    def agree(self, reference: Build, build: Build) -> Failure | None:
        """Run two builds of a task on equal random arguments; None where their results agree."""

    @abstractmethod
    def run_model(self, artifact: str, inputs: Arrays) -> Arrays:
        """Load an artifact folder and return its outputs by name for these inputs by name.

        artifact: absolute, as every path that a slice gets: it works in another folder.
        """

    @abstractmethod
    def compare_models(
        self, artifacts: Sequence[str], profile: Profile
    ) -> list[Measurement | Failure]:
        """Measure whole models end to end, interleaved, on seeded random inputs."""

    @abstractmethod
    def ready(self, work: Work) -> float | Failure:
        """Load work and run it; return the seconds of a repeat. It replaces earlier work."""

    @abstractmethod
    def begin(self, start_at: float, stop_at: float | None = None) -> None:
        """Repeat the work that is ready, between two moments of time.monotonic(); do not wait.

        Without `stop_at` it goes on until `end`. Nothing else is asked of the slice before `end`.
        """

    @abstractmethod
    def end(self) -> Ran | Failure:
        """Wait for `stop_at`, or stop the work where there is none; return how it went."""

    def conditions(self, *, idle: bool = False) -> Conditions:
        """Read the state of the device now; of one that tells nothing, nothing.

        Args:
            idle: nothing of ours ran there for a second, so that its utilisation is others'.
        """
        return Conditions()

    @abstractmethod
    def close(self) -> None:
        """Stop the runner without killing a GPU client that has work running."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
