"""The run time of a plan: loads its members, takes requests, answers futures.

with Engine(Plan.read("plan.yaml")) as engine:
    future = engine.submit("detector", {"x": image}, deadline_secs=0.02, tenant="shop")
    outputs = await engine.asubmit("detector", {"x": image})
"""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from tunerd.colocation import artifacts, undisturbed
from tunerd.colocation.buffers import InputBuffers
from tunerd.colocation.dispatcher import Dispatcher
from tunerd.colocation.estimates import Estimates
from tunerd.colocation.groups import groups_of, kernels_of, with_weights_of
from tunerd.colocation.memory import planned_bytes, require_room
from tunerd.colocation.places import place_of
from tunerd.colocation.places.base import Place
from tunerd.colocation.plan import Member, Plan, Proof
from tunerd.colocation.policies import policy_of
from tunerd.colocation.scheduler import Scheduler
from tunerd.colocation.stats import Counters, EngineStats, Launches, MemberStats
from tunerd.colocation.work import Group, Lane, RefusedError, Request, Seat
from tunerd.errors import InputError
from tunerd.vocabulary import Arrays, TensorSpec

OnStep = Callable[[str], None]


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
        self._place = place or place_of(self.plan.place, self.plan.device)
        self._say = on_step or (lambda _: None)
        self._ids = itertools.count()
        # Held while a number is given and the request taken, which may find that the engine fails.
        self._gate = threading.RLock()
        self._closing = threading.Lock()
        self._is_open = False
        self._is_started = False
        self._is_undisturbed = False
        self._members = {m.name: m for m in self.plan.members}
        self._groups: tuple[Group, ...] = ()
        self._kernels: dict[str, Path] = {}  # by member: the artifact by which it runs
        self._specs: dict[str, tuple[TensorSpec, ...]] = {}
        self._proofs: dict[str, Proof] = {}
        self._needed: dict[str, int] = {}
        self._brought_before: dict[str, int] = {}  # weights of groups, when it was started
        self._scheduler: Scheduler | None = None
        self._dispatcher: Dispatcher | None = None

    # --- life ----------------------------------------------------------------------------------

    def start(self) -> Self:
        """Check and load all members, and begin to take requests. Once in an engine's life.

        Raises LoadError for an artifact that is not the plan's, HostError where the lanes or the
        memory do not fit, and InfrastructureError where a member does not run.
        """
        if self._is_started:
            raise RuntimeError("an engine is started once; make another one")
        self._is_started = True
        members = self.plan.ordered
        self._groups = groups_of(members, self._policy.most_together)
        if self.plan.weights_gib is not None:
            self._groups = with_weights_of(self._groups, int(self.plan.weights_gib * (1 << 30)))
        self._kernels = kernels_of(members, self._groups)
        for member in members:
            artifacts.check(member, self.plan.device, self._kernels[member.name])
            self._specs[member.name] = artifacts.inputs_of(self._kernels[member.name])
        try:
            layouts = [self._place.cut(lanes) for lanes in self._layouts()]
            every = [lane for lanes in layouts for lane in lanes]
            self._require_room(every)
            self._needed = planned_bytes(
                self._place, members, every, self._groups, cut_of=self._policy.cut_of
            )
            self._scheduler = self._loaded(layouts)
            self._brought_before = dict(self._place.brought())
        except BaseException:
            self._place.close()
            raise
        self._dispatcher = Dispatcher(self._scheduler, self._place, on_failure=self._stop_taking)
        undisturbed.begin()
        self._is_undisturbed = self._is_open = True
        return self

    def _require_room(self, lanes: Sequence[Lane]) -> None:
        """Raise InputError where the weights of a group may have too little memory."""
        depth = min(self._place.depth, self._policy.depth)
        for group in self._groups:
            seats = sum(not set(group.members).isdisjoint(lane.members) for lane in lanes)
            require_room(group, seats if self._place.shares_weights else 1, depth=depth)

    def _layouts(self) -> list[tuple[Lane, ...]]:
        """Return the lanes of each layout of the plan; those after the first under other names."""
        named = self.plan.layouts
        layouts = [self._policy.lay_out(members) for members in named]
        pairs = zip(named, layouts, strict=True)
        if any(members != named[0] and lanes == layouts[0] for members, lanes in pairs):
            raise InputError(
                f"the policy {self._policy.kind} has no shares that `shares` could change; leave "
                "them out, or choose space or ordered"
            )
        return [
            tuple(replace(lane, name=f"{lane.name}/{nth}") if nth else lane for lane in lanes)
            for nth, lanes in enumerate(layouts)
        ]

    def _loaded(self, layouts: Sequence[Sequence[Lane]]) -> Scheduler:
        lanes = [lane for each in layouts for lane in each]
        estimates = Estimates()
        segments: dict[Seat, int] = {}
        grouped = {name: group for group in self._groups for name in group.members}
        pairs = ((m, x) for m in self.plan.ordered for x in lanes if m.name in x.members)
        for member, lane in pairs:
            group = grouped.get(member.name)
            seat = Seat(member.name if group is None else group.name, lane.name)
            if seat in segments:  # with another of its group
                continue
            self._say(f"loading {seat.member} into {seat.lane}")
            if group is None:
                loaded = self._place.load(member, lane, cut=self._policy.cut_of(member.name))
            else:
                some = [self._members[n] for n in group.members if n in lane.members]
                loaded = self._place.load_group(group, some, lane)
                estimates.compiled_for(seat, loaded.launch_secs)
                for count, secs in loaded.launch_secs.items():
                    estimates.observe(seat, 0, secs, now=time.monotonic(), count=count)
            segments[seat] = len(loaded.segment_secs)
            self._proofs[seat.lane] = loaded.proof
            for segment, secs in enumerate(loaded.segment_secs):
                estimates.observe(seat, segment, secs, now=time.monotonic())
        return Scheduler(
            self.plan.ordered,
            layouts[0],
            self._policy,
            segments,
            estimates,
            other_lanes=layouts[1:],
            depth=self._place.depth,
            groups=self._groups,
            tries_apart=self._place.runs_apart > 0,
        )

    def drain(self, timeout_secs: float | None = None) -> bool:
        """Take no more requests, and wait for the answers of all that were taken.

        Returns whether all have theirs. Raises RuntimeError in a future's callback.
        """
        if self._dispatcher is not None:
            self._dispatcher.refuse_own_thread()
        self._stop_taking()
        return self._dispatcher is None or self._dispatcher.wait(timeout_secs)

    def close(self, *, drain_secs: float | None = 0.0) -> None:
        """Stop. Requests without an answer after `drain_secs` are refused; None waits for all.

        Idempotent.
        """
        self.drain(drain_secs)
        if self._dispatcher is not None:
            with self._closing:
                self._dispatcher.close()
                self._place.close()
                if self._is_undisturbed:
                    self._is_undisturbed = False
                    undisturbed.end()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, raised: object, *_: object) -> None:
        self.close(drain_secs=None if raised is None else 0.0)

    @property
    def is_open(self) -> bool:
        """Whether it takes requests: from start to drain or close, or until it fails itself."""
        return self._is_open

    def _stop_taking(self) -> None:
        with self._gate:
            self._is_open = False

    # --- requests ------------------------------------------------------------------------------

    def submit(
        self,
        model: str,
        inputs: Any,
        *,
        deadline_secs: float | None = None,
        tenant: str | None = None,
    ) -> Future[Arrays]:
        """Have a member run once; return the future of its outputs by name, NumPy arrays.

        Args:
            inputs: arrays by name, or in the model's order, or what `input_buffers` returned, which
                is not copied on the way. They are read until the future is done.
            deadline_secs: from now; the member's SLO if not given, none where it has none.
            tenant: one of the member's; its first if not given.

        Raises InputError, TypeError or ValueError for what the member cannot take, and RefusedError
        where the engine takes nothing any more. The future raises RefusedError for a request that
        cannot be met, and MemberError for one whose member failed. A future may be cancelled while
        it waits.
        """
        future: Future[Arrays] = Future()
        self._take(model, inputs, deadline_secs, tenant, future)
        return future

    async def asubmit(
        self,
        model: str,
        inputs: Any,
        *,
        deadline_secs: float | None = None,
        tenant: str | None = None,
    ) -> Arrays:
        """Do what `submit` does, and await the outputs."""
        future: asyncio.Future[Arrays] = asyncio.get_running_loop().create_future()
        self._take(model, inputs, deadline_secs, tenant, future)
        return await future

    def _take(
        self,
        model: str,
        inputs: Any,
        deadline_secs: float | None,
        tenant: str | None,
        future: Future[Arrays] | asyncio.Future[Arrays],
    ) -> None:
        member = self._member(model)
        tenant = member.tenants[0] if tenant is None else tenant
        if tenant not in member.tenants:
            known = ", ".join(member.tenants)
            raise InputError(f"{model} has no tenant '{tenant}'; it has {known}")
        if self._dispatcher is None:
            raise RefusedError("the engine was not started; call start(), or use `with`")
        specs = self._specs[model]
        if isinstance(inputs, InputBuffers) and inputs.specs == specs:
            arrays = inputs.arrays
        else:
            arrays = artifacts.checked_inputs(model, specs, inputs)
        if deadline_secs is None and member.slo_ms is not None:
            deadline_secs = member.slo_ms / 1e3
        now = time.monotonic()  # to copy the inputs is part of the answer's time
        deadline_at = math.inf if deadline_secs is None else now + deadline_secs
        if self._is_open and self._dispatcher.refuses(model, deadline_at, now, future):
            return
        held = self._place.holding(model, arrays)
        with self._gate:
            if not self._is_open:
                self._place.give_back(model, held)
                raise RefusedError("the engine takes no requests any more")
            request = Request(next(self._ids), model, tenant, now, deadline_at)
            self._dispatcher.take(request, held, future)

    def reshare(self, shares: Mapping[str, int], *, timeout_secs: float | None = None) -> float:
        """Give members other shares while they serve; return after how many seconds they have them.

        What runs goes on to its end where it began, nothing else starts meanwhile, and what waits
        goes on waiting: no request is lost.

        Args:
            shares: in percent by member, as the plan's `share` or one of its `shares`. Members
                that are not named get what goes with these in the plan.
            timeout_secs: how long to wait; it is changed later, then, too.

        Raises InputError for shares that the plan does not name together, and RefusedError where
        the engine does not run.
        """
        for name in shares:
            self._member(name)
        layouts = [{m.name: m.share for m in members} for members in self.plan.layouts]
        fitting = [n for n, of in enumerate(layouts) if all(of[m] == shares[m] for m in shares)]
        if not fitting:
            known = "; ".join(", ".join(f"{m} {of[m]}%" for m in of) for of in layouts)
            raise InputError(f"the plan does not name these shares together; it names {known}")
        with self._gate:
            if self._dispatcher is None or not self._is_open:
                raise RefusedError("the engine does not run")
            changed = self._dispatcher.reshare(fitting[0])
        return changed.result(timeout_secs)

    def kill(self, model: str) -> None:
        """Kill a member's processes, as the system may where memory runs out: to see what follows.

        They are started again as after any fault. Raises InputError for a member that there is not,
        and HostError where the place has no process of a member that may be killed.
        """
        self._place.kill(self._member(model).name)

    def inputs_of(self, model: str) -> tuple[TensorSpec, ...]:
        """Return the names, shapes and types of a member's inputs, in order."""
        member = self._member(model)
        return self._specs.get(model) or artifacts.inputs_of(member.artifact)

    def input_buffers(self, model: str) -> InputBuffers:
        """Return arrays for a member's inputs, zeros at first, that the device reads itself.

        On a GPU they are pinned memory, as much as the inputs take, until nobody holds them. Who
        receives or decodes inputs writes them there, and `submit` has no more to copy. Raises
        InputError for a member that there is not, RefusedError where the engine does not run.
        """
        specs = self.inputs_of(model)
        if not self._is_open:
            raise RefusedError("the engine does not run")
        return InputBuffers(specs, self._place.lent(specs))

    def _member(self, name: str) -> Member:
        if name not in self._members:
            known = ", ".join(self._members)
            raise InputError(f"there is no member '{name}'; there are {known}")
        return self._members[name]

    # --- what has happened ---------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Return what has happened so far."""
        scheduler, dispatcher = self._scheduler, self._dispatcher
        members = {
            name: MemberStats(
                **vars(dispatcher.counted(name) if dispatcher else Counters()),
                tuned_for=artifacts.tuned_for(self._kernels.get(name, member.artifact)),
                planned_bytes=self._needed.get(name, 0),
            )
            for name, member in self._members.items()
        }
        return EngineStats(
            policy=self._policy.kind,
            place=self._place.kind,
            members=members,
            lanes=tuple(scheduler.lanes.values()) if scheduler else (),
            proofs=tuple(self._proofs.values()),
            faults=tuple(scheduler.faults) if scheduler else (),
            groups={group.name: self._launches(group.name) for group in self._groups},
            down={
                name: why
                for name in self._members
                if scheduler is not None and (why := scheduler.why_down(name))
            },
        )

    def _launches(self, group: str) -> Launches:
        if self._dispatcher is None:
            return Launches()
        found = self._dispatcher.launches.get(group, Launches()).copy()
        before = self._brought_before.get(group, 0)
        found.brought = max(0, self._place.brought().get(group, 0) - before)
        return found

    @property
    def gpu_uuid(self) -> str | None:
        """Return the UUID of the GPU that is shared; None on CPUs."""
        return self._place.gpu_uuid

    def memory_bytes(self) -> dict[str, int]:
        """Return the memory that each member, or group, was found to hold, where it is known."""
        found: dict[str, int] = {}
        for seat, size in self._place.memory_bytes().items():
            found[seat.member] = found.get(seat.member, 0) + size
        return found
