"""Points that plans of mixes share, in a team's file and on a team's server."""

from __future__ import annotations

import dataclasses
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.lib.record_samples import FACTS, TASK
from tests.lib.store_places import StorePlace
from tunerd.errors import FolderError, StoreError
from tunerd.records.points import MachineKind, SharedPoint, TeamPoints
from tunerd.system.store_address import StoreAddress

ON = MachineKind("GPU X", 132, "570.1", "tunerd 1, TVM FFI 2")
POINT = SharedPoint('{"kind": "curve"}', '{"secs": [1.0]}', ON, "host-a", 100.0)


@pytest.fixture(params=["file", "server"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> StoreAddress:
    if request.param == "file":
        return StoreAddress.parse(f"sqlite:///{tmp_path / 'team.sqlite'}")
    return StoreAddress.parse(request.getfixturevalue("postgres").new_database())


def save(address: StoreAddress, *points: SharedPoint) -> None:
    with TeamPoints.open_shared(address) as store:
        store.save(points)


def known(address: StoreAddress, on: MachineKind = ON) -> dict[str, SharedPoint]:
    with TeamPoints.read_shared(address) as store:
        return store.measured_on(on)


def test_points_are_found_by_subject_whoever_wrote_them(address: StoreAddress) -> None:
    other = dataclasses.replace(POINT, subject='{"kind": "pair"}', host="host-b")
    save(address, POINT)
    save(address, other)
    assert known(address) == {POINT.subject: POINT, other.subject: other}


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(MachineKind)])
def test_nothing_is_found_on_another_kind_of_machine(address: StoreAddress, field: str) -> None:
    other = dataclasses.replace(ON, **{field: 66 if field == "unit_count" else "another"})
    save(address, POINT)
    assert known(address, other) == {}
    save(address, dataclasses.replace(POINT, on=other, host="host-b"))
    assert known(address)[POINT.subject].host == "host-a"


def test_a_point_may_be_written_again_and_the_newest_stays(address: StoreAddress) -> None:
    newer = dataclasses.replace(POINT, value='{"secs": [2.0]}', measured_at=200.0)
    save(address, newer, POINT)
    save(address, POINT)
    assert known(address) == {POINT.subject: newer}


def test_many_may_write_at_once_to_a_new_store(address: StoreAddress) -> None:
    points = [dataclasses.replace(POINT, subject=str(number)) for number in range(4)]
    with ThreadPoolExecutor(len(points)) as pool:
        list(pool.map(lambda point: save(address, point), points))
    assert known(address) == {point.subject: point for point in points}


def test_a_store_of_runs_alone_has_no_point_and_gets_its_table(address: StoreAddress) -> None:
    place = StorePlace(address=str(address.url.render_as_string(False)), identity="a run")
    with place.open(FACTS) as run:
        run.register_tasks([TASK])
    assert known(address) == {}
    save(address, POINT)
    assert known(address) == {POINT.subject: POINT}
    with place.read() as run:
        assert run.tasks() == [TASK]


def test_a_store_that_is_none_is_said(tmp_path: Path) -> None:
    path = tmp_path / "team.sqlite"
    path.write_bytes(b"no database")
    address = StoreAddress.parse(f"sqlite:///{path}")
    with pytest.raises((FolderError, StoreError), match="cannot be opened as a store"):
        TeamPoints.open_shared(address)


def test_a_row_that_no_plan_can_have_written_is_said(tmp_path: Path) -> None:
    path = tmp_path / "team.sqlite"
    address = StoreAddress.parse(f"sqlite:///{path}")
    save(address, POINT)
    with sqlite3.connect(path) as raw:
        raw.execute("UPDATE measured_points SET measured_at = 'noon'")
    with pytest.raises(StoreError, match=r"measured_points\.measured_at is 'noon'"):
        known(address)
