"""Slices of simulated devices for chaos runs: real ones, but for their runners.

A runner is an object that answers the messages of a real one at once, and ends or hangs on cue.
Those of one device fall together where a candidate faults, and then nothing tells whose it was.
"""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from tests.lib.chaos import AT_A_RESULT, Chaos
from tunerd.runner.base import UNKNOWN, Company
from tunerd.runner.client import RunnerClient
from tunerd.runner.host import Blame
from tunerd.slices.base import Plan, ProcessSlice, Usability
from tunerd.slices.mps.gpu import UNNAMED
from tunerd.slices.simulated import SimulatedSlice, number_of, simulated_secs
from tunerd.vocabulary import (
    Build,
    Candidate,
    CapProof,
    Failure,
    Kind,
    Measurement,
    Profile,
    SliceRequest,
    SliceSpec,
    Stage,
    to_json,
)

# Of the list: the candidates whose number these divide.
_FAULTS, _HANGS = 7, 11
_FAILURES = {
    17: ("is out of memory", Failure(Stage.LOAD, Kind.OUT_OF_MEMORY, "48 GiB")),
    19: ("is refused", Failure(Stage.LOAD, Kind.REFUSED, "2,048 threads")),
}
_SIZE = struct.Struct("<Q")


class Hung(Exception):
    """A runner gives no answer, and lives."""


class Ended(Exception):
    """A runner has ended."""


class Connection:
    """A socket to a runner, as far as a slice uses one."""

    def __init__(self, slice_: FaultySlice) -> None:
        self._slice = slice_
        self._asked, self._said = bytearray(), bytearray()
        self._hangs = False

    def settimeout(self, secs: float | None) -> None: ...
    def close(self) -> None: ...

    def sendall(self, data: bytes) -> None:
        self._asked += data
        if len(self._asked) < _SIZE.size:
            return
        size = _SIZE.size + _SIZE.unpack(self._asked[: _SIZE.size])[0]
        header = json.loads(self._asked[_SIZE.size : size])
        if len(self._asked) < size + sum(header["blobs"]):
            return
        self._asked.clear()
        try:
            for body in self._slice.answers(header["body"]):
                answer = json.dumps({"body": body, "blobs": []}).encode()
                self._said += _SIZE.pack(len(answer)) + answer
        except Hung:
            self._hangs = True
        except Ended:
            pass

    def recv_into(self, view: memoryview) -> int:
        if not self._said and self._hangs:
            raise TimeoutError("timed out")
        got = min(len(view), len(self._said))
        view[:got] = self._said[:got]
        del self._said[:got]
        return got


