"""The contract of a policy: which waiting request goes to which idle lane.

A policy keeps nothing: what it decides follows from the view, so that a test can decide with any
clock. Members: time, streams, space, ordered, regulated, space-time.
"""

from __future__ import annotations

import heapq
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from tunerd.colocation.plan import Member, lane_of, shares_of
from tunerd.colocation.work import Lane, Queue, Running, Waiting

Choice = tuple[Waiting, Lane]


@dataclass(frozen=True)
class Together:
    """What starts in one launch, where members are a group; a head, and what `mates` has for it.

    at: not before; until then they are held, and more may come.
    """

    waits: tuple[Waiting, ...]
    lane: Lane
    at: float = -math.inf


class View(ABC):
    """What is known when a decision is made. All moments are of one clock, in seconds."""

    now: float
    members: Mapping[str, Member]
    lanes: Mapping[str, Lane]
    loaded_as: Mapping[str, str]  # by member: its own name, or its group's
    noted: dict[object, Any]  # by a policy of estimates, for as long as these are kept
    outlook: object | None = None  # what a policy foresaw; None again where lanes or seats change

    @property
    @abstractmethod
    def idle(self) -> Sequence[Lane]:
        """Lanes that take a segment: on which nothing runs, or less than the policy's depth."""

    @property
    @abstractmethod
    def running(self) -> Sequence[Running]:
        """What was started and has not ended, in each lane in the order of starting."""

    @abstractmethod
    def on(self, lane: Lane) -> Sequence[Running]:
        """Return what was started in a lane and has not ended, in the order of starting."""

    @property
    @abstractmethod
    def heads(self) -> Sequence[Waiting]:
        """What may start: requests between two segments, and the first of each queue."""

    @property
    @abstractmethod
    def waiting(self) -> Iterable[Waiting]:
        """All that waits, of each queue in the order of arrival."""

    @abstractmethod
    def startable(self) -> Iterable[Choice]:
        """Return each head with each lane on which it can start now, in the order of lanes."""

    @abstractmethod
    def next_of(self, queue: Queue) -> Iterable[Choice]:
        """Return the first of a queue with each lane on which it can start now."""

    @abstractmethod
    def can_start(self, waiting: Waiting, lane: Lane) -> bool:
        """Say whether a head can start on a lane now."""

    @abstractmethod
    def left_secs(
        self, waiting: Waiting, lane: Lane, *, likely: bool = False, count: int = 1
    ) -> float:
        """Return what a request's segments take from now on; `likely`: what they seldom exceed.

        count: of requests in the same launch, itself among them.
        """

    @abstractmethod
    def segment_secs(self, waiting: Waiting, lane: Lane) -> float:
        """Return what a request's next segment takes."""

    @abstractmethod
    def margin(self, now: float) -> float:
        """Return which part of its time a request that waits is to leave: others were as late.

        Any thread may ask.
        """

    @abstractmethod
    def lag_secs(self, queue: Queue) -> float:
        """Return by how much less a queue has had, over its weight, than the one that had most."""

    @abstractmethod
    def may_lag(self, secs: float) -> bool:
        """Say whether any queue may lag by more than that, which is sooner said than of each."""

    @abstractmethod
    def together(self, waiting: Waiting) -> int:
        """Return how many requests a launch with this one may have, itself among them."""

    @abstractmethod
    def mates(self, waiting: Waiting, lane: Lane) -> Sequence[Sequence[Waiting]]:
        """Return what may be in one launch with a head, by queue and in the order of arrival.

        Of each queue so many as there are, from the first on; its own queue is among them.
        """

    @abstractmethod
    def gap_secs(self, waiting: Waiting) -> float:
        """Return in how long one is likely to come that may be in a launch with this one."""


class Policy(BaseModel, ABC):
    """Its fields are what a plan may say of it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: ClassVar[str]
    about: ClassVar[str]  # in one line, for people

    @property
    def depth(self) -> int:
        """How many segments of a lane may be started before the first has ended.

        With two, a device goes on to the second without waiting for the host, and nothing that
        comes later can pass it any more. A place may take fewer.
        """
        return 1

    @property
    def most_together(self) -> int:
        """How many requests of a group a launch has at most; one: members stay by themselves."""
        return 1

    @property
    def segment_secs(self) -> float | None:
        """How long a segment may be, where a model can be cut; None leaves models whole."""
        return None

    def cut_of(self, member: str) -> float | Sequence[int] | None:
        """Return how long a member's segments may be, or after which kernels they end."""
        return self.segment_secs

    @property
    def stops_always(self) -> bool:
        """Whether to ask after each segment, also where nobody else waits."""
        return False

    @abstractmethod
    def lay_out(self, members: Sequence[Member]) -> tuple[Lane, ...]:
        """Return the lanes, each with the members that run in it."""

    @abstractmethod
    def choose(self, view: View) -> Choice | Together | None:
        """Return what to start next, None where nothing is to be started now.

        It is asked again after each start; what is held ends that, until its moment or until
        something has happened.
        """

    def starts(self, view: View) -> Iterator[Choice | Together]:
        """Yield what to start, one after the other: each has started when the next is asked for.

        What is held ends it. A policy that knows more than one at a time says so here.
        """
        while (choice := self.choose(view)) is not None:
            yield choice

    def may_start(self, waiting: Waiting, lane: Lane, view: View) -> bool:
        """Say whether a request may be started now on a lane that takes one."""
        return True

    def refusal(self, waiting: Waiting, view: View) -> str:
        """Say why a request that has just arrived cannot be met, "" where it can."""
        return ""

    def hopeless(self, member: str, deadline_at: float, now: float, view: View) -> str:
        """Say why a request that came now cannot be met, "" where that is not known at a glance.

        Any thread may ask, at any time: who sends spares the engine what it would refuse.
        """
        return ""

    def lateness(self, waiting: Waiting, view: View) -> str:
        """Say why the first of a queue need not be started any more, "" where it need.

        Asked of what has a deadline.
        """
        return ""


def own_lanes(members: Sequence[Member]) -> tuple[Lane, ...]:
    """Return a lane of its share for each member, and one for those that name the same lane."""
    shares = shares_of(members)
    lanes: dict[str, list[Member]] = {}
    for member in members:
        lanes.setdefault(lane_of(member), []).append(member)
    return tuple(
        Lane(name, shares[of[0].name], tuple(m.name for m in of), cores=of[0].cores)
        for name, of in lanes.items()
    )


class InOrder(Policy, ABC):
    """Requests start in the order of their arrival, each on the first lane that it can have."""

    @property
    def depth(self) -> int:
        return 2

    def choose(self, view: View) -> Choice | None:
        return next(self.starts(view), None)

    def starts(self, view: View) -> Iterator[Choice]:
        count = itertools.count()  # lanes of one request, in their order
        able = [(_number(choice), next(count), choice) for choice in view.startable()]
        heapq.heapify(able)
        while able:
            _, _, choice = heapq.heappop(able)
            if view.can_start(*choice):
                yield choice
                for another in view.next_of(choice[0].request.queue):
                    heapq.heappush(able, (_number(another), next(count), another))


def _number(choice: Choice) -> int:
    return choice[0].request.request_id
