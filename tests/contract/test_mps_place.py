"""The place of clients of MPS, with a fake daemon and a real guard."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.lib.colocation_plans import compiled, inputs, lookup, plan_of
from tests.lib.fake_mps import left
from tests.lib.place_subjects import (
    WAIT_SECS,
    end_guard,
    mps,
    opened,
    runners_of,
    same,
    void,
)
from tunerd.colocation.engine import Engine
from tunerd.colocation.places import apart
from tunerd.colocation.places.base import Done, FaultedApartError
from tunerd.colocation.places.mps import MpsPlace
from tunerd.colocation.places.process_seat import ProcessSeat
from tunerd.colocation.plan import Member
from tunerd.colocation.work import Lane, Seat
from tunerd.runner.client import ModelRunError, RunnerClient
from tunerd.slices.cpu import CpuSlice
from tunerd.system.cuda_driver import CONNECTIONS, ask_for_connections
from tunerd.system.processes import ProcessId
from tunerd.vocabulary import SliceSpec


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("members")


def test_clients_of_mps_have_the_shares_of_their_lanes_and_this_process_is_none(root: Path) -> None:
    with opened(mps, root) as subject:
        lanes = subject.place.cut([Lane("half", 50, ("m0",)), Lane("rest", 40, ("m1",))])
        proofs = [
            subject.place.load(subject.member(seed), lane, cut=None).proof
            for seed, lane in enumerate(lanes)
        ]
        assert [(p.lane, p.units, p.mechanism) for p in proofs] == [
            ("half", 66, "mps"),
            ("rest", 52, "mps"),
        ]
        pids = {held.pid for held in runners_of(subject)}
        pipes = subject.root_of_mps.glob("**/pipe/client-*")
        assert {int(path.name.removeprefix("client-")) for path in pipes} == pids
        assert os.getpid() not in pids


def test_clients_of_mps_do_not_ask_for_the_queues_of_an_engine_in_this_process(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CONNECTIONS, raising=False)
    ask_for_connections()
    assert CONNECTIONS in os.environ
    with opened(mps, root) as subject:
        (lane,) = subject.place.cut([Lane("whole", 100, ("m0",))])
        subject.load(0, lane)
        (held,) = runners_of(subject)
        assert CONNECTIONS.encode() not in Path(f"/proc/{held.pid}/environ").read_bytes()


def test_a_client_of_mps_is_evicted_by_the_daemon_and_its_neighbours_go_on(root: Path) -> None:
    with opened(mps, root) as subject:
        (lane,) = subject.place.cut([Lane("whole", 100, ("m0", "m1"))])
        seat, other = (subject.load(seed, lane) for seed in (0, 1))
        evicted, neighbour = (held.pid for held in runners_of(subject))
        subject.hang(seat)
        subject.place.start(seat, 0, inputs(), void)
        assert subject.place.evict(seat) == (seat,)
        subject.place.reload(seat)
        told = subject.journal()
        assert f"terminate {evicted}" in told
        assert f"terminate {neighbour}" not in told
        assert told.count("daemon start") == 1
        for each in (seat, other):
            assert isinstance(subject.run(each, inputs()), Done)
        assert runners_of(subject)[1].pid == neighbour


def test_the_end_of_one_client_of_mps_is_the_end_of_all_and_all_serve_again(root: Path) -> None:
    with opened(mps, root) as subject:
        plan = plan_of(root, {"one": {}, "two": {}, "three": {}}, kind="streams")
        with Engine(plan, place=subject.place) as engine:
            expected = engine.submit("one", inputs()).result(WAIT_SECS)
            os.kill(runners_of(subject)[0].pid, signal.SIGKILL)
            futures = [engine.submit(name, inputs()) for name in ("one", "two", "three") * 2]
            answers = [future.result(WAIT_SECS) for future in futures]
            for name in ("one", "two", "three"):  # there may have been an answer before the fault
                engine.submit(name, inputs()).result(WAIT_SECS)
            faults = engine.stats().faults
        assert same(answers[0], expected)
        assert all(fault.recovered_secs is not None for fault in faults)
        assert len(frozenset().union(*(fault.lost for fault in faults))) == 3


def is_fork(pid: int) -> bool:
    return "tunerd.system.fork_server" in psutil.Process(psutil.Process(pid).ppid()).cmdline()


def test_seats_are_loaded_again_into_forks_as_soon_as_those_can_be_made(root: Path) -> None:
    with opened(mps, root) as subject:
        (lane,) = subject.place.cut([Lane("whole", 100, ("m0",))])
        seat, deadline = subject.load(0, lane), time.monotonic() + WAIT_SECS
        while not is_fork(runners_of(subject)[0].pid):
            assert time.monotonic() < deadline
            subject.place.reload(seat)
        done = subject.run(seat, inputs())
        assert isinstance(done, Done)
        assert same(done.outputs, subject.expected(0, inputs()))


def test_what_runs_apart_in_a_fork_gives_the_same_answer(root: Path) -> None:
    with opened(mps, root) as subject:
        place = subject.place
        assert isinstance(place, MpsPlace)
        (lane,) = place.cut([Lane("whole", 100, ("m0",))])
        seat = subject.load(0, lane)
        assert place._forks is not None
        assert place._forks.wait_until_ready(WAIT_SECS)
        assert same(place.run_apart(seat, inputs()), subject.expected(0, inputs()))


def test_the_guard_is_let_go_also_where_a_seat_does_not_close(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(held: ProcessSeat) -> None:
        raise OSError("it does not close")

    let_go: list[str] = []
    with opened(mps, root) as subject:
        (lane,) = subject.place.cut([Lane("whole", 100, ("m0",))])
        subject.load(0, lane)
        seats = runners_of(subject)
        subject.place._early.callback(let_go.append, "guard")  # type: ignore[attr-defined]
        with monkeypatch.context() as patch:
            patch.setattr(ProcessSeat, "close", fail)
            with pytest.raises(OSError, match="does not close"):
                subject.place.close()
        assert let_go == ["guard"]
        for held in seats:
            held.close()


@pytest.fixture(scope="module")
def bad(root: Path) -> Path:
    """An artifact that faults where it is asked for a row that is nowhere."""
    return compiled(lookup(), root / "lookup", "cpu")


def test_who_may_be_to_blame_runs_apart_and_who_is_has_a_name_after_one_restart(
    root: Path, bad: Path
) -> None:
    rows, far = np.zeros(4, "int64"), np.full(4, 1 << 40, "int64")  # where nothing is mapped
    with opened(mps, root) as subject:
        plan = plan_of(root, {"one": {}, "two": {}}, kind="streams")
        member = Member(name="bad", artifact=bad)
        plan = plan.model_copy(update={"members": (*plan.members, member)})
        with Engine(plan, place=subject.place) as engine:
            expected = engine.submit("one", inputs()).result(WAIT_SECS)
            subject.hang(Seat("one", "stream-0"))  # it runs when the fault comes
            good = engine.submit("one", inputs())
            fault = engine.submit("bad", {"row": far})
            assert "bad" in str(fault.exception(WAIT_SECS))
            assert same(good.result(WAIT_SECS), expected)
            engine.submit("two", inputs()).result(WAIT_SECS)
            engine.submit("bad", {"row": rows}).result(WAIT_SECS)
            faults = engine.stats().faults
        assert [fault.member for fault in faults] == ["bad"]
        assert faults[0].recovered_secs is not None
        assert subject.journal().count("daemon start") == 2


ROWS, FAR = {"row": np.arange(4)}, {"row": np.full(4, 1 << 40)}


def apart_slice() -> CpuSlice:
    cores = tuple(sorted(os.sched_getaffinity(0)))
    return CpuSlice(SliceSpec("apart", "cpu", 100, cores=cores))


def test_what_faults_apart_or_does_not_end_there_is_a_fault_of_its_own(
    bad: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = apart.Apart()
    found = runs.run(apart_slice(), bad, ROWS)
    assert np.array_equal(found["found"], np.eye(4, 64, dtype="float32"))
    with pytest.raises(FaultedApartError, match="the runner ended"):
        runs.run(apart_slice(), bad, FAR)
    usual = RunnerClient.run_model

    def stopped(client: RunnerClient, *given: Any) -> Any:
        os.kill(client.prove().runner_pid, signal.SIGSTOP)
        return usual(client, *given)

    monkeypatch.setattr(apart, "_LIMIT_SECS", 4.0)  # a start takes less
    monkeypatch.setattr(RunnerClient, "run_model", stopped)
    with pytest.raises(FaultedApartError):
        runs.run(apart_slice(), bad, ROWS)


def test_a_fault_apart_is_told_before_its_process_has_ended(
    bad: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver may take seconds to let go of a process that has faulted."""
    may_end, usual = threading.Event(), CpuSlice.close

    def slow(made: CpuSlice) -> None:
        assert may_end.wait(WAIT_SECS)
        usual(made)

    monkeypatch.setattr(CpuSlice, "close", slow)
    runs = apart.Apart()
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(FaultedApartError, match="the runner ended"):
            runs.run(apart_slice(), bad, FAR)
        closed = pool.submit(runs.close)
        assert not closed.done()
        may_end.set()
        closed.result(WAIT_SECS)


