"""Where a run's store can be: its folder, or a team's store with other runs beside it."""

from __future__ import annotations

import dataclasses
import json
import tempfile
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tunerd.records import RunFacts, Store, server
from tunerd.system.store_address import StoreAddress
from tunerd.vocabulary import Candidate

KINDS = ("run folder", "team's file", "team's server")


def read_shared(address: StoreAddress, identity: str) -> Store:
    """Open a run in a team's store as it is at this moment; raises as `Store.join` does."""
    return Store._read(address.shown, server.open_reader(address), identity)


def proposed(
    store: Store, candidates: Iterable[Candidate], *, now: float | None = None
) -> list[str]:
    """Propose candidates and return their ids, which name their trials."""
    candidates = list(candidates)
    store.propose(candidates, now=now)
    return [c.candidate_id for c in candidates]


@dataclass(frozen=True)
class StorePlace:
    """One run's place: a folder, or an address and the run's identity."""

    folder: str = ""
    address: str = ""
    identity: str = ""

    def open(self, facts: RunFacts, now: float | None = None) -> Store:
        if self.folder:
            return Store.create_or_open(Path(self.folder), facts=facts, now=now)
        address = StoreAddress.parse(self.address)
        return Store.join(address, self.identity, facts=facts, now=now)

    def read(self) -> Store:
        if self.folder:
            return Store.read(Path(self.folder))
        return read_shared(StoreAddress.parse(self.address), self.identity)

    def fresh(self) -> StorePlace:
        """Return the place of another run: in the same team's store, or in a new folder."""
        if self.folder:
            return StorePlace(folder=tempfile.mkdtemp(dir=self.folder))
        return dataclasses.replace(self, identity=uuid.uuid4().hex)

    def __str__(self) -> str:
        return json.dumps(dataclasses.asdict(self))
