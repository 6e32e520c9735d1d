"""The slice actors of a run, each on the GPU that its slice was planned on.

Ray chooses an actor's GPU among those of its node. A slice that was meant for another one takes
that actor over; where no slice waits for the GPU, the actor holds it until all have their places.
"""

from __future__ import annotations

from typing import Any

from tunerd.cluster.actor_bodies import SliceActor
from tunerd.cluster.connection import Connection, gpu_ids
from tunerd.cluster.nodes import match_slices
from tunerd.cluster.ray_calls import Calls
from tunerd.vocabulary import SliceSpec


class SliceActors:
    """Slice actors by their slices' ids: those that live or are being started."""

    def __init__(self, connection: Connection, calls: Calls) -> None:
        self.actors: dict[str, Any] = {}
        self._connection, self._calls = connection, calls
        self._spare: list[Any] = []  # actors on GPUs where no slice waits
        self._without_place: set[str] = set()  # slices whose actors Ray has found no room for yet
        self._specs: dict[str, tuple[SliceSpec, str | None]] = {}  # each with its node

    def start(self, spec: SliceSpec, node_id: str | None) -> None:
        """Start a slice actor on its GPU; it answers "start" with its proof."""
        self._specs[spec.slice_id] = (spec, node_id)
        actor = self.actors[spec.slice_id] = self._actor(spec, node_id)
        if spec.gpu_uuid is None:
            self._calls.watch(spec.slice_id, "start", actor.start.remote(spec))
        else:  # Ray chooses the GPU
            self._without_place.add(spec.slice_id)
            self._calls.watch(spec.slice_id, "place", actor.__ray_call__.remote(gpu_ids))

    def restart(self, slice_id: str) -> None:
        """Start a slice again that was dropped; it keeps its place on its device."""
        self.start(*self._specs[slice_id])

    def placed(self, slice_id: str, gpu_ids: tuple[str, ...]) -> None:
        """Start a slice of the GPU that an actor got: the one it was made for, or another one."""
        node_id = self._specs[slice_id][1]
        waiting = [self._specs[s] for s in (slice_id, *self._calls.of("place"))]
        (spec,), _ = match_slices([(node_id, gpu_ids)], waiting)
        if spec is None:  # no slice of that GPU waits: hold it, so that Ray gives another one
            self._spare.append(self.actors[slice_id])
            self.restart(slice_id)
            return
        actors, other = self.actors, spec.slice_id
        actors[slice_id], actors[other] = actors[other], actors[slice_id]
        self._without_place.discard(other)
        self._calls.exchange(slice_id, other)
        self._calls.watch(other, "start", actors[other].start.remote(spec))
        self.free_spare()

    def free_spare(self) -> None:
        """End the actors that hold GPUs which no slice waits for, once all have their places."""
        if self._calls.of("place"):
            return
        spare, self._spare = self._spare, []
        for actor in spare:
            self._connection.ray.kill(actor)

    def forget_all(self) -> tuple[list[Any], list[Any]]:
        """Forget all actors; return those that have their places, and those that answer nothing."""
        actors, self.actors = self.actors, {}
        waiting = [actors.pop(s) for s in self._without_place & actors.keys()]
        self._without_place.clear()
        return list(actors.values()), waiting

    def _actor(self, spec: SliceSpec, node_id: str | None) -> Any:
        options: dict[str, Any] = {
            "num_cpus": 0,
            "num_gpus": 0 if spec.gpu_uuid is None else spec.pct / 100,
            "max_restarts": 0,
        }
        if node_id is not None:
            options["scheduling_strategy"] = self._connection.on(node_id)
        actor = self._connection.ray.remote(SliceActor).options(**options)
        return actor.remote(self._connection.scratch)
