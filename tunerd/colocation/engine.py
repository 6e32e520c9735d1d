"""The run time of a plan: takes requests, decides in one thread, answers futures.

with Engine(Plan.read("plan.yaml")) as engine:
    future = engine.submit("detector", {"x": image}, deadline_secs=0.02, tenant="shop")
    outputs = await engine.asubmit("detector", {"x": image})
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tunerd.colocation import artifacts
from tunerd.colocation.estimates import Estimates
from tunerd.colocation.memory import planned_bytes
from tunerd.colocation.places import place_of
from tunerd.colocation.places.base import Done, Fault, Place
from tunerd.colocation.plan import Plan, Proof
from tunerd.colocation.policies import policy_of
from tunerd.colocation.scheduler import Scheduler
from tunerd.colocation.stats import Counters, EngineStats, MemberStats
from tunerd.colocation.work import (
    Complete,
    Evict,
    Fail,
    Instruction,
    Lane,
    MemberError,
    Refuse,
    RefusedError,
    Reload,
    Request,
    Seat,
    Start,
)
from tunerd.errors import InputError, TunerdError
from tunerd.vocabulary import Arrays, TensorSpec

log = logging.getLogger(__name__)

_RELOADS = 3  # of a seat in a row, before it is given up
_TICK_SECS = 0.05  # how late an eviction may be noticed

OnStep = Callable[[str], None]
Outputs = Arrays
Event = Callable[[Scheduler, float], Sequence[Instruction]]


@dataclass
class _Asked:
    """A request that has no answer yet."""

    request: Request
    inputs: Arrays
    future: Future[Outputs]
    outputs: Outputs | None = None
    is_cancelled: bool = False

    def is_wanted(self) -> bool:
        """Say whether the caller still waits; from then on it cannot cancel any more."""
        if not self.is_cancelled and not self.future.running():
            self.is_cancelled = not self.future.set_running_or_notify_cancel()
        return not self.is_cancelled


class Engine:
    """Runs the members of a plan. Thread-safe; every request gets one answer.

    Args:
        plan: a Plan, or the path of one.
        place: instead of the plan's, for tests and for places of your own.
        on_step: is told what is loaded.
    """

    def __init__(
        self, plan: Plan | Path | str, *, place: Place | None = None, on_step: OnStep | None = None
    ) -> None:
        self.plan = plan if isinstance(plan, Plan) else Plan.read(plan)
        self._policy = policy_of(self.plan.policy.kind, self.plan.policy.parameters)
        self._place = place or place_of(self.plan.place)
        self._say = on_step or (lambda _: None)
        self._inbox: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._asked: dict[int, _Asked] = {}  # the dispatcher's, but for one that is just added
        self._ids = itertools.count()
        self._gate = threading.Lock()  # of the order of ids, and of `_is_open`
        self._is_open = False
        self._idle = threading.Condition()  # notified whenever a request gets its answer
        self._counters = {m.name: Counters() for m in self.plan.members}
        self._specs: dict[str, tuple[TensorSpec, ...]] = {}
        self._members = {m.name: m for m in self.plan.members}
        self._proofs: dict[str, Proof] = {}
        self._needed: dict[Seat, int] = {}
        self._reloads: dict[Seat, int] = {}
        self._scheduler: Scheduler | None = None
        self._dispatcher: threading.Thread | None = None
        self._loader: ThreadPoolExecutor | None = None
        self.clock = time.monotonic

    # --- life ----------------------------------------------------------------------------------

    def start(self) -> Self:
        """Check and load all members, and begin to take requests.

        Raises LoadError for an artifact that is not the plan's, HostError where the lanes or the
        memory do not fit, and InfrastructureError where a member does not run.
        """
        members = self.plan.ordered
        for member in members:
            artifacts.check(member)
            self._specs[member.name] = artifacts.inputs_of(member.artifact)
        lanes = self._place.cut(self._policy.lay_out(members))
        self._needed = planned_bytes(self._place, members, lanes)
        try:
            self._scheduler = self._loaded(lanes)
        except BaseException:
            self._place.close()
            raise
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="tunerd-loader")
        self._dispatcher = threading.Thread(
            target=self._dispatch, args=(self._scheduler,), name="tunerd-dispatcher", daemon=True
        )
        self._dispatcher.start()
        self._is_open = True
        return self

    def _loaded(self, lanes: Sequence[Lane]) -> Scheduler:
        estimates = Estimates()
        segments: dict[Seat, int] = {}
        by_name = {lane.name: lane for lane in lanes}
        for seat in self._needed:
            self._say(f"loading {seat.member} into {seat.lane}")
            loaded = self._place.load(
                self._members[seat.member],
                by_name[seat.lane],
                segment_secs=self._policy.segment_secs,
            )
            segments[seat] = len(loaded.segment_secs)
            self._proofs[seat.lane] = loaded.proof
            for segment, secs in enumerate(loaded.segment_secs):
                estimates.observe(seat, segment, secs, now=self.clock())
        return Scheduler(self.plan.ordered, lanes, self._policy, segments, estimates)

    def drain(self, timeout_secs: float | None = None) -> bool:
        """Take no more requests, and wait for the answers of all that were taken.

        Returns whether all have theirs.
        """
        with self._gate:
            self._is_open = False
        with self._idle:
            return self._idle.wait_for(lambda: not self._asked, timeout_secs)

    def close(self, *, drain_secs: float | None = 0.0) -> None:
        """Stop. Requests without an answer after `drain_secs` are refused; None waits for all.

        Idempotent.
        """
        self.drain(drain_secs)
        dispatcher, self._dispatcher = self._dispatcher, None
        if dispatcher is None:
            return
        self._inbox.put(None)
        dispatcher.join()
        assert self._loader is not None
        self._loader.shutdown(wait=True, cancel_futures=True)
        for asked in list(self._asked.values()):
            self._answer(asked, error=RefusedError("the engine was closed"))
        self._place.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, raised: object, *_: object) -> None:
        self.close(drain_secs=None if raised is None else 0.0)

    # --- requests ------------------------------------------------------------------------------

    def submit(
        self,
        model: str,
        inputs: Any,
        *,
        deadline_secs: float | None = None,
        tenant: str | None = None,
    ) -> Future[Outputs]:
        """Have a member run once; return the future of its outputs by name, NumPy arrays.

        Args:
            inputs: arrays by name, or in the model's order. They are read until the future is
                done.
            deadline_secs: from now; the member's SLO if not given, none where it has none.
            tenant: one of the member's; its first if not given.

        Raises InputError, TypeError or ValueError for what the member cannot take, and RefusedError
        where the engine takes nothing any more. The future raises RefusedError for a request that
        cannot be met, and MemberError for one whose member failed. A future may be cancelled while
        it waits.
        """
        member = self._members.get(model)
        if member is None:
            known = ", ".join(self._members)
            raise InputError(f"there is no member '{model}'; there are {known}")
        tenant = member.tenants[0] if tenant is None else tenant
        if tenant not in member.tenants:
            known = ", ".join(member.tenants)
            raise InputError(f"{model} has no tenant '{tenant}'; it has {known}")
        if model not in self._specs:
            raise RefusedError("the engine was not started; call start(), or use `with`")
        arrays = artifacts.checked_inputs(model, self._specs[model], inputs)
        if deadline_secs is None and member.slo_ms is not None:
            deadline_secs = member.slo_ms / 1e3
        future: Future[Outputs] = Future()
        with self._gate:  # ids in the order of the inbox
            if not self._is_open:
                raise RefusedError("the engine takes no requests any more")
            now = self.clock()
            deadline_at = math.inf if deadline_secs is None else now + deadline_secs
            request = Request(next(self._ids), model, tenant, now, deadline_at)
            self._asked[request.request_id] = _Asked(request, arrays, future)
            self._inbox.put(lambda scheduler, at: scheduler.arrive(request, at))
        return future

    async def asubmit(
        self,
        model: str,
        inputs: Any,
        *,
        deadline_secs: float | None = None,
        tenant: str | None = None,
    ) -> Outputs:
        """Do what `submit` does, and await the outputs."""
        future = self.submit(model, inputs, deadline_secs=deadline_secs, tenant=tenant)
        return await asyncio.wrap_future(future)

    def inputs_of(self, model: str) -> tuple[TensorSpec, ...]:
        """Return the names, shapes and types of a member's inputs, in order."""
        return self._specs[model]

    def stats(self) -> EngineStats:
        """Return what has happened so far."""
        scheduler = self._scheduler
        members = {
            name: MemberStats(
                **vars(counters),
                tuned_for=artifacts.tuned_for(self._members[name].artifact),
                planned_bytes=sum(b for seat, b in self._needed.items() if seat.member == name),
            )
            for name, counters in self._counters.items()
        }
        return EngineStats(
            policy=self._policy.kind,
            place=self._place.kind,
            members=members,
            lanes=tuple(scheduler.lanes.values()) if scheduler else (),
            proofs=tuple(self._proofs.values()),
            faults=tuple(scheduler.faults) if scheduler else (),
        )

    @property
    def gpu_uuid(self) -> str | None:
        """Return the UUID of the GPU that is shared; None on CPUs."""
        return self._place.gpu_uuid

    def memory_bytes(self) -> dict[str, int]:
        """Return the memory that each member was found to hold, where the place can tell."""
        found: dict[str, int] = {}
        for seat, size in self._place.memory_bytes().items():
            found[seat.member] = found.get(seat.member, 0) + size
        return found

    # --- the dispatcher's thread ---------------------------------------------------------------

    def _dispatch(self, scheduler: Scheduler) -> None:
        try:
            while (event := self._next_event(scheduler)) is not None:
                for instruction in event(scheduler, self.clock()):
                    self._carry_out(instruction)
        except Exception as error:  # a bug, as of a policy, must not leave callers waiting
            log.exception("the dispatcher has failed")
            with self._gate:
                self._is_open = False
            for asked in list(self._asked.values()):
                self._answer(asked, error=RefusedError(f"the engine failed: {error!r}"))

    def _next_event(self, scheduler: Scheduler) -> Event | None:
        due_at = scheduler.next_tick()
        timeout = None if math.isinf(due_at) else max(_TICK_SECS, due_at - self.clock())
        try:
            return self._inbox.get(timeout=timeout)
        except queue.Empty:
            return lambda scheduler, at: scheduler.tick(at)

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Start(request_id=request_id):
                self._start(instruction, self._asked[request_id])
            case Complete(request_id=request_id):
                asked = self._asked[request_id]
                self._answer(asked, outputs=asked.outputs)
            case Refuse(request_id, reason, was_admitted):
                error = RefusedError(reason, was_admitted=was_admitted)
                self._answer(self._asked[request_id], error=error)
            case Fail(request_id=request_id, reason=reason):
                asked = self._asked[request_id]
                said = f"{asked.request.member} failed: {reason}"
                self._answer(asked, error=MemberError(said))
            case Evict(seat=seat, reason=reason):
                also = [lost for lost in self._place.evict(seat) if lost != seat]
                self._inbox.put(lambda s, at: s.lost(also, at, culprit=seat.member, reason=reason))
            case Reload(seat=seat):
                self._reload(seat)

    def _start(self, start: Start, asked: _Asked) -> None:
        seat, start_id = start.seat, start.start_id
        if not asked.is_wanted():
            self._inbox.put(lambda s, at: s.withdrawn(start_id, seat, at))
            return

        def told(answer: Done | Fault) -> None:
            if isinstance(answer, Done):
                self._inbox.put(lambda s, at: self._done(s, start_id, seat, asked, answer, at))
            else:
                self._inbox.put(lambda s, at: self._faulted(s, start_id, seat, answer, at))

        self._place.start(seat, start.segment, asked.inputs, told)

    def _done(
        self,
        scheduler: Scheduler,
        start_id: int,
        seat: Seat,
        asked: _Asked,
        done: Done,
        at: float,
    ) -> Sequence[Instruction]:
        asked.outputs = done.outputs
        return scheduler.ended(start_id, seat, done.secs, at)

    def _faulted(
        self, scheduler: Scheduler, start_id: int, seat: Seat, fault: Fault, at: float
    ) -> Sequence[Instruction]:
        running = next((r for r in scheduler.running if r.start_id == start_id), None)
        if running is None:  # evicted meanwhile
            return ()
        culprit = seat.member if fault.is_own else ""
        return scheduler.lost(fault.lost, at, culprit=culprit, reason=fault.reason)

    def _reload(self, seat: Seat) -> None:
        assert self._loader is not None

        def load() -> None:
            try:
                self._place.reload(seat)
            except Exception as error:
                reason = str(error) if isinstance(error, TunerdError) else repr(error)
                self._inbox.put(lambda s, at: self._not_reloaded(s, seat, reason, at))
            else:
                self._reloads.pop(seat, None)
                self._inbox.put(lambda s, at: s.ready(seat, at))

        self._loader.submit(load)

    def _not_reloaded(
        self, scheduler: Scheduler, seat: Seat, reason: str, at: float
    ) -> Sequence[Instruction]:
        self._reloads[seat] = tries = self._reloads.get(seat, 0) + 1
        log.warning("%s cannot be loaded into %s: %s", seat.member, seat.lane, reason)
        return (Reload(seat),) if tries < _RELOADS else scheduler.given_up(seat, reason, at)

    def _answer(
        self, asked: _Asked, *, outputs: Outputs | None = None, error: Exception | None = None
    ) -> None:
        with self._idle:
            self._asked.pop(asked.request.request_id, None)
            self._idle.notify_all()
        counters = self._counters[asked.request.member]
        if not asked.is_wanted():
            counters.cancelled += 1
        elif error is None:
            counters.ended(self.clock() - asked.request.arrived_at)
            asked.future.set_result(outputs or {})
        else:
            counters.failed += isinstance(error, MemberError)
            counters.refused += isinstance(error, RefusedError)
            asked.future.set_exception(error)
