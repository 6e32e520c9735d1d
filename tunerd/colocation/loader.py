"""The threads beside the dispatcher's: they load seats again after faults, and try suspects."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from tunerd.colocation.places.base import FaultedApartError, Loaded, Place
from tunerd.colocation.scheduler import Event, Scheduler
from tunerd.colocation.work import Instruction, Reload, Seat
from tunerd.errors import TunerdError
from tunerd.vocabulary import Arrays

log = logging.getLogger(__name__)

_TRIES = 3  # of a seat in a row, before it is given up


class Loader:
    """What comes of its work is told as events.

    Args:
        tell: takes an event, from any thread.
    """

    def __init__(self, place: Place, tell: Callable[[Event], None]) -> None:
        self._place, self._tell = place, tell
        self._tries: dict[Seat, int] = {}  # without success; changed by events
        self._pool = ThreadPoolExecutor(place.loaders, thread_name_prefix="tunerd-loader")

    def close(self) -> None:
        """Wait for what is in work, and begin nothing more."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def reload(self, seat: Seat) -> None:
        """Load a seat again."""
        self._pool.submit(self._reload, seat)

    def try_apart(
        self, request_id: int, seat: Seat, inputs: Arrays, take: Callable[[Arrays], None]
    ) -> None:
        """Run a request where a fault of it reaches nobody; `take` has its outputs before all."""
        self._pool.submit(self._try_apart, request_id, seat, inputs, take)

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

    def _try_apart(
        self, request_id: int, seat: Seat, inputs: Arrays, take: Callable[[Arrays], None]
    ) -> None:
        reason, is_fault = "", True
        try:
            take(self._place.run_apart(seat, inputs))
        except FaultedApartError as error:
            reason = str(error)
        except BaseException as error:  # else its caller would wait for ever
            log.warning("%s could not be tried apart from others: %s", seat.member, error)
            reason, is_fault = repr(error), False
        self._tell(lambda s, at: s.tried_apart(request_id, at, reason=reason, is_fault=is_fault))
