"""A member on a lane of a GPU, as a whole or in segments, without a thread of its own.

A whole one is launched by whoever starts it: the copies of its inputs, from the pinned memory that
the request has, and one graph with the copies of the outputs in it. There are as many graphs as the
lane's depth, all on the lane's stream: the second is queued behind the first on the device, which
begins it without waiting for the host. On the device they have their memory in common, which the
order of the stream allows. A group has such graphs for each number of requests that its kernels are
for, and a launch takes the smallest that fits.

One in segments is a graph for each: where one has ended, who starts segments launches the one after
the next, unless a pause is wanted.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from tunerd.artifacts.segments import Cut
from tunerd.colocation import artifacts
from tunerd.colocation.groups import tried_tenants
from tunerd.colocation.places.base import Done, Fault, Told
from tunerd.colocation.places.completions import Entry
from tunerd.colocation.places.staged import CudaGroup, CudaModel, InPieces, Staged
from tunerd.colocation.places.tracks import Behind, Brought, CudaSeat, FaultOf, Requests, Track
from tunerd.colocation.plan import Member
from tunerd.colocation.work import Group, Lane, Seat
from tunerd.vocabulary import Arrays

_TRIES = 5  # of a seat that was just loaded: the clocks of an idle GPU rise; the fastest counts


class _OnTrack(CudaSeat):
    """A seat whose graphs are launched by whoever starts it, one behind the other of its lane."""

    def __init__(self, name: str, lane: Lane, track: Track) -> None:
        self.lane = lane
        self._name, self._track = name, track

    def leave(self) -> list[CudaSeat]:
        left = {self, *self._track.leave()}
        for seat in left:
            seat.is_lost = True
        return [*left]

    def _launch(
        self,
        free: deque[Staged],
        given: Any,
        secs: float,
        done: Callable[[Staged], Done],
        fault_of: FaultOf,
        told: Told,
    ) -> None:
        """Launch the first of those that are free, and tell what comes of it."""
        if self.is_lost:
            told(self._lost())
            return
        staged, track = free.popleft(), self._track
        under_way = track.under_way

        def ended(error: Exception | None) -> None:
            under_way.popleft()
            answer: Done | Fault
            try:
                if error is not None:
                    raise error
                answer = done(staged)
                free.append(staged)
            except Exception as found:
                answer = fault_of(found)
            told(answer)

        if track.waiting or (staged.may_go_in_parts and staged.goes_in_parts(given)):
            self._launch_in_turn(staged, given, secs, ended, lambda error: told(fault_of(error)))
            return
        try:
            track.launch(self, staged, given, secs, ended)
        except Exception as error:
            told(fault_of(error))

    def _launch_in_turn(
        self,
        staged: Staged,
        given: Any,
        secs: float,
        ended: Callable[[Exception | None], None],
        failed: Callable[[Exception], None],
    ) -> None:
        track = self._track
        if staged.goes_in_parts(given):
            entry = Entry(track.watched(staged, staged), secs, ended)
            track.launch_in_turn(Brought(self, track, staged, given, entry, failed))
        else:
            launch = functools.partial(track.launch, self, staged, given, secs, ended)
            track.launch_in_turn(Behind(self, launch, failed))

    def _lost(self) -> Fault:
        """Say that it went with another, of which the scheduler hears next."""
        seat = Seat(self._name, self.lane.name)
        return Fault("its lane was left to what hangs there", (seat,), is_own=False)

    def _tried(self, staged: Staged, given: Any) -> float:
        """Launch what was just made some times; return the least seconds."""
        least = math.inf
        for _ in range(_TRIES):
            staged.launch(given, self._track.stream)
            staged.wait()
            staged.read()
            least = min(least, staged.secs())
        return least


class WholeSeat(_OnTrack):
    def __init__(
        self, member: Member, lane: Lane, model: CudaModel, track: Track, depth: int
    ) -> None:
        super().__init__(member.name, lane, track)
        self._member, self._model, self._depth = member, model, depth
        self._secs = math.inf  # of the last inference
        self._free: deque[Staged] = deque()

    def load(self) -> tuple[float, ...]:
        self._free += self._model.staged(self._track.capture_stream, self._depth)
        inputs = artifacts.sample_inputs(self._member.artifact)
        self._secs = min(self._tried(staged, inputs) for staged in self._free)
        return (self._secs,)

    def start(self, segment: int, inputs: Arrays, fault_of: FaultOf, told: Told) -> None:
        def done(staged: Staged) -> Done:
            self._secs = staged.secs()
            return Done(self._secs, staged.read())

        self._launch(self._free, inputs, self._secs, done, fault_of, told)

    def anew(self) -> CudaSeat:
        return WholeSeat(self._member, self.lane, self._model, self._track, self._depth)

    def close(self) -> None:
        self._free.clear()


class GroupSeat(_OnTrack):
    """tenants: by member, as the model calls them."""

    def __init__(
        self,
        group: Group,
        lane: Lane,
        model: CudaGroup,
        tenants: Mapping[str, str],
        track: Track,
        depth: int,
    ) -> None:
        super().__init__(group.name, lane, track)
        self._group, self._model, self._tenants, self._depth = group, model, tenants, depth
        self._secs: dict[int, float] = {}  # of the last launch
        self._free: dict[int, deque[Staged]] = {}

    def load(self) -> tuple[float, ...]:
        names = tried_tenants(self._group, self._tenants)
        inputs = artifacts.sample_inputs(self._group.kernels)
        made = self._model.staged_lanes(self._track.capture_stream, self._depth)
        for count, each in sorted(made.items()):
            requests = [(names[nth % len(names)], inputs) for nth in range(count)]
            self._free[count] = deque(each)
            self._secs[count] = min(self._tried(staged, requests) for staged in each)
        self.launch_secs = dict(self._secs)
        return (self._secs[min(self._secs)],)

    def start_together(self, requests: Requests, fault_of: FaultOf, told: Told) -> None:
        count = next(n for n in self._secs if n >= len(requests))

        def done(staged: Staged) -> Done:
            self._secs[count] = secs = staged.secs()
            return Done(secs, None, each=tuple(staged.read()))

        given = [(self._tenants[name], inputs) for name, inputs in requests]
        self._launch(self._free[count], given, self._secs[count], done, fault_of, told)

    def anew(self) -> CudaSeat:
        return GroupSeat(
            self._group, self.lane, self._model, self._tenants, self._track, self._depth
        )

    def close(self) -> None:
        self._free.clear()


class SegmentedSeat(_OnTrack):
    """Segments are launched one by one, and where no pause is wanted one behind the one that runs.

    The first one alone: a pause that is asked for at once has no more before it.
    """

    def __init__(
        self, member: Member, lane: Lane, model: CudaModel, track: Track, limits: Cut
    ) -> None:
        super().__init__(member.name, lane, track)
        self._member, self._model, self._limits = member, model, limits
        self._run: InPieces | None = None
        self._is_wanted = False  # a pause
        self._next = 0  # to be launched

    def load(self) -> tuple[float, ...]:
        run = self._model.staged_segments(self._track.capture_stream, self._limits)
        self._run, self.ends = run, run.ends
        return run.segment_secs

    def start(self, segment: int, inputs: Arrays, fault_of: FaultOf, told: Told) -> None:
        run = self._run
        assert run is not None
        if self.is_lost:
            told(self._lost())
            return
        under_way, last, secs = self._track.under_way, len(run.pieces) - 1, 0.0
        self._is_wanted, self._next = False, segment
        has_failed = False

        def failed(error: Exception) -> None:
            nonlocal has_failed
            if not has_failed:  # what was launched behind fails as well
                has_failed = True
                told(fault_of(error))

        def launch() -> None:
            number, self._next = self._next, self._next + 1
            piece, secs_of = run.pieces[number], run.segment_secs[number]
            work = self._track.watched(piece, run) if number == last else piece
            entry = Entry(work, secs_of, lambda error: ended(number, error))
            self._launch_segment(run, number, inputs, entry, failed)

        def ended(number: int, error: Exception | None) -> None:
            nonlocal secs
            under_way.popleft()
            if has_failed:
                return
            try:
                if error is not None:
                    raise error
                secs += run.pieces[number].secs()
                outputs = run.read() if number == last else None
            except Exception as found:
                failed(found)
                return
            is_alone = self._next == number + 1
            if number == last or (is_alone and self._is_wanted):
                told(Done(secs, outputs, number + 1 - segment))
                return
            while self._next <= min(last, number + 2) and not (self._is_wanted or has_failed):
                launch()

        launch()

    def pause(self) -> None:
        self._is_wanted = True

    def _launch_segment(
        self,
        run: InPieces,
        number: int,
        inputs: Arrays,
        entry: Entry,
        failed: Callable[[Exception], None],
    ) -> None:
        track = self._track
        if number == 0 and run.goes_in_parts(inputs):
            brought = Brought(self, track, run, inputs, entry, failed, has_copies=False)
            track.launch_in_turn(brought)
        elif track.waiting:
            queue = functools.partial(self._queue, run, number, inputs, entry)
            track.launch_in_turn(Behind(self, queue, failed))
        else:
            try:
                self._queue(run, number, inputs, entry)
            except Exception as error:
                failed(error)

    def _queue(self, run: InPieces, number: int, inputs: Arrays, entry: Entry) -> None:
        track = self._track
        if number:
            run.pieces[number].launch(track.stream)
        else:
            run.launch(inputs, track.stream)
        track.add(self, *entry)

    def anew(self) -> CudaSeat:
        return SegmentedSeat(self._member, self.lane, self._model, self._track, self._limits)

    def close(self) -> None:
        self._run = None
