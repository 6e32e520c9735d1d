"""Ray: where tuners and slices live.

A slice actor holds `num_gpus = pct/100` and no CPU; a tuner holds the CPUs that it uses. On CPU
slices the tuner of a lane holds the cores, and the slice of that lane measures on them in turn.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tunerd.cluster.actor_bodies import TunerActor, WorkerReply
from tunerd.cluster.connection import Connection
from tunerd.cluster.nodes import Node, Survey, TunerSpec, survey_here
from tunerd.cluster.ray_calls import LOOK_SECS, Calls
from tunerd.cluster.reaper import require_alive
from tunerd.cluster.slice_actors import SliceActors
from tunerd.cluster.tuner import BUILD_TIMEOUT_SECS
from tunerd.coordinator import events as ev
from tunerd.errors import InfrastructureError, Interrupted
from tunerd.runner.base import Company
from tunerd.runner.profiles import BASELINE_CHECK
from tunerd.system import clock
from tunerd.vocabulary import (
    SEARCH,
    Build,
    Candidate,
    CapProof,
    Failure,
    Profile,
    SliceRequest,
    SliceSpec,
    TargetSpec,
    Task,
    TransferredResults,
)

log = logging.getLogger(__name__)

PLACE_SECS = 60.0  # until Ray has found room for an actor and started its process
READY_SECS = 180.0  # until a slice has proved its cap, or a tuner has imported TVM
CALL_SECS = 3600.0
PROPOSE_SECS = 600.0  # for a batch of a task; seconds are usual
MEASURE_SECS = 240.0  # for a build: its limit in the runner, and a runner that is started again
GRACE_SECS = 30.0  # over the limits that a worker keeps by itself
HURRY_SECS = 15.0  # for tuners to end what nobody waits for any more
BUILD_ROUNDS = 3  # in which what was lost with a tuner is built again
_CLOSE_SECS = 15.0
_ANSWER_SECS = 10.0  # for a slice that is asked whether it lives


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
        self._connection = Connection(address, run, cpus=cpus, gpus=gpus, logs=logs)
        self._ray = self._connection.ray
        limits = {"warm_up": ready_secs, "start": ready_secs, "place": place_secs}
        self._calls = Calls(self._ray, self._connection.daemons, limits | {"survey": ready_secs})
        self._ready_secs = ready_secs
        self._slices = SliceActors(self._connection, self._calls)
        self._tuners: dict[str, Any] = {}
        self._tuner_specs: dict[str, TunerSpec] = {}
        self._target: TargetSpec | None = None
        self._precision = ""
        self._seed = 0
        self._islands = 0  # given to tuners so far
        self._given: tuple[Any, ...] = ()  # to all tuners
        self._profile = SEARCH
        self._lost_one = False
        self.on_call: Callable[[str, float, float], None] = lambda slice_id, start, end: None
        self.on_wait: Callable[[], None] = lambda: None  # for builds; may raise to stop there
        self._here = ("", "")  # boot id and name of the driver's host

    # --- nodes ---------------------------------------------------------------------------------

    def nodes(self, request: SliceRequest) -> list[Node]:
        """Survey every node that is alive, on that node."""
        alive = self.living_nodes()
        asked = [self._survey(n, request) for n in alive]
        surveys: list[Survey] = self._calls.got(asked, "surveying the nodes", self._ready_secs)
        driver = self._connection.node_id
        at = dict(zip(alive, surveys, strict=True))
        self._here = (at[driver].boot_id, at[driver].hostname)
        return [self._node(n, survey, is_driver=n == driver) for n, survey in at.items()]

    def living_nodes(self) -> dict[str, int]:
        """Return the nodes that are alive, and how many CPUs Ray hands out on each."""
        return {
            n["NodeID"]: int(n["Resources"].get("CPU", 0)) for n in self._ray.nodes() if n["Alive"]
        }

    def survey(self, node_id: str, request: SliceRequest) -> None:
        """Ask a node what it says of itself; it answers "survey", as a worker of the node's id."""
        self._calls.watch(node_id, "survey", self._survey(node_id, request))

    def surveyed(self, answer: WorkerReply) -> Node:
        """Return the node that an answer to `survey` tells of."""
        return self._node(answer.worker_id, answer.value)

    def _survey(self, node_id: str, request: SliceRequest) -> Any:
        survey = self._ray.remote(num_cpus=0, max_retries=0)(survey_here)
        return survey.options(scheduling_strategy=self._connection.on(node_id)).remote(request)

    def _node(self, node_id: str, survey: Survey, *, is_driver: bool = False) -> Node:
        return Node(
            node_id=node_id,
            cpus=self.living_nodes().get(node_id, 0),
            survey=survey,
            is_here=(survey.boot_id, survey.hostname) == self._here,
            is_driver=is_driver,
        )

    # --- slices --------------------------------------------------------------------------------

    def start_slices(self, specs: Sequence[tuple[SliceSpec, str | None]]) -> list[CapProof]:
        """Start a slice actor for each (spec, node) and return their proofs, in order.

        Raises HostError or InfrastructureError, saying what was asked and what is free.
        """
        asked = {spec.slice_id for spec, _ in specs}
        for spec, node_id in specs:
            self.start_slice(spec, node_id)
        proofs: dict[str, CapProof] = {}
        while len(proofs) < len(specs):
            for answer in self.answers(LOOK_SECS):
                if answer.worker_id not in asked:  # a tuner, or a node that joins
                    continue
                if answer.problem:
                    raise answer.problem
                if answer.error:
                    raise InfrastructureError(answer.error)
                proofs[answer.worker_id] = answer.value
        return [proofs[spec.slice_id] for spec, _ in specs]

    def start_slice(self, spec: SliceSpec, node_id: str | None) -> None:
        """Start a slice actor on its GPU; it answers "start" with its proof."""
        self._slices.start(spec, node_id)

    # --- tuners --------------------------------------------------------------------------------

    def start_tuners(
        self, specs: Sequence[TunerSpec], target: TargetSpec, seed: int, precision: str = ""
    ) -> None:
        """Start tuner actors; they import what searching and building for `target` needs.

        Those that an earlier session has left stay, where they are what is asked for.

        precision: that is asked for, "" where the model's own is.
        """
        self._precision = precision
        if (target, seed) != (self._target, self._seed):
            self._end_tuners(set(self._tuners))
        self._target, self._seed = target, seed
        asked = {s.tuner_id: s for s in specs}
        self._end_tuners({t for t in self._tuners if asked.get(t) != self._tuner_specs[t]})
        for spec in specs:
            if spec.tuner_id not in self._tuners:
                self._start_tuner(spec)

    def _end_tuners(self, tuner_ids: Collection[str]) -> None:
        for tuner_id in tuner_ids:
            self._calls.forget(tuner_id)
            self._ray.kill(self._tuners.pop(tuner_id))

    def give_tasks(
        self,
        tasks: Sequence[Task],
        *,
        transferred: Sequence[TransferredResults] = (),
        sms: int | None = None,
        libraries: Sequence[str] = (),
        profile: Profile = SEARCH,
    ) -> None:
        """Tell the tuners what to search and learn; each answers "warm_up" once it can work.

        sms: of the share of a GPU that is tuned for.
        libraries: that are searched, too.
        profile: of the search's measurements.
        """
        self._profile = profile
        put = self._ray.put
        self._given = (put(tuple(tasks)), put(tuple(transferred)), sms, tuple(libraries))
        for tuner_id in self._tuners:
            self._warm_up(tuner_id)

    def add_tuner(self, spec: TunerSpec) -> None:
        """Start a tuner beside those that have tasks; it answers "warm_up" once it can work."""
        self._start_tuner(spec)
        self._warm_up(spec.tuner_id)

    def _start_tuner(self, spec: TunerSpec) -> None:
        self._tuner_specs[spec.tuner_id] = spec
        options: dict[str, Any] = {"num_cpus": spec.cpus, "num_gpus": 0, "max_restarts": 0}
        if spec.node_id is not None:
            options["scheduling_strategy"] = self._connection.on(spec.node_id)
        actor = self._ray.remote(TunerActor).options(**options)
        handle = actor.remote(
            self._seed, spec.cpus, self._islands, spec.cores, self._connection.scratch
        )
        handle.prepare.remote(self._target, self._precision)
        self._islands += 1
        self._tuners[spec.tuner_id] = handle

    def _warm_up(self, tuner_id: str) -> None:
        self._calls.watch(tuner_id, "warm_up", self._tuners[tuner_id].warm_up.remote(*self._given))

    # --- workers -------------------------------------------------------------------------------

    def restart(self, worker_id: str) -> None:
        """Start a worker that was dropped again: it answers "warm_up" or "start" when it is ready.

        A slice keeps its place on its device, a tuner begins new islands.
        """
        if worker_id in self._tuner_specs:
            self.add_tuner(self._tuner_specs[worker_id])
        else:
            self._slices.restart(worker_id)

    @property
    def tuner_ids(self) -> frozenset[str]:
        """The tuners that live or are being started."""
        return frozenset(self._tuners)

    @property
    def slice_ids(self) -> frozenset[str]:
        """The slices that live or are being started."""
        return frozenset(self._slices.actors)

    def submit(self, instruction: ev.Work) -> None:
        """Carry out an instruction; its end comes back from `answers`."""
        match instruction:
            case ev.Propose(worker_id, task, count, results, exclude, rows, source):
                call = self._tuners[worker_id].propose.remote(
                    task.task_id, source, count, results, exclude, rows
                )
                self._calls.watch(worker_id, "propose", call, limit_secs=PROPOSE_SECS)
            case ev.BuildThem(worker_id, candidates):
                self._build(worker_id, candidates)
            case ev.Measure(worker_id, builds, neighbours, best_secs, is_alone):
                call = self._slices.actors[worker_id].measure.remote(
                    builds, self._profile, best_secs, Company(neighbours, is_alone)
                )
                limit_secs = MEASURE_SECS * len(builds) + GRACE_SECS
                self._calls.watch(worker_id, "measure", call, limit_secs=limit_secs)
            case ev.CheckBaseline(worker_id, build, neighbours):
                call = self._slices.actors[worker_id].measure.remote(
                    (build,), BASELINE_CHECK, (), Company(neighbours)
                )
                limit_secs = MEASURE_SECS + GRACE_SECS
                self._calls.watch(worker_id, "measure", call, limit_secs=limit_secs)

    def _build(self, tuner_id: str, candidates: tuple[Candidate, ...]) -> None:
        call = self._tuners[tuner_id].build.remote(candidates)
        limit_secs = BUILD_TIMEOUT_SECS * len(candidates) + GRACE_SECS
        self._calls.watch(tuner_id, "build", call, limit_secs=limit_secs)

    def hurry_tuners(self) -> None:
        """Take tuners for lost that do not soon end what they were asked."""
        self._calls.hurry(("propose", "build"), HURRY_SECS)

    def answers(self, timeout_secs: float) -> list[WorkerReply]:
        """Return the calls that ended, waiting at most `timeout_secs` for the first.

        Raises InfrastructureError where Ray itself has ended.
        """
        answers = []
        for answer in self._calls.ended(timeout_secs):
            if answer.method == "place" and not answer.error:
                self._slices.placed(answer.worker_id, answer.value)
            else:
                answers.append(answer)
        return answers

    def call(self, worker_id: str, method: str, *arguments: Any) -> Any:
        """Call a slice and wait; raises InfrastructureError where it is lost."""
        return self.call_all([(worker_id, method, arguments)])[0]

    def call_all(self, asked: Sequence[tuple[str, str, tuple[Any, ...]]]) -> list[Any]:
        """Call slices at once, each by its id, a method and arguments; results in order."""
        started_at = clock.now()
        references = [
            getattr(self._slices.actors[w], m).remote(*arguments) for w, m, arguments in asked
        ]
        methods = ", ".join(sorted({f"{m} in {w}" for w, m, _ in asked}))
        results: list[Any] = self._calls.got(references, methods, CALL_SECS)
        for worker_id, method, _ in asked:
            if method != "conditions":  # a look at the device is no work
                self.on_call(worker_id, started_at, clock.now())
        return results

    def silent(self, slice_ids: Sequence[str]) -> list[str]:
        """Return the slices that do not answer: they are lost, or hang.

        Raises InfrastructureError where Ray itself has ended.
        """
        require_alive(self._connection.daemons)
        asked = {
            s: self._slices.actors[s].sees.remote("/")
            for s in slice_ids
            if s in self._slices.actors
        }
        return [
            s for s in slice_ids if s not in asked or self._seen(asked[s], _ANSWER_SECS) is None
        ]

    def _seen(self, asked: Any, timeout_secs: float) -> bool | None:
        """Return what a slice sees; None where it does not answer."""
        try:
            return bool(self._ray.get(asked, timeout=timeout_secs))
        except self._ray.exceptions.RayError:
            return None

    def build_all(self, candidates: Sequence[Candidate]) -> list[Build | Failure]:
        """Build candidates on all tuners that are ready at once; results in order.

        What is lost with a tuner is built again by those that live, itself started again among
        them. Raises InfrastructureError where that is in vain, and the problem of a tuner.
        """
        found: dict[str, Build | Failure] = {}
        lost = ""
        for _ in range(BUILD_ROUNDS):
            if left := [c for c in candidates if c.candidate_id not in found]:
                lost = self._build_on_all(left, found)
        if any(c.candidate_id not in found for c in candidates):
            raise InfrastructureError(f"building the finalists: {lost}")
        return [found[c.candidate_id] for c in candidates]

    def _build_on_all(
        self, candidates: Sequence[Candidate], into: dict[str, Build | Failure]
    ) -> str:
        """Build candidates; start tuners again that are lost, and return why one of them was."""
        tuners = self._ready_tuners()
        parts = {t: p for i, t in enumerate(tuners) if (p := tuple(candidates[i :: len(tuners)]))}
        for tuner_id, part in parts.items():
            self._build(tuner_id, part)
        lost = ""
        while self._calls.of("build"):
            self.on_wait()
            for answer in self.answers(LOOK_SECS):
                worker_id, is_build = answer.worker_id, answer.method == "build"
                if is_build and answer.problem:
                    raise answer.problem
                if is_build and not answer.error:
                    built = zip(parts[worker_id], answer.value, strict=True)
                    into |= {c.candidate_id: b for c, b in built}
                elif answer.error and worker_id in self._tuners:
                    log.error("lost %s: %s", worker_id, answer.error)
                    self.drop(worker_id)
                    if is_build:
                        lost = answer.error
                        self.restart(worker_id)
        return lost

    def _ready_tuners(self) -> list[str]:
        if self._calls.of("warm_up"):
            self._calls.wait_for("warm_up", self._ready_secs)
            for answer in self.answers(0):
                if answer.error:
                    self.drop(answer.worker_id)
        still = set(self._calls.of("warm_up"))
        ready = [tuner_id for tuner_id in self._tuners if tuner_id not in still]
        if not ready:
            message = self._calls.too_late("building the finalists", self._ready_secs)
            raise InfrastructureError(message)
        return ready

    def reader_of(self, folder: Path, slice_ids: Sequence[str]) -> str:
        """Return the first slice that sees `folder`: what is measured there must load from it.

        Raises InfrastructureError where none does.
        """
        probe = folder / f".{secrets.token_hex(8)}"
        probe.touch(mode=0o600)
        try:
            require_alive(self._connection.daemons)
            asked = [self._slices.actors[s].sees.remote(str(probe.resolve())) for s in slice_ids]
            for slice_id, sees in zip(slice_ids, asked, strict=True):
                if self._seen(sees, self._ready_secs):
                    return slice_id
        finally:
            probe.unlink()
        raise InfrastructureError(
            f"no slice sees the run folder {folder.resolve()}, and the tuned model is verified in "
            "one; put --out on a file system that the nodes share, or start tunerd on a node that "
            "has a slice"
        )

    def drop(self, worker_id: str) -> None:
        """Forget a worker that is lost, and whatever it was asked."""
        self._lost_one = True
        actor = self._tuners.pop(worker_id, None) or self._slices.actors.pop(worker_id, None)
        self._calls.forget(worker_id)
        self._slices.free_spare()
        if actor is not None:
            self._ray.kill(actor)  # it may still be waiting for its place

    # --- the end -------------------------------------------------------------------------------

    def end_session(self) -> None:
        """Close the slices and forget what was asked; the tuners stay for the next session."""
        for worker_id in (*self._slices.actors, *self._tuners):
            self._calls.forget(worker_id)
        self._slices.free_spare()
        self._end_actors(*self._slices.forget_all())

    def close(self) -> None:
        """Close the slices, then end the actors and a local cluster. Idempotent."""
        tuners, self._tuners = self._tuners, {}
        try:
            slices, waiting = self._slices.forget_all()
            self._end_actors(slices, (*waiting, *tuners.values()))
        finally:
            self._connection.close()

    def _end_actors(self, slices: Collection[Any], others: Collection[Any]) -> None:
        """End actors: slices once they have closed, others at once."""
        ray = self._ray
        if not self._connection.is_up:
            return
        with contextlib.suppress(ray.exceptions.RayError):
            closing = [a.close.remote() for a in slices]
            if closing:
                ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_SECS)
        for actor in (*slices, *others):
            with contextlib.suppress(ray.exceptions.RayError, ValueError):
                ray.kill(actor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        stopped = error is None or isinstance(error, Interrupted | KeyboardInterrupt)
        if self._lost_one or not stopped:
            self._connection.keep_logs(None if stopped else error)
        self.close()
