"""Long models in segments, between which short ones have their turn.

GACER (arXiv 2304.11745) regulates granularity so: with a yield point every 100 to 300 us, a model
of 0.2 ms waits for one segment of a model of 20 ms, and not for all of it. Where an artifact is in
one segment, it is one. Between segments it is earliest slack first, as `ordered`; of what has no
deadline, the one that has least left is first, until another is owed its turn (Paella, SOSP 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import Field

from tunerd.colocation.plan import Member
from tunerd.colocation.policies.ordered import Ordered
from tunerd.colocation.work import Lane


class Regulated(Ordered):
    """Attributes:
    segment_us: how long a segment may be, at most.
    lanes: how many segments run at the same time, each on the whole device.
    """

    kind: ClassVar[str] = "regulated"
    about: ClassVar[str] = "long models in segments, earliest slack first between them"

    segment_us: Annotated[float, Field(gt=0)] = 200.0
    lanes: Annotated[int, Field(ge=1, le=64)] = 1

    @property
    def segment_secs(self) -> float | None:
        return self.segment_us / 1e6

    def lay_out(self, members: Sequence[Member]) -> tuple[Lane, ...]:
        names = tuple(m.name for m in members)
        return tuple(Lane(f"whole-{i}", 100, names) for i in range(self.lanes))

    def _length(self, left_secs: float) -> float:
        return left_secs
