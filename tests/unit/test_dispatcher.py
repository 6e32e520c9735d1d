"""Which thread decides: the dispatcher's, or who sends a request while that sleeps."""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import numpy as np
import pytest

from tests.lib.waiting import until
from tunerd.artifacts.segments import Cut
from tunerd.colocation.dispatcher import Dispatcher
from tunerd.colocation.estimates import Estimates
from tunerd.colocation.places.base import Done, Loaded, Place, Told
from tunerd.colocation.plan import Member
from tunerd.colocation.policies import policy_of
from tunerd.colocation.scheduler import Scheduler
from tunerd.colocation.work import Lane, RefusedError, Request, Seat
from tunerd.testing.simulation import member
from tunerd.vocabulary import Arrays

NAMES = ("one", "two", "three", "four")
WAIT_SECS = 60


class ToldPlace(Place):
    """Notes who starts what, and ends it at once, or when the test says so."""

    depth = 2

    def __init__(self, *, at_once: bool) -> None:
        self.starts: list[tuple[str, Arrays, threading.Thread, bool]] = []
        self.waiting: list[Told] = []
        self._at_once, self._is_borrowed = at_once, False

    def cut(self, lanes: Sequence[Lane]) -> tuple[Lane, ...]:
        return tuple(lanes)

    def capacity_bytes(self) -> int:
        return 1

    def needed_bytes(self, member: Member, seats: int, *, cut: Cut | None) -> int:
        return 0

    def load(self, member: Member, lane: Lane, *, cut: Cut | None) -> Loaded:
        raise NotImplementedError("nothing is loaded here")

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[None]:
        self._is_borrowed = True
        yield
        self._is_borrowed = False

    def start(self, seat: Seat, segment: int, inputs: Arrays, told: Told) -> None:
        thread = threading.current_thread()
        self.starts.append((seat.member, inputs, thread, self._is_borrowed))
        if self._at_once:
            told(Done(1e-6, {}))
        else:
            self.waiting.append(told)

    def evict(self, seat: Seat) -> tuple[Seat, ...]:
        return (seat,)

    def reload(self, seat: Seat) -> Loaded:
        raise NotImplementedError("nothing is lost here")

    def close(self) -> None: ...


class Sender:
    """Sends requests as an engine does."""

    def __init__(self, place: ToldPlace, kind: str = "streams") -> None:
        members = [member(name) for name in NAMES]
        policy = policy_of(kind, {})
        lanes = policy.lay_out(members)
        segments = {Seat(m, lane.name): 1 for lane in lanes for m in lane.members}
        estimates = Estimates()
        for seat in segments:
            estimates.observe(seat, 0, 1e-4, now=0.0)
        self.scheduler = Scheduler(members, lanes, policy, segments, estimates, depth=2)
        self.has_failed = threading.Event()
        self.dispatcher = Dispatcher(self.scheduler, place, on_failure=self.has_failed.set)
        self._gate, self._count = threading.Lock(), 0

    def send(self, name: str, number: int = 0) -> Future[Arrays]:
        future: Future[Arrays] = Future()
        with self._gate:
            request = Request(self._count, name, "default", time.monotonic())
            self._count += 1
            self.dispatcher.take(request, {"number": np.int64(number)}, future)  # type: ignore[dict-item]
        return future

    def wait_until_it_sleeps(self) -> None:
        until(lambda: self.dispatcher._inbox.is_awaited)


@pytest.fixture
def place() -> ToldPlace:
    return ToldPlace(at_once=False)


@pytest.fixture
def sender(place: ToldPlace) -> Iterator[Sender]:
    made = Sender(place)
    yield made
    made.dispatcher.close()


def test_who_sends_starts_it_while_the_dispatcher_sleeps(place: ToldPlace, sender: Sender) -> None:
    mine = 0
    for number in range(50):
        sender.wait_until_it_sleeps()
        time.sleep(0.001)  # others that came shortly before would be company
        future = sender.send("one")
        until(lambda number=number: len(place.starts) == number + 1)
        _, _, thread, is_borrowed = place.starts[-1]
        is_mine = thread is threading.current_thread()
        assert is_borrowed == is_mine
        mine += is_mine
        place.waiting.pop()(Done(1e-6, {}))
        assert future.result(WAIT_SECS) == {}
    assert mine  # as a rule all of them; a thread may have been woken meanwhile


def test_requests_of_many_threads_start_in_the_order_of_each() -> None:
    place = ToldPlace(at_once=True)
    sender = Sender(place)

    def client(name: str) -> None:
        for number in range(300):
            future = sender.send(name, number)
            if number % 7 == 0:  # the dispatcher may sleep meanwhile
                future.result(WAIT_SECS)

    threads = [threading.Thread(target=client, args=(name,)) for name in NAMES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sender.dispatcher.wait(WAIT_SECS)
    sender.dispatcher.close()
    for name in NAMES:
        mine = [int(inputs["number"]) for member, inputs, *_ in place.starts if member == name]
        assert mine == list(range(300))


def test_what_fails_in_a_sender_s_thread_ends_the_engine_and_answers_all(
    place: ToldPlace, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender.wait_until_it_sleeps()
    first = sender.send("one")
    until(lambda: bool(place.starts))

    def fails(*_: object) -> list[object]:
        raise KeyError("a bug")

    monkeypatch.setattr(sender.scheduler, "turn", fails)
    for future in (first, sender.send("two")):
        with pytest.raises(RefusedError, match="a bug"):
            future.result(WAIT_SECS)
    assert sender.has_failed.wait(WAIT_SECS)
