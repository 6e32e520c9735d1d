"""Slices whose work is done by a runner process at the other end of a socket.

A runner that dies or hangs takes one build with it: that build failed, or is collateral where a
neighbour's fault ended the runner; the rest is measured by the next runner.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import signal
import socket
import struct
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from tunerd.errors import DiskError, HostError, InfrastructureError, TunerdError
from tunerd.runner.messages import build_to, failure_from
from tunerd.runner.sampling import DEAD
from tunerd.runner.work import Ran, Work
from tunerd.slices.base import Slice
from tunerd.system import processes, wire
from tunerd.system.codec import arrays_from, arrays_to
from tunerd.vocabulary import (
    Arrays,
    Build,
    CapProof,
    Conditions,
    Failure,
    Kind,
    Measurement,
    Profile,
    SliceSpec,
    Stage,
    to_json,
)

log = logging.getLogger(__name__)

START_SECS = 120.0  # importing TVM on a busy machine, making a context
RECOVERY_SECS = 20.0  # for a device to take clients again after a fault
_RETRY_SECS = 0.5
BUILD_SECS = 60.0  # to load and measure one build; of several in turns, to load or sample one
# Where a task's best is known: to load and measure one of its builds, and so many times the best.
KNOWN_SECS, KNOWN_TIMES = 20.0, 10_000.0
MODEL_SECS = 600.0  # to load a whole model and run it some times, or to sample it
SLOWED_TIMES = 10.0  # the seconds of a repeat alone, which it may take beside others
EXIT_SECS = 5.0  # for a runner whose connection has ended to be gone
# An operator's, or the operating system's where memory is short: of whoever has most of it. What a
# kernel does to its own process is another signal: SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT.
_FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGHUP}
OF_MPS = "CUDA_ERROR_MPS_"  # of a daemon that ended, or a client that was terminated: no kernel's


class RemoteSlice(Slice):
    """Measures in a runner. Members say how one is launched, proved and ended."""

    culprit = ""  # the slice that the last fence was blamed on; "" is this one
    fault = ""  # what it did, as far as the guard knows

    def __init__(self, spec: SliceSpec) -> None:
        super().__init__(spec)
        self._connection: socket.socket | None = None
        self._proof: CapProof | None = None
        self._repeat_secs = 0.0  # of the work that is ready
        self._stop_at: float | None = None  # of the work that began last
        self._unheard: Failure | None = None  # why it did not begin

    @abstractmethod
    def _launch(self) -> socket.socket:
        """Start the runner and return the connected socket."""

    @abstractmethod
    def _fence(self, reason: str) -> None:
        """Make sure that nothing of the runner runs any more. Safe to call twice."""

    @abstractmethod
    def _prove(self, facts: dict[str, Any]) -> CapProof:
        """Check what the runner obtained; raises HostError where it is not the share."""

    def _ended_from_outside(self) -> str:
        """Name the signal that ended a lost runner, if no kernel can have been its cause."""
        return ""

    def _revive(self, reason: str) -> None:
        """Do what can be done, in most members nothing, for a device that takes no runner."""

    def start(self) -> CapProof:
        since = time.monotonic()
        is_revived = False
        while "error" in (answer := self._launched()):
            problem = answer["error"]
            self._disconnect()  # or the next request would take what it answers for a fault
            tried_secs = time.monotonic() - since
            # A share that was obtained before is obtained again, once the device has recovered.
            passes = self._proof is not None or OF_MPS in problem.upper()
            if not passes or tried_secs > RECOVERY_SECS:
                why = (
                    "; its MPS daemon takes no client of yours" if OF_MPS in problem.upper() else ""
                )
                raise HostError(f"the slice {self.spec.slice_id} cannot run: {problem}{why}")
            log.warning("%s is refused: %s", self.spec.slice_id, problem)
            if tried_secs > RECOVERY_SECS / 2 and not is_revived:
                self._revive(problem)
                is_revived = True
            time.sleep(_RETRY_SECS)
        self._proof = self._prove(answer["facts"])
        return self._proof

    def _launched(self) -> Any:
        """Launch a runner, and return what it says of its device."""
        self._connection = self._launch()
        self._connection.settimeout(START_SECS)
        try:
            wire.send(self._connection, {"op": "prove"})
            answer, _ = wire.receive(self._connection)
        except (OSError, ValueError) as error:
            self._lose(f"the runner ended at its start: {error}")
            raise InfrastructureError(
                f"the runner of {self.spec.slice_id} ended at its start: {error}"
            ) from error
        return answer

    def measure(
        self, builds: Sequence[Build], profile: Profile, best_secs: Sequence[float | None] = ()
    ) -> list[Measurement | Failure]:
        bests = tuple(best_secs) or (None,) * len(builds)
        results: list[Measurement | Failure] = []
        while (done := len(results)) < len(builds):
            try:
                for result in self._measured(builds[done:], profile, bests[done:]):
                    is_told = self._connection is not None  # and not that the runner was lost
                    if is_told and isinstance(result, Failure):
                        result = self._checked(result)
                    results.append(result)
                    if self._connection is None:
                        break
            except TunerdError as error:  # there is no further runner, or a disk is full
                if not results:
                    raise
                self._disconnect()
                left = Failure(Stage.RUN, Kind.COLLATERAL, f"it was not measured: {error}")
                results += [left] * (len(builds) - len(results))
        return results

    def _measured(
        self, builds: Sequence[Build], profile: Profile, bests: Sequence[float | None]
    ) -> Iterator[Measurement | Failure]:
        """Yield results in order; ends early, after a failure, where the runner was lost."""
        is_under_way = False
        try:
            self._ask(
                {
                    "op": "measure",
                    "builds": [build_to(b) for b in builds],
                    "profile": to_json(profile),
                    "best_secs": bests,
                },
                [b.library for b in builds],
                timeout_secs=BUILD_SECS,
            )
            assert self._connection is not None
            for best_secs in bests:
                self._connection.settimeout(_limit_secs(best_secs))
                self._receive()  # which build starts
                is_under_way = True
                yield self._result(self._receive()["result"], profile, self.conditions)
                is_under_way = False
        except (OSError, ValueError) as error:
            failure = self._lost(error)
            if failure.kind.ends_trial and not is_under_way:
                message = f"{failure.message}, before the build was loaded"
                failure = Failure(Stage.RUN, Kind.COLLATERAL, message)
            yield failure

    def compare(self, builds: Sequence[Build], profile: Profile) -> list[Measurement | Failure]:
        body = {
            "op": "compare",
            "builds": [build_to(b) for b in builds],
            "profile": to_json(profile),
        }
        return self._compared(body, [b.library for b in builds], len(builds), profile, BUILD_SECS)

    def agree(self, reference: Build, build: Build) -> Failure | None:
        body = {"op": "agree", "builds": [build_to(reference), build_to(build)]}
        try:
            self._ask(body, [reference.library, build.library], timeout_secs=2 * BUILD_SECS)
            answer = self._receive()["failure"]
        except (OSError, ValueError) as error:
            return self._lost(error)
        return None if answer is None else self._checked(failure_from(answer))

    def compare_models(
        self, artifacts: Sequence[str], profile: Profile
    ) -> list[Measurement | Failure]:
        body = {
            "op": "compare_models",
            "artifacts": list(artifacts),
            "profile": to_json(profile),
        }
        return self._compared(body, [], len(artifacts), profile, MODEL_SECS)

    def run_model(self, artifact: str, inputs: Arrays) -> Arrays:
        specs, blobs = arrays_to(inputs)
        try:
            self._ask(
                {"op": "run_model", "artifact": artifact, "inputs": specs},
                blobs,
                timeout_secs=MODEL_SECS,
            )
            answer, out = self._answer()
        except (OSError, ValueError) as error:
            failure = self._lost(error)
            raise InfrastructureError(f"the model did not run: {failure.message}") from error
        if "failure" in answer:
            failure = self._checked(failure_from(answer["failure"]))
            raise InfrastructureError(f"the model did not run: {failure.message}")
        return arrays_from(answer["outputs"], out)

    def ready(self, work: Work) -> float | Failure:
        build = work.build
        body = {"op": "ready", "artifact": work.artifact, "build": build and build_to(build)}
        try:
            blobs = [] if build is None else [build.library]
            self._ask(body, blobs, timeout_secs=MODEL_SECS)
            answer = self._receive()
        except (OSError, ValueError) as error:
            return self._lost(error)
        if "failure" in answer:
            return self._checked(failure_from(answer["failure"]))
        self._repeat_secs = float(answer["once_secs"])
        return self._repeat_secs

    def begin(self, start_at: float, stop_at: float | None = None) -> None:
        self._stop_at, self._unheard = stop_at, None
        try:
            self._ask(
                {"op": "begin", "start_at": start_at, "stop_at": stop_at},
                [],
                timeout_secs=BUILD_SECS,
            )
            self._receive()
        except (OSError, ValueError) as error:
            self._unheard = self._lost(error)

    def end(self) -> Ran | Failure:
        if self._unheard is not None:
            return self._unheard
        left_secs = 0.0 if self._stop_at is None else max(0.0, self._stop_at - time.monotonic())
        try:
            if self._connection is None:
                raise wire.Closed("the slice was closed")
            repeat_secs = max(BUILD_SECS, SLOWED_TIMES * self._repeat_secs)
            self._connection.settimeout(left_secs + repeat_secs)
            if self._stop_at is None:
                wire.send(self._connection, {"op": "stop"})
            answer, blobs = self._answer()
        except (OSError, ValueError) as error:
            return self._lost(error)
        if "failure" in answer:
            return self._checked(failure_from(answer["failure"]))
        starts, ends = (struct.unpack(f"<{len(b) // 8}d", b) for b in blobs)
        return Ran(self.spec.slice_id, starts, ends, int(answer["calls"]))

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(OSError):
                wire.send(connection, {"op": "close"})
            connection.close()

    # --- the connection ------------------------------------------------------------------------

    def _ask(self, body: Any, blobs: Sequence[bytes], *, timeout_secs: float) -> None:
        if self._connection is None:
            self.start()
        assert self._connection is not None
        self._connection.settimeout(timeout_secs)
        wire.send(self._connection, body, blobs)

    def _receive(self) -> Any:
        body, _ = self._answer()
        return body

    def _answer(self) -> tuple[Any, list[bytes]]:
        """Return the next message that is an answer; signs of life begin the time limit anew."""
        assert self._connection is not None
        body, blobs = wire.receive(self._connection)
        while "goes_on" in body:
            body, blobs = wire.receive(self._connection)
        if "disk" in body:
            raise DiskError(body["disk"])
        if "error" in body:
            raise ValueError(body["error"])
        return body, blobs

    def _compared(
        self,
        body: Any,
        blobs: Sequence[bytes],
        count: int,
        profile: Profile,
        timeout_secs: float,
    ) -> list[Measurement | Failure]:
        try:
            self._ask(body, blobs, timeout_secs=timeout_secs)
            answer = self._receive()
        except (OSError, ValueError) as error:
            return [self._lost(error)] * count
        asked = functools.cache(self.conditions)  # one moment is that of them all
        results = [self._result(r, profile, asked) for r in answer["results"]]
        fatal = [r for r in results if isinstance(r, Failure) and _is_fatal(r)]
        if not fatal:
            return results
        blamed = self._blamed(fatal[0])  # the others met the context that it left
        return [blamed if r in fatal else r for r in results]

    def _result(
        self, entry: dict[str, Any], profile: Profile, conditions: Callable[[], Conditions]
    ) -> Measurement | Failure:
        if "failure" in entry:
            return failure_from(entry["failure"])
        assert self._proof is not None
        return Measurement(
            run_secs=tuple(entry["run_secs"]),
            calls_per_sample=entry["calls"],
            profile=profile.name,
            slice_id=self.spec.slice_id,
            sm_count=self._proof.sm_count,
            conditions=conditions(),
        )

    def _checked(self, failure: Failure) -> Failure:
        """Blame a failure, as the runner told it, after which that runner is of no use."""
        return self._blamed(failure) if _is_fatal(failure) else failure

    def _lost(self, error: Exception) -> Failure:
        if isinstance(error, TimeoutError):
            message = f"the runner gave no answer in time: {error}"
            failure = Failure(Stage.RUN, Kind.TIMEOUT, message)
            if self._proof is not None and processes.is_stopped(self._proof.runner_pid):
                failure = Failure(Stage.RUN, Kind.COLLATERAL, f"{message}; it is stopped")
        elif signal_name := self._ended_from_outside():
            failure = Failure(Stage.RUN, Kind.COLLATERAL, f"the runner got {signal_name}")
        else:
            failure = Failure(Stage.RUN, Kind.CRASH, f"the runner ended: {error}")
        return self._blamed(failure)

    def _blamed(self, failure: Failure) -> Failure:
        """End the runner after a failure, and say whether the fault was a neighbour's."""
        self._lose(failure.message)
        if self.culprit and self.culprit != self.spec.slice_id:
            message = f"a fault in {self.culprit} ended this runner"
        elif OF_MPS in failure.message.upper():
            message = f"MPS ended its client: {failure.message}"
        elif self.fault and self.fault not in failure.message:
            return replace(failure, message=f"{failure.message}; {self.fault}")
        else:
            return failure
        return Failure(failure.stage, Kind.COLLATERAL, message)

    def _lose(self, reason: str) -> None:
        log.warning("%s: %s", self.spec.slice_id, reason)
        self._disconnect()
        self.culprit = self.fault = ""
        self._fence(reason)

    def _disconnect(self) -> None:
        """End the connection; a runner that works ends by itself then."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _limit_secs(best_secs: float | None) -> float:
    """Return how long a build may take from its start, by the best of its task."""
    if best_secs is None:
        return BUILD_SECS
    return min(BUILD_SECS, max(KNOWN_SECS, KNOWN_TIMES * best_secs))


def _is_fatal(failure: Failure) -> bool:
    """Say whether a failure, as the runner told it, has left it without a context or a daemon."""
    return failure.kind is Kind.CRASH or OF_MPS in failure.message.upper()


def is_sticky(message: str) -> bool:
    """Say whether an error has left its CUDA context dead, and under MPS those beside it."""
    return DEAD in message or OF_MPS in message.upper()


def outside_signal(exit_status: int | None) -> str:
    """Name the signal that ended a runner if no kernel can have sent it, or return ""."""
    number = -(exit_status or 0)
    return signal.Signals(number).name if number in _FROM_OUTSIDE else ""
