"""The search's way between the coordinator, which decides, and the workers, which do.

What workers answer becomes the coordinator's events; its instructions become rows of the store
and work for the workers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tunerd.cluster.actor_bodies import WorkerReply
from tunerd.cluster.membership import Membership
from tunerd.cluster.ray_cluster import Cluster
from tunerd.coordinator import events as ev
from tunerd.coordinator.coordinator import Coordinator
from tunerd.runs.finals.best_builds import BestBuilds
from tunerd.runs.folder import RunFolder
from tunerd.runs.timekeeping import Timekeeper
from tunerd.telemetry.events import Telemetry
from tunerd.vocabulary import Candidate, Proposal

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SearchLoop:
    """One search, by the parts of a run that take part in it."""

    coordinator: Coordinator
    cluster: Cluster
    membership: Membership
    folder: RunFolder
    timekeeper: Timekeeper
    telemetry: Telemetry
    best_builds: BestBuilds  # keeps what was built of the best candidates

    def start(self, defaults: Sequence[Candidate]) -> None:
        """Begin with the default of each task, and with the slices, which are ready."""
        self._carry_out(self.coordinator.start(list(defaults)))
        for slice_id in self.membership.slice_ids:
            self.tell(self._joining(slice_id))

    def step(self, wait_secs: float) -> None:
        """Take what workers answer, waiting so long for a first one, and see which have left."""
        for answer in self.cluster.answers(wait_secs):
            for event in self._events(answer):
                self.tell(event)
        for worker_id in self.membership.look():
            if worker_id in self.coordinator.workers:
                self.tell(ev.WorkerLost(worker_id, "its node left"))

    def tell(self, event: ev.Event) -> None:
        self._carry_out(self.coordinator.handle(event))

    def _events(self, answer: WorkerReply) -> Iterator[ev.Event]:
        worker_id = answer.worker_id
        if answer.method == "survey":
            self.membership.join(answer)
            return
        worker = self.coordinator.workers.get(worker_id)
        work = worker.work if worker else None
        role = self.membership.role(worker_id)
        self.timekeeper.note(answer, role, work)
        self.telemetry.answered(role, answer.busy_secs)
        if answer.error:
            if worker:
                yield ev.WorkerLost(worker_id, answer.error)
            self.membership.lose(worker_id, answer.error, answer.problem)
            return
        if answer.method in ("warm_up", "start"):
            if self.membership.is_fit(answer):
                log.info("%s is ready", worker_id)
                yield self._joining(worker_id)
            return
        self.membership.has_answered(worker_id)
        match work:
            case ev.Propose(task=task):
                proposal: Proposal = answer.value
                if proposal.message:
                    about = {"task": task.name, "tuner": worker_id}
                    log.info("%s: %s", task.name, proposal.message, extra=about)
                yield ev.Proposed(
                    worker_id,
                    task.task_id,
                    proposal.candidates,
                    proposal.exhausted,
                    proposal.message,
                    proposal.features,
                )
            case ev.BuildThem(candidates=candidates):
                yield ev.BuildsEnded(worker_id, tuple(zip(candidates, answer.value, strict=True)))
            case ev.Measure(builds=builds):
                self.telemetry.measured(self.membership.device(worker_id), answer.value)
                self.best_builds.note(builds, answer.value)
                candidates = tuple(b.candidate for b in builds)
                yield ev.MeasurementsEnded(
                    worker_id, tuple(zip(candidates, answer.value, strict=True))
                )
            case ev.CheckBaseline():
                self.telemetry.measured(self.membership.device(worker_id), answer.value)
                yield ev.BaselineChecked(worker_id, answer.value[0], answer.busy_secs or 0.0)
        if answer.method == "measure" and (
            faulty := self.membership.has_faulted(worker_id, answer.value)
        ):
            for slice_id in self.coordinator.workers.keys() & set(faulty):
                yield ev.WorkerLost(slice_id, "its device is left alone")
            self.membership.leave_alone(faulty)

    def _carry_out(self, instructions: Sequence[ev.Instruction]) -> None:
        store = self.folder.store
        for instruction in instructions:
            match instruction:
                case ev.StoreProposed(candidates):
                    store.propose(candidates)
                case ev.StoreBuilt(builds):
                    store.built(builds)
                case ev.StoreEnded(results):
                    trial_ids = self.folder.finish({c.candidate_id: r for c, r in results})
                    self.telemetry.trials_ended(
                        (trial_ids[c.candidate_id], c, r) for c, r in results
                    )
                case ev.StoreBaselineCheck(task_id, measurement, busy_secs):
                    store.add_baseline_check(task_id, measurement, busy_secs)
                case ev.Measure(worker_id, builds):
                    started = [b.candidate for b in builds]
                    store.start([c.candidate_id for c in started], worker_id)
                    self.telemetry.trials_started(started, worker_id)
                    self.cluster.submit(instruction)
                case ev.Propose() | ev.BuildThem() | ev.CheckBaseline():
                    self.cluster.submit(instruction)
                case ev.Hurry(reason):
                    log.info("tuners are to end what they do: %s", reason)
                    self.cluster.hurry_tuners()
                case ev.Finish(reason):
                    log.info("search ended: %s", reason)

    def _joining(self, worker_id: str) -> ev.WorkerJoined:
        membership = self.membership
        role, lane = membership.role(worker_id), membership.lane(worker_id)
        if role != "slice":
            return ev.WorkerJoined(worker_id, role, lane)
        device, domain = membership.hardware(worker_id), membership.fault_domain(worker_id)
        return ev.WorkerJoined(worker_id, role, lane, device, faults_alone=domain != device)
