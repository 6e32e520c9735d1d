"""Long models in segments, between which short ones have their turn.

GACER (arXiv 2304.11745) regulates granularity so: with a yield point every 100 to 300 us, a model
of 0.2 ms waits for one segment of a model of 20 ms, and not for all of it. Where an artifact is in
one segment, it is one. Between segments it is earliest slack first, as `ordered`; of what has no
deadline, the one that has least left is first, until another is owed its turn (Paella, SOSP 2023).

With `stops`, which `tunerd colocate regulate` finds, each member has a lane of the whole device and
stops after these kernels. Parts that are `apart` do not run at once: what would start beside one of
those waits, and others may pass it, until its queue lags by `patience_ms`. Then nothing starts
before it can.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from tunerd.colocation.plan import Member, Name
from tunerd.colocation.policies.base import Choice, Policy, Together, View
from tunerd.colocation.policies.ordered import Ordered, least_secs
from tunerd.colocation.regulation.values import Part, Regulation
from tunerd.colocation.work import Lane, Waiting
from tunerd.errors import InputError

Kernel = Annotated[int, Field(ge=1)]


class Regulated(Ordered):
    """Attributes:
    segment_us: how long a segment may be, at most.
    lanes: how many segments run at the same time, each on the whole device.
    stops: instead of both, after which kernels each member stops.
    apart: parts that do not run at once, as `vgg:0 bert:2`: the first of one, the third of another.
    """

    kind: ClassVar[str] = "regulated"
    about: ClassVar[str] = "long models in segments, earliest slack first between them"

    segment_us: Annotated[float, Field(gt=0)] = 200.0
    lanes: Annotated[int, Field(ge=1, le=64)] = 1
    stops: Annotated[dict[Name, tuple[Kernel, ...]], Field(default_factory=dict)]
    apart: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        self.regulation.check()
        return self

    @cached_property
    def regulation(self) -> Regulation:
        return Regulation.read(self.stops, self.apart)

    @property
    def segment_secs(self) -> float | None:
        return self.segment_us / 1e6

    @property
    def depth(self) -> int:
        return 1  # who comes is to wait for one segment

    def cut_of(self, member: str) -> float | Sequence[int] | None:
        return self.stops[member] if self.stops else self.segment_secs

    @property
    def stops_always(self) -> bool:
        return bool(self.apart)

    def lay_out(self, members: Sequence[Member]) -> tuple[Lane, ...]:
        names = tuple(m.name for m in members)
        if not self.stops:
            return tuple(Lane(f"whole-{i}", 100, names) for i in range(self.lanes))
        if set(names) != set(self.stops):
            raise InputError(
                f"policy regulated: stops: they are of {', '.join(self.stops)}, and the plan's "
                f"members are {', '.join(names)}; name each, [] for one that does not stop"
            )
        return tuple(Lane(name, 100, (name,)) for name in names)

    def choose(self, view: View) -> Choice | Together | None:
        if not self.apart:
            return super().choose(view)
        runs = {_part(running.waiting) for running in view.running}
        choices = [*view.startable()]
        free = [c for c in choices if not self.regulation.is_apart(_part(c[0]), runs)]
        passed = (waiting for waiting, _ in choices if all(waiting is not c[0] for c in free))
        if any(view.lag_secs(w.request.queue) > self.patience_ms / 1e3 for w in passed):
            return None
        return self._chosen(view, free)

    def starts(self, view: View) -> Iterator[Choice | Together]:
        return Policy.starts(self, view) if self.apart else super().starts(view)

    def _length(self, waiting: Waiting, lanes: Sequence[Lane], view: View) -> float:
        return least_secs(waiting, lanes, view)


def _part(waiting: Waiting) -> Part:
    return Part(waiting.request.member, waiting.segment)
