"""Which choices of a design to try, and in what order: by chance, by score, and no two alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tunerd.candidates.metaschedule.design import Design
from tunerd.candidates.metaschedule.knobs import Choices

_HOPE = 32.0  # by chance, the first by estimate come e^32 times as often as the last


@dataclass(frozen=True)
class Choice:
    """One choice of one sketch."""

    sketch: int
    row: Choices

    @property
    def key(self) -> tuple[int, bytes]:
        return self.sketch, self.row.tobytes()


def by_chance(
    design: Design, sampled: Sequence[Choices], random: np.random.Generator
) -> Iterator[Choice]:
    """Yield choices in random order; first more often those that are estimated to be fast."""
    choices = [Choice(i, row) for i, rows in enumerate(sampled) for row in rows]
    secs = np.concatenate(
        [s.estimated_secs(rows) for s, rows in zip(design.sketches, sampled, strict=True)]
    )
    ranks = np.argsort(np.argsort(secs, kind="stable"), kind="stable") / max(1, len(secs))
    hope = -_HOPE * np.where(np.isnan(secs), 0.5, ranks)
    # Gumbel noise draws without replacement, by the exponential of what it is added to.
    for i in np.argsort(-(hope + random.gumbel(size=len(secs)))):
        yield choices[i]


def by_score(
    scores: npt.NDArray[np.float32], count: int, random: np.random.Generator
) -> npt.NDArray[np.int64]:
    """Draw indices, better ones more often: by rank, the first ten times as often as the last."""
    ranks = np.empty(len(scores))
    ranks[np.argsort(-scores, kind="stable")] = np.linspace(1.0, 0.1, len(scores))
    return random.choice(len(scores), size=count, p=ranks / ranks.sum())


def unlike(
    design: Design, choices: Sequence[Choice], count: int, *, most_alike: int
) -> tuple[list[Choice], list[Choice]]:
    """Split off the first `count`, few of them with the same tiles; return them and the rest."""
    chosen: list[Choice] = []
    rest: list[Choice] = []
    alike: dict[tuple[int, bytes], int] = {}
    for place, choice in enumerate(choices):
        if len(chosen) == count:
            return chosen, [*rest, *choices[place:]]
        tiles = design.sketches[choice.sketch].tiles_of(choice.row).tobytes()
        seen = alike.get((choice.sketch, tiles), 0)
        if seen < most_alike:
            alike[choice.sketch, tiles] = seen + 1
            chosen.append(choice)
        else:
            rest.append(choice)
    return chosen, rest


def first_of_each(rows: Choices) -> npt.NDArray[np.int64]:
    """Return where each distinct row appears first, in that order."""
    # By a linear hash modulo 2**64: sorting numbers is far faster than sorting rows. That two rows
    # which differ have one hash is all but impossible, and costs one choice of thousands.
    factors = np.random.default_rng(0).integers(1, 2**63, rows.shape[1], dtype=np.uint64) * 2 + 1
    hashes = (rows.astype(np.uint64) * factors).sum(axis=1, dtype=np.uint64)
    _, first = np.unique(hashes, return_index=True)
    return np.sort(first)
