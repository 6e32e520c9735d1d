"""Candidates that wait for a build, by who should build them."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

from tunerd.vocabulary import Candidate


class BuildQueue:
    """A tuner gets what is nobody's first, then its own proposals, then another tuner's.

    Nobody's are defaults, of which the gains of all tasks wait, and what was lost or left over. A
    tuner still has the scheduled modules of its own proposals; another one must replay the traces.
    """

    def __init__(self) -> None:
        self._nobodys: deque[Candidate] = deque()
        self._by_tuner: OrderedDict[str, deque[Candidate]] = OrderedDict()  # none is empty
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def add(self, candidates: Iterable[Candidate], proposer: str | None = None) -> None:
        """Append candidates; without a proposer they are nobody's."""
        found = list(candidates)
        if found and proposer is not None:
            self._by_tuner.setdefault(proposer, deque()).extend(found)
        else:
            self._nobodys.extend(found)
        self._length += len(found)

    def add_first(self, candidates: Sequence[Candidate]) -> None:
        self._nobodys.extendleft(reversed(candidates))
        self._length += len(candidates)

    def disown(self, tuner_id: str) -> None:
        """Make a lost tuner's proposals nobody's."""
        self._nobodys.extend(self._by_tuner.pop(tuner_id, ()))

    def queue_for(self, tuner_id: str) -> Sequence[Candidate]:
        """Return the queue that this tuner takes from next, to be looked at only."""
        return self._nobodys or self._by_tuner[self._owner(tuner_id)]

    def take(self, tuner_id: str, count: int) -> tuple[Candidate, ...]:
        """Remove the first `count` of `queue_for`, which must hold as many."""
        self._length -= count
        if self._nobodys:
            return tuple(self._nobodys.popleft() for _ in range(count))
        owner = self._owner(tuner_id)
        queue = self._by_tuner[owner]
        taken = tuple(queue.popleft() for _ in range(count))
        if not queue:
            del self._by_tuner[owner]
        return taken

    def clear(self) -> None:
        self._nobodys.clear()
        self._by_tuner.clear()
        self._length = 0

    def _owner(self, tuner_id: str) -> str:
        return tuner_id if tuner_id in self._by_tuner else next(iter(self._by_tuner))
