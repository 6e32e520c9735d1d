"""A member in a process of its own: where its requests lie, and what the process was asked for."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from tunerd.artifacts.segments import Cut
from tunerd.colocation import artifacts
from tunerd.colocation.places.base import PROCESS_DEPTH, Told, slots_ahead
from tunerd.colocation.places.lent import Lent
from tunerd.colocation.plan import Member
from tunerd.colocation.work import Lane
from tunerd.runner.seat_client import Cutting, SeatClient
from tunerd.runner.seat_service import Buffers
from tunerd.slices.base import ProcessSlice
from tunerd.system.processes import ProcessId
from tunerd.vocabulary import Arrays, CapProof

_CLOSE_SECS = 5.0
_EVICTED = "it gave no answer in time"  # as slices say it of a runner that disturbs no other


class Held(dict[str, "np.ndarray[Any, Any]"]):
    """A request's inputs, as its caller has them, which lie in a slot of a seat as well."""

    def __init__(self, inputs: Arrays, seat: ProcessSeat, slot: int) -> None:
        super().__init__(inputs)
        self.seat, self.slot = seat, slot


@dataclass(eq=False, slots=True)
class Run:
    """One start of a request in its seat, up to a pause or the end.

    is_own: the slot is the seat's, and not held for the request.
    lent: other memory, which has its inputs.
    """

    held: ProcessSeat
    segment: int
    slot: int
    is_own: bool
    told: Told
    lent: Lent | None = None
    is_ready: bool = True
    is_asked: bool = False
    asked_at: float = 0.0


class ProcessSeat:
    """A runner in a slice of its own.

    Requests lie in slots of the memory that both sides share. Some are for what is started, the
    others for what waits: who sends a request writes it there. All but `lend`, `take_back` and
    what loads and closes is for one thread at a time.
    """

    def __init__(self, member: Member, lane: Lane, made: ProcessSlice, cut: Cut | None) -> None:
        self.member, self.lane, self.slice, self.cut = member, lane, made, cut
        self.has_company = False  # since its last start
        self.client = SeatClient(made, lambda: not self.has_company)
        self.segments = 1
        self.asked: deque[Run] = deque()
        self.free_at = 0.0  # when the process had ended what it was asked for before
        self.ended: OSError | None = None  # how the process was seen to have ended
        self.is_lost = False  # why is being found out
        self.is_left = False  # nobody waits for what it runs
        self.is_evicted = False
        self.finding: threading.Thread | None = None
        self._own: deque[int] = deque()
        self._ahead: deque[int] = deque()
        self._paused: tuple[int, bool] = (0, True)  # the slot of what pauses
        self._came: set[int] = set()  # memory with which a request has come
        self._mapped: set[int] = set()  # and that the process has
        self._buffers: tuple[Buffers, ...] = ()

    def load(self) -> tuple[CapProof, Cutting]:
        try:
            return self._load()
        except BaseException:
            self.close()
            raise

    def _load(self) -> tuple[CapProof, Cutting]:
        path = self.member.artifact
        own, ahead = 1, 0
        if self.cut is None:
            own = PROCESS_DEPTH
            ahead = slots_ahead(artifacts.needed_memory(path).request_bytes)
        proof = self.client.prove()
        found = self.client.take(
            str(path),
            artifacts.sample_inputs(path),
            artifacts.outputs_of(path),
            math.inf if self.cut is None else self.cut,
            buffers=own + ahead,
        )
        self.segments, self.pid = len(found.secs), proof.runner_pid
        self.process = ProcessId.of(self.pid)  # None where it has ended already
        self._buffers, self.descriptor = self.client.buffers, self.client.descriptor
        self.input_bytes, self.output_bytes = (
            sum(array.nbytes for array in arrays.values()) for arrays in self._buffers[0]
        )
        self._own.extend(range(own))
        self._ahead.extend(range(own, own + ahead))
        return proof, found

    # --- requests --------------------------------------------------------------------------------

    def lend(self, inputs: Arrays) -> Arrays:
        """Have a request's inputs where the process finds them, if there is a slot. Any thread."""
        buffers = self._buffers
        if isinstance(inputs, Lent):
            if inputs.number in self._came:
                return inputs
            self._came.add(inputs.number)
        try:
            slot = self._ahead.popleft()
        except IndexError:
            return inputs
        if not buffers:  # it was closed, and is loaded again
            return inputs
        _write(buffers[slot], inputs)
        return Held(inputs, self, slot)

    def take_back(self, slot: int) -> None:
        """Take back what was lent: nothing of the request runs any more. Any thread."""
        self._ahead.append(slot)

    def run_of(self, segment: int, inputs: Arrays, told: Told) -> Run:
        """Return a start; what pauses goes on where it is."""
        self.client.ask_to_pause(False)
        if segment:
            return Run(self, segment, *self._paused, told)
        if isinstance(inputs, Held) and inputs.seat is self:
            return Run(self, 0, inputs.slot, False, told)
        if isinstance(inputs, Lent):
            return Run(self, 0, self._own.popleft(), True, told, inputs)
        return Run(self, 0, self._own.popleft(), True, told, is_ready=False)

    def write(self, run: Run, inputs: Arrays) -> None:
        _write(self._buffers[run.slot], inputs)
        run.is_ready = True

    def ask(self, run: Run) -> None:
        """Have the process run it, behind what it was asked for before."""
        run.is_asked, run.asked_at = True, time.monotonic()
        self.asked.append(run)
        number, descriptor = 0, None
        if run.lent is not None and run.segment == 0:
            number = run.lent.number
            if number not in self._mapped:
                self._mapped.add(number)
                descriptor = run.lent.descriptor
        self.client.ask(run.segment, run.slot, number, descriptor)

    def forget(self, number: int) -> None:
        """Have the process give up memory that was lent, if it has it."""
        self._came.discard(number)
        if number in self._mapped:
            self._mapped.discard(number)
            self.client.forget(number)

    def outputs(self, run: Run) -> Arrays:
        """Return copies of a run's outputs."""
        outputs = self._buffers[run.slot].outputs
        return {name: array.copy() for name, array in outputs.items()}

    def free(self, run: Run) -> None:
        """Let another request have the slot."""
        if run.is_own:
            self._own.append(run.slot)

    def keep(self, run: Run) -> None:
        """Leave the slot to what pauses."""
        self._paused = run.slot, run.is_own

    # --- its end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """End the process, and give up its memory. What was lent is of no use any more."""
        if self.is_evicted:
            self.slice.fence(_EVICTED, is_alone=False)
        if self.finding is not None:
            self.finding.join(_CLOSE_SECS)
        self.client.close()
        self.slice.close()
        self._buffers = ()  # or the memory would stay until garbage is collected
        self.asked.clear()


def _write(buffers: Buffers, inputs: Arrays) -> None:
    for name, array in inputs.items():
        np.copyto(buffers.inputs[name], array)
