"""One run: wires model, cluster, coordinator, store and ending together; goes on after any kill."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tunerd import clock, host, preparation
from tunerd import events as ev
from tunerd.actors import Cluster
from tunerd.coordinator import Coordinator, Limits
from tunerd.drift import drift
from tunerd.errors import HostError, InfrastructureError, Interrupted
from tunerd.finals import Ending, finish
from tunerd.history import failures_of, history_of
from tunerd.progress import Progress, ProgressState, TaskProgress
from tunerd.records import RunFacts
from tunerd.report.page import write_report
from tunerd.run_folder import RunFolder, disk_errors_said
from tunerd.search import Proposal, default_candidate
from tunerd.settings import TuneSettings
from tunerd.stop import Stop
from tunerd.time_use import time_use
from tunerd.timekeeping import Timekeeper
from tunerd.vocabulary import (
    Candidate,
    CapProof,
    Correctness,
    Failure,
    Outcome,
    Phase,
    Task,
    TrialState,
    to_json,
)
from tunerd.warm_start import WarmStart
from tunerd.workers import Answer

if TYPE_CHECKING:
    from tunerd.host import HostFacts
    from tunerd.model import FixedModel

log = logging.getLogger(__name__)

_TICK_SECS = 0.5
MAX_RESTARTS = 3  # of each worker: one that ends more often has a cause that stays


def tune(settings: TuneSettings, progress: Progress) -> Outcome:
    """Tune a model as `settings` say and return how it ended; the run folder keeps everything.

    Raises TunerdError for what people can mend. Interrupted (Ctrl-C or SIGTERM, once) comes after
    what was under way has been measured and stored: the same call goes on from there.
    """
    with _opened(settings, progress, None) as session:
        return session.run()


def search(
    settings: TuneSettings, progress: Progress, selection: preparation.Selection | None = None
) -> None:
    """Search a model's tasks, or some, and store their trials; compile and report nothing.

    Raises as `tune` does, and InputError where the model has no such task.
    """
    with _opened(settings, progress, selection) as session:
        session.search()


@contextlib.contextmanager
def _opened(
    settings: TuneSettings, progress: Progress, selection: preparation.Selection | None
) -> Iterator[_Session]:
    started = time.monotonic()
    facts = host.facts()
    with contextlib.ExitStack() as stack:
        stack.enter_context(disk_errors_said(settings.out))
        opened = None
        if settings.address is None:  # what this machine cannot do is said before anything loads
            layout = preparation.local_layout(settings)
            model = preparation.read(settings)
        else:
            model = preparation.read(settings)
            opened = stack.enter_context(_joined(settings, _run_name(model)))
            layout = preparation.cluster_layout(settings, opened)
        earlier = preparation.warm_starts(settings, layout)
        run_facts = RunFacts.of(
            settings, model, target=layout.target, device=layout.device, host=facts
        )
        folder = stack.enter_context(RunFolder.open(settings.out, facts=run_facts))
        stop = stack.enter_context(Stop())
        place = _Place(facts, layout, opened, earlier)
        yield _Session(settings, folder, model, place, progress, stop, started, selection)


def _joined(settings: TuneSettings, run: str) -> Cluster:
    return Cluster(address=settings.address, run=run, cpus=0, gpus=0)


def _run_name(model: FixedModel) -> str:
    """Return what tells this run's slices from those of other runs on the same GPUs."""
    return f"{model.name}-{int(time.time())}-{os.getpid()}"


@dataclass(frozen=True)
class _Place:
    """Where a session works, and what it knows before."""

    facts: HostFacts
    layout: preparation.Layout
    opened: Cluster | None  # None: a private one, not started yet
    earlier: tuple[WarmStart, ...]


