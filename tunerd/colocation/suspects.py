"""Whose fault it may have been: what ran together when one came that nobody could name.

Each suspect runs once more: apart from the others, where the place can do that, until one of them
has faulted; and else alone.
"""

from __future__ import annotations

from collections.abc import Iterable

from tunerd.colocation.work import FaultReport, Queue, Running, Seat, Waiting


class Suspects:
    """Requests that are to run alone: a fault that comes again has a name then.

    As long as there are any, nothing but their queues' first requests starts, one at a time.
    """

    def __init__(self) -> None:
        self._waits: list[Waiting] = []

    def __bool__(self) -> bool:
        return bool(self._waits)

    def add(self, waits: Iterable[Waiting]) -> None:
        self._waits += waits

    def keep(self, left: Iterable[Waiting]) -> None:
        """Forget those that are not among what waits or runs."""
        numbers = {waiting.request.request_id for waiting in left}
        self._waits = [w for w in self._waits if w.request.request_id in numbers]

    @property
    def queues(self) -> list[Queue]:
        """Return their queues, in the order in which they were added."""
        return list(dict.fromkeys(waiting.request.queue for waiting in self._waits))


class Apart:
    """Requests that are tried where a fault of theirs reaches nobody; others go on meanwhile."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[Waiting, FaultReport]] = {}

    def add(self, waiting: Waiting, fault: FaultReport) -> None:
        """Note one, with the fault that may be its own."""
        self._of[waiting.request.request_id] = waiting, fault

    def take(self, request_id: int) -> tuple[Waiting, FaultReport] | None:
        """Forget one that was tried, and return it with its fault; None where it is not known."""
        return self._of.pop(request_id, None)


def likeliest_first(
    suspects: Iterable[tuple[Waiting, Seat]],
    ran: Iterable[Running],
    faults: Iterable[FaultReport],
) -> tuple[tuple[int, Seat], ...]:
    """Order requests, with the seats where they ran: first whose members have faulted before, then
    who began last, for most faults come soon.

    ran: what ran when the fault came. faults: those of which somebody is known to be to blame.
    """
    blamed = {fault.member for fault in faults}
    began_at = {w.request.request_id: running.started_at for running in ran for w in running.waits}

    def key(suspect: tuple[Waiting, Seat]) -> tuple[bool, float]:
        request = suspect[0].request
        return request.member not in blamed, -began_at[request.request_id]

    return tuple((w.request.request_id, seat) for w, seat in sorted(suspects, key=key))
