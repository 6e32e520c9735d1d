"""By how much a model is slower beside another one: measured, estimated, or assumed to be none.

A pair is measured by `colocation.bench`: both at their shares, each with its next request sent when
the last is answered, together and alone in turns; the slowdown is the median beside over that
alone. A side may be launches of several requests, of as many models of one architecture or of one
that has batches. Pairs are kept as lines of JSON with the features of both, so that they outlast
the artifacts and teach the estimate.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import TypeAdapter, ValidationError

from tunerd.colocation.bench import bench
from tunerd.colocation.plan import LoadChoice, Member, Plan, PolicyChoice
from tunerd.colocation.planning.curves import Origin
from tunerd.errors import InputError
from tunerd.system.jsonl import Journal
from tunerd.vocabulary.verdict import Interval

if TYPE_CHECKING:
    from tunerd.colocation.planning.estimates import SlowdownModel

How = Literal["measured", "estimated", "assumed", "alone"]
Key = tuple[str, int, int]  # architecture, share, how many in a launch
PAIRS = "pairs.jsonl"
ROUNDS, ROUND_SECS = 3, 1.0  # of a measured pair: together, and each alone
_LONGER = (1, 4, 16)  # times as long, until each has answered enough


@dataclass(frozen=True)
class Side:
    """A model at a share, or launches of several of its architecture's requests there.

    architecture: what models with the same kernels have in common. features: of one request.
    together: how many requests a launch has.
    """

    name: str
    architecture: str
    share: int  # percent
    features: Mapping[str, float]
    together: int = 1

    @property
    def key(self) -> Key:
        return self.architecture, self.share, self.together

    @property
    def text(self) -> str:
        """Return it for people."""
        launch = f" ({self.together} in a launch)" if self.together > 1 else ""
        return f"{self.name} at {self.share}%{launch}"


@dataclass(frozen=True)
class Pair:
    """What `of` takes beside `beside`, which is always busy, over what it takes alone."""

    of: Side
    beside: Side
    device: str
    slowdown: Interval
    source: str
    origin: Origin | None = None  # None: this plan measured it

    @property
    def models(self) -> tuple[str, str]:
        """The two models, in any order: what estimates leave out together."""
        first, second = sorted((self.of.architecture, self.beside.architecture))
        return first, second


@dataclass(frozen=True)
class Slowdown:
    """A factor on a member's time, 1 and above, and how it is known."""

    interval: Interval
    how: How
    note: str = ""


NONE = Slowdown(Interval(1.0, 1.0, 1.0), "alone")


class Pairs:
    """Measured pairs of one device, and what is said where a pair was not measured."""

    def __init__(
        self, pairs: Iterable[Pair], device: str, *, model: SlowdownModel | None = None
    ) -> None:
        self.device = device
        self.model = model
        self.measured = [pair for pair in pairs if pair.device == device]
        self._by_key = {(p.of.key, p.beside.key): p for p in self.measured}
        self._said: dict[tuple[Key, Key], Slowdown] = {}

    def add(self, pairs: Iterable[Pair]) -> None:
        for pair in pairs:
            self.measured.append(pair)
            self._by_key[pair.of.key, pair.beside.key] = pair
        self._said.clear()

    def slowdown(self, of: Side, beside: Side) -> Slowdown:
        """Return what is known of one model beside another, best first."""
        key = of.key, beside.key
        if key not in self._said:
            self._said[key] = self._look_up(of, beside)
        return self._said[key]

    def _look_up(self, of: Side, beside: Side) -> Slowdown:
        pair = self._by_key.get((of.key, beside.key))
        if pair is not None:
            return Slowdown(_at_least_one(pair.slowdown), "measured")
        if self.model is None:
            return Slowdown(
                NONE.interval, "assumed", "no pair was measured, and none to learn from"
            )
        found = self.model.estimate(of, beside)
        if isinstance(found, str):
            return Slowdown(NONE.interval, "assumed", f"not estimated: {found}")
        return Slowdown(_at_least_one(found), "estimated")


