"""Which task deserves the next batch, kept as tasks change instead of asked of all of them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Mapping

from tunerd.candidates.base import BATCH
from tunerd.coordinator.task_state import TaskState

_ABROAD = 0.3  # what a gain counts for a tuner that has no island of the task: it must be told all


class Ranking:
    """Keys by value. Changes and looks at the highest cost O(log keys), amortised."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self._heap: list[tuple[float, int, str]] = []  # also what has changed since
        self._order: dict[str, int] = {}  # of equals the first known comes first

    def put(self, key: str, value: float | None) -> None:
        """Set a value; None takes the key out."""
        if self.values.get(key) == value:
            return
        if value is None:
            del self.values[key]
            return
        self.values[key] = value
        heapq.heappush(self._heap, self._entry(key))
        if len(self._heap) > 2 * len(self.values) + 64:
            self._heap = [self._entry(k) for k in self.values]
            heapq.heapify(self._heap)

    def highest(self) -> str | None:
        while self._heap:
            negative, _, key = self._heap[0]
            if self.values.get(key) == -negative:
                return key
            heapq.heappop(self._heap)
        return None

    def _entry(self, key: str) -> tuple[float, int, str]:
        return -self.values[key], self._order.setdefault(key, len(self._order)), key


class TaskScheduler:
    """The tasks of a run by what they may gain. Whoever changes a task's state says `changed`."""

    def __init__(self, states: Mapping[str, TaskState]) -> None:
        self._states = states
        self._changed = dict.fromkeys(states)
        self._scores = Ranking()  # what decides who gets a batch
        self._gains = Ranking()  # of the tasks that are not exhausted; no limit until two batches
        self._unfilled = set(states)  # neither exhausted nor full
        self._weighted = dict.fromkeys(states, 0.0)
        self._weighted_sum = 0.0
        self._unknown: set[str] = set()  # tasks that have no latency yet
        self._defaults_open: set[str] = set()

    def changed(self, state: TaskState) -> None:
        self._changed[state.task.task_id] = None

    def most_to_gain(self, islands: Collection[str]) -> TaskState | None:
        """Return the task to search next for a tuner with islands of these tasks, or None."""
        self._refresh()
        highest, scores = self._scores.highest(), self._scores.values
        if highest is None or highest in islands:
            return None if highest is None else self._states[highest]
        home = max((t for t in islands if t in scores), key=scores.__getitem__, default=None)
        if home is not None and scores[home] >= _ABROAD * scores[highest]:
            return self._states[home]
        return self._states[highest]

    @property
    def defaults_open(self) -> int:
        """The tasks whose default is under way: what they may gain is a guess."""
        self._refresh()
        return len(self._defaults_open)

    def highest_gain_secs(self) -> float:
        """Return the most that any task may gain, inf while one was hardly searched."""
        self._refresh()
        highest = self._gains.highest()
        return 0.0 if highest is None else self._gains.values[highest]

    def weighted_best_secs(self) -> float | None:
        """Return the model's time by its kernels, or None while a default is not measured yet."""
        self._refresh()
        return None if self._unknown else self._weighted_sum

    @property
    def all_exhausted(self) -> bool:
        self._refresh()
        return not self._gains.values

    @property
    def all_exhausted_or_full(self) -> bool:
        self._refresh()
        return not self._unfilled

    def _refresh(self) -> None:
        for task_id in self._changed:
            state = self._states[task_id]
            gain = state.next_gain_secs() if state.room(BATCH) > 0 else None
            under_way = state.proposing + math.ceil(state.open / BATCH)
            self._scores.put(task_id, None if gain is None else gain / (1 + under_way) ** 2)
            if state.exhausted:
                self._gains.put(task_id, None)
            else:
                most = math.inf if state.hardly_searched else state.gain_secs()
                self._gains.put(task_id, most)
            if state.exhausted or state.is_full:
                self._unfilled.discard(task_id)
            if state.default_open:
                self._defaults_open.add(task_id)
            else:
                self._defaults_open.discard(task_id)
            self._weigh(task_id, state.weighted_secs)
        self._changed.clear()

    def _weigh(self, task_id: str, secs: float | None) -> None:
        if secs is None:
            self._unknown.add(task_id)
            return
        self._unknown.discard(task_id)
        self._weighted_sum += secs - self._weighted[task_id]
        self._weighted[task_id] = secs
