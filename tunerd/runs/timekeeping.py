"""Notes where a session's time goes, in batches, for `time_use` to sum up."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from tunerd.cluster.actor_bodies import WorkerReply
from tunerd.coordinator.events import BuildThem, Measure, Propose, Work
from tunerd.records import Store
from tunerd.system import clock
from tunerd.vocabulary import Activity, Phase, PhaseTime, Span

_SPANS_AT_ONCE = 200  # in a transaction
_SPANS_SECS = 2.0  # of spans that may be lost with a killed session
_ACTIVITIES = {
    "propose": Activity.SEARCH,
    "build": Activity.BUILD,
    "measure": Activity.MEASURE,
    "warm_up": Activity.WAIT,
    "start": Activity.WAIT,
    "place": Activity.WAIT,  # of an actor that ended before it had its GPU
}


class Timekeeper:
    """Writes spans of workers and phases of one session to its store."""

    def __init__(self, store: Store, *, began_at: float) -> None:
        self._store = store
        self._spans: list[Span] = []
        self._phase = Phase.START
        self._since = began_at
        self._cores = core_busy_secs()

    def enter(self, phase: Phase) -> None:
        """End the phase that is under way, and begin another one."""
        self.end()
        self._phase, self._since, self._cores = phase, clock.now(), core_busy_secs()

    def end(self) -> None:
        """Write what the phase under way has left to write. No phase follows unless entered."""
        self._flush()
        if self._since == 0.0:
            return
        now, cores = clock.now(), core_busy_secs()
        busy = tuple(
            (c, round(s - self._cores[c], 3)) for c, s in cores.items() if c in self._cores
        )
        self._store.add_phase(
            PhaseTime(self._phase, self._since, now, self._store.session, core_busy_secs=busy)
        )
        self._since = 0.0

    def expect(self, workers: Iterable[str], role: str) -> None:
        """Note who takes part: one that never gets work was idle all the time."""
        now = clock.now()
        session = self._store.session
        self._spans += [Span(w, Activity.IDLE, now, now, role, session) for w in workers]
        self._flush()

    def note(self, answer: WorkerReply, role: str, work: Work | None) -> None:
        """Note a piece of work that ended, or was lost."""
        items, task_id = 0, ""
        match work:
            case Propose(task=task):
                items = 0 if answer.error else len(answer.value.candidates)
                task_id = task.task_id
            case BuildThem(candidates=candidates):
                items = len(candidates)
            case Measure(builds=builds):
                items = len(builds)
        self._spans.append(
            Span(
                answer.worker_id,
                _ACTIVITIES[answer.method],
                answer.started_at,
                answer.ended_at,
                role,
                self._store.session,
                items,
                task_id,
                answer.busy_secs,
                answer.cpu_secs,
            )
        )
        waited_secs = answer.ended_at - self._spans[0].end
        if len(self._spans) >= _SPANS_AT_ONCE or waited_secs >= _SPANS_SECS:
            self._flush()

    def called(self, slice_id: str, started_at: float, ended_at: float) -> None:
        """Note work that was waited for in a slice, as the end of a run does."""
        session = self._store.session
        self._spans.append(Span(slice_id, Activity.MEASURE, started_at, ended_at, "slice", session))

    def _flush(self) -> None:
        spans, self._spans = self._spans, []
        self._store.add_spans(spans)


def core_busy_secs(stat: Path = Path("/proc/stat")) -> dict[int, float]:
    """Return how long each core that this process may use has worked since boot.

    For anybody: user, nice, system, irq and softirq of proc_stat(5). Empty where there is no such
    file, or no core in it.
    """
    try:
        lines = stat.read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    tick_secs = 1.0 / os.sysconf("SC_CLK_TCK")
    mine = os.sched_getaffinity(0)
    found = {}
    for line in lines:
        name, *fields = line.split() or [""]
        if name.startswith("cpu") and name[3:].isdecimal() and int(name[3:]) in mine:
            user, nice, system, _idle, _iowait, irq, softirq = map(int, fields[:7])
            found[int(name[3:])] = tick_secs * (user + nice + system + irq + softirq)
    return found
