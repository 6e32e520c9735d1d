"""One run: wires model, cluster, coordinator, store and ending together; goes on after any kill."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from tunerd.candidates import registry
from tunerd.cluster.membership import Membership
from tunerd.cluster.metrics import ray_record
from tunerd.cluster.ray_cluster import Cluster
from tunerd.coordinator import events as ev
from tunerd.coordinator.budget import Limits
from tunerd.coordinator.coordinator import Coordinator
from tunerd.errors import Interrupted, TunerdError
from tunerd.frontend.kernels import Selection
from tunerd.frontend.model import FixedModel
from tunerd.frontend.process import Lowerer, Lowering
from tunerd.records import Store
from tunerd.records.paths import Paths
from tunerd.runner.profiles import within
from tunerd.runs.finals.allowance import Allowance
from tunerd.runs.finals.best_builds import BestBuilds
from tunerd.runs.finals.finals import Ending, finish
from tunerd.runs.finals.quiet_slice import WAIT_SECS, Finals, Patience, QuietSlice
from tunerd.runs.finals.selection import FINALISTS
from tunerd.runs.folder import RunFolder
from tunerd.runs.loop import SearchLoop
from tunerd.runs.plan import RunPlan, plan_run, read
from tunerd.runs.progress import RunProgress
from tunerd.runs.shared import SharedCluster, SharedResources, run_name
from tunerd.runs.team_store import obtained_in, team_store
from tunerd.runs.timekeeping import Timekeeper
from tunerd.settings import TuneSettings
from tunerd.slices import member
from tunerd.system import clock
from tunerd.system.files import disk_errors_said
from tunerd.system.signals import Stop
from tunerd.telemetry.events import Telemetry
from tunerd.telemetry.metrics import record_nothing
from tunerd.telemetry.progress import Progress
from tunerd.telemetry.time_use import time_use
from tunerd.vocabulary import SEARCH, CapProof, Phase, Task, default_candidate
from tunerd.vocabulary.outcome import Outcome
from tunerd.vocabulary.verdict import Verdict

log = logging.getLogger(__name__)

STOPPING = "stopping: what is under way is measured and kept; Ctrl-C again ends at once"
_TICK_SECS = 0.5
WriteReport = Callable[[Paths, Store], None]


def plan(settings: TuneSettings) -> RunPlan:
    """Plan a run up to its tasks. Changes nothing, and leaves a cluster again.

    Raises as `plan_run` does, FolderError where the folder is another run's, and ModelError where
    the model cannot be lowered.
    """
    with contextlib.ExitStack() as stack:
        lowerer = stack.enter_context(Lowerer())
        joined = None
        if settings.address is not None:
            cluster = Cluster(address=settings.address, run="plan", cpus=0, gpus=0)
            joined = stack.enter_context(cluster)
        planned = plan_run(settings, cluster=joined)
        planned.require_folder()
        lowering = Lowering(planned.model, planned.layout.target, lowerer=lowerer)
        stack.callback(lowering.close)
        return planned.with_tasks(lowering.result())


def tune(
    settings: TuneSettings,
    progress: Progress,
    *,
    shared: SharedResources | None = None,
    private: SharedCluster | None = None,
    write_report: WriteReport | None = None,
) -> Outcome:
    """Tune a model as `settings` say and return how it ended; the run folder keeps everything.

    Args:
        shared: of the settings' model, by other sessions of this process.
        private: a cluster for runs of other models, too; not for those of an address.
        write_report: writes the run's page, while the run still holds its folder.

    Raises TunerdError for what people can mend. Interrupted (Ctrl-C or SIGTERM, once) comes after
    what was under way has been measured and stored: the same call goes on from there.
    """
    with _opened(settings, progress, shared, private=private) as run:
        return run.tune(write_report)


def execute(
    planned: RunPlan, progress: Progress, *, write_report: WriteReport | None = None
) -> Outcome:
    """Do what was planned; returns and raises as `tune` does.

    On a cluster the nodes are asked again: they may have come and gone since.
    """
    with _opened(planned.settings, progress, planned=planned) as run:
        return run.tune(write_report)


def search(
    settings: TuneSettings,
    progress: Progress,
    selection: Selection | None = None,
    *,
    shared: SharedResources | None = None,
) -> None:
    """Search a model's tasks, or some, and store their trials; compile and report nothing.

    Raises as `tune` does, and InputError where the model has no such task.
    """
    with _opened(settings, progress, shared, selection=selection) as run:
        run.search()


@contextlib.contextmanager
def _opened(
    settings: TuneSettings,
    progress: Progress,
    lent: SharedResources | None = None,
    *,
    selection: Selection | None = None,
    planned: RunPlan | None = None,
    private: SharedCluster | None = None,
) -> Iterator[Run]:
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        say = functools.partial(progress.warn, STOPPING)
        stop = stack.enter_context(Stop(say))  # first: a job may be stopped at any moment
        progress.begin("reading the model")
        stack.enter_context(disk_errors_said(settings.out))
        if lent is not None:
            shared = lent
            planned = plan_run(
                settings, model=shared.model, selection=selection, is_beside_own=True
            )
        elif settings.address is None:  # what this machine cannot do is said before Ray starts
            # TVM is imported there while the host and the model are read here.
            lowerer = stack.enter_context(Lowerer())
            is_beside_own = private is not None and private.is_up
            planned = planned or plan_run(
                settings, selection=selection, is_beside_own=is_beside_own
            )
            shared = SharedResources(planned.model, lowerer, private=private)
        else:
            lowerer = stack.enter_context(Lowerer())
            model = read(settings) if planned is None else planned.model
            joined = stack.enter_context(_joined(settings.address, model))
            planned = plan_run(settings, model=model, cluster=joined, selection=selection)
            shared = SharedResources(model, lowerer, joined=joined)
        folder = stack.enter_context(RunFolder.open(settings.out, facts=planned.facts))
        record = record_nothing if shared.joined is None else ray_record()
        telemetry = stack.enter_context(
            Telemetry(progress, folder.paths, planned.facts, settings, record=record)
        )
        if planned.warning:
            telemetry.warn(planned.warning)
        if lent is None:
            stack.enter_context(shared)
        yield Run(planned, folder, shared, telemetry, stop=stop, started=started)


def _joined(address: str, model: FixedModel) -> Cluster:
    return Cluster(address=address, run=run_name(model), cpus=0, gpus=0)


class Run:
    """Does what was planned, in the run's folder.

    Args:
        started: when it began, by time.monotonic().
    """

    def __init__(
        self,
        plan: RunPlan,
        folder: RunFolder,
        shared: SharedResources,
        telemetry: Telemetry,
        *,
        stop: Stop,
        started: float,
    ) -> None:
        self._plan = plan
        self._folder = folder
        self._store = folder.store
        self._shared = shared
        self._team = team_store(plan.settings, folder.store, self._say)
        self._telemetry = telemetry
        self._stop = stop
        self._progress = RunProgress(plan, telemetry, started=started)
        self._tasks: tuple[Task, ...] = ()
        self._coordinator = Coordinator((), Limits())
        self._taken_over = 0  # trials of earlier sessions that had ended
        began_at = clock.now() - (time.monotonic() - started)
        self._timekeeper = Timekeeper(self._store, began_at=began_at)
        self._membership: Membership | None = None
        self._best_builds = BestBuilds(FINALISTS)

    def tune(self, write_report: WriteReport | None) -> Outcome:
        """Tune and finish, in a cluster that is open or in a private one."""
        with self._searched(to_finish=True) as (cluster, membership, lowering):
            self._progress.phase = "finishing"
            self._warn_if_nothing_was_left()
            self._show("choosing finalists")
            kernels = lowering.result()
            slice_id = self._quiet_slice(cluster, membership)
            cluster.on_wait = self._require_not_stopped
            no_wait = self._plan.settings.no_wait
            patience = Patience(self._say, secs=0.0 if no_wait else WAIT_SECS)
            outcome = finish(
                Ending(
                    plan=self._plan,
                    folder=self._folder,
                    kernels=kernels,
                    quiet=QuietSlice(
                        cluster,
                        slice_id,
                        others=membership.beside(slice_id),
                        finals=Finals.of(self._plan.settings, kernels.touched_bytes),
                        patience=patience,
                        revive=membership.revive,
                    ),
                    cores=membership.cores_here(slice_id),
                    proofs=membership.proofs,
                    say=self._say,
                    enter=self._timekeeper.enter,
                    unsearched=self._coordinator.unsearched(),
                    built=self._best_builds.all(),
                    allowance=self._allowance(patience),
                )
            )
            self._timekeeper.end()
        if write_report is not None:
            self._show("writing the report")
            write_report(self._folder.paths, self._store)
        if outcome.verification.verdict is Verdict.WRONG:
            log.error("%s", outcome.verification.message)
        elif self._team is not None:
            states = self._coordinator.tasks.items()
            self._team.publish(outcome, exhausted={task_id for task_id, s in states if s.exhausted})
        return outcome

    def _allowance(self, patience: Patience) -> Allowance:
        """Return how long the finals may take beside what they wait for a quiet device.

        As long as they do, where more was asked of them.
        """
        if self._plan.settings.fidelity:
            return Allowance()
        use = time_use(self._store.spans(), self._store.phases())
        # What a team's store has no record of, its other runs would search again or go without.
        return Allowance.after(use, leaves_out=self._team is None, now=patience.now)

    def search(self) -> None:
        """Tune and leave it at the trials."""
        with self._searched(to_finish=False):
            pass

    @contextlib.contextmanager
    def _searched(self, *, to_finish: bool) -> Iterator[tuple[Cluster, Membership, Lowering]]:
        """Search, and yield what a search ends with while its workers live."""
        # All that takes seconds at once: the model is lowered while Ray and the workers start.
        lowering = self._shared.lower(self._plan.layout.target)
        self._say("starting Ray, and lowering the model")
        with contextlib.ExitStack() as stack:
            stack.callback(self._interrupt)  # last: no worker is left to end a trial
            cluster = stack.enter_context(self._cluster())
            cluster.on_call = self._timekeeper.called
            stack.callback(self._timekeeper.end)
            self._progress.log_step("Ray is there")
            membership = self._membership = Membership(
                cluster,
                self._plan.layout,
                settings=self._plan.settings,
                store=self._store,
                telemetry=self._telemetry,
                elastic=self._plan.settings.address is not None,
            )
            proofs = self._start_workers(membership)
            self._progress.log_step("the slices have their shares")
            self._say("the slices have their shares; lowering the model")
            # Refuses a folder that no slice sees, before the search.
            quiet_slice = self._quiet_slice(cluster, membership)
            extracted = lowering.extracted()
            tasks = self._selected(extracted.tasks)
            self._progress.log_step("the model is lowered")
            finals = Finals.of(self._plan.settings, extracted.touched_bytes)
            self._store.obtained = obtained_in(quiet_slice, proofs, self._store, finals.conditions)
            transferred = [past for x in self._plan.warm_starts for past in x.transferred]
            sms = proofs[0].sm_count if self._plan.layout.target.is_cuda else None
            profile = within(SEARCH, extracted.touched_bytes)
            cluster.give_tasks(
                tasks,
                transferred=transferred,
                sms=sms,
                libraries=self._plan.settings.libraries,
                profile=profile,
            )
            self._restore(tasks, proofs)
            if to_finish:
                stack.enter_context(_loading(lowering))
            self._search(cluster, membership, lowering if to_finish else None)
            self._shared.keep(self._plan.layout.target, self._best_builds.all())
            self._timekeeper.end()
            self._require_not_stopped()
            yield cluster, membership, lowering

    @contextlib.contextmanager
    def _cluster(self) -> Iterator[Cluster]:
        shared, layout = self._shared, self._plan.layout
        with contextlib.ExitStack() as stack:
            if shared.joined is None:
                specs = [spec for spec, _ in layout.slices]
                early = member(self._plan.settings.slice_kind).early(specs, shared.run)
                stack.enter_context(early)
            logs = self._folder.paths.logs / "ray"
            yield stack.enter_context(shared.cluster(layout, logs=logs))

    def _restore(self, tasks: tuple[Task, ...], proofs: Sequence[CapProof]) -> None:
        """Take over what earlier sessions in this folder have measured."""
        settings = self._plan.settings
        per_task = self._plan.selection.trials_per_task if self._plan.selection else None
        limits = Limits(settings.trials, settings.budget_secs, per_task)
        self._store.register_tasks(tasks)
        for proof in proofs:
            self._store.save_proof(proof)
            self._telemetry.proved(proof)
        self._tasks = self._to_search(tasks)
        self._coordinator = Coordinator(
            self._tasks,
            limits,
            sources=registry.searched(settings.libraries),
            known=functools.partial(self._shared.build_of, self._plan.layout.target),
        )
        task_ids = {t.task_id for t in self._tasks}
        waiting = [r.candidate for r in self._store.requeue_unfinished()]
        unfinished = [c for c in waiting if c.task_id in task_ids]
        ended = [
            (r.candidate, r.result)
            for r in self._store.records()
            if r.result is not None and r.candidate.task_id in task_ids
        ]
        self._coordinator.restore(ended, unfinished, lost=self._store.lost())
        self._taken_over = self._coordinator.ended_trials
        if ended:
            log.info("going on with %d trials of earlier sessions", len(ended))

    def _interrupt(self) -> None:
        """Store that the session ends, in order, before what it had begun.

        A store that takes nothing more is not told: then the next session cannot know either.
        """
        with contextlib.suppress(TunerdError):
            self._store.interrupt()

    def _selected(self, tasks: tuple[Task, ...]) -> tuple[Task, ...]:
        selection = self._plan.selection
        return tasks if selection is None else selection.among(tasks)

    def _to_search(self, tasks: tuple[Task, ...]) -> tuple[Task, ...]:
        """Return the tasks that a team's store has no record of."""
        if self._team is None or self._store.obtained is None:
            return tasks
        on, require = self._store.obtained, self._plan.settings.require_hit
        taken = self._team.take(tasks, on, require=require)
        return tuple(t for t in tasks if t.task_id not in taken)

    def _start_workers(self, membership: Membership) -> tuple[CapProof, ...]:
        layout = self._plan.layout
        self._say(
            f"starting {len(layout.tuners)} tuners and {len(layout.slices)} slices, and lowering "
            "the model"
        )
        return membership.start()

    def _quiet_slice(self, cluster: Cluster, membership: Membership) -> str:
        """Return where finalists are measured: the first slice that lives and sees the folder."""
        living = [slice_id for slice_id in membership.slice_ids if slice_id in cluster.slice_ids]
        return cluster.reader_of(self._folder.paths.root, living)

    # --- the loop ------------------------------------------------------------------------------

    def _search(self, cluster: Cluster, membership: Membership, lowering: Lowering | None) -> None:
        coordinator = self._coordinator
        self._progress.begin_search()
        self._timekeeper.enter(Phase.SEARCH)
        known = [t.task_id for t in self._tasks]
        earlier = self._plan.warm_starts
        self._show("; ".join(f"warm start: {x.sentence(known)}" for x in earlier))
        self._timekeeper.expect(membership.tuner_ids, "tuner")
        self._timekeeper.expect(membership.slice_ids, "slice")
        loop = SearchLoop(
            coordinator=coordinator,
            cluster=cluster,
            membership=membership,
            folder=self._folder,
            timekeeper=self._timekeeper,
            telemetry=self._telemetry,
            best_builds=self._best_builds,
        )
        loop.start([default_candidate(t) for t in self._tasks])
        while not coordinator.finished:
            loop.step(_TICK_SECS)
            if self._stop.requested and not coordinator.finished:
                loop.tell(ev.StopRequested("stopped on request"))
            if lowering is not None and lowering.problem is not None:
                raise lowering.problem  # what comes after the search would be in vain
            loop.tell(ev.Tick(self._progress.searched_secs))
            self._show("")

    def _require_not_stopped(self) -> None:
        if self._stop.requested:
            raise Interrupted(
                "stopped on request; what was measured is stored, and the same command goes on"
            )

    def _warn_if_nothing_was_left(self) -> None:
        coordinator = self._coordinator
        if 0 < self._taken_over == coordinator.ended_trials and not coordinator.is_cut_short:
            self._telemetry.warn(
                f"nothing was left to search: {coordinator.finished}; what was found is compiled, "
                "verified and timed again"
            )

    # --- what people see -----------------------------------------------------------------------

    def _say(self, message: str) -> None:
        """Show what comes next, unless somebody wants the run to stop here."""
        self._require_not_stopped()
        self._show(message)

    def _show(self, message: str) -> None:
        self._progress.show(message, self._coordinator, self._membership)


@contextlib.contextmanager
def _loading(lowering: Lowering) -> Iterator[None]:
    """Load TVM into this process, for the end, while tuners are at work.

    Not beside Ray's start or end: they set variables of the environment, which TVM reads, and
    setenv(3) is not thread-safe.
    """

    def load() -> None:
        with contextlib.suppress(Exception):  # who wants the kernels is told
            _ = lowering.result().lowered.mod

    thread = threading.Thread(target=load)
    thread.start()
    try:
        yield
    finally:
        thread.join()
