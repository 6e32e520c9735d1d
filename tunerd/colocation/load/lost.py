"""Which requests a load has lost."""

from __future__ import annotations

from collections.abc import Sequence

from tunerd.colocation.load.generator import DONE, FAILED, Sample
from tunerd.colocation.plan import Member


def lost_of(samples: Sequence[Sample], members: Sequence[Member]) -> list[Sample]:
    """Return the requests without an answer, but those that were refused for their deadline."""
    bound = {member.name for member in members if member.slo_ms is not None}
    return [s for s in samples if s.end == FAILED or (s.end != DONE and s.member not in bound)]
