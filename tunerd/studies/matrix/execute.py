"""A matrix from its settings: levels, finalists at every share, artifacts, every artifact at every
share. Each piece is kept as it ends, and the same call goes on after any kill.

No more than one slice measures at any time, and what is compared is sampled in turns within it:
all finalists of a task at a share, and all artifacts at a share. Shares follow each other in a
random order, and whole models in several rounds of all shares, so that a clock that drifts does
not look like a share. The slices of all shares start together and are idle in between, because a
start takes longer than what is measured; each round has new ones, so that what a process got for
its life does not look like an artifact.
"""

from __future__ import annotations

import functools
import itertools
import random
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

from tunerd.artifacts.manifest import MANIFEST
from tunerd.coordinator.isolation import MAX_ATTEMPTS
from tunerd.errors import InfrastructureError, Interrupted, WrongResultError
from tunerd.frontend.kernels import Kernels
from tunerd.frontend.samples import read_samples
from tunerd.records import Store
from tunerd.runner.base import ALONE, Runner
from tunerd.runner.profiles import within
from tunerd.runs import run
from tunerd.runs.finals.faults import is_final, without_cause
from tunerd.runs.finals.verify import Expected, expected_of
from tunerd.runs.plan import read
from tunerd.runs.shared import SharedResources
from tunerd.runs.timekeeping import core_busy_secs
from tunerd.slices import require_plan
from tunerd.stats.paired import fastest
from tunerd.studies.matrix.asked import Asked
from tunerd.studies.matrix.building import build_all, compile_all
from tunerd.studies.matrix.claims import DEFAULT, said_of
from tunerd.studies.matrix.folder import MatrixFolder, opened
from tunerd.studies.matrix.levels import Cost, cost_of, finalists_of, levels_of, settings_of
from tunerd.studies.matrix.profiles import cell_profile, contest_profile
from tunerd.studies.matrix.records import (
    ArtifactDone,
    CellDone,
    ContestDone,
    LevelDone,
    ModelTimes,
    StageDone,
    StageName,
)
from tunerd.studies.timing import StartedSlice, require_measured, started_at
from tunerd.system.signals import Stop
from tunerd.telemetry.progress import Progress
from tunerd.vocabulary import (
    Arrays,
    Build,
    Candidate,
    CapProof,
    Failure,
    Measurement,
    Phase,
    Profile,
    SliceRequest,
    TargetSpec,
    TrialState,
    default_candidate,
)
from tunerd.vocabulary.verdict import Verdict

Result = Measurement | Failure
Showing = Callable[[], AbstractContextManager[Progress]]  # of one level's progress


def carry_out(asked: Asked, showing: Showing, say: Callable[[str], None]) -> MatrixFolder:
    """Make the matrix, or what is left of it, and return what is kept.

    Raises TunerdError as `session.tune` does, WrongResultError where an artifact disagrees with
    its reference, and Interrupted after what was under way is kept.
    """
    fixed = read(asked.base)
    samples = read_samples(asked.base.inputs, fixed.inputs, asked.base.values)
    for pct in asked.shares:  # what this machine cannot do is said before hours of work
        require_plan(SliceRequest(asked.base.slice_kind, pct))
    with (
        opened(asked.base.out, asked.identity(fixed.digest, samples)) as kept,
        Stop() as stop,
        SharedResources(fixed) as shared,
    ):
        work = _Matrix(asked, kept, say, stop, shared, samples)
        work.levels(showing)
        if not work.is_measured:
            target = require_plan(SliceRequest(asked.base.slice_kind, max(asked.shares))).target
            say("lowering the model")
            kernels = shared.kernels(target)
            builds = work.build(kernels, target)
            shared.end_cluster()
            work.contests(builds, target, kernels.touched_bytes)
            work.artifacts(kernels, target)
            work.cells(target)
        return kept