class _Session:
    def __init__(
        self,
        settings: TuneSettings,
        folder: RunFolder,
        model: FixedModel,
        place: _Place,
        progress: Progress,
        stop: Stop,
        started: float,
        selection: preparation.Selection | None,
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._store = folder.store
        self._model = model
        self._place = place
        self._layout = place.layout
        self._selection = selection
        self._progress = progress
        self._stop = stop
        self._started = started
        self._phase = "starting"
        self._tasks: tuple[Task, ...] = ()
        self._coordinator = Coordinator((), Limits())
        self._trial_ids: dict[str, int] = {}
        began_at = clock.now() - (time.monotonic() - started)
        self._timekeeper = Timekeeper(self._store, began_at=began_at)
        self._restarts: Counter[str] = Counter()  # by worker
        self._lanes = preparation.lanes_of(place.layout)
        self._proofs: tuple[CapProof, ...] = ()
        self._began = started

    def run(self) -> Outcome:
        """Tune and finish, in a cluster that is open or in a private one."""
        with self._searched() as (cluster, kernels, proofs):
            self._phase = "finishing"
            quiet_slice = self._quiet_slice(cluster)
            outcome = finish(
                Ending(
                    settings=self._settings,
                    folder=self._folder,
                    model=kernels.model,
                    layout=self._layout,
                    kernels=kernels,
                    cluster=cluster,
                    quiet_slice=quiet_slice,
                    proofs=proofs,
                    say=self._say,
                    enter=self._timekeeper.enter,
                    unsearched=self._coordinator.unsearched(),
                )
            )
            self._timekeeper.end()
        self._show("writing the report")
        self._report(outcome)
        if outcome.verification.verdict is Correctness.WRONG:
            log.error("%s", outcome.verification.message)
        return outcome

    def search(self) -> None:
        """Tune and leave it at the trials."""
        with self._searched():
            pass

    @contextlib.contextmanager
    def _searched(self) -> Iterator[tuple[Cluster, preparation.Kernels, tuple[CapProof, ...]]]:
        """Search, and yield what a search ends with while its workers live."""
        self._show("starting Ray")
        with contextlib.ExitStack() as stack:
            cluster = self._place.opened or stack.enter_context(self._private_cluster())
            stack.callback(self._timekeeper.end)
            # All that takes seconds at once: workers import TVM while the model is lowered. Not
            # before Ray has started: that sets variables of the environment, and a thread that
            # reads one meanwhile, as TVM does, may crash (setenv(3) is not thread-safe).
            lowering = self._lowering()
            proofs = self._start_workers(cluster)
            self._quiet_slice(cluster)  # refuses a folder that no slice sees, before the search
            kernels = lowering.result()
            self._tasks = kernels.tasks
            lessons = [lesson for x in self._place.earlier for lesson in x.lessons]
            sms = proofs[0].sm_count if self._layout.target.is_cuda else None
            cluster.give_tasks(kernels.tasks, lessons=lessons, sms=sms)
            self._restore(kernels, proofs)
            self._search(cluster)
            self._timekeeper.end()
            self._require_not_stopped()
            yield cluster, kernels, proofs

    def _private_cluster(self) -> Cluster:
        return Cluster(
            address=None,
            run=_run_name(self._model),
            cpus=self._place.facts.usable_cores,
            gpus=len({s.gpu_uuid for s, _ in self._layout.slices if s.gpu_uuid}),
            logs=self._folder.paths.logs / "ray",
        )

    def _lowering(self) -> Future[preparation.Kernels]:
        future: Future[preparation.Kernels] = Future()
        threading.Thread(target=self._lower, args=(future,), daemon=True).start()
        return future

    def _lower(self, into: Future[preparation.Kernels]) -> None:
        try:
            kernels = preparation.kernels_of(self._model, self._layout.target, self._selection)
            into.set_result(kernels)
        except BaseException as error:
            into.set_exception(error)

    def _restore(self, kernels: preparation.Kernels, proofs: Sequence[CapProof]) -> None:
        """Take over what earlier sessions in this folder have measured."""
        settings = self._settings
        per_task = self._selection.trials_per_task if self._selection else None
        limits = Limits(settings.trials, settings.budget_secs, per_task)
        self._coordinator = Coordinator(kernels.tasks, limits)
        self._store.register_tasks(kernels.tasks)
        self._store.save_slices([s for s, _ in self._layout.slices])
        for proof in proofs:
            self._store.save_proof(proof)
        unfinished = [r.candidate for r in self._store.requeue_unfinished()]
        ended = []
        for record in self._store.records():
            if record.state in (TrialState.MEASURED, TrialState.FAILED):
                assert record.result is not None
                ended.append((record.candidate, record.result))
            else:
                self._trial_ids[record.candidate.candidate_id] = record.trial_id
        self._coordinator.restore(ended, unfinished)
        if ended:
            log.info("going on with %d trials of earlier sessions", len(ended))

    def _start_workers(self, cluster: Cluster) -> tuple[CapProof, ...]:
        layout = self._layout
        self._show(
            f"starting {len(layout.tuners)} tuners and {len(layout.slices)} slices, and lowering "
            "the model"
        )
        cluster.start_tuners(layout.tuners, layout.target, self._settings.seed)
        proofs = cluster.start_slices(layout.slices)
        self._proofs = tuple(proofs)
        _require_same_share(self._proofs)
        return self._proofs

    def _quiet_slice(self, cluster: Cluster) -> str:
        """Return where finalists are measured: the first slice that lives and sees the folder."""
        planned = [s.slice_id for s, _ in self._layout.slices]
        living = [slice_id for slice_id in planned if slice_id in cluster.slice_ids]
        return cluster.reader_of(self._folder.paths.root, living)

    # --- the loop ------------------------------------------------------------------------------

    def _search(self, cluster: Cluster) -> None:
        coordinator = self._coordinator
        self._phase = "tuning"
        self._began = time.monotonic()
        self._timekeeper.enter(Phase.SEARCH)
        if earlier := self._place.earlier:
            known = [t.task_id for t in self._tasks]
            said = "; ".join(f"warm start: {x.sentence(known)}" for x in earlier)
            log.info("%s", said)
            self._show(said)
        self._timekeeper.expect([t.tuner_id for t in self._layout.tuners], "tuner")
        self._timekeeper.expect([s.slice_id for s, _ in self._layout.slices], "slice")
        self._carry_out(cluster, coordinator.start([default_candidate(t) for t in self._tasks]))
        for spec, _ in self._layout.slices:
            joined = ev.WorkerJoined(spec.slice_id, "slice", self._lanes[spec.slice_id])
            self._carry_out(cluster, coordinator.handle(joined))
        while not coordinator.finished:
            for answer in cluster.answers(_TICK_SECS):
                self._note(answer)
                for event in self._events(cluster, answer):
                    self._carry_out(cluster, coordinator.handle(event))
            if self._stop.requested and not coordinator.finished:
                self._carry_out(cluster, coordinator.handle(ev.StopRequested("stopped on request")))
            tick = ev.Tick(time.monotonic() - self._began)
            self._carry_out(cluster, coordinator.handle(tick))
            self._show("")

    def _events(self, cluster: Cluster, answer: Answer) -> Iterator[ev.Event]:
        worker_id = answer.worker_id
        if answer.error:
            yield from self._lose(cluster, worker_id, answer.error)
            return
        if answer.method == "start":
            self._store.save_proof(answer.value)
            _require_same_share((*self._proofs, answer.value))
        if answer.method in ("warm_up", "start"):
            yield ev.WorkerJoined(worker_id, self._role(worker_id), self._lanes[worker_id])
            return
        work = self._coordinator.workers[worker_id].work
        match work:
            case ev.Propose(task=task):
                proposal: Proposal = answer.value
                if proposal.message:
                    log.info("%s: %s", task.name, proposal.message)
                yield ev.Proposed(
                    worker_id,
                    task.task_id,
                    proposal.candidates,
                    proposal.exhausted,
                    proposal.message,
                )
            case ev.BuildThem(candidates=candidates):
                yield ev.BuildsEnded(worker_id, tuple(zip(candidates, answer.value, strict=True)))
            case ev.Measure(builds=builds):
                candidates = tuple(b.candidate for b in builds)
                yield ev.MeasurementsEnded(
                    worker_id, tuple(zip(candidates, answer.value, strict=True))
                )
            case ev.RunSentinel():
                yield ev.SpotChecked(worker_id, answer.value[0], answer.busy_secs or 0.0)

    def _lose(self, cluster: Cluster, worker_id: str, message: str) -> Iterator[ev.Event]:
        """Requeue what a worker had, and start it again unless it keeps ending."""
        log.error("lost %s: %s", worker_id, message)
        cluster.drop(worker_id)
        if worker_id in self._coordinator.workers:
            yield ev.WorkerLost(worker_id, message)
        self._restarts[worker_id] += 1
        if self._restarts[worker_id] <= MAX_RESTARTS:
            cluster.restart(worker_id)
            return
        role = self._role(worker_id)
        if not (cluster.tuner_ids if role == "tuner" else cluster.slice_ids):
            raise InfrastructureError(
                f"the last {role} ended {MAX_RESTARTS + 1} times, at last with: {message}; what "
                "was measured is stored, and the same command goes on"
            )

    def _role(self, worker_id: str) -> str:
        return "tuner" if worker_id in {t.tuner_id for t in self._layout.tuners} else "slice"

    def _require_not_stopped(self) -> None:
        if self._stop.requested:
            raise Interrupted(
                "stopped on request; what was measured is stored, and the same command goes on"
            )

    def _carry_out(self, cluster: Cluster, instructions: list[ev.Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case ev.StoreProposed(candidates):
                    self._propose(candidates)
                case ev.StoreBuilt(builds):
                    for build in builds:
                        self._store.built(self._trial_ids[build.candidate.candidate_id], build)
                case ev.StoreEnded(results):
                    ended = {self._trial_ids[x.candidate_id]: r for x, r in results}
                    # Before the trial ends: what has ended is not looked at again.
                    for trial_id, result in ended.items():
                        if isinstance(result, Failure):
                            self._folder.write_log(trial_id, result.message)
                    self._store.finish_all(ended)
                    for x, result in results:  # nothing is heard again of what has ended
                        if not isinstance(result, Failure) or result.kind.ends_trial:
                            del self._trial_ids[x.candidate_id]
                case ev.Measure(worker_id, builds, _):
                    trial_ids = [self._trial_ids[b.candidate.candidate_id] for b in builds]
                    self._store.start(trial_ids, worker_id)
                    cluster.submit(instruction)
                case ev.Propose() | ev.BuildThem() | ev.RunSentinel():
                    cluster.submit(instruction)
                case ev.StoreSpotCheck(task_id, measurement, busy_secs):
                    self._store.add_spot_check(task_id, measurement, busy_secs)
                case ev.Finish(reason):
                    log.info("search ended: %s", reason)

    def _propose(self, candidates: tuple[Candidate, ...]) -> None:
        trial_ids = self._store.propose(candidates)
        self._trial_ids |= {x.candidate_id: i for x, i in zip(candidates, trial_ids, strict=True)}

    # --- what people see -----------------------------------------------------------------------

    def _say(self, message: str) -> None:
        """Show what comes next, unless somebody wants the run to stop here."""
        self._require_not_stopped()
        self._show(message)

    def _show(self, message: str) -> None:
        coordinator, layout = self._coordinator, self._layout
        states = coordinator.tasks.values()
        total = coordinator.weighted_best_secs() or 0.0
        self._progress.update(
            ProgressState(
                elapsed_secs=time.monotonic() - self._started,
                budget_secs=self._settings.budget_secs,
                trials_done=coordinator.ended_trials,
                trials_failed=coordinator.failed_trials,
                trials_budget=self._settings.trials,
                slices_busy=coordinator.busy("slice"),
                slices=len(layout.slices),
                tuners_busy=coordinator.busy("tuner"),
                tuners=len(layout.tuners),
                tasks=tuple(
                    TaskProgress(
                        name=s.task.name,
                        weight=s.task.weight,
                        default_secs=s.default_secs,
                        best_secs=s.best_secs,
                        trials=s.ended,
                        share=s.task.weight * s.reference_secs / total if total else 0.0,
                    )
                    for s in states
                ),
                phase=self._phase,
                message=message,
            )
        )

    def _report(self, outcome: Outcome) -> None:
        sessions = self._store.sessions()
        write_report(
            self._folder.paths.report,
            outcome=outcome,
            history=history_of(self._tasks, self._store.records(), sessions[0][0]),
            time_use=time_use(self._store.spans(), self._store.phases()),
            failures=failures_of(self._store.records()),
            drift=drift(self._store.spot_checks()),
            settings=self._settings.model_dump(mode="json"),
            host=to_json(self._place.facts),
        )

    def _note(self, answer: Answer) -> None:
        worker = self._coordinator.workers.get(answer.worker_id)
        work = worker.work if worker else None
        self._timekeeper.note(answer, self._role(answer.worker_id), work)


def _require_same_share(proofs: Sequence[CapProof]) -> None:
    if len({(p.device, p.sm_count) for p in proofs}) > 1:
        raise HostError(
            "the slices obtained different shares: "
            + ", ".join(f"{p.slice_id}: {p.sm_count} of {p.device}" for p in proofs)
            + "; their measurements could not be compared"
        )
