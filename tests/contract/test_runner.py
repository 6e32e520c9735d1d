"""What a runner tells its slice of failures and of long work. Its device is a CPU that may die."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from tests.lib.artifact_fixtures import tiny_artifact
from tests.lib.build_fixtures import LLVM, doubling, raising
from tunerd.errors import HostError, InfrastructureError
from tunerd.runner import sampling, service
from tunerd.runner.client import RunnerClient, _limit_secs
from tunerd.runner.host import Blame, RunnerHost
from tunerd.runner.load import Load
from tunerd.runner.profiles import final_profile
from tunerd.runner.sampling import DEAD, CpuDevice, Device
from tunerd.system import host, wire
from tunerd.vocabulary import (
    MODEL,
    SEARCH,
    Build,
    CapProof,
    Failure,
    Kind,
    Measurement,
    Profile,
    Stage,
    to_json,
)

QUICK = Profile("quick-v1", max_samples=4, max_total_secs=0.05)
TEN = Profile("ten-v1", min_samples=10, max_samples=10, min_sample_secs=0.0)
CORES = sorted(host.facts().cores)[:1]
FATAL = "CUDA_ERROR_"  # a kernel that raises it leaves a mortal device dead


class MortalDevice(CpuDevice):
    """A CPU that answers nothing any more once a kernel has raised what has FATAL in its name."""

    is_dead = False

    def prepare(self, build: Build, path: Path, profile: Profile) -> sampling.Timed:
        self._require_life()
        try:
            return super().prepare(build, path, profile)
        except Exception as error:
            self.is_dead = FATAL in str(error)
            raise

    def loaded(self, path: Path) -> Callable[[Sequence[Any]], list[Any]]:
        self._require_life()
        kernel = super().loaded(path)

        def call(arrays: Sequence[Any]) -> list[Any]:
            try:
                return kernel(arrays)
            except Exception as error:
                self.is_dead = FATAL in str(error)
                raise

        return call

    def is_alive(self) -> bool:
        return not self.is_dead

    def _require_life(self) -> None:
        if self.is_dead:
            raise RuntimeError("CUDA: what the context says to everything")


class DeafDevice(MortalDevice):
    """A device whose process ends as it is asked whether it is alive."""

    def is_alive(self) -> bool:
        raise wire.Closed("the process has ended")


class ThreadHost(RunnerHost):
    """Has threads for a runner's processes."""

    slice_id = "cpu-0-0"

    def __init__(self) -> None:
        self.launches = 0

    def connect(self) -> socket.socket:
        self.launches += 1
        return runner_of_its_own()

    def fence(self, reason: str, *, is_alone: bool) -> Blame:
        return Blame()

    def check(self, facts: dict[str, Any]) -> CapProof:
        return PROOF


PROOF = CapProof("cpu-0-0", "cpu", 1, 2, "affinity", attached=True)


def runner_of_its_own() -> socket.socket:
    """Return a connection to a runner in a new thread, which ends with it."""
    ours, its = socket.socketpair()

    def serve() -> None:
        with its, contextlib.suppress(wire.Closed, OSError):
            service.RunnerService(its, "cpu", CORES).serve()

    threading.Thread(target=serve, daemon=True).start()
    return ours


@pytest.fixture
def host_(monkeypatch: pytest.MonkeyPatch) -> ThreadHost:
    monkeypatch.setattr(sampling, "CpuDevice", MortalDevice)
    return ThreadHost()


@pytest.fixture
def runner(host_: ThreadHost) -> Iterator[RunnerClient]:
    client = RunnerClient(host_)
    yield client
    client.close()


@pytest.fixture(scope="module")
def sound() -> Build:
    return doubling(LLVM)


# --- a context that has died -------------------------------------------------------------------

# Names that CUDA has, and one that it may get.
ERRORS = [
    "CUDA_ERROR_ILLEGAL_ADDRESS",
    "CUDA_ERROR_INVALID_ADDRESS_SPACE",
    "CUDA_ERROR_CONTAINED",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "CUDA_ERROR_OF_A_LATER_VERSION",
]


