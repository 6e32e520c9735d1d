"""A member on a lane of a GPU: as a whole, without a thread, or in segments, with one.

A whole one is launched by whoever starts it: its inputs are written into a staging buffer in host
memory, and one graph has the copies to and from the device in it. There are as many buffers and
graphs as the lane's depth, all on the lane's stream: the second is queued behind the first on the
device, which begins it without waiting for the host. On the device they have their memory in
common, which the order of the stream allows.

One in segments is launched segment by segment, and asked between them whether to pause: a thread
waits for each.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tunerd.artifacts.segments import Pauses, Recorded
from tunerd.colocation import artifacts
from tunerd.colocation.places.base import Done, Fault, Told
from tunerd.colocation.places.completions import Completions, Entry
from tunerd.colocation.places.seat_thread import SeatThread
from tunerd.colocation.plan import Member
from tunerd.colocation.work import Lane, Seat
from tunerd.vocabulary import Arrays

_TRIES = 5  # of a seat that was just loaded: the clocks of an idle GPU rise; the fastest counts
_CLOSE_SECS = 5.0

FaultOf = Callable[[Exception], Fault]


class Staged(Protocol):
    """What a whole member launches: a StagedModel."""

    def launch(self, inputs: Mapping[str, Any], stream: int) -> None: ...
    def is_done(self) -> bool: ...
    def wait(self) -> None: ...
    def secs(self) -> float: ...
    def read(self) -> Arrays: ...


class Captured(Recorded, Protocol):
    """What is cut into segments: a CapturedModel."""

    def launch(self) -> None: ...


class InSegments(Protocol):
    """A capture that may pause: a SegmentedCapture."""

    segment_secs: tuple[float, ...]

    def __call__(self, inputs: Arrays, pauses: Pauses, /) -> Arrays: ...


class CudaModel(Protocol):
    """What a member is loaded as: a LoadedModel for a GPU."""

    def staged(self, stream: int, count: int = 1) -> Sequence[Staged]: ...
    def captured(self, stream: int | None = None) -> Captured: ...


class Track:
    """The stream of a lane, and the seats whose graphs are on it."""

    def __init__(self, make_stream: Callable[[], int], completions: Completions) -> None:
        self._make_stream, self._completions = make_stream, completions
        self.stream, self.line = make_stream(), completions.line()
        self.under_way: deque[WholeSeat] = deque()

    def add(self, seat: WholeSeat, work: Staged, ended: Callable[[Exception | None], None]) -> None:
        self.under_way.append(seat)
        self._completions.add(self.line, Entry(work, seat.secs, ended))

    def leave(self) -> list[WholeSeat]:
        """Begin anew beside what hangs; return the seats that hang with it."""
        left = list(self.under_way)
        self.line.is_left = True
        self.stream, self.line = self._make_stream(), self._completions.line()
        self.under_way = deque()
        return left


class CudaSeat(ABC):
    """What a place asks of a seat. lane: for which it was loaded."""

    member: Member
    lane: Lane

    @abstractmethod
    def load(self) -> tuple[float, ...]:
        """Make the graphs and try them; return the seconds of each segment, of one with copies."""

    @abstractmethod
    def start(self, segment: int, inputs: Arrays, fault_of: FaultOf, told: Told) -> None: ...

    def pause(self) -> None:  # noqa: B027
        """Stop after the segment, where there are several."""

    @abstractmethod
    def leave(self) -> list[CudaSeat]:
        """Leave what runs alone; return the seats that went with it, this one among them."""

    @abstractmethod
    def anew(self) -> CudaSeat:
        """Return the same seat, to be loaded again."""

    @abstractmethod
    def close(self) -> None: ...


class WholeSeat(CudaSeat):
    def __init__(
        self, member: Member, lane: Lane, model: CudaModel, track: Track, depth: int
    ) -> None:
        self.member, self.lane = member, lane
        self.secs = math.inf  # of the last inference
        self._model, self._track, self._depth = model, track, depth
        self._free: deque[Staged] = deque()
        self._is_lost = False  # what hangs may still write its buffers

    def load(self) -> tuple[float, ...]:
        self._free += self._model.staged(self._track.stream, self._depth)
        inputs = artifacts.sample_inputs(self.member.artifact)
        for staged in self._free:
            for _ in range(_TRIES):
                staged.launch(inputs, self._track.stream)
                staged.wait()
                staged.read()
                self.secs = min(self.secs, staged.secs())
        return (self.secs,)

    def start(self, segment: int, inputs: Arrays, fault_of: FaultOf, told: Told) -> None:
        if self._is_lost:  # with another, of which the scheduler hears next
            seat = Seat(self.member.name, self.lane.name)
            told(Fault("its lane was left to what hangs there", (seat,), is_own=False))
            return
        staged, under_way = self._free.popleft(), self._track.under_way

        def ended(error: Exception | None) -> None:
            under_way.popleft()
            answer: Done | Fault
            try:
                if error is not None:
                    raise error
                self.secs = secs = staged.secs()
                answer = Done(secs, staged.read())
                self._free.append(staged)
            except Exception as found:
                answer = fault_of(found)
            told(answer)

        try:
            staged.launch(inputs, self._track.stream)
        except Exception as error:
            told(fault_of(error))
        else:
            self._track.add(self, staged, ended)

    def leave(self) -> list[CudaSeat]:
        left = {self, *self._track.leave()}
        for seat in left:
            seat._is_lost = True
        return [*left]

    def anew(self) -> CudaSeat:
        return WholeSeat(self.member, self.lane, self._model, self._track, self._depth)

    def close(self) -> None:
        self._free.clear()


class SegmentedSeat(CudaSeat):
    """cut: makes segments of a capture. make_stream: on which it is, None for one of its own."""

    def __init__(
        self,
        member: Member,
        lane: Lane,
        model: CudaModel,
        make_stream: Callable[[], int | None],
        cut: Callable[[Captured, Arrays], InSegments],
    ) -> None:
        self.member, self.lane = member, lane
        self._model, self._make_stream, self._cut = model, make_stream, cut
        self._thread = SeatThread(f"{member.name}@{lane.name}")
        self._in_segments: InSegments | None = None

    def load(self) -> tuple[float, ...]:
        return self._thread.call(self._load)

    def start(self, segment: int, inputs: Arrays, fault_of: FaultOf, told: Told) -> None:
        run = self._in_segments
        assert run is not None
        count = len(run.segment_secs)
        self._thread.start(segment, count, lambda pauses: run(inputs, pauses), fault_of, told)

    def pause(self) -> None:
        self._thread.pause()

    def leave(self) -> list[CudaSeat]:
        self._thread.leave()
        return [self]

    def anew(self) -> CudaSeat:
        self._thread.leave()
        return SegmentedSeat(self.member, self.lane, self._model, self._make_stream, self._cut)

    def close(self) -> None:
        self._thread.close(_CLOSE_SECS)

    def _load(self) -> tuple[float, ...]:
        captured = self._model.captured(self._make_stream())
        inputs = artifacts.sample_inputs(self.member.artifact)
        for _ in range(_TRIES):
            captured.write(inputs)
            captured.launch()
            captured.read()
        self._in_segments = self._cut(captured, inputs)
        return self._in_segments.segment_secs
