"""A bench that takes a member out while its load runs: by a kill, and by a request that faults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.lib.colocation_plans import artifact, compiled, lookup, plan_of
from tests.lib.place_subjects import Subject, mps, opened, processes
from tunerd.colocation import bench as benches
from tunerd.colocation import engine as engines
from tunerd.colocation.bench import Benched
from tunerd.colocation.load.outage import Outage
from tunerd.colocation.plan import Plan
from tunerd.errors import InputError

FAULT_AT = 1.0


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("members")


@pytest.fixture(scope="module")
def bad(root: Path) -> Path:
    """An artifact that faults where it is asked for a row that is nowhere."""
    return compiled(lookup(), root / "lookup", "cpu")


def row_file(folder: Path, **arrays: Any) -> Path:
    np.savez(folder / "row.npz", **arrays)
    return folder / "row.npz"


@pytest.fixture
def far(tmp_path: Path) -> Path:
    return row_file(tmp_path, row=np.full(4, 1 << 40, "int64"))


def plan_with(root: Path, bad: Path, place: str, load: Mapping[str, Any]) -> Plan:
    paths = {"bad": bad, "one": artifact(root, 0)}
    members = [{"name": name, "artifact": path, "rate": 40} for name, path in paths.items()]
    document = {"place": place, "policy": {"kind": "streams"}, "members": members}
    return Plan.model_validate(document | {"load": {"kind": "poisson", "duration": 5} | load})


def benched(
    make: Callable[[Path], Subject], root: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> Benched:
    with opened(make, root) as subject:
        monkeypatch.setattr(engines, "place_of", lambda *_: subject.place)
        return benches.bench(plan, (), lambda _: None)


def outage_of(found: Benched) -> Outage:
    (result,) = found.results
    assert result.outage is not None
    return result.outage


def test_a_bench_of_processes_takes_a_member_out_by_a_kill(
    root: Path, bad: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill = {"member": "bad", "after": FAULT_AT}
    plan = plan_with(root, bad, "processes", {"kill": kill})
    outage = outage_of(benched(processes, root, plan, monkeypatch))
    (taken,) = outage.rounds
    assert (outage.member, outage.cause, outage.missed) == ("bad", "killed", 0)
    assert taken.at_secs == pytest.approx(FAULT_AT, abs=0.3)
    assert taken.out_secs is not None
    assert 0 < taken.out_secs <= (taken.served_again_secs or 0)
    assert (outage.lost, outage.lost_own) == (0, 0)


@pytest.mark.parametrize("make", [processes, mps], ids=["processes", "mps"])
def test_a_bench_sends_what_faults_and_says_what_the_others_lose(
    make: Callable[[Path], Subject],
    root: Path,
    bad: Path,
    far: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault = {"member": "bad", "after": FAULT_AT, "inputs": far}
    plan = plan_with(root, bad, make.__name__, {"fault": fault})
    found = benched(make, root, plan, monkeypatch)
    outage = outage_of(found)
    assert sum(found.results[0].faults.values()) >= 1
    (taken,) = outage.rounds
    (when,) = found.rounds[0].outages
    assert when is not None
    assert FAULT_AT <= when.at_secs == taken.at_secs < when.known_secs
    assert (outage.member, outage.cause, outage.missed) == ("bad", "faulted", 0)
    assert taken.out_secs is not None
    assert when.known_secs - when.at_secs < taken.out_secs <= (taken.served_again_secs or 0)
    assert (outage.lost, outage.lost_own) == (0, 0)
    (one,) = outage.neighbours
    assert one.member == "one"
    assert one.before.per_sec
    if make is mps:  # a fault of one client takes all: an answer waits until all are loaded again
        assert one.during.longest_secs is not None
        assert one.during.longest_secs > taken.out_secs / 4


def test_inputs_that_cause_no_fault_are_an_error(
    root: Path, bad: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = row_file(tmp_path, row=np.zeros(4, "int64"))
    fault = {"member": "bad", "after": FAULT_AT, "inputs": near}
    plan = plan_with(root, bad, "processes", {"duration": 2, "fault": fault})
    with pytest.raises(InputError, match=r"bad answered .*row\.npz without a fault; give inputs"):
        benched(processes, root, plan, monkeypatch)


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        (None, "cannot be read as inputs .*; write it with numpy.savez, its arrays named row"),
        ({"line": np.zeros(4, "int64")}, "has an array 'line', and the model takes row"),
        ({}, "holds no array; the model takes row"),
        ({"row": np.zeros(3, "int64")}, r"row.npz does not fit: input 'row' of bad is int64\[3\]"),
        ({"row": np.zeros(4)}, r"is float64\[4\]; it takes int64\[4\]"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_before_anything_is_loaded(
    arrays: Mapping[str, Any] | None,
    said: str,
    root: Path,
    bad: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "row.npz" if arrays is None else row_file(tmp_path, **arrays)
    fault = {"member": "bad", "after": FAULT_AT, "inputs": path}
    plan = plan_with(root, bad, "processes", {"fault": fault})
    monkeypatch.setattr(benches, "Engine", None)
    with pytest.raises(InputError, match=f"load.fault: .*{said}"):
        benches.bench(plan, (), lambda _: None)


def test_a_member_of_several_inputs_is_to_have_all_of_them(root: Path, tmp_path: Path) -> None:
    path = row_file(tmp_path, offset=np.zeros((2, 10), "float32"))
    load = {"fault": {"member": "one", "after": 0.4, "inputs": path}, "duration": 1}
    plan = plan_of(root, {"one": {}}, place="processes", load=load)
    with pytest.raises(InputError, match="one takes the inputs x, offset and got offset"):
        benches.bench(plan, (), lambda _: None)
