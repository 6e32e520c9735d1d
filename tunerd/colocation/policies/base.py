"""The contract of a policy: which waiting request goes to which idle lane.

A policy keeps nothing: what it decides follows from the view, so that a test can decide with any
clock. Members: time, streams, space, ordered, regulated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from tunerd.colocation.plan import Member
from tunerd.colocation.work import Lane, Queue, Running, Waiting

Choice = tuple[Waiting, Lane]


class View(ABC):
    """What is known when a decision is made. All moments are of one clock, in seconds."""

    now: float
    members: Mapping[str, Member]
    lanes: Mapping[str, Lane]

    @property
    @abstractmethod
    def idle(self) -> Sequence[Lane]:
        """Lanes that take a segment: on which nothing runs, or less than the policy's depth."""

    @property
    @abstractmethod
    def running(self) -> Sequence[Running]:
        """What was started and has not ended, in each lane in the order of starting."""

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
    def can_start(self, waiting: Waiting, lane: Lane) -> bool:
        """Say whether a head can start on a lane now."""

    @abstractmethod
    def left_secs(self, waiting: Waiting, lane: Lane, *, likely: bool = False) -> float:
        """Return what a request's segments take from now on; `likely`: what they seldom exceed."""

    @abstractmethod
    def segment_secs(self, waiting: Waiting, lane: Lane) -> float:
        """Return what a request's next segment takes."""

    @abstractmethod
    def lag_secs(self, queue: Queue) -> float:
        """Return by how much less a queue has had, over its weight, than the one that had most."""


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
    def segment_secs(self) -> float | None:
        """How long a segment may be, where a model can be cut; None leaves models whole."""
        return None

    @abstractmethod
    def lay_out(self, members: Sequence[Member]) -> tuple[Lane, ...]:
        """Return the lanes, each with the members that run in it."""

    @abstractmethod
    def choose(self, view: View) -> Choice | None:
        """Return what to start next, None where nothing is to be started now.

        It is asked again after each start.
        """

    def refusal(self, waiting: Waiting, view: View) -> str:
        """Say why a request that has just arrived cannot be met, "" where it can."""
        return ""

    def lateness(self, waiting: Waiting, view: View) -> str:
        """Say why the first of a queue need not be started any more, "" where it need."""
        return ""


def first_come(view: View) -> Choice | None:
    """Return the earliest arrival that can start, and the first idle lane that it can have."""
    return min(view.startable(), key=_number, default=None)


def _number(choice: Choice) -> int:
    return choice[0].request.request_id
