"""What starts the process of a runner, fences it, and tells how and by whose fault it ended."""

from __future__ import annotations

import signal
import socket
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from tunerd.runner.sampling import DEAD
from tunerd.vocabulary import CapProof, Conditions, Failure, Kind

RUNNER_COMMAND = (sys.executable, "-m", "tunerd.runner.process")
START_SECS = 120.0  # importing TVM on a busy machine, making a context
EXIT_SECS = 5.0  # for a runner whose connection has ended to be gone
OF_MPS = "CUDA_ERROR_MPS_"  # of a daemon that ended, or a client that was terminated: no kernel's
# An operator's, or the operating system's where memory is short: of whoever has most of it. What a
# kernel does to its own process is another signal: SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT.
_FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGHUP}


@dataclass(frozen=True)
class Blame:
    """Who a fence was blamed on, as far as anybody knows."""

    culprit: str = ""  # a slice; "" is the one that asked for the fence
    fault: str = ""  # what it did


class RunnerHost(ABC):
    """Holds the process of one slice's runner for a `RunnerClient`."""

    slice_id: str

    @abstractmethod
    def connect(self) -> socket.socket:
        """Start a process and return the connected socket."""

    @abstractmethod
    def check(self, facts: dict[str, Any]) -> CapProof:
        """Check what the process obtained; raises HostError where it is not the share."""

    @abstractmethod
    def fence(self, reason: str, *, is_alone: bool) -> Blame:
        """Make sure that nothing of the process runs any more. Safe to call twice.

        Args:
            is_alone: whether no other slice of the device had work.
        """

    def ended_from_outside(self) -> str:
        """Name the signal that ended a lost process, if no kernel can have been its cause."""
        return ""

    def revive(self, reason: str) -> None:  # noqa: B027
        """Do what can be done, in most members nothing, for a device that takes no process."""

    def conditions(self) -> Conditions:
        """Read the state of the device now; of one that tells nothing, nothing."""
        return Conditions()


def is_mps_error(message: str) -> bool:
    """Say whether an error is one of MPS, which no kernel causes."""
    return OF_MPS in message.upper()


def is_fatal(failure: Failure) -> bool:
    """Say whether a failure, as the runner told it, has left it without a context or a daemon."""
    return failure.kind is Kind.CRASH or is_mps_error(failure.message)


def is_sticky(message: str) -> bool:
    """Say whether an error has left its CUDA context dead, and under MPS those beside it."""
    return DEAD in message or is_mps_error(message)


def outside_signal(exit_status: int | None) -> str:
    """Name the signal that ended a runner if no kernel can have sent it, or return ""."""
    number = -(exit_status or 0)
    return signal.Signals(number).name if number in _FROM_OUTSIDE else ""
