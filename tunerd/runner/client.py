"""The slice's end of a runner process: requests, time limits, and whose fault a loss was.

A process that dies or hangs takes one build with it: that build failed, or is collateral where a
neighbour's fault ended the process; the rest is measured by the next one.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from tunerd.errors import DiskError, HostError, InfrastructureError, TunerdError
from tunerd.runner.base import ALONE, UNKNOWN, Company, Runner, TorchModule
from tunerd.runner.host import START_SECS, Blame, RunnerHost, is_fatal, is_mps_error
from tunerd.runner.load import Load, Repeats
from tunerd.system import processes, wire
from tunerd.system.codec import arrays_from, arrays_to, value_from
from tunerd.vocabulary import (
    Arrays,
    Build,
    CapProof,
    Conditions,
    Failure,
    Kind,
    Measurement,
    Profile,
    Stage,
    to_json,
)

log = logging.getLogger(__name__)

RECOVERY_SECS = 20.0  # for a device to take clients again after a fault
_RETRY_SECS = 0.5
BUILD_SECS = 60.0  # to load and measure one build; of several in turns, to load or sample one
# Where a task's best is known: to load and measure one of its builds, and so many times the best.
KNOWN_SECS, KNOWN_TIMES = 20.0, 10_000.0
MODEL_SECS = 600.0  # to load a whole model and run it some times, or to sample it
SLOWED_TIMES = 10.0  # the seconds of a repeat alone, which it may take beside others


class ModelRunError(InfrastructureError):
    """A whole model that was run once, and failed or was lost."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"the model did not run: {failure.message}")
        self.failure = failure


