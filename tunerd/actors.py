"""Ray: where tuners and slices live. The only module that imports it.

A slice actor holds `num_gpus = pct/100` and no CPU; a tuner holds the CPUs that it uses. On CPU
slices the tuner of a lane holds the cores, and the slice of that lane measures on them in turn.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from tunerd import events as ev
from tunerd.errors import HostError, InfrastructureError, TunerdError
from tunerd.slices.base import Plan, Slice
from tunerd.vocabulary import (
    SEARCH,
    Arrays,
    Build,
    Candidate,
    CapProof,
    Failure,
    Measurement,
    Profile,
    SliceSpec,
    Task,
)

log = logging.getLogger(__name__)

READY_SECS = 180.0
OBJECT_STORE_BYTES = 256 << 20

# Before ray is imported: on Linux it listens on all interfaces otherwise.
_LOCAL_ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


@dataclass(frozen=True)
class TunerSpec:
    """A tuner as planned: the CPUs that it holds, and the cores that it is pinned to."""

    tuner_id: str
    cpus: int
    cores: tuple[int, ...] = ()
    lane: str | None = None
    node_id: str | None = None


@dataclass(frozen=True)
class Node:
    """One machine of the cluster, and the slices planned on it."""

    node_id: str
    hostname: str
    cpus: int
    plan: Plan


@dataclass(frozen=True)
class Answer:
    """The end of one call: `value` or `error`, and when it started and ended (host clock)."""

    worker_id: str
    method: str  # "warm_up", "propose", "build" or "measure"
    value: Any
    error: str
    started_at: float
    ended_at: float


class TunerActor:
    """A Tuner behind Ray."""

    def __init__(
        self, tasks: Sequence[Task], seed: int, threads: int, number: int, cores: tuple[int, ...]
    ) -> None:
        from tunerd.tuner import Tuner

        self._tuner = Tuner(tasks, seed=seed, threads=threads, island_number=number, cores=cores)

    def warm_up(self) -> float:
        return self._tuner.warm_up()

    def propose(self, task_id: str, count: int, told: Any, exclude: Any) -> Any:
        return self._tuner.propose(task_id, count, told, exclude)

    def build(self, candidates: tuple[Candidate, ...]) -> list[Build | Failure]:
        return self._tuner.build(candidates)


class SliceActor:
    """A Slice behind Ray. Makes no CUDA context: its runner does."""

    def __init__(self) -> None:
        self._slice: Slice | None = None

    def device_index(self) -> int:
        """Return the GPU that Ray gave this actor, 0 where it holds none."""
        import ray

        ids = ray.get_gpu_ids()
        return int(ids[0]) if ids else 0

    def start(self, spec: SliceSpec) -> CapProof:
        from tunerd.slices import member

        self._slice = member(spec.kind)(spec)
        return self._slice.start()

    def measure(
        self, builds: tuple[Build, ...], profile: Profile, neighbours: int
    ) -> list[Measurement | Failure]:
        assert self._slice is not None
        results = self._slice.measure(builds, profile)
        return [
            replace(r, conditions=replace(r.conditions, neighbours=neighbours))
            if isinstance(r, Measurement)
            else r
            for r in results
        ]

    def compare(self, builds: tuple[Build, ...], profile: Profile) -> list[Measurement | Failure]:
        assert self._slice is not None
        return self._slice.compare(builds, profile)

    def run_model(self, artifact: str, inputs: Arrays) -> Arrays:
        assert self._slice is not None
        return self._slice.run_model(artifact, inputs)

    def compare_models(
        self, artifacts: tuple[str, ...], profile: Profile
    ) -> list[Measurement | Failure]:
        assert self._slice is not None
        return self._slice.compare_models(artifacts, profile)

    def close(self) -> None:
        if self._slice is not None:
            self._slice.close()


class Cluster:
    """A Ray cluster with this run's actors in it: a private local one, or one at an address.

    Close it, or use it as a context manager: actors are asked to close before Ray ends them.
    """

    def __init__(self, *, address: str | None, run: str, cpus: int, gpus: int) -> None:
        self._folder = tempfile.mkdtemp(prefix="tunerd-ray-") if address is None else None
        self._actors: dict[str, Any] = {}
        self._pending: dict[Any, tuple[str, str, float]] = {}
        os.environ["TUNERD_RUN"] = run
        if address is None:
            for name, value in _LOCAL_ENVIRONMENT.items():
                os.environ.setdefault(name, value)
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        import ray

        self._ray = ray
        try:
            if address is None:
                ray.init(
                    num_cpus=cpus,
                    num_gpus=gpus,
                    _node_ip_address="127.0.0.1",
                    _temp_dir=self._folder,
                    object_store_memory=OBJECT_STORE_BYTES,
                    include_dashboard=False,
                    log_to_driver=False,
                    configure_logging=False,
                )
            else:
                ray.init(
                    address=address,
                    log_to_driver=False,
                    configure_logging=False,
                    runtime_env={"env_vars": {"TUNERD_RUN": run}},
                )
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            where = f"at {address}" if address else "on this machine"
            raise InfrastructureError(
                f"Ray {where} cannot be used: {str(error).strip().splitlines()[0]}; check the "
                "address, and RAY_AUTH_TOKEN where the cluster uses tokens"
            ) from error

    # --- planning on the nodes -----------------------------------------------------------------

    def nodes(self, kind: str, pct: int, per_device: int | None, *, external: bool) -> list[Node]:
        """Plan the slices of every node that is alive, on that node."""
        ray = self._ray
        plan = ray.remote(num_cpus=0, max_retries=0)(plan_here)
        alive = [n for n in ray.nodes() if n["Alive"]]
        asked = [
            plan.options(scheduling_strategy=self._on(n["NodeID"])).remote(
                kind, pct, per_device, external
            )
            for n in alive
        ]
        plans = ray.get(asked, timeout=READY_SECS)
        return [
            Node(n["NodeID"], n["NodeManagerHostname"], int(n["Resources"].get("CPU", 0)), p)
            for n, p in zip(alive, plans, strict=True)
        ]

    # --- workers -------------------------------------------------------------------------------

    def start_slices(self, specs: Sequence[tuple[SliceSpec, str | None]]) -> list[CapProof]:
        """Start a slice actor for each (spec, node) and return their proofs, in order.

        Raises HostError or InfrastructureError, saying what was asked and what is free.
        """
        ray = self._ray
        actor = ray.remote(max_restarts=0)(SliceActor)
        handles = []
        for spec, node_id in specs:
            needs_gpu = spec.kind in ("mps", "whole")
            options: dict[str, Any] = {
                "num_cpus": 0,
                "num_gpus": spec.pct / 100 if needs_gpu else 0,
            }
            if node_id is not None:
                options["scheduling_strategy"] = self._on(node_id)
            handles.append(actor.options(**options).remote())
        asked = f"{len(specs)} slices of {specs[0][0].pct}%"
        indices = self._got([h.device_index.remote() for h in handles], asked)
        # Ray chooses the GPU; each actor then gets a spec that was planned for that one.
        left = list(specs)
        matched: list[tuple[SliceSpec, Any]] = []
        for handle, index in zip(handles, indices, strict=True):
            chosen = next((s for s in left if s[0].device_index == index), left[0])
            left.remove(chosen)
            matched.append((chosen[0], handle))
        proofs = self._got([h.start.remote(s) for s, h in matched], asked)
        for spec, handle in matched:
            self._actors[spec.slice_id] = handle
        by_id = {p.slice_id: p for p in proofs}
        return [by_id[s.slice_id] for s, _ in specs]

    def start_tuners(self, specs: Sequence[TunerSpec], tasks: Sequence[Task], seed: int) -> None:
        """Start tuner actors; they warm up while the slices prove themselves."""
        ray = self._ray
        actor = ray.remote(max_restarts=0)(TunerActor)
        shared = ray.put(tuple(tasks))
        for number, spec in enumerate(specs):
            options: dict[str, Any] = {"num_cpus": spec.cpus, "num_gpus": 0}
            if spec.node_id is not None:
                options["scheduling_strategy"] = self._on(spec.node_id)
            handle = actor.options(**options).remote(shared, seed, spec.cpus, number, spec.cores)
            self._actors[spec.tuner_id] = handle
            self._watch(spec.tuner_id, "warm_up", handle.warm_up.remote())

    def submit(self, instruction: ev.Propose | ev.BuildThem | ev.Measure) -> None:
        """Carry out an instruction; its end comes back from `answers`."""
        actor = self._actors[instruction.worker_id]
        match instruction:
            case ev.Propose(worker_id, task, count, told, exclude):
                call = actor.propose.remote(task.task_id, count, told, exclude)
                self._watch(worker_id, "propose", call)
            case ev.BuildThem(worker_id, candidates):
                self._watch(worker_id, "build", actor.build.remote(candidates))
            case ev.Measure(worker_id, builds, neighbours):
                call = actor.measure.remote(builds, SEARCH, neighbours)
                self._watch(worker_id, "measure", call)

    def answers(self, timeout_secs: float) -> list[Answer]:
        """Return the calls that ended, waiting at most `timeout_secs` for the first."""
        if not self._pending:
            return []
        ray = self._ray
        waiting = list(self._pending)
        done, _ = ray.wait(waiting, num_returns=1, timeout=timeout_secs)
        if done:  # and whatever ended meanwhile
            done, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0)
        answers = []
        for reference in done:
            worker_id, method, started_at = self._pending.pop(reference)
            value, error = None, ""
            try:
                value = ray.get(reference)
            except ray.exceptions.RayError as problem:
                error = str(problem).strip().splitlines()[-1]
            answers.append(Answer(worker_id, method, value, error, started_at, time.time()))
        return answers

    def call(self, worker_id: str, method: str, *arguments: Any) -> Any:
        """Call a worker and wait; raises InfrastructureError where it is lost."""
        reference = getattr(self._actors[worker_id], method).remote(*arguments)
        return self._got([reference], f"{method} in {worker_id}", timeout_secs=3600.0)[0]

    def build_all(self, candidates: Sequence[Candidate]) -> list[Build | Failure]:
        """Build candidates on all tuners at once; results in order."""
        tuners = [a for name, a in self._actors.items() if name.startswith("tuner")]
        parts = [candidates[i :: len(tuners)] for i in range(len(tuners))]
        asked = [t.build.remote(tuple(p)) for t, p in zip(tuners, parts, strict=True) if p]
        found: dict[str, Build | Failure] = {}
        built = self._got(asked, "building the finalists", timeout_secs=3600.0)
        for part, results in zip((p for p in parts if p), built, strict=True):
            found |= {c.candidate_id: r for c, r in zip(part, results, strict=True)}
        return [found[c.candidate_id] for c in candidates]

    def drop(self, worker_id: str) -> None:
        """Forget a worker that is lost, and whatever it was asked."""
        self._actors.pop(worker_id, None)
        self._pending = {r: p for r, p in self._pending.items() if p[0] != worker_id}

    def close(self) -> None:
        """Close the slices, then end the actors and a local cluster. Idempotent."""
        ray = self._ray
        actors, self._actors = self._actors, {}
        if ray.is_initialized():
            closing = [a.close.remote() for a in actors.values() if hasattr(a, "close")]
            with contextlib.suppress(Exception):
                ray.wait(closing, num_returns=len(closing), timeout=15.0)
            for actor in actors.values():
                with contextlib.suppress(Exception):
                    ray.kill(actor)
            ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- Ray's words ---------------------------------------------------------------------------

    def _watch(self, worker_id: str, method: str, reference: Any) -> None:
        self._pending[reference] = (worker_id, method, time.time())

    def _got(self, references: list[Any], asked: str, timeout_secs: float = READY_SECS) -> Any:
        ray = self._ray
        try:
            return ray.get(references, timeout=timeout_secs)
        except ray.exceptions.GetTimeoutError as error:
            raise InfrastructureError(
                f"{asked}: not ready after {timeout_secs:.0f} s; asked of the cluster "
                f"{ray.cluster_resources()}, free {ray.available_resources()}"
            ) from error
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, TunerdError):
                raise cause from None
            raise InfrastructureError(f"{asked}: {cause!r}") from error
        except ray.exceptions.RayError as error:
            message = str(error).strip().splitlines()[0]
            raise InfrastructureError(f"{asked}: {message}") from error

    def _on(self, node_id: str) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return NodeAffinitySchedulingStrategy(node_id, soft=False)


def plan_here(kind: str, pct: int, per_device: int | None, external: bool) -> Plan:
    """Plan this host's slices of a kind."""
    from tunerd.slices import plan

    return plan(kind, pct, per_device, external=external)


def plan_tuners(nodes: Sequence[Node], wanted: int | None) -> list[TunerSpec]:
    """Plan the search and build processes of a cluster.

    A lane of CPU slices gets one on its cores. On the other nodes each CPU gets one, less one for
    each slice's runner and, on the first node, one for the driver.
    """
    specs: list[TunerSpec] = []
    for number, node in enumerate(nodes):
        slices = node.plan.slices
        lanes = {s.lane: s.cores for s in slices if s.lane is not None}
        if lanes:
            specs += [
                TunerSpec(f"tuner-{number}-{i}", len(cores), cores, lane, node.node_id or None)
                for i, (lane, cores) in enumerate(lanes.items())
            ]
            continue
        runners = len(slices) if any(s.gpu_uuid for s in slices) else 0
        count = max(1, node.cpus - runners - (number == 0))
        specs += [
            TunerSpec(f"tuner-{number}-{i}", 1, node_id=node.node_id or None) for i in range(count)
        ]
    if wanted is not None and wanted > len(specs):
        raise HostError(
            f"--tuners {wanted} is more than the {len(specs)} that fit the cores; give fewer"
        )
    return specs[:wanted]
