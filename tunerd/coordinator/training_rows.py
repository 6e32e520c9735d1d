"""What tuners' cost models are told: results of all tasks, the newest ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

from tunerd.coordinator.events import Proposed
from tunerd.vocabulary import Candidate, Failure, Measurement, TrainingRow

_MOST = 1024  # that are kept, and told at once: some 500 KB


class TrainingRows:
    """Results with the features that came with their candidates, numbered as they ended."""

    def __init__(self) -> None:
        self.count = 0  # that ever came
        self._newest: deque[TrainingRow] = deque(maxlen=_MOST)
        self._open: dict[str, bytes] = {}  # features by the ids of trials that have not ended

    def opened(self, fresh: Sequence[Candidate], proposed: Proposed) -> None:
        """Keep the features of what is new in a proposal, where its tuner has given them."""
        names = (c.candidate_id for c in proposed.candidates)
        features = dict(zip(names, proposed.features, strict=False))
        for candidate in fresh:
            if candidate.candidate_id in features:
                self._open[candidate.candidate_id] = features[candidate.candidate_id]

    def ended(self, candidate: Candidate, result: Measurement | Failure) -> None:
        features = self._open.pop(candidate.candidate_id, None)
        if features is None:  # a default, or of an earlier session
            return
        secs = result.median_secs if isinstance(result, Measurement) else None
        self._newest.append(TrainingRow(candidate.task_id, candidate.candidate_id, features, secs))
        self.count += 1

    def since(self, number: int) -> tuple[TrainingRow, ...]:
        """Return those kept, in order, except for the first `number` that came."""
        fresh = min(self.count - number, len(self._newest))
        return tuple(islice(self._newest, len(self._newest) - fresh, None))
