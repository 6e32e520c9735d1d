"""Ray: where tuners and slices live. The only module that imports it.

A slice actor holds `num_gpus = pct/100` and no CPU; a tuner holds the CPUs that it uses. On CPU
slices the tuner of a lane holds the cores, and the slice of that lane measures on them in turn.

Ctrl-C reaches a terminal's whole process group. Ray starts its daemons with SIGINT blocked, which
workers and their children inherit, so only the driver hears it, and drains.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tunerd import clock
from tunerd import events as ev
from tunerd.errors import InfrastructureError, Interrupted, TunerdError
from tunerd.nodes import Node, Survey, TunerSpec, match_slices, survey_here
from tunerd.profiles import SENTINEL
from tunerd.ray_environment import (
    Environment,
    RayFolder,
    environment,
    environment_to_join,
    forget_token,
    handlers_kept,
    join,
    log_lines,
    sentence,
    start_private,
)
from tunerd.ray_leash import Daemon, leashed, raylet_at, require_alive
from tunerd.vocabulary import (
    SEARCH,
    Build,
    Candidate,
    CapProof,
    Failure,
    Lesson,
    SliceSpec,
    TargetSpec,
    Task,
)
from tunerd.workers import Answer, SliceActor, TunerActor

log = logging.getLogger(__name__)

PLACE_SECS = 60.0  # until Ray has found room for an actor and started its process
READY_SECS = 180.0  # until a slice has proved its cap, or a tuner has imported TVM
CALL_SECS = 3600.0
_CLOSE_SECS = 15.0
_LOOK_SECS = 0.5  # how often Ray's daemons are looked at while a call is waited for
_GETTING_READY = ("warm_up", "start")


class Cluster:
    """A Ray cluster with this run's actors in it: a private local one, or one at an address.

    Close it, or use it as a context manager: actors are asked to close before Ray ends them.

    Args:
        address: HOST:PORT of a cluster, or "auto"; None starts a private one on this machine.
        run: tells this run from others on the same GPUs.
        logs: where the private cluster's logs are kept if the run fails or loses a worker.
    """

    def __init__(
        self,
        *,
        address: str | None,
        run: str,
        cpus: int,
        gpus: int,
        logs: Path | None = None,
        place_secs: float = PLACE_SECS,
        ready_secs: float = READY_SECS,
    ) -> None:
        self._logs = logs
        self._place_secs, self._ready_secs = place_secs, ready_secs
        self._slices: dict[str, Any] = {}
        self._tuners: dict[str, Any] = {}
        self._pending: dict[Any, tuple[str, str, float]] = {}
        self._slice_specs: dict[str, tuple[SliceSpec, str | None]] = {}  # each with its node
        self._tuner_specs: dict[str, TunerSpec] = {}
        self._target: TargetSpec | None = None
        self._seed = 0
        self._islands = 0  # given to tuners so far
        self._given: tuple[Any, ...] = ()  # to all tuners
        self._lost_one = False
        self._leash = contextlib.ExitStack()
        self._daemons: tuple[Daemon, ...] = ()
        self._folder = RayFolder() if address is None else None
        self._environment = Environment(
            environment(run) if address is None else environment_to_join(address, run)
        )
        try:
            import ray

            self._ray = ray
            # It prints the raylet's messages on stdout, which carries results, and has no switch.
            ray._private.worker.print_to_stdstream = log_lines
            forget_token()
            with handlers_kept():
                if self._folder is not None:
                    start_private(ray.init, self._folder, cpus=cpus, gpus=gpus)
                    self._daemons = self._leash.enter_context(leashed())
                elif address is not None:
                    join(ray.init, address, run)
                    node = ray._private.worker.global_worker.node
                    self._daemons = raylet_at(node.raylet_socket_name)
        except BaseException:
            if self._folder is not None and (kept := self._keep_logs()):
                log.error("the run had a problem%s", kept)
            self._end()
            raise

    # --- planning on the nodes -----------------------------------------------------------------

    def nodes(self, kind: str, pct: int, per_device: int | None, *, external: bool) -> list[Node]:
        """Survey every node that is alive, on that node."""
        ray = self._ray
        survey = ray.remote(num_cpus=0, max_retries=0)(survey_here)
        alive = [n for n in ray.nodes() if n["Alive"]]
        asked = [
            survey.options(scheduling_strategy=self._on(n["NodeID"])).remote(
                kind, pct, per_device, external
            )
            for n in alive
        ]
        surveys: list[Survey] = self._got(asked, "surveying the nodes", self._ready_secs)
        driver = ray.get_runtime_context().get_node_id()
        at = {n["NodeID"]: s for n, s in zip(alive, surveys, strict=True)}
        here = (at[driver].boot_id, at[driver].hostname)
        return [
            Node(
                node_id=n["NodeID"],
                cpus=int(n["Resources"].get("CPU", 0)),
                survey=survey,
                is_here=(survey.boot_id, survey.hostname) == here,
            )
            for n, survey in zip(alive, surveys, strict=True)
        ]

    # --- workers -------------------------------------------------------------------------------

    def start_slices(self, specs: Sequence[tuple[SliceSpec, str | None]]) -> list[CapProof]:
        """Start a slice actor for each (spec, node) and return their proofs, in order.

        Raises HostError or InfrastructureError, saying what was asked and what is free.
        """
        asked = f"{len(specs)} slice(s) of {specs[0][0].pct}%"
        placed = self._placed(specs, asked)
        self._slices |= placed
        self._slice_specs |= {spec.slice_id: (spec, node_id) for spec, node_id in specs}
        starting = [placed[spec.slice_id].start.remote(spec) for spec, _ in specs]
        proofs: list[CapProof] = self._got(starting, asked, self._ready_secs)
        return proofs

    def _placed(self, specs: Sequence[tuple[SliceSpec, str | None]], asked: str) -> dict[str, Any]:
        """Start actors until each spec has one on its GPU: Ray chooses, and fills one GPU first."""
        placed: dict[str, Any] = {}
        spare: list[Any] = []
        waiting = list(specs)
        try:
            while waiting:
                started = [(self._slice_actor(spec, node), node) for spec, node in waiting]
                spare += [actor for actor, _ in started]
                ids = self._got(
                    [a.__ray_call__.remote(_gpu_ids) for a, _ in started], asked, self._place_secs
                )
                free = [(node, i) for (_, node), i in zip(started, ids, strict=True)]
                chosen, waiting = match_slices(free, waiting)
                for (actor, _), spec in zip(started, chosen, strict=True):
                    if spec is not None:
                        placed[spec.slice_id] = actor
                        spare.remove(actor)
        finally:
            for actor in spare:  # on the GPU of another slice
                self._ray.kill(actor)
        return placed

    def _slice_actor(self, spec: SliceSpec, node_id: str | None) -> Any:
        options: dict[str, Any] = {
            "num_cpus": 0,
            "num_gpus": 0 if spec.gpu_uuid is None else spec.pct / 100,
            "max_restarts": 0,
        }
        if node_id is not None:
            options["scheduling_strategy"] = self._on(node_id)
        return self._ray.remote(SliceActor).options(**options).remote(self._scratch)

    def start_tuners(self, specs: Sequence[TunerSpec], target: TargetSpec, seed: int) -> None:
        """Start tuner actors; they import what searching and building for `target` needs."""
        self._target, self._seed = target, seed
        self._tuner_specs |= {spec.tuner_id: spec for spec in specs}
        for spec in specs:
            self._start_tuner(spec)

    def give_tasks(
        self, tasks: Sequence[Task], *, lessons: Sequence[Lesson] = (), sms: int | None = None
    ) -> None:
        """Tell the tuners what to search and learn; each answers "warm_up" once it can work.

        sms: of the share of a GPU that is tuned for.
        """
        self._given = (self._ray.put(tuple(tasks)), self._ray.put(tuple(lessons)), sms)
        for tuner_id in self._tuners:
            self._warm_up(tuner_id)

    def restart(self, worker_id: str) -> None:
        """Start a worker that was dropped again: it answers "warm_up" or "start" when it is ready.

        A slice keeps its place on its device, a tuner begins new islands.
        """
        if worker_id in self._tuner_specs:
            self._start_tuner(self._tuner_specs[worker_id])
            self._warm_up(worker_id)
            return
        spec, node_id = self._slice_specs[worker_id]
        actor = self._slices[worker_id] = self._slice_actor(spec, node_id)
        self._watch(worker_id, "start", actor.start.remote(spec))

    @property
    def tuner_ids(self) -> frozenset[str]:
        """The tuners that live or are being started."""
        return frozenset(self._tuners)

    @property
    def slice_ids(self) -> frozenset[str]:
        """The slices that live or are being started."""
        return frozenset(self._slices)

    def _start_tuner(self, spec: TunerSpec) -> None:
        options: dict[str, Any] = {"num_cpus": spec.cpus, "num_gpus": 0, "max_restarts": 0}
        if spec.node_id is not None:
            options["scheduling_strategy"] = self._on(spec.node_id)
        actor = self._ray.remote(TunerActor).options(**options)
        handle = actor.remote(self._seed, spec.cpus, self._islands, spec.cores, self._scratch)
        handle.prepare.remote(self._target)
        self._islands += 1
        self._tuners[spec.tuner_id] = handle

    def _warm_up(self, tuner_id: str) -> None:
        self._watch(tuner_id, "warm_up", self._tuners[tuner_id].warm_up.remote(*self._given))

    def submit(self, instruction: ev.Work) -> None:
        """Carry out an instruction; its end comes back from `answers`."""
        match instruction:
            case ev.Propose(worker_id, task, count, told, exclude):
                call = self._tuners[worker_id].propose.remote(task.task_id, count, told, exclude)
                self._watch(worker_id, "propose", call)
            case ev.BuildThem(worker_id, candidates):
                call = self._tuners[worker_id].build.remote(candidates)
                self._watch(worker_id, "build", call)
            case ev.Measure(worker_id, builds, neighbours):
                call = self._slices[worker_id].measure.remote(builds, SEARCH, neighbours)
                self._watch(worker_id, "measure", call)
            case ev.RunSentinel(worker_id, build, neighbours):
                call = self._slices[worker_id].measure.remote((build,), SENTINEL, neighbours)
                self._watch(worker_id, "measure", call)

    def answers(self, timeout_secs: float) -> list[Answer]:
        """Return the calls that ended, waiting at most `timeout_secs` for the first.

        Raises InfrastructureError where Ray itself has ended.
        """
        require_alive(self._daemons)
        if not self._pending:
            return []
        ray = self._ray
        waiting = list(self._pending)
        done, _ = ray.wait(waiting, num_returns=1, timeout=timeout_secs)
        if done:  # and whatever ended meanwhile
            done, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0)
        answers = []
        for reference in done:
            asked = self._pending.pop(reference)
            value, error = None, ""
            try:
                value = ray.get(reference)
            except ray.exceptions.RayError as problem:
                error = sentence(problem)
            answers.append(Answer.of(asked, value, error))
        return answers + self._not_ready()

    def _not_ready(self) -> list[Answer]:
        now = clock.now()
        late = [
            (reference, asked)
            for reference, asked in self._pending.items()
            if asked[1] in _GETTING_READY and now - asked[2] > self._ready_secs
        ]
        for reference, _ in late:
            del self._pending[reference]
        return [
            Answer(worker_id, method, None, self._too_late(worker_id, now - since), since, now)
            for _, (worker_id, method, since) in late
        ]

    def call(self, worker_id: str, method: str, *arguments: Any) -> Any:
        """Call a slice and wait; raises InfrastructureError where it is lost."""
        reference = getattr(self._slices[worker_id], method).remote(*arguments)
        return self._got([reference], f"{method} in {worker_id}", CALL_SECS)[0]

    def call_all(self, asked: Sequence[tuple[str, str, tuple[Any, ...]]]) -> list[Any]:
        """Call slices at once, each by its id, a method and arguments; results in order."""
        references = [getattr(self._slices[w], m).remote(*arguments) for w, m, arguments in asked]
        methods = ", ".join(sorted({f"{m} in {w}" for w, m, _ in asked}))
        results: list[Any] = self._got(references, methods, CALL_SECS)
        return results

    def build_all(self, candidates: Sequence[Candidate]) -> list[Build | Failure]:
        """Build candidates on all tuners that are ready at once; results in order."""
        tuners = self._ready_tuners()
        parts = [p for i in range(len(tuners)) if (p := tuple(candidates[i :: len(tuners)]))]
        asked = [t.build.remote(p) for t, p in zip(tuners, parts, strict=False)]
        found: dict[str, Build | Failure] = {}
        built = self._got(asked, "building the finalists", CALL_SECS)
        for part, results in zip(parts, built, strict=True):
            found |= {c.candidate_id: r for c, r in zip(part, results.value, strict=True)}
        return [found[c.candidate_id] for c in candidates]

    def _ready_tuners(self) -> list[Any]:
        warming = [r for r, (_, method, _) in self._pending.items() if method == "warm_up"]
        if warming:
            self._ray.wait(warming, num_returns=len(warming), timeout=self._ready_secs)
            for answer in self.answers(0):
                if answer.error:
                    self.drop(answer.worker_id)
        still = {
            worker_id for worker_id, method, _ in self._pending.values() if method == "warm_up"
        }
        ready = [tuner for tuner_id, tuner in self._tuners.items() if tuner_id not in still]
        if not ready:
            raise InfrastructureError(self._too_late("building the finalists", self._ready_secs))
        return ready

    def reader_of(self, folder: Path, slice_ids: Sequence[str]) -> str:
        """Return the first slice that sees `folder`: what is measured there must load from it.

        Raises InfrastructureError where none does.
        """
        probe = folder / f".{secrets.token_hex(8)}"
        probe.touch(mode=0o600)
        try:
            asked = [self._slices[s].sees.remote(str(probe.resolve())) for s in slice_ids]
            seen = self._got(asked, "looking for the run folder", self._ready_secs)
        finally:
            probe.unlink()
        for slice_id, sees in zip(slice_ids, seen, strict=True):
            if sees:
                return slice_id
        raise InfrastructureError(
            f"no slice sees the run folder {folder.resolve()}, and the tuned model is verified in "
            "one; put --out on a file system that the nodes share, or start tunerd on a node that "
            "has a slice"
        )

    def drop(self, worker_id: str) -> None:
        """Forget a worker that is lost, and whatever it was asked."""
        self._lost_one = True
        actor = self._tuners.pop(worker_id, None) or self._slices.pop(worker_id, None)
        self._pending = {r: p for r, p in self._pending.items() if p[0] != worker_id}
        if actor is not None:
            self._ray.kill(actor)  # it may still be waiting for its place

    # --- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the slices, then end the actors and a local cluster. Idempotent."""
        ray = self._ray
        slices, self._slices = self._slices, {}
        tuners, self._tuners = self._tuners, {}
        if ray.is_initialized() and all(d.alive for d in self._daemons):
            with contextlib.suppress(ray.exceptions.RayError):
                closing = [a.close.remote() for a in slices.values()]
                if closing:
                    ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_SECS)
            for actor in (*slices.values(), *tuners.values()):
                with contextlib.suppress(ray.exceptions.RayError, ValueError):
                    ray.kill(actor)
        self._end()

    def _end(self) -> None:
        ray = getattr(self, "_ray", None)
        if ray is not None and ray.is_initialized():
            ray.shutdown()
        self._leash.close()
        if self._folder is not None:
            self._folder.close()
        self._environment.undo()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        stopped = error is None or isinstance(error, Interrupted | KeyboardInterrupt)
        if (self._lost_one or not stopped) and (kept := self._keep_logs()):
            log.error("the run had a problem%s", kept)
        self.close()

    def _keep_logs(self) -> str:
        """Keep the cluster's logs and say where, as the end of a sentence."""
        if self._folder is None:
            return "; see the logs of Ray on its nodes, in /tmp/ray/session_latest/logs by default"
        try:
            if self._logs is None or not self._folder.keep_logs(self._logs):
                return ""
        except OSError as error:  # which may be the very problem that ends the run
            return f"; the logs of Ray cannot be kept in {self._logs}: {error.strerror}"
        return f"; the logs of Ray and its workers are in {self._logs}"

    # --- Ray's words ---------------------------------------------------------------------------

    @property
    def _scratch(self) -> str | None:
        return None if self._folder is None else str(self._folder.scratch)

    def _watch(self, worker_id: str, method: str, reference: Any) -> None:
        self._pending[reference] = (worker_id, method, clock.now())

    def _got(self, references: list[Any], asked: str, timeout_secs: float) -> Any:
        ray = self._ray
        deadline = time.monotonic() + timeout_secs
        try:
            while True:
                require_alive(self._daemons)
                left_secs = max(0.0, deadline - time.monotonic())
                try:
                    return ray.get(references, timeout=min(left_secs, _LOOK_SECS))
                except ray.exceptions.GetTimeoutError as error:
                    if left_secs <= _LOOK_SECS:
                        raise InfrastructureError(self._too_late(asked, timeout_secs)) from error
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, TunerdError):
                raise error.cause from None
            raise InfrastructureError(f"{asked}: {sentence(error)}") from error
        except ray.exceptions.RayError as error:
            raise InfrastructureError(f"{asked}: {sentence(error)}") from error

    def _too_late(self, asked: str, after_secs: float) -> str:
        total, free = self._ray.cluster_resources(), self._ray.available_resources()
        room = ", ".join(f"{free.get(k, 0):g} of {total.get(k, 0):g} {k}s" for k in ("CPU", "GPU"))
        return (
            f"{asked}: not ready after {after_secs:.0f} s; free in the cluster: {room}; wait until "
            "others have ended, or ask for less with --slices and --tuners"
        )

    def _on(self, node_id: str) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return NodeAffinitySchedulingStrategy(node_id, soft=False)


def _gpu_ids(_: SliceActor) -> tuple[str, ...]:
    """Return the GPUs that Ray gave the actor in which this runs, as its node numbers them."""
    import ray

    return tuple(str(gpu) for gpu in ray.get_gpu_ids())
