"""What a run and the gate read of a team's store, with changes: the rows of strangers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path

from hypothesis import strategies as st

from tests.lib.fuzz_mutations import changed_bytes, changed_stores
from tests.system.test_team_store import Member, member, whole_model
from tunerd.errors import TunerdError
from tunerd.studies.compare import load_sides
from tunerd.system.store_address import StoreAddress
from tunerd.vocabulary import Model, TensorSpec

_MODEL = Model("net", "d" * 64, (TensorSpec("x", (1,), "float32"),), (), graph=None)


@contextlib.contextmanager
def _joined(folder: Path, store: Path) -> Iterator[Member]:
    made = member(folder, StoreAddress.parse(f"sqlite:///{store}"))
    try:
        yield made
    finally:
        made.own.close()


def _publish(each: Member) -> None:
    outcome = whole_model(_MODEL, 1.0)
    each.own.save_outcome(outcome)
    each.team.publish(outcome)


def team_inputs(folder: Path) -> st.SearchStrategy[bytes]:
    store = folder / "team.sqlite"
    if not store.exists():
        for number, ratio in enumerate((2.0, 3.0)):
            with _joined(folder / f"member{number}", store) as each:
                each.tune("t0", "t1", ratio=ratio)
                _publish(each)
    whole = store.read_bytes()
    stores = changed_stores([whole])
    return st.one_of(stores, stores, stores, changed_bytes([whole]))


def read_team(content: bytes, folder: Path) -> None:
    """Take from the store, compare with the newest run in it, and publish into it."""
    store = folder / "team.sqlite"
    store.write_bytes(content)
    query = f"sqlite:///{store}#model=net,share=cpu50"
    with _joined(folder / "own", store) as own:
        own.tune("t0")
        for read in (
            own.take,
            functools.partial(own.take, require=True),
            functools.partial(load_sides, query, query),
            functools.partial(_publish, own),
        ):
            with contextlib.suppress(TunerdError):
                read()
