"""A stand-in for Ray, of one process: actors that are objects, calls that end when they are waited
for, in an order drawn from a seed, and losses on cue. It proves nothing of Ray itself."""

from __future__ import annotations

import random
import sys
import types
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


class RayError(Exception):
    pass


class ActorDiedError(RayError):
    pass


class GetTimeoutError(RayError):
    pass


class RayTaskError(RayError):
    def __init__(self, cause: BaseException) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.cause = cause


class Reference:
    """A call, or a value that was put."""

    def __init__(self) -> None:
        self.value: Any = None
        self.error: RayError | None = None
        self.is_done = False

    def end(self, value: Any = None, error: RayError | None = None) -> None:
        self.value, self.error, self.is_done = value, error, True


@dataclass
class Actor:
    """A process of the cluster: an object, and what it was asked and has not done."""

    name: str
    make: Callable[[], Any]
    node_id: str = ""
    calls: deque[tuple[str, tuple[Any, ...], Reference]] = field(default_factory=deque)
    instance: Any = None
    death: str = ""

    def die(self, message: str) -> None:
        self.death = self.death or message
        while self.calls:
            self.calls.popleft()[2].end(error=ActorDiedError(self.death))


class Handle:
    def __init__(self, actor: Actor) -> None:
        self._actor = actor

    def __getattr__(self, method: str) -> Any:
        def remote(*arguments: Any) -> Reference:
            reference = Reference()
            if self._actor.death:
                reference.end(error=ActorDiedError(self._actor.death))
            else:
                self._actor.calls.append((method, arguments, reference))
            return reference

        return types.SimpleNamespace(remote=remote)


# Says why an actor dies at a call, before it does the work or after it; "" where it lives.
Strike = Callable[[Actor, str, tuple[Any, ...]], str]


class Affinity:
    """Where an actor or a task is to be."""

    def __init__(self, node_id: str, *, soft: bool) -> None:
        self.node_id = node_id


class Metric:
    """A number that nobody reads."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def set(self, *_: Any, **__: Any) -> None: ...
    def inc(self, *_: Any, **__: Any) -> None: ...


class SimulatedRay:
    """What `tunerd.cluster.ray_cluster` uses of the module `ray`."""

    def __init__(self, seed: str, strike: Strike, at_wait: Callable[[], None]) -> None:
        self._random = random.Random(seed)
        self._strike, self._at_wait = strike, at_wait
        self._is_up = False
        self.actors: list[Actor] = []
        self.node_ids = ["node-0"]  # the driver's first
        self.here = "node-0"  # where the call is done that is being done
        self._joined = 1  # nodes so far
        self.exceptions = types.SimpleNamespace(
            RayError=RayError, RayTaskError=RayTaskError, GetTimeoutError=GetTimeoutError
        )

    def install(self) -> None:
        """Become the module `ray` of this process."""
        loader = types.SimpleNamespace(reset_cache=lambda: None)
        raylet = types.SimpleNamespace(
            Config=types.SimpleNamespace(initialize=lambda _: None),
            AuthenticationTokenLoader=types.SimpleNamespace(instance=lambda: loader),
        )
        affinity = types.SimpleNamespace(NodeAffinitySchedulingStrategy=Affinity)
        metrics = types.SimpleNamespace(Counter=Metric, Gauge=Metric)
        sys.modules |= {  # type: ignore[assignment]
            "ray": self,
            "ray._raylet": raylet,
            "ray.util": types.SimpleNamespace(),
            "ray.util.metrics": metrics,
            "ray.util.scheduling_strategies": affinity,
        }

    def init(self, **_: Any) -> None:
        self._is_up = True

    def is_initialized(self) -> bool:
        return self._is_up

    def shutdown(self) -> None:
        self._is_up = False
        for actor in self.actors:
            actor.die("the cluster has ended")

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0}

    available_resources = cluster_resources

    def get_gpu_ids(self) -> list[int]:
        return []

    # --- nodes of a cluster that was joined ----------------------------------------------------

    def nodes(self) -> list[dict[str, Any]]:
        resources = {"CPU": 2.0}
        return [
            {"NodeID": n, "Resources": resources, "Alive": True, "RayletSocketName": ""}
            for n in self.node_ids
        ]

    def get_runtime_context(self) -> Any:
        return types.SimpleNamespace(get_node_id=lambda: self.node_ids[0])

    def join_node(self) -> str:
        """Have a node join, and return its id."""
        self.node_ids.append(f"node-{self._joined}")
        self._joined += 1
        return self.node_ids[-1]

    def leave_node(self, node_id: str, message: str) -> None:
        self.node_ids.remove(node_id)
        for actor in self.actors:
            if actor.node_id == node_id:
                actor.die(message)

    # --- actors and tasks ----------------------------------------------------------------------

    def remote(self, work: Any = None, **_: Any) -> Any:
        """Return what makes actors of a class, or does a function on a node."""
        if work is None:  # with options: a decorator
            return self.remote

        def options(scheduling_strategy: Affinity | None = None, **_: Any) -> Any:
            node_id = scheduling_strategy.node_id if scheduling_strategy else self.node_ids[0]

            def create(*arguments: Any) -> Handle:
                return Handle(self._actor(work.__name__, lambda: work(*arguments), node_id))

            def task(*arguments: Any) -> Any:
                does = Handle(self._actor(work.__name__, lambda: None, node_id))
                return does.__ray_call__.remote(lambda _: work(*arguments))

            is_class = isinstance(work, type)
            return types.SimpleNamespace(remote=create if is_class else task)

        return types.SimpleNamespace(options=options)

    def _actor(self, name: str, make: Callable[[], Any], node_id: str) -> Actor:
        self.actors.append(Actor(name, make, node_id))
        if node_id not in self.node_ids:
            self.actors[-1].die("its node has left")
        return self.actors[-1]

    def kill(self, handle: Handle) -> None:
        handle._actor.die("it was killed")

    def put(self, value: Any) -> Reference:
        reference = Reference()
        reference.end(value)
        return reference

    def get(self, asked: Any, timeout: float | None = None) -> Any:
        references = asked if isinstance(asked, list) else [asked]
        for reference in references:
            while not reference.is_done:
                self._step()
            if reference.error is not None:
                raise reference.error
        return [r.value for r in references] if isinstance(asked, list) else asked.value

    def wait(
        self, asked: Sequence[Reference], *, num_returns: int, timeout: float
    ) -> tuple[list[Reference], list[Reference]]:
        self._at_wait()
        if timeout and not any(r.is_done for r in asked):
            self._step()
        done = [r for r in asked if r.is_done][:num_returns]
        return done, [r for r in asked if r not in done]

    def _step(self) -> None:
        """Do one call of any actor."""
        working = [a for a in self.actors if a.calls]
        actor = self._random.choice(working)
        method, arguments, reference = actor.calls.popleft()
        message = self._strike(actor, method, arguments)
        if actor.death or message:
            actor.die(message)
            reference.end(error=ActorDiedError(actor.death))
            return
        self.here = actor.node_id
        try:
            if actor.instance is None:
                actor.instance = actor.make()
            values = tuple(a.value if isinstance(a, Reference) else a for a in arguments)
            if method == "__ray_call__":
                value = values[0](actor.instance, *values[1:])
            else:
                value = getattr(actor.instance, method)(*values)
        except Exception as error:
            reference.end(error=RayTaskError(error))
        else:
            reference.end(value)