@pytest.mark.parametrize("name", ERRORS)
def test_whatever_left_a_context_dead_is_a_crash_and_costs_one_build(
    runner: RunnerClient, host_: ThreadHost, sound: Build, name: str
) -> None:
    before, failure, *after = runner.measure([sound, raising(LLVM, name), sound, sound], QUICK)
    assert isinstance(before, Measurement)
    assert isinstance(failure, Failure)
    assert failure.kind is Kind.CRASH
    assert name in failure.message
    assert failure.message.endswith(DEAD)
    assert all(isinstance(result, Measurement) for result in after)
    assert host_.launches == 2


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("too many resources requested for launch", Kind.REFUSED),
        ("an illegal instruction was encountered", Kind.REFUSED),  # says a text, not the context
        ("out of memory", Kind.OUT_OF_MEMORY),
    ],
)
def test_what_a_context_outlives_fails_one_build_in_the_same_runner(
    runner: RunnerClient, host_: ThreadHost, sound: Build, text: str, kind: Kind
) -> None:
    failure, after = runner.measure([raising(LLVM, text), sound], QUICK)
    assert isinstance(failure, Failure)
    assert failure.kind is kind
    assert isinstance(after, Measurement)
    assert host_.launches == 1


def test_of_builds_in_turns_those_from_the_dead_context_on_are_crashes(
    runner: RunnerClient, host_: ThreadHost, sound: Build
) -> None:
    builds = [raising(LLVM, "out of memory"), raising(LLVM, "CUDA_ERROR_CONTAINED"), sound]
    results = runner.compare(builds, QUICK)
    kinds = [result.kind for result in results if isinstance(result, Failure)]
    assert kinds == [Kind.OUT_OF_MEMORY, Kind.CRASH, Kind.CRASH]
    (again,) = runner.compare([sound], QUICK)
    assert isinstance(again, Measurement)
    assert host_.launches == 2


def test_a_comparison_of_results_and_work_that_kill_their_context_are_crashes(
    runner: RunnerClient, host_: ThreadHost, sound: Build
) -> None:
    fatal = raising(LLVM, "CUDA_ERROR_CONTAINED")
    for ask in (lambda: runner.agree(fatal, fatal), lambda: runner.load(Load(build=fatal))):
        launches = host_.launches
        failure = ask()
        assert isinstance(failure, Failure)
        assert failure.kind is Kind.CRASH
        (after,) = runner.measure([sound], QUICK)
        assert isinstance(after, Measurement)
        assert host_.launches == max(1, launches) + 1