class RunnerClient(Runner):
    """Measures in a process that its host starts, again where the last one was lost."""

    def __init__(self, host: RunnerHost) -> None:
        self._host = host
        self._connection: socket.socket | None = None
        self._proof: CapProof | None = None
        self._repeat_secs = 0.0  # of what is loaded
        self._stop_at: float | None = None  # of what is repeated
        self._unheard: Failure | None = None  # why it is not

    def prove(self, *, is_alone: bool = False) -> CapProof:
        """Return what the process obtained, proved in it; start one where none is connected.

        Raises HostError where it is not the share, InfrastructureError where no process starts.
        """
        if self._connection is None:
            self._proof = self._started(is_alone)
        assert self._proof is not None
        return self._proof

    def close(self) -> None:
        """Have the process end by itself. Idempotent; the host ends one that does not."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(OSError):
                wire.send(connection, {"op": "close"})
            connection.close()

    # --- requests ------------------------------------------------------------------------------

    def measure(
        self,
        builds: Sequence[Build],
        profile: Profile,
        *,
        best_secs: Sequence[float | None] = (),
        company: Company = UNKNOWN,
    ) -> list[Measurement | Failure]:
        bests = tuple(best_secs) or (None,) * len(builds)
        results: list[Measurement | Failure] = []
        while (done := len(results)) < len(builds):
            try:
                for result in self._measured(builds[done:], profile, bests[done:], company):
                    is_told = self._connection is not None  # and not that the process was lost
                    if is_told and isinstance(result, Failure):
                        result = self._checked(result, company)
                    results.append(result)
                    if self._connection is None:
                        break
            except TunerdError as error:  # there is no further process, or a disk is full
                if not results:
                    raise
                self._disconnect()
                left = Failure(Stage.RUN, Kind.COLLATERAL, f"it was not measured: {error}")
                results += [left] * (len(builds) - len(results))
        return results

    def _measured(
        self,
        builds: Sequence[Build],
        profile: Profile,
        bests: Sequence[float | None],
        company: Company,
    ) -> Iterator[Measurement | Failure]:
        """Yield results in order; ends early, after a failure, where the process was lost."""
        is_under_way = False
        body = {
            "op": "measure",
            "builds": [to_json(b) for b in builds],
            "profile": to_json(profile),
            "best_secs": bests,
        }
        conditions = functools.partial(self._conditions, company)
        try:
            self._ask(body, [b.library for b in builds], timeout_secs=BUILD_SECS, company=company)
            assert self._connection is not None
            for best_secs in bests:
                self._connection.settimeout(_limit_secs(best_secs))
                self._receive()  # which build starts
                is_under_way = True
                yield self._result(self._receive()["result"], profile, conditions)
                is_under_way = False
        except (OSError, ValueError) as error:
            failure = self._lost(error, company)
            if failure.kind.ends_trial and not is_under_way:
                message = f"{failure.message}, before the build was loaded"
                failure = Failure(Stage.RUN, Kind.COLLATERAL, message)
            yield failure

    def compare(
        self, builds: Sequence[Build], profile: Profile, *, company: Company = UNKNOWN
    ) -> list[Measurement | Failure]:
        body = {"op": "compare", "builds": [to_json(b) for b in builds]}
        blobs = [b.library for b in builds]
        return self._compared(body, blobs, len(builds), profile, BUILD_SECS, company)

    def compare_models(
        self, artifacts: Sequence[str], profile: Profile, *, company: Company = UNKNOWN
    ) -> list[Measurement | Failure]:
        body = {"op": "compare_models", "artifacts": list(artifacts)}
        return self._compared(body, [], len(artifacts), profile, MODEL_SECS, company)

    def prepare_pytorch(
        self, way: str, module: TorchModule, *, anew: bool, limit_secs: float
    ) -> str | Failure:
        if anew:
            self.close()
        inputs, blobs = arrays_to(module.inputs)
        outputs, more = arrays_to(module.outputs)
        body = {"op": "prepare_pytorch", "way": way, "inputs": inputs, "outputs": outputs}
        body |= {"made_by": module.made_by, "precision": module.precision}
        try:
            self._ask(body, [*blobs, *more], timeout_secs=limit_secs, company=ALONE)
            answer = self._receive()
        except (OSError, ValueError) as error:
            return self._lost(error, ALONE)
        if "failure" in answer:
            return self._checked(value_from(Failure, answer["failure"]), ALONE)
        return str(answer["said"])

    def compare_with_pytorch(
        self, artifact: str, ways: Sequence[str], profile: Profile
    ) -> list[Measurement | Failure]:
        body = {"op": "compare_with_pytorch", "artifact": artifact, "ways": list(ways)}
        return self._compared(body, [], 1 + len(ways), profile, MODEL_SECS, ALONE)

    def _compared(
        self,
        body: dict[str, Any],
        blobs: Sequence[wire.Blob],
        count: int,
        profile: Profile,
        timeout_secs: float,
        company: Company,
    ) -> list[Measurement | Failure]:
        body = {**body, "profile": to_json(profile)}
        try:
            self._ask(body, blobs, timeout_secs=timeout_secs, company=company)
            answer = self._receive()
        except (OSError, ValueError) as error:
            return [self._lost(error, company)] * count
        asked = functools.cache(lambda: self._conditions(company))  # one moment is that of them all
        results = [self._result(r, profile, asked) for r in answer["results"]]
        fatal = [r for r in results if isinstance(r, Failure) and is_fatal(r)]
        if not fatal:
            return results
        blamed = self._blamed(fatal[0], company)  # the others met the context that it left
        return [blamed if r in fatal else r for r in results]

    def agree(
        self, reference: Build, build: Build, *, company: Company = UNKNOWN
    ) -> Failure | None:
        body = {"op": "agree", "builds": [to_json(reference), to_json(build)]}
        blobs = [reference.library, build.library]
        try:
            self._ask(body, blobs, timeout_secs=2 * BUILD_SECS, company=company)
            answer = self._receive()["failure"]
        except (OSError, ValueError) as error:
            return self._lost(error, company)
        return None if answer is None else self._checked(value_from(Failure, answer), company)

    def run_model(
        self, artifact: str, inputs: Arrays, *, alone: str = "", company: Company = UNKNOWN
    ) -> Arrays:
        specs, blobs = arrays_to(inputs)
        body = {"op": "run_model", "artifact": artifact, "inputs": specs, "alone": alone}
        try:
            self._ask(body, blobs, timeout_secs=MODEL_SECS, company=company)
            answer, out = self._answer()
        except (OSError, ValueError) as error:
            raise ModelRunError(self._lost(error, company)) from error
        if "failure" in answer:
            raise ModelRunError(self._checked(value_from(Failure, answer["failure"]), company))
        return arrays_from(answer["outputs"], out)

    def load(self, load: Load) -> float | Failure:
        build = load.build
        body = {"op": "load", "artifact": load.artifact, "build": to_json(build)}
        try:
            blobs = [] if build is None else [build.library]
            self._ask(body, blobs, timeout_secs=MODEL_SECS)
            answer = self._receive()
        except (OSError, ValueError) as error:
            return self._lost(error)
        if "failure" in answer:
            return self._checked(value_from(Failure, answer["failure"]))
        self._repeat_secs = float(answer["once_secs"])
        return self._repeat_secs

    def repeat(self, start_at: float, stop_at: float | None = None) -> None:
        self._stop_at, self._unheard = stop_at, None
        body = {"op": "repeat", "start_at": start_at, "stop_at": stop_at}
        try:
            self._ask(body, [], timeout_secs=BUILD_SECS)
            self._receive()
        except (OSError, ValueError) as error:
            self._unheard = self._lost(error)

    def stop(self) -> Repeats | Failure:
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
            return self._checked(value_from(Failure, answer["failure"]))
        starts, ends = (struct.unpack(f"<{len(b) // 8}d", b) for b in blobs)
        return Repeats(self._host.slice_id, starts, ends, int(answer["calls"]))

    def _conditions(self, company: Company) -> Conditions:
        return company.seen_in(self._host.conditions())

    def _result(
        self, entry: dict[str, Any], profile: Profile, conditions: Callable[[], Conditions]
    ) -> Measurement | Failure:
        if "failure" in entry:
            return value_from(Failure, entry["failure"])
        assert self._proof is not None
        return Measurement(
            run_secs=tuple(entry["run_secs"]),
            calls_per_sample=entry["calls"],
            profile=profile.name,
            slice_id=self._host.slice_id,
            sm_count=self._proof.sm_count,
            conditions=conditions(),
        )

    # --- the connection ------------------------------------------------------------------------

    def _started(self, is_alone: bool) -> CapProof:
        """Start a process, again while a device recovers, and prove its share."""
        since = time.monotonic()
        is_revived = False
        while "error" in (answer := self._launched(is_alone)):
            problem = answer["error"]
            self._disconnect()  # or the next request would take what it answers for a fault
            tried_secs = time.monotonic() - since
            # A share that was obtained before is obtained again, once the device has recovered.
            passes = self._proof is not None or is_mps_error(problem)
            if not passes or tried_secs > RECOVERY_SECS:
                why = "; its MPS daemon takes no client of yours" if is_mps_error(problem) else ""
                raise HostError(f"the slice {self._host.slice_id} cannot run: {problem}{why}")
            log.warning("%s is refused: %s", self._host.slice_id, problem)
            if tried_secs > RECOVERY_SECS / 2 and not is_revived:
                self._host.revive(problem)
                is_revived = True
            time.sleep(_RETRY_SECS)
        try:
            return self._host.check(answer["facts"])
        except Exception:  # without a proof it measures nothing
            self._disconnect()
            raise

    def _launched(self, is_alone: bool) -> Any:
        """Launch a process, and return what it says of its device."""
        self._connection = self._host.connect()
        self._connection.settimeout(START_SECS)
        try:
            wire.send(self._connection, {"op": "prove"})
            answer, _ = wire.receive(self._connection)
        except (OSError, ValueError) as error:
            self._lose(f"the runner ended at its start: {error}", is_alone=is_alone)
            raise InfrastructureError(
                f"the runner of {self._host.slice_id} ended at its start: {error}"
            ) from error
        return answer

    def _ask(
        self,
        body: Any,
        blobs: Sequence[wire.Blob],
        *,
        timeout_secs: float,
        company: Company = UNKNOWN,
    ) -> None:
        if self._connection is None:
            self.prove(is_alone=company.is_alone)
        assert self._connection is not None
        self._connection.settimeout(timeout_secs)
        wire.send(self._connection, body, blobs)

    def _receive(self) -> Any:
        body, _ = self._answer()
        return body

    def _answer(self) -> tuple[Any, list[bytearray]]:
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

    def _disconnect(self) -> None:
        """End the connection; a runner that works ends by itself then."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    # --- losses --------------------------------------------------------------------------------

    def _checked(self, failure: Failure, company: Company = UNKNOWN) -> Failure:
        """Blame a failure, as the runner told it, after which that runner is of no use."""
        return self._blamed(failure, company) if is_fatal(failure) else failure

    def _lost(self, error: Exception, company: Company = UNKNOWN) -> Failure:
        if isinstance(error, TimeoutError):
            message = f"the runner gave no answer in time: {error}"
            failure = Failure(Stage.RUN, Kind.TIMEOUT, message)
            if self._proof is not None and processes.is_stopped(self._proof.runner_pid):
                failure = Failure(Stage.RUN, Kind.COLLATERAL, f"{message}; it is stopped")
        elif signal_name := self._host.ended_from_outside():
            failure = Failure(Stage.RUN, Kind.COLLATERAL, f"the runner got {signal_name}")
        else:
            failure = Failure(Stage.RUN, Kind.CRASH, f"the runner ended: {error}")
        return self._blamed(failure, company)

    def _blamed(self, failure: Failure, company: Company) -> Failure:
        """End the runner after a failure, and say whether the fault was a neighbour's."""
        blame = self._lose(failure.message, is_alone=company.is_alone)
        if blame.culprit and blame.culprit != self._host.slice_id:
            message = f"a fault in {blame.culprit} ended this runner"
        elif is_mps_error(failure.message):
            message = f"MPS ended its client: {failure.message}"
        elif blame.fault and blame.fault not in failure.message:
            return replace(failure, message=f"{failure.message}; {blame.fault}")
        else:
            return failure
        return Failure(failure.stage, Kind.COLLATERAL, message)

    def _lose(self, reason: str, *, is_alone: bool = False) -> Blame:
        log.warning("%s: %s", self._host.slice_id, reason)
        self._disconnect()
        return self._host.fence(reason, is_alone=is_alone)


def _limit_secs(best_secs: float | None) -> float:
    """Return how long a build may take from its start, by the best of its task."""
    if best_secs is None:
        return BUILD_SECS
    return min(BUILD_SECS, max(KNOWN_SECS, KNOWN_TIMES * best_secs))