def test_what_cannot_be_loaded_apart_is_no_fault(tmp_path: Path) -> None:
    with pytest.raises(ModelRunError):
        apart.Apart().run(apart_slice(), tmp_path / "nothing", ROWS)


def test_who_closes_waits_neither_for_what_runs_apart_nor_for_what_would(
    bad: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, has_stopped = apart.Apart(), threading.Event()
    usual = RunnerClient.run_model

    def stopped(client: RunnerClient, *given: Any) -> Any:
        os.kill(client.prove().runner_pid, signal.SIGSTOP)
        has_stopped.set()
        return usual(client, *given)

    monkeypatch.setattr(RunnerClient, "run_model", stopped)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(runs.run, apart_slice(), bad, ROWS)
        assert has_stopped.wait(WAIT_SECS)
        runs.end()
        assert "the runner ended" in str(asked.exception(WAIT_SECS))
    with pytest.raises(RuntimeError, match="the engine was closed"):
        runs.run(apart_slice(), bad, ROWS)


_SERVER = """
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tests.lib.colocation_plans import inputs, plan_of
from tests.lib.place_subjects import mps, runners_of
from tunerd.colocation.engine import Engine
subject = mps(Path(sys.argv[1]))
engine = Engine(plan_of(subject.root, {"one": {}, "two": {}}), place=subject.place).start()
engine.submit("one", inputs()).result(60)
print(subject.root_of_mps, *(held.pid for held in runners_of(subject)), flush=True)
sys.stdin.read()
"""


def test_a_server_that_is_killed_leaves_no_client_of_mps_and_signals_none(root: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER, root],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as server:
        assert server.stdout is not None
        folder, *pids = server.stdout.readline().split()
        clients = [ProcessId.of(int(pid)) for pid in pids]
        server.kill()
    assert len(clients) == 2
    assert left(client for client in clients if client is not None) == []
    assert "signal" not in (Path(folder) / "journal").read_text()
    end_guard(Path(folder))
