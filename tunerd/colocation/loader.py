"""The threads beside the dispatcher's: they load seats again after faults, and try suspects.

A fault that took several has one to blame among them, as a rule. So they are tried one after
another, by few threads, and when one has faulted those that are left are not tried: they run where
they ran before, as soon as that is there again.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tunerd.colocation.places.base import FaultedApartError, Loaded, Place
from tunerd.colocation.scheduler import Event, Scheduler
from tunerd.colocation.work import Instruction, Reload, Seat
from tunerd.errors import TunerdError
from tunerd.vocabulary import Arrays

log = logging.getLogger(__name__)

_TRIES = 3  # of a seat in a row, before it is given up


@dataclass(frozen=True)
class Suspect:
    """A request that may have caused a fault. take: is given its outputs before all is told."""

    request_id: int
    seat: Seat
    inputs: Arrays
    take: Callable[[Arrays], None]


class Loader:
    """What comes of its work is told as events.

    Args:
        tell: takes an event, from any thread.
    """

    def __init__(self, place: Place, tell: Callable[[Event], None]) -> None:
        self._place, self._tell = place, tell
        self._tries: dict[Seat, int] = {}  # without success; changed by events
        self._pool = ThreadPoolExecutor(place.loaders, thread_name_prefix="tunerd-loader")
        self._apart = ThreadPoolExecutor(
            max(1, place.runs_apart), thread_name_prefix="tunerd-apart"
        )

    def close(self) -> None:
        """Wait for what is in work, and begin nothing more."""
        for pool in (self._apart, self._pool):
            pool.shutdown(wait=True, cancel_futures=True)

    def reload(self, seat: Seat) -> None:
        """Load a seat again."""
        self._pool.submit(self._reload, seat)

    def try_apart(self, suspects: Sequence[Suspect]) -> None:
        """Run requests where a fault of them reaches nobody, in this order, until one faults."""
        left = deque(suspects)
        for _ in range(min(len(left), self._place.runs_apart)):
            self._apart.submit(self._try_each, left)

    def _reload(self, seat: Seat) -> None:
        try:
            loaded = self._place.reload(seat)
        except BaseException as error:  # else its requests would wait for ever
            reason = str(error) if isinstance(error, TunerdError) else repr(error)
            self._tell(lambda s, at: self._not_loaded(s, seat, reason, at))
        else:
            self._tell(lambda s, at: self._loaded(s, seat, loaded, at))

    def _loaded(
        self, scheduler: Scheduler, seat: Seat, loaded: Loaded, at: float
    ) -> Sequence[Instruction]:
        self._tries.pop(seat, None)
        return scheduler.ready(seat, at, segments=len(loaded.segment_secs))

    def _not_loaded(
        self, scheduler: Scheduler, seat: Seat, reason: str, at: float
    ) -> Sequence[Instruction]:
        self._tries[seat] = tries = self._tries.get(seat, 0) + 1
        log.warning("%s cannot be loaded into %s: %s", seat.member, seat.lane, reason)
        return (Reload(seat),) if tries < _TRIES else scheduler.given_up(seat, reason, at)

    def _try_each(self, left: deque[Suspect]) -> None:
        """Try those that no other thread has tried yet."""
        for suspect in _taken(left):
            self._try_apart(suspect, left)

    def _try_apart(self, suspect: Suspect, left: deque[Suspect]) -> None:
        request_id, reason, is_fault = suspect.request_id, "", True
        others: list[int] = []
        try:
            suspect.take(self._place.run_apart(suspect.seat, suspect.inputs))
        except FaultedApartError as error:
            reason, others = str(error), [other.request_id for other in _taken(left)]
        except BaseException as error:  # else its caller would wait for ever
            member = suspect.seat.member
            log.warning("%s could not be tried apart from others: %s", member, error)
            reason, is_fault = repr(error), False
        self._tell(
            lambda s, at: [
                *s.tried_apart(request_id, at, reason=reason, is_fault=is_fault),
                *s.not_tried(others, at),
            ]
        )


def _taken(left: deque[Suspect]) -> Iterator[Suspect]:
    """Take one after the other, which other threads may do as well, until none is left."""
    with contextlib.suppress(IndexError):
        while True:
            yield left.popleft()
