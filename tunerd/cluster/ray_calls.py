"""Calls of Ray's actors and tasks: which have not come back, and how the others ended."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tunerd.cluster.actor_bodies import WorkerReply
from tunerd.cluster.ray_environment import sentence
from tunerd.cluster.reaper import Daemon, require_alive
from tunerd.errors import InfrastructureError, TunerdError
from tunerd.system import clock

LOOK_SECS = 0.5  # how often Ray's daemons are looked at while a call is waited for


@dataclass(frozen=True)
class _Asked:
    """A call under way."""

    worker_id: str
    method: str
    since: float  # host clock
    until: float  # when it counts as lost
    is_work: bool  # and not getting ready, which may lack room in the cluster


class Calls:
    """What was asked of workers, by the references of Ray.

    Args:
        ray: the module.
        daemons: without which nothing comes back.
        limits: the seconds after which a call that gets a worker ready counts as lost, by method.
    """

    def __init__(self, ray: Any, daemons: Sequence[Daemon], limits: Mapping[str, float]) -> None:
        self._ray, self._daemons, self._limits = ray, daemons, limits
        self._waiting: dict[Any, _Asked] = {}

    def watch(
        self, worker_id: str, method: str, reference: Any, *, limit_secs: float = math.inf
    ) -> None:
        """Wait for a call. limit_secs: after which work counts as lost."""
        now = clock.now()
        ready_secs = self._limits.get(method)
        until = now + (limit_secs if ready_secs is None else ready_secs)
        self._waiting[reference] = _Asked(worker_id, method, now, until, ready_secs is None)

    def hurry(self, methods: Collection[str], within_secs: float) -> None:
        """Count calls of some methods that are under way as lost unless they end so soon."""
        until = clock.now() + within_secs
        self._waiting = {
            r: replace(a, until=min(a.until, until)) if a.method in methods else a
            for r, a in self._waiting.items()
        }

    def forget(self, worker_id: str) -> None:
        self._waiting = {r: a for r, a in self._waiting.items() if a.worker_id != worker_id}

    def exchange(self, one: str, other: str) -> None:
        """Take what was asked of one worker for asked of another one, and the other way round."""
        ids = {one: other, other: one}
        self._waiting = {
            r: replace(a, worker_id=ids.get(a.worker_id, a.worker_id))
            for r, a in self._waiting.items()
        }

    def of(self, method: str) -> list[str]:
        """Return the workers that have not answered a method."""
        return [a.worker_id for a in self._waiting.values() if a.method == method]

    def ended(self, timeout_secs: float) -> list[WorkerReply]:
        """Return the calls that ended, waiting at most `timeout_secs` for the first.

        Raises InfrastructureError where Ray itself has ended.
        """
        require_alive(self._daemons)
        if not self._waiting:
            time.sleep(timeout_secs)  # who asks in a loop must not spin
            return []
        ray = self._ray
        waiting = list(self._waiting)
        done, _ = ray.wait(waiting, num_returns=1, timeout=timeout_secs)
        if done:  # and whatever ended meanwhile
            done, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0)
        answers = [self._answer(reference) for reference in done]
        return answers + self._late()

    def _answer(self, reference: Any) -> WorkerReply:
        of = self._waiting.pop(reference)
        asked = (of.worker_id, of.method, of.since)
        try:
            return WorkerReply.of(asked, self._ray.get(reference), "")
        except self._ray.exceptions.RayError as problem:
            return WorkerReply.of(asked, None, sentence(problem), _cause(problem))

    def _late(self) -> list[WorkerReply]:
        now = clock.now()
        late = {r: a for r, a in self._waiting.items() if now > a.until}
        for reference in late:
            del self._waiting[reference]
        return [
            WorkerReply(a.worker_id, a.method, None, self._why_late(a, now - a.since), a.since, now)
            for a in late.values()
        ]

    def _why_late(self, asked: _Asked, after_secs: float) -> str:
        if asked.is_work:
            return f"it has not ended {asked.method} after {after_secs:.0f} s"
        return self.too_late(asked.worker_id, after_secs)

    def wait_for(self, method: str, timeout_secs: float) -> None:
        """Wait until no worker has a method to answer; what they answered is kept for `ended`."""
        asked = [r for r, a in self._waiting.items() if a.method == method]
        if asked:
            self._ray.wait(asked, num_returns=len(asked), timeout=timeout_secs)

    def got(self, references: list[Any], asked: str, timeout_secs: float) -> Any:
        """Return the values of calls that are not watched; raises the TunerdError of a worker."""
        ray = self._ray
        deadline = time.monotonic() + timeout_secs
        try:
            while True:
                require_alive(self._daemons)
                left_secs = max(0.0, deadline - time.monotonic())
                try:
                    return ray.get(references, timeout=min(left_secs, LOOK_SECS))
                except ray.exceptions.GetTimeoutError as error:
                    if left_secs <= LOOK_SECS:
                        raise InfrastructureError(self.too_late(asked, timeout_secs)) from error
        except ray.exceptions.RayError as error:
            if cause := _cause(error):
                raise cause from None
            raise InfrastructureError(f"{asked}: {sentence(error)}") from error

    def too_late(self, asked: str, after_secs: float) -> str:
        total, free = self._ray.cluster_resources(), self._ray.available_resources()
        room = ", ".join(f"{free.get(k, 0):g} of {total.get(k, 0):g} {k}s" for k in ("CPU", "GPU"))
        return (
            f"{asked}: not ready after {after_secs:.0f} s; free in the cluster: {room}; wait until "
            "others have ended, or ask for less with --slices and --tuners"
        )


def _cause(error: Any) -> TunerdError | None:
    """Return the error for people that a worker raised, None where it was anything else."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, TunerdError) else None
