"""What plans of mixes share by a team's store: points of curves, pairs, and what the engine takes.

The store is asked once, before anything is measured, and written to once, when all is. What this
plan measures is kept in its folder first: where the store is away the plan goes on without it, and
the same command, run again, writes what is missing. A point is taken where the very artifact, or
for pairs and the engine artifacts with the very kernels, was measured in the same way on the same
kind of machine. An artifact's manifest says its batch, so that its sha256 holds it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from tunerd.colocation.planning.curves import Origin, Point, point_json, point_of
from tunerd.colocation.planning.engine_cost import EngineCost, Key
from tunerd.colocation.planning.pairs import Pair, Side
from tunerd.errors import InputError, TunerdError
from tunerd.records.points import MachineKind, SharedPoint, TeamPoints
from tunerd.system import clock
from tunerd.system.jsonl import Journal
from tunerd.system.store_address import StoreAddress

log = logging.getLogger(__name__)

_T = TypeVar("_T")
MEASURED = "measured.jsonl"
_SHARED = TypeAdapter(SharedPoint)
_PAIR, _COST = TypeAdapter(Pair), TypeAdapter(EngineCost)


class Team:
    """A team's store as one plan meets it.

    address: None without one; what is measured is kept for it all the same.
    on: this kind of machine, or why nothing is shared on it.
    place: of the engine, by which pairs and what the engine takes are measured.
    """

    def __init__(
        self,
        address: StoreAddress | None,
        on: MachineKind | str,
        *,
        place: str,
        host: str,
        folder: Path,
        say: Callable[[str], None],
    ) -> None:
        self._address = address
        self._on = on
        self._place, self._host = place, host
        self._journal = Journal(folder / MEASURED)
        self._say = say
        self._known: dict[str, SharedPoint] = {}
        self._own: set[str] = set()  # subjects that this plan measured before: not taken
        self.notes: list[str] = []
        if address is not None and isinstance(on, str):
            self._note(f"nothing is shared by {address.shown}: {on}")

    # --- the store -----------------------------------------------------------------------------

    def ask(self, *, is_dry: bool) -> None:
        """Read what the team has measured on this kind of machine; a dry run creates no table."""
        address, on = self._address, self._on
        if address is None or isinstance(on, str):
            return
        if is_dry and address.file is not None and not address.file.exists():
            return
        self._own = {point.subject for point in self._measured() if point.on == on}
        self._say(f"asking {address.shown} for points")
        opened = TeamPoints.read_shared if is_dry else TeamPoints.open_shared
        try:
            with opened(address) as store:
                self._known = store.measured_on(on)
        except TunerdError as error:
            self._note(f"no point was taken: {error}")

    def publish(self) -> None:
        """Give the team what this plan measured, now and before; it may have that already."""
        address = self._address
        if address is None or isinstance(self._on, str):
            return
        measured = self._measured()
        if not measured or all(self._known.get(p.subject) == p for p in measured):
            return
        self._say(f"writing {len(measured)} points to {address.shown}")
        try:
            with TeamPoints.open_shared(address) as store:
                store.save(measured)
        except TunerdError as error:
            self._note(f"no point was written, and the same command does it later: {error}")

    def _measured(self) -> list[SharedPoint]:
        found = []
        for line in self._journal.read().splitlines():
            try:
                found.append(_SHARED.validate_json(line))
            except ValidationError:
                raise InputError(
                    f"{self._journal.path} holds a line that is no point; remove it"
                ) from None
        return found

    def _note(self, text: str) -> None:
        log.warning("%s", text)
        self._say(text)
        self.notes.append(text)

    # --- what was measured ---------------------------------------------------------------------

    def points(
        self, of: str, digest: str, wanted: Iterable[tuple[int, int]], *, how: str
    ) -> list[Point]:
        """Return points of an artifact as of an entry of a mix.

        wanted: pairs of a share and how many are in a launch. how: it was measured.
        """
        found = []
        for share, together in wanted:
            shared = self._others(_of_curve(digest, share, together, how))
            point = None if shared is None else _decoded(shared, lambda v: point_of(json.loads(v)))
            if shared is None or point is None:
                continue
            if (point.share, point.together) == (share, together):
                found.append(replace(point, of=of, origin=self._origin(shared)))
        return found

    def keep_points(self, digest: str, points: Iterable[Point], *, how: str) -> None:
        for point in points:
            subject = _of_curve(digest, point.share, point.together, how)
            self._keep(subject, point_json(point))

    def pairs(self, architectures: Collection[str], device: str) -> list[Pair]:
        """Return pairs among models of these architectures."""
        found = []
        for subject, shared in self._known.items():
            if subject in self._own or '"kind": "pair"' not in subject:
                continue
            pair = _decoded(shared, _PAIR.validate_json)
            if pair is None or self._of_pair(pair) != subject:
                continue
            if pair.device == device and {*pair.models} <= {*architectures}:
                found.append(replace(pair, origin=self._origin(shared)))
        return found

    def keep_pairs(self, pairs: Iterable[Pair]) -> None:
        for pair in pairs:
            self._keep(self._of_pair(pair), asdict(pair))

    def cost(self, key: Key) -> EngineCost | None:
        """Return what the engine takes; key: as EngineCost's."""
        shared = self._others(self._of_cost(key))
        cost = None if shared is None else _decoded(shared, _COST.validate_json)
        if shared is None or cost is None or cost.key != key:
            return None
        return replace(cost, origin=self._origin(shared))

    def keep_cost(self, cost: EngineCost) -> None:
        self._keep(self._of_cost(cost.key), asdict(cost))

    def _of_pair(self, pair: Pair) -> str:
        of, beside = _of_side(pair.of), _of_side(pair.beside)
        return _subject("pair", of=of, beside=beside, place=self._place)

    def _of_cost(self, key: Key) -> str:
        of, _, rate, all_rate, lanes = key
        rehearsed = {"lanes": lanes} if lanes else {}
        said = {"of": of, "rate": rate, "all_rate": all_rate, **rehearsed}
        return _subject("engine", place=self._place, **said)

    def _others(self, subject: str) -> SharedPoint | None:
        return None if subject in self._own else self._known.get(subject)

    def _keep(self, subject: str, value: dict[str, Any]) -> None:
        if isinstance(self._on, str):
            return
        point = SharedPoint(subject, json.dumps(value), self._on, self._host, clock.now())
        self._journal.append(json.dumps(asdict(point)))

    def _origin(self, shared: SharedPoint) -> Origin:
        assert self._address is not None
        return Origin(self._address.shown, shared.host, shared.measured_at)


def _of_side(side: Side) -> list[str | int]:
    """Return what names a side, of one model as stores have it from before there were launches."""
    architecture, share, together = side.key
    return [architecture, share, together] if together > 1 else [architecture, share]


def _of_curve(digest: str, share: int, together: int, how: str) -> str:
    return _subject("curve", artifact=digest, share=share, together=together, how=how)


def _subject(kind: str, **said: Any) -> str:
    return json.dumps({"kind": kind, **said}, sort_keys=True)


def _decoded(shared: SharedPoint, read: Callable[[str], _T]) -> _T | None:
    """Return a point's value; None for a row that no plan can have written."""
    try:
        return read(shared.value)
    except (ValueError, TypeError, KeyError, ValidationError) as error:
        log.warning("a point of %s is damaged, and passed over: %s", shared.subject, error)
        return None
