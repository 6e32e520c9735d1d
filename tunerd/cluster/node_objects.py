"""One object on each node of a cluster, in an actor that may hold all GPUs of its node."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any, Self

from tunerd.cluster.connection import Connection
from tunerd.cluster.ray_calls import Calls
from tunerd.system.processes import ProcessId, has_variable

PLACE_SECS = 60.0  # until Ray has room for an actor, and its process has started
_CALL_SECS = 60.0
_THREADS = "OMP_NUM_THREADS"


class NodeObjects:
    """What `make` returns on each node that lives now. Close it, or use it as a context manager.

    with_gpus: hold all GPUs of each node, and leave the nodes out that have none.

    Args:
        address: HOST:PORT of a cluster, or "auto".
        run: a name for what is done there.
        make: is called in a process of each node, and has to be importable there.

    Raises InfrastructureError where a node's GPUs are held by others, or Ray cannot be joined, and
    the TunerdError that `make` raises.
    """

    def __init__(self, address: str, run: str, make: Callable[[], Any], *, with_gpus: bool) -> None:
        self._connection = Connection(address, run, cpus=0, gpus=0, logs=None)
        try:
            ray = self._connection.ray
            self._calls = Calls(ray, self._connection.daemons, {})
            holder = ray.remote(_Holder)
            alive = {n["NodeID"]: n["Resources"].get("GPU", 0) for n in ray.nodes() if n["Alive"]}
            self._actors = {
                node: holder.options(
                    num_cpus=0,
                    num_gpus=count if with_gpus else 0,
                    scheduling_strategy=self._connection.on(node),
                ).remote(make)
                for node, count in alive.items()
                if count or not with_gpus
            }
            ready = [actor.ready.remote() for actor in self._actors.values()]
            self._calls.got(ready, "an actor on each node, with all of its GPUs", PLACE_SECS)
        except BaseException:
            self._connection.close()
            raise

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(self._actors)

    def call(self, node: str, method: str, *args: Any, limit_secs: float = _CALL_SECS) -> Any:
        """Return what a method returns; raises the TunerdError that it raises.

        InfrastructureError where the node does not answer within `limit_secs`.
        """
        reference = self._actors[node].call.remote(method, *args)
        return self._calls.got([reference], f"{method} on node {node[:8]}", limit_secs)[0]

    def close(self) -> None:
        """End the actors and leave the cluster. Idempotent."""
        actors, self._actors = self._actors, {}
        for actor in actors.values():
            with contextlib.suppress(Exception):  # Ray has ended it, or itself
                self._connection.ray.kill(actor)
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Holder:
    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def ready(self) -> None:
        """Make the object. What the constructor of an actor raises, Ray tells as text alone."""
        self._object = self._make()

    def call(self, method: str, *args: Any) -> Any:
        _forget_threads_of_ray()
        return getattr(self._object, method)(*args)


def _forget_threads_of_ray() -> None:
    """Let programs that are started from here have as many threads as their node lets them.

    Ray sets one thread for an actor without CPUs, where the node says nothing.
    """
    own, threads = ProcessId.of(os.getpid()), os.environ.get(_THREADS)
    if own is not None and threads is not None and not has_variable(own, _THREADS, threads):
        del os.environ[_THREADS]
