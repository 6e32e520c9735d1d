"""The contract of a policy: which of the devices that can take a job it gets.

A policy keeps nothing: what it decides follows from the job and the view, so that jobs with the
same needs are placed in the order of arrival. It never leaves a device empty that could take the
job. Members: exclusive, round-robin, least-utilised, most-free-memory, estimated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from tunerd.colocation.placement.values import Job, View


@dataclass(frozen=True)
class Choice:
    """A device by name. note: what people should know of how it was found, "" where nothing."""

    device: str
    note: str = ""


class Policy(ABC):
    kind: ClassVar[str]
    about: ClassVar[str]  # in one line, for people

    @abstractmethod
    def choose(self, job: Job, view: View) -> Choice | None:
        """Return one of the view's states, None where the job should rather wait."""
