"""A member that is killed while a load runs: when all served again, and what was lost by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tunerd.colocation.load.generator import DONE, Observed
from tunerd.colocation.load.lost import lost_of
from tunerd.colocation.plan import Member


@dataclass(frozen=True)
class Killed:
    """A member that was killed once in each round.

    served_again_secs: by round, after how long each member had answered a request that was sent
    since; None where one has answered none.
    lost: requests that `lost_of` returns, of the other members; lost_own: of this one.
    """

    member: str
    served_again_secs: tuple[float | None, ...]
    lost: int
    lost_own: int


def killed_of(name: str, rounds: Sequence[Observed], members: Sequence[Member]) -> Killed:
    """Return what the death of a member has cost, by all requests of the rounds."""
    lost = [s.member for observed in rounds for s in lost_of(observed.samples, members)]
    again = tuple(_served_again_secs(observed, members) for observed in rounds)
    return Killed(name, again, len(lost) - lost.count(name), lost.count(name))


def _served_again_secs(observed: Observed, members: Sequence[Member]) -> float | None:
    at = observed.called_at
    if at is None:
        return None
    since = [s for s in observed.samples if s.end == DONE and s.sent_at >= at]
    firsts = [min((s.ended_at for s in since if s.member == m.name), default=None) for m in members]
    known = [first for first in firsts if first is not None]
    return max(known) - at if len(known) == len(firsts) else None