class _Matrix:
    def __init__(
        self,
        asked: Asked,
        kept: MatrixFolder,
        say: Callable[[str], None],
        stop: Stop,
        shared: SharedResources,
        samples: Sequence[Arrays] = (),
    ) -> None:
        self._asked = asked
        self._samples = samples  # inputs that were given
        self._shared = shared
        self._kept = kept
        self._say = say
        self._slice_secs = 0.0
        self._stop = stop  # a level has its own while it runs

    @property
    def is_measured(self) -> bool:
        done = {(line.round, line.run_at) for line in self._kept.of(CellDone)}
        return done >= {(r, s) for r in range(self._asked.rounds) for s in self._asked.shares}

    # --- levels --------------------------------------------------------------------------------

    def levels(self, showing: Showing) -> None:
        """Tune at the first share and search at the others."""
        kept, asked = self._kept, self._asked
        done = {line.pct for line in kept.of(LevelDone)}
        todo = levels_of(asked.shares, independent=asked.independent)
        for number, level in enumerate(todo, 1):
            if level.pct in done:
                continue
            out = kept.level(asked.name(level.pct))
            folders = [kept.level(asked.name(pct)) for pct in level.learns_from]
            settings = settings_of(asked.base, level, folders, out)
            self._go_on(f"level {number} of {len(todo)}: {level.pct}%")
            with showing() as progress:
                if number == 1:
                    run.tune(settings, progress, shared=self._shared)
                else:
                    run.search(settings, progress, shared=self._shared)
            with Store.read(out) as store:
                cost, artifact_cost = cost_of(store), cost_of(store, (Phase.MODEL,))
                counts = store.counts(is_default=False)
            trials = counts[TrialState.MEASURED] + counts[TrialState.FAILED]
            kept.add(LevelDone(level.pct, level.learns_from, trials, cost, artifact_cost))

    # --- finalists -----------------------------------------------------------------------------

    def build(
        self, kernels: Kernels, target: TargetSpec
    ) -> dict[str, list[tuple[Candidate, Build | Failure]]]:
        """Build the finalists of all levels once; return each task's, its default first.

        What was compared at every share before is left out.

        A task without finalists keeps its default schedule: there is nothing to choose.
        """
        found: dict[str, list[Candidate]] = {}
        for finalists in self._finalists.values():
            for task_id, candidates in finalists.items():
                found.setdefault(task_id, []).extend(candidates)
        sides = {
            task.task_id: _distinct([default_candidate(task), *found.get(task.task_id, ())])
            for task in kernels.tasks
        }
        # Without any, the defaults are measured: an artifact names the shares that it ran at.
        contests = {task_id: of for task_id, of in sides.items() if len(of) > 1} or sides
        done = self._contests_done()
        contests = {
            task_id: of
            for task_id, of in contests.items()
            if not done.issuperset((pct, task_id) for pct in self._asked.shares)
        }
        wanted = list(itertools.chain.from_iterable(contests.values()))
        with self._costs("finalists"):
            builds = build_all(
                wanted, self._kept, target, self._asked.base, self._shared, self._go_on
            )
        return {
            task_id: [(c, builds[c.candidate_id]) for c in of] for task_id, of in contests.items()
        }

    def contests(
        self,
        builds: Mapping[str, list[tuple[Candidate, Build | Failure]]],
        target: TargetSpec,
        model_bytes: int,
    ) -> None:
        """Measure all finalists of each task at each share, and choose its winner there."""
        profile = within(contest_profile(self._asked.base.l2), model_bytes)
        done = self._contests_done()
        todo_at = {
            pct: todo
            for pct in self._order("contests")
            if (todo := [task_id for task_id in builds if (pct, task_id) not in done])
        }
        if not todo_at:
            return
        with self._costs("finalists"), self._slices(todo_at) as slices:
            for pct, todo in todo_at.items():
                one = slices[pct]
                for number, task_id in enumerate(todo):
                    if number % 10 == 0:
                        self._go_on(
                            f"finalists of all levels at {pct}% ({one.proof.sm_count} of "
                            f"{one.proof.device_sm_count}), task {number + 1} of {len(todo)}"
                        )
                    self._require_not_stopped()
                    self._contest(one, task_id, builds[task_id], profile)

    def _contest(
        self,
        one: StartedSlice,
        task_id: str,
        entries: Sequence[tuple[Candidate, Build | Failure]],
        profile: Profile,
    ) -> None:
        # What faulted at another share would take the slice with it at this one, too.
        failed = self._kept.failed(task_id)
        entered = {c.candidate_id: failed.get(c.candidate_id, build) for c, build in entries}
        ready = [build for build in entered.values() if isinstance(build, Build)]
        results: dict[str, Result] = {c: b for c, b in entered.items() if isinstance(b, Failure)}

        def measure(builds: Sequence[Build]) -> list[Result]:
            with self._working():
                return _final(lambda: one.runner.compare(builds, profile, company=ALONE))

        answers = measure(ready) if ready else []
        answers = without_cause(
            ready, answers, alone=lambda build: measure([build])[0], together=measure
        )
        results |= {b.candidate.candidate_id: r for b, r in zip(ready, answers, strict=True)}
        builds = {b.candidate.candidate_id: b for b in ready}
        default = entries[0][0].candidate_id
        may_win = self._may_win(one.pct, task_id)
        agreed = self._kept.agreed(task_id)
        while (winner := winner_of(results, default, may_win)) != default and default in builds:
            if winner in agreed:
                break
            with self._working():
                failure = one.runner.agree(builds[default], builds[winner], company=ALONE)
            if failure is None:
                break
            results[winner] = failure
        self._kept.add(
            ContestDone(one.pct, task_id, winner, default, results, one.proof, time.time())
        )

    def _contests_done(self) -> set[tuple[int, str]]:
        """Return at which shares the finalists of which tasks were measured."""
        return {(line.run_at, line.task_id) for line in self._kept.of(ContestDone)}

    @functools.cached_property
    def _finalists(self) -> dict[int, dict[str, list[Candidate]]]:
        """The best candidates of each level's search, by its share and their task."""
        found = {}
        for pct in self._asked.shares:
            with Store.read(self._kept.level(self._asked.name(pct))) as store:
                found[pct] = finalists_of(store)
        return found

    def _may_win(self, pct: int, task_id: str) -> set[str]:
        """Return the candidates that may win at a share, by id: those of all levels or its own."""
        levels = [pct] if self._asked.independent else self._asked.shares
        return {c.candidate_id for at in levels for c in self._finalists[at].get(task_id, ())}

    # --- whole models --------------------------------------------------------------------------

    def artifacts(self, kernels: Kernels, target: TargetSpec) -> None:
        """Compile the model with each share's winners, and with its defaults; verify each."""
        asked, kept = self._asked, self._kept
        done = {x.tuned_at for x in kept.of(ArtifactDone)}
        paths = {pct: kept.artifact(asked.name(pct)) for pct in (DEFAULT, *asked.shares)}
        todo = [p for p in paths if p not in done or not (paths[p] / MANIFEST).is_file()]
        if not todo:
            return
        with self._costs("artifacts"):
            compile_all(
                {pct: paths[pct] for pct in todo},
                self._candidates(),
                kept,
                kernels,
                target,
                self._go_on,
                sample=next(iter(self._samples), None),
            )
            self._go_on(f"comparing outputs with {kernels.model.graph.reference}")
            most, expected = max(asked.shares), expected_of(kernels.model, self._samples)
            with self._slices([most]) as slices:
                for pct in todo:
                    self._require_not_stopped()
                    self._verify(slices[most].runner, expected, pct)

    def _verify(self, runner: Runner, expected: Expected, pct: int) -> None:
        folder = str(self._kept.artifact(self._asked.name(pct)))

        def run_model(inputs: Arrays) -> Arrays:
            with self._working():
                return runner.run_model(folder, inputs, company=ALONE)

        verification = expected.verify(run_model)
        if verification.verdict is Verdict.WRONG:
            raise WrongResultError(
                f"the model {said_of(pct)} disagrees with {verification.reference}: "
                f"{verification.message}; see {folder}"
            )
        self._kept.add(ArtifactDone(pct, verification))

    def _candidates(self) -> dict[str, Candidate]:
        levels = self._finalists.values()
        return {c.candidate_id: c for level in levels for of in level.values() for c in of}

    def cells(self, target: TargetSpec) -> None:
        """Run every artifact at every share, in rounds."""
        asked, kept = self._asked, self._kept
        profile = cell_profile(target)
        done = {(line.round, line.run_at) for line in kept.of(CellDone)}
        rows = (DEFAULT, *asked.shares)
        for number in range(asked.rounds):
            todo = [p for p in self._order(f"cells {number}") if (number, p) not in done]
            if not todo:
                continue
            with self._costs("rounds"), self._slices(todo) as slices:
                for pct in todo:
                    self._go_on(f"every model at {pct}%, round {number + 1} of {asked.rounds}")
                    order = random.Random(f"{asked.base.seed} {number} {pct}")
                    self._cell(number, slices[pct], order.sample(rows, len(rows)), profile)

    def _cell(self, number: int, one: StartedSlice, rows: Sequence[int], profile: Profile) -> None:
        """Run the artifacts of `rows` in turns at a slice's share."""
        self._require_same_share(one.pct, one.proof)
        paths = [str(self._kept.artifact(self._asked.name(row))) for row in rows]
        with self._working():
            results = _final(lambda: one.runner.compare_models(paths, profile, company=ALONE))
        names = [f"the model {said_of(row)}" for row in rows]
        measured = require_measured(results, names, one.slice_id)
        times = tuple(
            ModelTimes(**vars(result), tuned_at=row)
            for row, result in zip(rows, measured, strict=True)
        )
        self._kept.add(CellDone(number, one.pct, times, one.proof, time.time()))

    def _require_same_share(self, pct: int, proof: CapProof) -> None:
        """Refuse a share that is another than in an earlier part of this matrix."""
        lines: list[ContestDone | CellDone] = [
            *self._kept.of(ContestDone),
            *self._kept.of(CellDone),
        ]
        for line in lines:
            found = (line.proof.device, line.proof.sm_count)
            if line.run_at == pct and found != (proof.device, proof.sm_count):
                raise InfrastructureError(
                    f"{pct}% is {proof.sm_count} of {proof.device} now and was {found[1]} of "
                    f"{found[0]} in an earlier part of {self._kept.root}; go on where that "
                    "was measured, or name a new folder"
                )

    # --- slices, order and costs ---------------------------------------------------------------

    def _order(self, what: str) -> list[int]:
        shares = list(self._asked.shares)
        random.Random(f"{self._asked.base.seed} {what}").shuffle(shares)
        return shares

    def _slices(self, shares: Iterable[int]) -> AbstractContextManager[dict[int, StartedSlice]]:
        """Start a slice of each share; no two of them work at once."""
        kind = self._asked.base.slice_kind
        plans = {pct: require_plan(SliceRequest(kind, pct)) for pct in shares}
        return started_at({pct: plan.slices[0] for pct, plan in plans.items()})

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Count what a slice takes; between such times it is idle."""
        since = time.monotonic()
        try:
            yield
        finally:
            self._slice_secs += time.monotonic() - since

    @contextmanager
    def _costs(self, stage: StageName) -> Iterator[None]:
        """Keep what a stage takes, also where it is interrupted."""
        since, before, self._slice_secs = time.monotonic(), core_busy_secs(), 0.0
        try:
            yield
        finally:
            after = core_busy_secs()
            cpu = sum(after[c] - before[c] for c in after if c in before) if before else None
            cost = Cost(time.monotonic() - since, cpu, self._slice_secs)
            self._kept.add(StageDone(stage, cost))

    def _go_on(self, message: str) -> None:
        self._require_not_stopped()
        self._say(message)

    def _require_not_stopped(self) -> None:
        if self._stop.requested:
            raise Interrupted(
                "stopped on request; what was measured is kept, and the same command goes on"
            )


def winner_of(results: Mapping[str, Result], default: str, may_win: Container[str]) -> str:
    """Return the fastest candidate if it is faster than the default by an interval, else that.

    Args:
        may_win: the ids of those that count, beside the default.
    """
    timed = {c: r.run_secs for c, r in sorted(results.items()) if isinstance(r, Measurement)}
    rivals = {c: secs for c, secs in timed.items() if c != default and c in may_win}
    if not rivals:
        return default
    best, compared = fastest(timed.get(default), rivals)
    return best if compared is None or compared.verdict is Verdict.FASTER else default


def _distinct(finalists: Iterable[Candidate]) -> list[Candidate]:
    """Return each candidate once, in order."""
    return list({c.candidate_id: c for c in finalists}.values())


def _final(measure: Callable[[], list[Result]]) -> list[Result]:
    """Measure again where somebody else's fault came between. The other slices are idle."""
    for _ in range(MAX_ATTEMPTS):
        results = measure()
        if all(map(is_final, results)):
            break
    return results