def test_a_runner_in_whose_context_no_model_runs_any_more_is_replaced(
    runner: RunnerClient, host_: ThreadHost, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for is_dead, launches in ((False, 1), (True, 2)):
        monkeypatch.setattr(MortalDevice, "is_dead", is_dead)
        with pytest.raises(InfrastructureError, match="the model did not run"):
            runner.run_model(str(tmp_path), {})
        monkeypatch.setattr(MortalDevice, "is_dead", False)
        runner.agree(doubling(LLVM), doubling(LLVM))
        assert host_.launches == launches


def test_a_runner_that_ends_as_it_is_asked_for_its_context_costs_one_build(
    runner: RunnerClient, host_: ThreadHost, sound: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "CpuDevice", DeafDevice)
    failure, after = runner.measure([raising(LLVM, "anything"), sound], QUICK)
    assert isinstance(failure, Failure)
    assert failure.kind is Kind.CRASH
    assert isinstance(after, Measurement)
    assert host_.launches == 2


@pytest.mark.parametrize("problem", [HostError("no memory"), InfrastructureError("no runner")])
def test_what_was_measured_is_told_where_no_further_runner_starts(
    runner: RunnerClient,
    host_: ThreadHost,
    sound: Build,
    monkeypatch: pytest.MonkeyPatch,
    problem: Exception,
) -> None:
    runner.prove()

    def refuse() -> socket.socket:
        raise problem

    monkeypatch.setattr(host_, "connect", refuse)
    before, crash, left, last = runner.measure(
        [sound, raising(LLVM, "CUDA_ERROR_CONTAINED"), sound, sound], QUICK
    )
    assert isinstance(before, Measurement)
    assert isinstance(crash, Failure)
    assert crash.kind is Kind.CRASH
    assert left == last == Failure(Stage.RUN, Kind.COLLATERAL, f"it was not measured: {problem}")
    with pytest.raises(type(problem)):
        runner.measure([sound], QUICK)


def test_a_device_is_alive_unless_it_answers_with_an_error() -> None:
    class Absent(MortalDevice):
        tvm_name = "metal"

    assert CpuDevice.is_alive(CpuDevice(CORES))
    assert not Device.is_alive(Absent(CORES))


# --- signs of life -----------------------------------------------------------------------------


def answers(asked: dict[str, Any], blobs: Sequence[bytes] = ()) -> list[Any]:
    """Ask a runner; return its messages up to the results."""
    said: list[Any] = []
    with runner_of_its_own() as connection:
        wire.send(connection, asked, blobs)
        while not said or "results" not in said[-1]:
            said.append(wire.receive(connection)[0])
    return said


def test_a_sign_follows_each_build_that_is_loaded_and_each_sample(
    sound: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_SIGN_SECS", 0.0)
    asked = {"op": "compare", "builds": [to_json(sound)] * 2, "profile": to_json(TEN)}
    *signs, results = answers(asked, [sound.library] * 2)
    assert signs == [{"goes_on": True}] * (2 + 2 * 10)
    assert [len(r["run_secs"]) for r in results["results"]] == [10, 10]


def test_a_sign_follows_each_model_that_is_loaded_and_each_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_SIGN_SECS", 0.0)
    tiny_artifact(tmp_path / "tiny")
    artifacts = [str(tmp_path / "tiny"), str(tmp_path / "missing")]
    *signs, _ = answers({"op": "compare_models", "artifacts": artifacts, "profile": to_json(TEN)})
    assert signs == [{"goes_on": True}] * (2 + 10)


def test_what_takes_less_than_a_second_gives_no_sign(
    sound: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_SIGN_SECS", 1e9)
    asked = {"op": "compare", "builds": [to_json(sound)], "profile": to_json(TEN)}
    (results,) = answers(asked, [sound.library])
    assert results["results"]


# --- the time that work may take ---------------------------------------------------------------

SIGN = {"goes_on": True}
SAMPLES = {"calls": 1, "run_secs": [2.0] * 20}


@dataclass
class Script:
    """A connection that answers with messages, each so many seconds after the one before."""

    messages: list[tuple[float, Any]]
    limit_secs: float = 0.0
    left: bytes = b""

    def settimeout(self, secs: float) -> None:
        self.limit_secs = secs

    def sendall(self, data: bytes) -> None: ...
    def close(self) -> None: ...

    def recv_into(self, view: memoryview) -> int:
        if not self.left:
            secs, body = self.messages.pop(0)
            if secs > self.limit_secs:
                raise TimeoutError("timed out")
            blobs = [0, 0] if "calls" in body else []  # no starts and no ends of repeats
            header = json.dumps({"body": body, "blobs": blobs}).encode()
            self.left = struct.pack("<Q", len(header)) + header
        got = min(len(view), len(self.left))
        view[:got], self.left = self.left[:got], self.left[got:]
        return got


def client_of(*messages: tuple[float, Any]) -> RunnerClient:
    made = RunnerClient(ThreadHost())
    made._connection, made._proof = cast(Any, Script(list(messages))), PROOF
    return made


def test_a_comparison_that_gives_signs_may_take_as_long_as_its_samples_do(sound: Build) -> None:
    profile = final_profile("warm")
    signs = [(59.0, SIGN)] * (1 + profile.min_samples)
    (result,) = client_of(*signs, (1.0, {"results": [SAMPLES]})).compare([sound], profile)
    assert isinstance(result, Measurement)


def test_whole_models_that_give_signs_may_take_as_long_as_their_samples_do() -> None:
    signs = [(300.0, SIGN)] * 2 * MODEL.min_samples
    script = client_of(*signs, (1.0, {"results": [SAMPLES] * 2}))
    results = script.compare_models(["default", "tuned"], MODEL)
    assert all(isinstance(result, Measurement) for result in results)


@pytest.mark.parametrize("signs", [0, 1, 30])
def test_a_comparison_that_gives_no_sign_for_its_limit_has_a_kernel_without_end(
    sound: Build, signs: int
) -> None:
    told = [(1.0, SIGN)] * signs
    kernels = client_of(*told, (61.0, SIGN)).compare([sound] * 2, final_profile("warm"))
    models = client_of(*told, (601.0, SIGN)).compare_models(["default", "tuned"], MODEL)
    for result in (*kernels, *models):
        assert isinstance(result, Failure)
        assert (result.stage, result.kind) == (Stage.RUN, Kind.TIMEOUT)


@pytest.mark.parametrize(
    ("best_secs", "secs", "kind"),
    [
        (None, 59.0, None),
        (None, 61.0, Kind.TIMEOUT),
        (1e-3, 19.0, None),
        (1e-3, 21.0, Kind.TIMEOUT),
    ],
)
def test_a_build_of_the_search_has_a_minute_or_less_where_its_tasks_best_is_known(
    sound: Build, best_secs: float | None, secs: float, kind: Kind | None
) -> None:
    script = client_of((1.0, {"starting": ""}), (secs, {"result": SAMPLES}))
    (result,) = script.measure([sound], SEARCH, best_secs=[best_secs])
    assert (result.kind if isinstance(result, Failure) else None) is kind


@pytest.mark.parametrize(("once_secs", "kind"), [(1e-3, Kind.TIMEOUT), (90.0, None)])
def test_a_repeat_that_is_under_way_at_the_end_has_time_by_its_length(
    once_secs: float, kind: Kind | None
) -> None:
    told = ((1.0, {"once_secs": once_secs}), (0.0, {"begun": True}), (170.0, {"calls": 1}))
    script = client_of(*told)
    script.load(Load(artifact="folder"))
    script.repeat(0.0)
    ended = script.stop()
    assert (ended.kind if isinstance(ended, Failure) else None) is kind


@pytest.mark.parametrize(
    ("best_secs", "limit_secs"),
    [(None, 60.0), (20e-6, 20.0), (2e-3, 20.0), (4e-3, 40.0), (6e-3, 60.0), (3.0, 60.0)],
)
def test_the_time_of_a_build_follows_the_best_of_its_task(
    best_secs: float | None, limit_secs: float
) -> None:
    """20 s to load it are always there, and no more than 60 s for everything."""
    assert _limit_secs(best_secs) == pytest.approx(limit_secs)


class Constant:
    """A call that takes so long, as it says."""

    calls = 1

    def __init__(self, secs: float) -> None:
        self._secs = secs

    def sample(self) -> float:
        return self._secs


@pytest.mark.parametrize(
    ("slow_secs", "samples"), [(2.0, 2), (0.09, MODEL.hopeless_after), (0.01, MODEL.hopeless_after)]
)
def test_what_takes_long_and_is_far_behind_is_sampled_twice(slow_secs: float, samples: int) -> None:
    fast_secs = 0.01 if slow_secs > 0.01 else 0.0001
    ready = [Constant(slow_secs), Constant(fast_secs)]
    slow, fast = sampling.interleaved(CpuDevice(CORES), ready, profile=MODEL, goes_on=lambda: None)
    assert not isinstance(slow, Failure)
    assert not isinstance(fast, Failure)
    assert (len(slow[1]), len(fast[1])) == (samples, MODEL.max_samples)
