"""The contract of a slice: a share of a device in which a runner works.

A family member says whether it is usable here, plans its slices, launches the runner of one, proves
what it obtained, and stops it. Members: mps, cpu, whole, simulated.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from tunerd.runner.base import Runner
from tunerd.runner.client import RunnerClient
from tunerd.runner.host import RunnerHost
from tunerd.vocabulary import CapProof, Conditions, SliceRequest, SliceSpec, TargetSpec


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
    note: str = ""  # what it may cost who else uses the devices


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
    def launch(self) -> Runner:
        """Start the runner, unless it runs; prove the cap inside it, and return it.

        Raises HostError where the share is not obtained: nothing is measured without a proof.
        """

    @abstractmethod
    def prove(self) -> CapProof:
        """Return what the runner obtained, read inside it; start one where none runs."""

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


class ProcessSlice(Slice, RunnerHost):
    """A slice whose runner is a process; members are its host."""

    def __init__(self, spec: SliceSpec) -> None:
        super().__init__(spec)
        self.slice_id = spec.slice_id
        self._runner = RunnerClient(self)

    def launch(self) -> RunnerClient:
        self._runner.prove()
        return self._runner

    def prove(self) -> CapProof:
        return self._runner.prove()

    def conditions(self, *, idle: bool = False) -> Conditions:
        return Conditions()

    def close(self) -> None:
        self._runner.close()