class FaultySlice(ProcessSlice):
    """A slice of a simulated device."""

    kind = "simulated"
    chaos: ClassVar[Chaos]
    spoilt: ClassVar[list[str]] = []  # finalists' measurements that must be repeated
    _devices: ClassVar[defaultdict[str, list[FaultySlice]]] = defaultdict(list)

    def __init__(self, spec: SliceSpec) -> None:
        super().__init__(spec)
        self._runner = FaultyRunner(self)
        self.builds: Sequence[Build] = ()  # that are asked for
        self.is_alone = False  # while they are measured
        self._killed = ""  # the name of what ended the runner from outside
        self._blamed_on = self._fell_with = ""
        self._devices[spec.gpu_uuid or ""].append(self)

    @classmethod
    def usability(cls) -> Usability:
        return SimulatedSlice.usability()

    @classmethod
    def plan(cls, request: SliceRequest) -> Plan:
        return SimulatedSlice.plan(request)

    # --- the runner ----------------------------------------------------------------------------

    def answers(self, asked: Any) -> Iterator[Any]:
        """Yield what the runner answers; raises Hung or Ended where it answers nothing more."""
        if asked["op"] == "prove":
            yield {"facts": {}}
        if asked["op"] != "measure":
            return
        for build in self.builds:
            self._may_fall(build.candidate)
            yield {"starting": ""}
            self._strike(build.candidate)
            if failure := self._failure_of(build.candidate):
                yield {"result": {"failure": to_json(failure)}}
                continue
            secs = simulated_secs(build.candidate)
            samples = range(asked["profile"]["min_samples"])
            yield {"result": {"calls": 1, "run_secs": [secs * (1 + 1e-4 * i) for i in samples]}}

    def _strike(self, candidate: Candidate) -> None:
        may_fail = not candidate.is_default
        if may_fail and not number_of(candidate.candidate_id) % _FAULTS:
            self._fault(candidate)
        if may_fail and not number_of(candidate.candidate_id) % _HANGS:
            self.chaos.note("own", "hangs")
            raise Hung
        fault = self.chaos.draw(AT_A_RESULT)
        if fault and self.chaos.may_lose([candidate.candidate_id]):
            name = self.chaos.inject(fault)
            if fault == "runner killed":
                self._killed = name
            else:
                self._blamed_on = name
            if fault == "daemon lost":
                self._take_others_down(name)
            raise Ended

    def _failure_of(self, candidate: Candidate) -> Failure | None:
        """Return how a candidate fails without harm to anything else, if it does."""
        number = number_of(candidate.candidate_id)
        divisor = next((d for d in _FAILURES if not number % d), None)
        if divisor is None or candidate.is_default:
            return None
        what, failure = _FAILURES[divisor]
        self.chaos.note("own", what)
        return failure

    def _fault(self, candidate: Candidate) -> None:
        """Take all runners of the device down; nothing but being alone tells whose fault it was."""
        self.chaos.note("own", "faults")
        self._take_others_down(self.spec.slice_id)
        if not self.is_alone and self.chaos.may_lose([candidate.candidate_id]):
            self.chaos.note("own", "faults, unnamed")
            self._blamed_on = UNNAMED
        raise Ended

    def _take_others_down(self, culprit: str) -> None:
        for other in self._devices[self.spec.gpu_uuid or ""]:
            if other is not self:
                other._fell_with = culprit

    def _may_fall(self, candidate: Candidate) -> None:
        culprit, self._fell_with = self._fell_with, ""
        if culprit and self.chaos.may_lose([candidate.candidate_id]):
            self.chaos.note("own", "falls with a neighbour")
            self._blamed_on = culprit
            raise Ended

    # --- what members of ProcessSlice say ------------------------------------------------------

    def connect(self) -> Any:
        return Connection(self)

    def fence(self, reason: str, *, is_alone: bool) -> Blame:
        blame, self._blamed_on, self._killed = Blame(self._blamed_on), "", ""
        return blame

    def ended_from_outside(self) -> str:
        return self._killed and f"SIGKILL ({self._killed})"

    def check(self, facts: dict[str, Any]) -> CapProof:
        return SimulatedSlice(self.spec).prove()


class FaultyRunner(RunnerClient):
    """The client of an object that plays a process."""

    def __init__(self, slice_: FaultySlice) -> None:
        super().__init__(slice_)
        self._slice = slice_

    def compare(
        self, builds: Sequence[Build], profile: Profile, *, company: Company = UNKNOWN
    ) -> list[Measurement | Failure]:
        chaos, spoilt = self._slice.chaos, self._slice.spoilt
        while spoilt:
            chaos.see(spoilt.pop())
        results = self.measure(builds, profile, company=company)
        spoilt += [r.message for r in results if isinstance(r, Failure) and not r.kind.ends_trial]
        return results

    def agree(
        self, reference: Build, build: Build, *, company: Company = UNKNOWN
    ) -> Failure | None:
        return None

    def _measured(
        self,
        builds: Sequence[Build],
        profile: Profile,
        bests: Sequence[float | None],
        company: Company,
    ) -> Iterator[Measurement | Failure]:
        self._slice.builds, self._slice.is_alone = builds, company.is_alone
        return super()._measured(builds, profile, bests, company)
