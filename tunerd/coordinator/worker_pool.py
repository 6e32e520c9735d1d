"""Who there is, who works, and who is free: what the coordinator asks at every event."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from tunerd.coordinator.events import Work


@dataclass
class Worker:
    worker_id: str
    role: str  # "tuner" or "slice"
    lane: str | None
    device: str  # what a slice is a share of
    faults_alone: bool = False  # it ends no other slice of the device
    work: Work | None = None
    # What it was told so far: results by task_id and source, and rows of all tasks by source.
    islands: dict[str, dict[str, int]] = field(default_factory=dict)
    training_rows: dict[str, int] = field(default_factory=dict)

    @property
    def fault_domain(self) -> str:
        """What a slice shares its faults on."""
        return self.worker_id if self.faults_alone else self.device


class WorkerPool:
    """All workers. Those of one lane share cores: none is free while one of them works.

    Nor is a slice whose fault domain is held.
    """

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}
        self._counts: Counter[str] = Counter()  # by role
        self._busy: Counter[str] = Counter()
        self._lanes: defaultdict[str, dict[str, Worker]] = defaultdict(dict)
        self._busy_on: Counter[str] = Counter()  # slices, by device
        self._domains: defaultdict[str, dict[str, Worker]] = defaultdict(dict)  # slices alone
        self._held: set[str] = set()
        self._free: defaultdict[str, OrderedDict[str, Worker]] = defaultdict(OrderedDict)

    def join(self, worker: Worker) -> None:
        self.workers[worker.worker_id] = worker
        self._counts[worker.role] += 1
        if worker.lane is not None:
            self._lanes[worker.lane][worker.worker_id] = worker
        if worker.role == "slice":
            self._domains[worker.fault_domain][worker.worker_id] = worker
        self._offer(worker)

    def leave(self, worker: Worker) -> None:
        if worker.work is not None:
            self.end(worker)
        del self.workers[worker.worker_id]
        self._counts[worker.role] -= 1
        self._free[worker.role].pop(worker.worker_id, None)
        if worker.lane is not None:
            del self._lanes[worker.lane][worker.worker_id]
        if worker.role == "slice":
            del self._domains[worker.fault_domain][worker.worker_id]

    def begin(self, worker: Worker, work: Work) -> None:
        worker.work = work
        self._busy[worker.role] += 1
        self._busy_on[worker.device] += worker.role == "slice"
        for other in self._sharing(worker):
            self._free[other.role].pop(other.worker_id, None)

    def end(self, worker: Worker) -> None:
        worker.work = None
        self._busy[worker.role] -= 1
        self._busy_on[worker.device] -= worker.role == "slice"
        for other in self._sharing(worker):
            self._offer(other)

    def hold(self, domain: str) -> None:
        """Have no slice of a fault domain be free, until it is let go. Those at work go on."""
        self._held.add(domain)
        for worker in self._domains[domain].values():
            self._free[worker.role].pop(worker.worker_id, None)

    def let_go(self, domain: str) -> None:
        self._held.discard(domain)
        for worker in self._domains[domain].values():
            self._offer(worker)

    def is_quiet(self, domain: str) -> bool:
        """Whether no slice of a fault domain works; True of one that has none."""
        return all(w.work is None for w in self._domains[domain].values())

    def held_back(self, domain: str) -> Worker | None:
        """Return a slice of a fault domain that could work if it were not held, or None."""
        return next((w for w in self._domains[domain].values() if self._may_work(w)), None)

    def free(self, role: str) -> Worker | None:
        """Return who has been free the longest, or None."""
        return next(iter(self._free[role].values()), None)

    def all_free(self, role: str) -> list[Worker]:
        """Return all that are free; the answer stays as it is while work begins."""
        return list(self._free[role].values())

    def is_free(self, worker: Worker) -> bool:
        return worker.worker_id in self._free[worker.role]

    def count(self, role: str) -> int:
        return self._counts[role]

    def busy(self, role: str) -> int:
        return self._busy[role]

    def busy_on(self, device: str) -> int:
        """Return how many slices of a device work."""
        return self._busy_on[device]

    @property
    def is_idle(self) -> bool:
        return not any(self._busy.values())

    def _offer(self, worker: Worker) -> None:
        is_held = worker.role == "slice" and worker.fault_domain in self._held
        if self._may_work(worker) and not is_held:
            self._free[worker.role][worker.worker_id] = worker

    def _may_work(self, worker: Worker) -> bool:
        return all(w.work is None for w in self._sharing(worker))

    def _sharing(self, worker: Worker) -> Iterable[Worker]:
        """Return the workers of its lane, itself among them."""
        return (worker,) if worker.lane is None else self._lanes[worker.lane].values()
