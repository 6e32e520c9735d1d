"""Lanes of a GPU: the stream of each, what is launched there in which order, and by which seats.

Very large inputs are brought in parts, beside what the lane has under way; what is started behind
them waits for its turn (`bringing`). Very large outputs are fetched in parts, and have been before
the next launch of the lane counts as ended (`fetching`).
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tunerd.colocation.places.base import Fault, Told
from tunerd.colocation.places.bringing import Bringing
from tunerd.colocation.places.completions import Completions, Entry, Launched
from tunerd.colocation.places.fetching import Fetched
from tunerd.colocation.places.staged import InParts, Part, Staged
from tunerd.colocation.work import Lane
from tunerd.vocabulary import Arrays

FaultOf = Callable[[BaseException], Fault]
Requests = Sequence[tuple[str, Arrays]]  # of members


class CudaSeat(ABC):
    """What a place asks of a seat.

    lane: for which it was loaded.
    ends: after which kernels its segments end, where it was cut.
    launch_secs: of a group's, by the number of requests.
    is_lost: what hangs may still write its buffers.
    """

    lane: Lane
    ends: tuple[int, ...] = ()
    launch_secs: Mapping[int, float] = MappingProxyType({})
    is_lost = False

    @abstractmethod
    def load(self) -> tuple[float, ...]:
        """Make the graphs and try them; return the seconds of each segment, of one with copies."""

    def start(self, segment: int, inputs: Arrays, fault_of: FaultOf, told: Told) -> None:
        raise NotImplementedError("a group's seat has its requests started together")

    def start_together(self, requests: Requests, fault_of: FaultOf, told: Told) -> None:
        raise NotImplementedError("only a group's seat takes several requests")

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


class Track:
    """The stream of a lane, and the seats whose graphs are on it.

    capture_stream: where graphs are captured: what another seat launches meanwhile must not be in
    them.
    bring_stream: for the inputs of what waits behind another one, and for parts.
    waiting: launches behind which a further one has to wait, because one is being brought.
    """

    def __init__(
        self,
        make_stream: Callable[[], int],
        capture_stream: int,
        bring_stream: int,
        completions: Completions,
    ) -> None:
        self._make_stream, self._completions = make_stream, completions
        self.capture_stream, self.bring_stream = capture_stream, bring_stream
        self._fetch_stream: int | None = None
        self._fetching: Bringing[Fetched] | None = None
        self.stream, self.line = make_stream(), completions.line()
        self.under_way: deque[CudaSeat] = deque()
        self._bring_nothing()

    def launch(
        self,
        seat: CudaSeat,
        staged: Staged,
        given: Any,
        secs: float,
        ended: Callable[[Exception | None], None],
    ) -> None:
        """Queue all of a launch, which waits for nothing that is being brought."""
        work: Launched
        under_way = self.under_way
        bring = self.bring_stream if under_way else None
        if staged.fetches_apart:
            fetch, leaves = self.fetch_stream, staged.comes_in_parts
            staged.launch(given, self.stream, bring=bring, fetch=fetch, leaves=leaves)
            work = self.watched(staged, staged)
        else:
            staged.launch(given, self.stream, bring=bring)
            work = staged
        under_way.append(seat)
        self._completions.add(self.line, Entry(work, secs, ended))

    def watched(self, launched: Launched, staged: InParts) -> Launched:
        """Return what has ended when the outputs of a launch are there: itself, if they are small.

        staged: whose last graph it is.
        """
        if not staged.fetches_apart:
            return launched
        fetching = None
        if staged.comes_in_parts:
            if self._fetching is None:
                self._fetching = Bringing(self._completions, self.fetch_stream)
            fetching = self._fetching
        return Fetched(launched, staged, fetching)

    def launch_in_turn(self, launch: Brought | Behind) -> None:
        """Queue a launch when those that wait were queued, and what it needs was brought."""
        self._bringing.add(launch)

    def add(
        self, seat: CudaSeat, work: Launched, secs: float, ended: Callable[[Exception | None], None]
    ) -> None:
        """Watch what was launched on the stream."""
        self.under_way.append(seat)
        self._completions.add(self.line, Entry(work, secs, ended))

    @property
    def fetch_stream(self) -> int:
        """The stream for large outputs: the next one's kernels need not wait for their copies."""
        if self._fetch_stream is None:
            self._fetch_stream = self._make_stream()
        return self._fetch_stream

    @property
    def streams(self) -> list[int]:
        """Return those that are of this track alone."""
        return [self.stream, *([] if self._fetch_stream is None else [self._fetch_stream])]

    def leave(self) -> list[CudaSeat]:
        """Begin anew beside what hangs; return the seats that hang with it."""
        left = [*self.under_way, *(launch.seat for launch in self._bringing.leave())]
        self.line.is_left = True
        if self._fetching is not None:
            self._fetching.leave()
            self._fetching = None
        self.stream, self._fetch_stream = self._make_stream(), None
        self.line = self._completions.line()
        self.under_way = deque()
        self._bring_nothing()
        return left

    def _bring_nothing(self) -> None:
        bringing: Bringing[Brought | Behind] = Bringing(self._completions, self.bring_stream)
        self._bringing, self.waiting = bringing, bringing.waiting


@dataclass(eq=False, slots=True)
class Brought:
    """A launch whose inputs are brought in parts before.

    entry: of what is launched; has_copies: its seconds have the copies in them, which the launch
    does not wait for once more.
    """

    seat: CudaSeat
    track: Track
    staged: InParts
    given: Any
    entry: Entry
    failed: Callable[[Exception], None]
    has_copies: bool = True
    _began_at: float = field(default=math.inf, init=False)

    def begin(self) -> Sequence[Part]:
        track = self.track
        if track.under_way:  # to which the time belongs until that has ended
            return self.staged.begin(self.given, None)
        self._began_at = time.monotonic()
        return self.staged.begin(self.given, track.stream)

    def launch(self) -> None:
        track, (work, secs, ended) = self.track, self.entry
        staged = self.staged
        fetch = track.fetch_stream if staged.fetches_apart else None
        staged.follow(track.stream, fetch=fetch, leaves=staged.comes_in_parts)
        if self.has_copies:
            had_secs = max(0.0, time.monotonic() - self._began_at)
            secs = max(0.0, secs - had_secs)
        track.add(self.seat, work, secs, ended)

    def give_up(self) -> None:
        self.staged.give_up()


@dataclass(frozen=True, eq=False, slots=True)
class Behind:
    """A launch that is started while one before it is being brought."""

    seat: CudaSeat
    launch: Callable[[], None]
    failed: Callable[[Exception], None]

    def begin(self) -> Sequence[Part]:
        return ()

    def give_up(self) -> None: ...