def measure(
    one: tuple[Side, Sequence[Path]],
    two: tuple[Side, Sequence[Path]],
    *,
    like: Plan,
    device: str,
    say: Callable[[str], None],
    rounds: int = ROUNDS,
    round_secs: float = ROUND_SECS,
) -> tuple[Pair, Pair]:
    """Run two sides beside each other; return what each loses.

    Rounds are made longer where a side answers too little in them for a median. Raises InputError
    where that does not help, and as Engine.start does.

    Args:
        one, two: a side, and its artifacts: as many as a launch has requests, or one with batches.
        like: a plan whose place and device are taken.
    """
    sides = one[0], two[0]
    together = max(side.together for side in sides)
    members = (*_busy("one", *one, together), *_busy("two", *two, together))
    policy: dict[str, Any] = {"kind": "space"}
    if together > 1:
        policy = {"kind": "space-time", "slices": "lanes", "together": together}
    names = f"{sides[0].text} beside {sides[1].text}"
    for longer in _LONGER:
        secs = longer * round_secs
        load = LoadChoice(kind="closed", duration=secs, alone=("one", "two"), rounds=rounds)
        plan = like.model_copy(
            update={
                "members": members,
                "order": (),
                "weights_gib": None,  # a plan with it has room for what is always busy here
                "policy": PolicyChoice.model_validate(policy),
                "load": load,
            }
        )
        (result,) = bench(plan, (), lambda what: say(f"{names}: {what}")).results
        first, second = (against.p50 for against in result.against_alone)
        if first is not None and second is not None:
            how = "measured by colocation bench"
            return Pair(*sides, device, first, how), Pair(*sides[::-1], device, second, how)
        say(f"{names}: too little was answered in {secs:g} s")
    slow = sides[0 if first is None else 1]
    raise InputError(
        f"{slow.name} answered too little in {secs:g} s to tell its median ({names}); say "
        "`pairs: estimate` or `none` under `search`"
    )


def _busy(lane: str, side: Side, artifacts: Sequence[Path], most: int) -> Iterator[Member]:
    """Yield the members of a side in a lane of its share, always busy.

    Of launches there are requests for two: while one runs the next is full. Where others' launches
    may have more (`most`), there are requests for one, so that these do not.
    """
    if side.together == 1:
        yield Member(name=lane, artifact=artifacts[0], share=side.share)
        return
    artifacts = artifacts[: side.together]
    requests = side.together * (2 if side.together == most else 1)
    for nth, artifact in enumerate(artifacts):
        yield Member(
            name=f"{lane}-{nth}",
            artifact=artifact,
            share=side.share,
            lane=lane,
            clients=math.ceil(requests / len(artifacts)),
        )


def append(path: Path, pairs: Iterable[Pair]) -> None:
    """Add pairs to a file; they are on the disk when this returns."""
    journal = Journal(path)
    for pair in pairs:
        journal.append(json.dumps(asdict(pair)))


_PAIR = TypeAdapter(Pair)


def pair_of(line: bytes) -> Pair:
    """Return the pair that a line of JSON says; ValidationError where it is none."""
    return _PAIR.validate_json(line)


def read_pairs(path: Path) -> list[Pair]:
    """Read a file of pairs, none where there is none yet; InputError where a line is no pair."""
    found = []
    for number, line in enumerate(Journal(path).read().splitlines(), 1):
        try:
            found.append(pair_of(line))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise InputError(
                f"line {number} of {path} is no measured pair: {first['msg']}; take it out"
            ) from None
    return found


def _at_least_one(interval: Interval) -> Interval:
    """Take what is faster beside another for noise: nobody is promised to gain by neighbours."""
    value, low, high = (max(1.0, x) for x in (interval.value, interval.low, interval.high))
    return Interval(value, low, high)
