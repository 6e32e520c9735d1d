"""The contract of slices, kept by every member that is usable here."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from artifact_fixtures import tiny_artifact
from build_fixtures import (
    built,
    default_of,
    endless,
    matmul_task,
    raising,
    suicide,
    task_of,
)

from tunerd.builder.build import build_candidate
from tunerd.errors import HostError
from tunerd.frontend.onnx.reference import Reference
from tunerd.runner import client
from tunerd.slices import member, plan
from tunerd.slices.base import Slice
from tunerd.slices.cpu import CpuSlice
from tunerd.slices.simulated import FAULTS_VARIABLE, SimulatedSlice, number_of, simulated_secs
from tunerd.system import host
from tunerd.system.arrays import random_inputs
from tunerd.vocabulary import (
    METASCHEDULE,
    SEARCH,
    Build,
    Candidate,
    Conditions,
    Failure,
    Kind,
    Measurement,
    Model,
    Profile,
    SliceRequest,
    SliceSpec,
    Stage,
    TargetSpec,
)

QUICK = Profile("quick-v1", max_samples=4, max_total_secs=0.05)
KINDS = [
    "cpu",
    "simulated",
    pytest.param("mps", marks=pytest.mark.gpu),
    pytest.param("whole", marks=pytest.mark.gpu),
]


def pct_of(kind: str) -> int:
    """The least share that is a slice of its own here, 100% of a whole GPU."""
    if kind == "cpu":
        return -(-100 // host.facts().usable_cores)
    return {"simulated": 50, "mps": 40, "whole": 100}[kind]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    usable = member(request.param).usability()
    if not usable.ok:
        pytest.skip(usable.why)
    return str(request.param)


@pytest.fixture
def spec(kind: str) -> SliceSpec:
    return plan(SliceRequest(kind, pct_of(kind))).slices[0]


@pytest.fixture
def measured(spec: SliceSpec) -> Iterator[Slice]:
    with member(spec.kind)(spec) as made:
        yield made


@pytest.fixture
def with_runner(spec: SliceSpec) -> Iterator[Slice]:
    """A slice whose runner is a process that a kernel may end."""
    if spec.kind == "simulated":
        pytest.skip("a simulated slice has no runner; its faults come on cue")
    if spec.kind == "mps":
        pytest.skip("a client of MPS never ends by a signal; the tests of MPS fence it")
    if spec.kind == "whole":
        pytest.skip("a kernel of a GPU cannot signal its process")
    with member(spec.kind)(spec) as made:
        yield made


def target_of(spec: SliceSpec) -> TargetSpec:
    return plan(SliceRequest(spec.kind, spec.pct)).target


def builds_for(spec: SliceSpec, count: int = 3) -> list[Build]:
    """Build small kernels of different lengths."""
    return [kernel(spec, 64 << i) for i in range(count)]


def kernel(spec: SliceSpec, length: int) -> Build:
    from tvm import te

    data = te.placeholder((length,), name="data")
    twice = te.compute((length,), lambda i: data[i] * 2.0, name="twice")
    task = task_of([data, twice], target_of(spec))
    return built(build_candidate(task, named(default_of(task), length)))


def named(of: Candidate, number: int) -> Candidate:
    return dataclasses.replace(of, candidate_id=f"{number:016x}")


def broken(build: Build) -> Build:
    return dataclasses.replace(build, library=b"no library")


# --- the contract ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cpu", "simulated", "mps", "whole"])
def test_a_kind_says_whether_it_is_usable_here_and_why(name: str) -> None:
    usable = member(name).usability()
    assert usable.why
    if not usable.ok:
        planned = plan(SliceRequest(name, 40 if name == "mps" else 100))
        assert planned.slices == ()
        assert planned.problem


def test_shares_of_a_device_sum_to_100_at_most(kind: str) -> None:
    planned = plan(SliceRequest(kind, pct_of(kind)))
    assert planned.problem == ""
    assert planned.bound
    for index in {s.device_index for s in planned.slices}:
        assert sum(s.pct for s in planned.slices if s.device_index == index) <= 100


def test_slices_are_disjoint(kind: str) -> None:
    slices = plan(SliceRequest(kind, pct_of(kind))).slices
    assert len({s.slice_id for s in slices}) == len(slices)
    cores = [core for s in slices for core in s.cores]
    assert len(set(cores)) == len(cores)


def test_more_slices_than_fit_is_a_problem_that_says_how_many_do(kind: str) -> None:
    planned = plan(SliceRequest(kind, pct_of(kind), per_device=1000))
    assert planned.slices == ()
    assert "1000" in planned.problem
    assert planned.bound in planned.problem


def test_start_proves_what_was_obtained(measured: Slice) -> None:
    proof = measured.prove()
    assert proof.slice_id == measured.spec.slice_id
    assert 0 < proof.sm_count <= proof.device_sm_count
    assert proof.attached
    assert proof.mechanism
    assert proof.device


def test_each_build_is_measured_in_order_with_its_profile(measured: Slice) -> None:
    proof = measured.prove()
    results = measured.launch().measure(builds_for(measured.spec), QUICK)
    assert len(results) == 3
    for result in results:
        assert isinstance(result, Measurement), result
        assert QUICK.min_samples <= len(result.run_secs) <= QUICK.max_samples
        assert min(result.run_secs) > 0
        assert result.calls_per_sample >= 1
        assert result.profile == QUICK.name
        assert result.sm_count == proof.sm_count
        assert result.slice_id == measured.spec.slice_id


def test_a_slice_starts_itself_when_it_is_asked_to_measure(measured: Slice) -> None:
    (result,) = measured.launch().measure(builds_for(measured.spec, 1), QUICK)
    assert isinstance(result, Measurement)


def test_no_builds_bring_no_results(measured: Slice) -> None:
    assert measured.launch().measure([], QUICK) == []


def test_a_kernel_far_slower_than_a_rival_of_its_task_gets_few_samples(
    measured: Slice, spec: SliceSpec
) -> None:
    if spec.kind == "simulated":
        pytest.skip("simulated samples take no time, so none is left out")
    fast, slow = (kernel(spec, length) for length in (64, 1 << 24))
    (best,) = measured.launch().measure([fast], SEARCH)
    assert isinstance(best, Measurement)
    counts = []
    for build, best_secs in ((slow, None), (slow, best.median_secs), (fast, best.median_secs)):
        (result,) = measured.launch().measure([build], SEARCH, best_secs=[best_secs])
        assert isinstance(result, Measurement)
        counts.append(len(result.run_secs))
    assert counts[1] == SEARCH.hopeless_after < min(counts[0], counts[2])


def test_compared_builds_have_as_many_samples_each(measured: Slice) -> None:
    results = measured.launch().compare(builds_for(measured.spec, 2), QUICK)
    lengths = {len(r.run_secs) for r in results if isinstance(r, Measurement)}
    assert len(results) == 2
    assert len(lengths) == 1


def test_of_compared_builds_the_conditions_are_asked_once(
    with_runner: Slice, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds, asked = builds_for(with_runner.spec), []
    conditions = with_runner.conditions

    def counted(**_: bool) -> Conditions:  # on a GPU they take milliseconds
        asked.append(conditions())
        return asked[-1]

    monkeypatch.setattr(with_runner, "conditions", counted)
    results = with_runner.launch().compare(builds, QUICK)
    assert [r.conditions for r in results if isinstance(r, Measurement)] == asked * len(builds)


def test_of_compared_builds_one_that_cannot_win_gets_fewer_samples(measured: Slice) -> None:
    if measured.spec.kind == "simulated":
        pytest.skip("simulated samples take no time, so none is left out")
    profile = Profile(
        "few-v1", max_samples=8, max_total_secs=60.0, hopeless_after=5, hopeless_over=1.05
    )
    builds = [kernel(measured.spec, length) for length in (64, 1 << 24)]
    fast, slow = measured.launch().compare(builds, profile)
    assert isinstance(fast, Measurement)
    assert isinstance(slow, Measurement)
    assert (len(fast.run_secs), len(slow.run_secs)) == (8, 5)


def test_a_closed_slice_can_be_closed_again(spec: SliceSpec) -> None:
    made = member(spec.kind)(spec)
    made.prove()
    made.close()
    made.close()


def test_a_slice_that_was_never_started_can_be_closed(spec: SliceSpec) -> None:
    member(spec.kind)(spec).close()


def test_a_closed_slice_leaves_no_process_and_no_file(
    spec: SliceSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = member(spec.kind)(spec)
    pid = made.prove().runner_pid
    made.launch().measure(builds_for(spec, 1), QUICK)
    made.close()
    assert list(tmp_path.iterdir()) == []
    if pid:
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Model]:
    folder = tmp_path_factory.mktemp("artifact") / "tiny"
    model = tiny_artifact(folder)
    return str(folder), model


def skip_on_gpu(spec: SliceSpec) -> None:
    if spec.gpu_uuid is not None:
        pytest.skip("the artifact of these tests is one for llvm")


def test_a_model_runs_in_the_slice(measured: Slice, artifact: tuple[str, Model]) -> None:
    skip_on_gpu(measured.spec)
    folder, model = artifact
    inputs = random_inputs(model.inputs, 0)
    outputs = measured.launch().run_model(folder, inputs)
    expected = Reference(model.proto).run(inputs)
    assert outputs.keys() == expected.keys() == {"scores", "features"}
    for name, array in expected.items():
        np.testing.assert_allclose(outputs[name], array, rtol=1e-4, atol=1e-5)


def test_models_are_timed_in_turns(measured: Slice, artifact: tuple[str, Model]) -> None:
    skip_on_gpu(measured.spec)
    folder, _ = artifact
    results = measured.launch().compare_models((folder, folder), QUICK)
    for result in results:
        assert isinstance(result, Measurement)
        assert min(result.run_secs) > 0
        assert result.profile == QUICK.name


# --- faults ------------------------------------------------------------------------------------


def test_a_build_that_cannot_be_loaded_is_a_failure_and_the_next_is_measured(
    with_runner: Slice,
) -> None:
    first, second = builds_for(with_runner.spec, 2)
    failure, result = with_runner.launch().measure([broken(first), second], QUICK)
    assert isinstance(failure, Failure)
    assert failure.stage is Stage.LOAD
    assert isinstance(result, Measurement)


def test_a_build_agrees_with_another_build_of_its_task(measured: Slice) -> None:
    (first,) = builds_for(measured.spec, 1)
    other = dataclasses.replace(first, candidate=named(first.candidate, 7))
    assert measured.launch().agree(first, other) is None


def test_a_build_that_computes_something_else_does_not_agree(with_runner: Slice) -> None:
    task = matmul_task(target_of(with_runner.spec))
    right, wrong = (
        built(build_candidate(t, default_of(t)))
        for t in (task, matmul_task(target_of(with_runner.spec), after="negative"))
    )
    failure = with_runner.launch().agree(right, wrong)
    assert isinstance(failure, Failure)
    assert (failure.stage, failure.kind) == (Stage.VERIFY, Kind.WRONG_ANSWER)


def test_a_build_that_cannot_be_loaded_does_not_spoil_a_comparison(with_runner: Slice) -> None:
    first, second = builds_for(with_runner.spec, 2)
    failure, result = with_runner.launch().compare([broken(first), second], QUICK)
    assert isinstance(failure, Failure)
    assert isinstance(result, Measurement)


def test_a_crashed_runner_costs_one_build_and_the_next_one_goes_on(with_runner: Slice) -> None:
    before = with_runner.prove().runner_pid
    first, last = builds_for(with_runner.spec, 2)
    ends = suicide(target_of(with_runner.spec), signal.SIGSEGV)
    good, crash, after = with_runner.launch().measure([first, ends, last], QUICK)
    assert isinstance(good, Measurement)
    assert isinstance(crash, Failure)
    assert (crash.stage, crash.kind) == (Stage.RUN, Kind.CRASH)
    assert isinstance(after, Measurement)
    assert not psutil.pid_exists(before)


def test_no_build_is_blamed_for_a_signal_from_outside(with_runner: Slice) -> None:
    # Which build was under way when the runner was killed says nothing: this one stands for any.
    if with_runner.kind == "mps":
        pytest.skip("its guard knows who is to blame")
    with_runner.prove()
    (last,) = builds_for(with_runner.spec, 1)
    build = suicide(target_of(with_runner.spec), signal.SIGKILL)
    lost, after = with_runner.launch().measure([build, last], QUICK)
    assert isinstance(lost, Failure)
    assert lost.kind is Kind.COLLATERAL
    assert lost.message == "the runner got SIGKILL"
    assert isinstance(after, Measurement)


def test_a_kernel_that_never_returns_times_out_and_the_rest_goes_on(
    with_runner: Slice, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = with_runner.prove().runner_pid
    monkeypatch.setattr(client, "BUILD_SECS", 2.0)
    (last,) = builds_for(with_runner.spec, 1)
    timeout, after = with_runner.launch().measure(
        [endless(target_of(with_runner.spec)), last], QUICK
    )
    assert isinstance(timeout, Failure)
    assert timeout.kind is Kind.TIMEOUT
    assert isinstance(after, Measurement), after
    assert not psutil.pid_exists(pid)


def test_no_build_is_blamed_for_a_runner_that_somebody_stopped(
    with_runner: Slice, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = with_runner.prove().runner_pid
    monkeypatch.setattr(client, "BUILD_SECS", 2.0)
    build, last = builds_for(with_runner.spec, 2)
    psutil.Process(pid).suspend()
    lost, after = with_runner.launch().measure([build, last], QUICK)
    assert isinstance(lost, Failure)
    assert lost.kind is Kind.COLLATERAL
    assert isinstance(after, Measurement), after
    assert not psutil.pid_exists(pid)


def test_a_kernel_is_not_blamed_for_its_time_if_somebody_stopped_the_runner(
    with_runner: Slice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "BUILD_SECS", 5.0)
    stopping = threading.Timer(1, psutil.Process(with_runner.prove().runner_pid).suspend)
    stopping.start()  # before, the runner's kernel is as good as any
    (lost,) = with_runner.launch().measure([endless(target_of(with_runner.spec))], QUICK)
    stopping.join()
    assert isinstance(lost, Failure)
    assert lost.kind is Kind.COLLATERAL


def test_a_build_that_does_not_run_leaves_the_runner_as_it_is(with_runner: Slice) -> None:
    pid = with_runner.prove().runner_pid
    (sound,) = builds_for(with_runner.spec, 1)
    refused = raising(target_of(with_runner.spec), "too many resources requested for launch")
    failure, result = with_runner.launch().measure([refused, sound], QUICK)
    assert isinstance(failure, Failure)
    assert failure.kind is Kind.REFUSED
    assert isinstance(result, Measurement)
    assert psutil.pid_exists(pid)


def test_a_kernel_of_a_task_that_was_measured_has_less_time(
    with_runner: Slice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "KNOWN_SECS", 2.0)
    (good,) = builds_for(with_runner.spec, 1)
    never = endless(target_of(with_runner.spec))
    (measured,) = with_runner.launch().measure([good], QUICK)
    assert isinstance(measured, Measurement)
    (timeout,) = with_runner.launch().measure([never], QUICK, best_secs=[measured.median_secs])
    assert isinstance(timeout, Failure)
    assert timeout.kind is Kind.TIMEOUT


def test_a_runner_that_was_killed_while_idle_is_replaced(with_runner: Slice) -> None:
    pid = with_runner.prove().runner_pid
    psutil.Process(pid).kill()
    psutil.Process(pid).wait()
    first, last = with_runner.launch().measure(builds_for(with_runner.spec, 2), QUICK)
    assert isinstance(first, Measurement) or not first.kind.ends_trial
    assert isinstance(last, Measurement)


_HOLDER = """
import sys
from test_slices import QUICK, endless, target_of
from tunerd.slices import member, plan
from tunerd.vocabulary import SliceRequest
spec = plan(SliceRequest("cpu", 100)).slices[0]
held = member("cpu")(spec)
kernel = endless(target_of(spec))
print(held.prove().runner_pid, flush=True)
held.launch().measure([kernel], QUICK)
"""


def test_a_runner_ends_with_its_slices_process_in_the_middle_of_a_kernel(
    with_runner: Slice,
) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER],
        cwd=Path(__file__).parent,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    runner = psutil.Process(int(holder.stdout.readline()))
    busy_secs = runner.cpu_times().user + 1.0  # loading takes less: it is in the kernel then
    while runner.cpu_times().user < busy_secs:
        assert holder.poll() is None
    holder.kill()
    holder.wait()
    runner.wait(30)


def test_a_model_that_is_not_there_is_a_failure_of_that_model(
    with_runner: Slice, artifact: tuple[str, Model], tmp_path: Path
) -> None:
    missing, found = with_runner.launch().compare_models((str(tmp_path), artifact[0]), QUICK)
    assert isinstance(missing, Failure)
    assert missing.stage is Stage.LOAD
    assert isinstance(found, Measurement)


# --- cpu ---------------------------------------------------------------------------------------


def affinities(pid: int) -> list[frozenset[int]]:
    """Return the cores of each thread of a process."""
    threads = [int(folder.name) for folder in Path(f"/proc/{pid}/task").iterdir()]
    return [frozenset(os.sched_getaffinity(thread)) for thread in threads]


@pytest.mark.skipif(host.facts().usable_cores < 2, reason="two slices need two cores")
def test_two_cpu_slices_keep_to_their_own_cores() -> None:
    specs = plan(SliceRequest("cpu", 50)).slices
    with CpuSlice(specs[0]) as first, CpuSlice(specs[1]) as second:
        pids = [first.prove().runner_pid, second.prove().runner_pid]
        wide = [wide_kernel(spec) for spec in specs]
        results: list[Any] = []
        at_once = [
            threading.Thread(target=lambda s=s, w=w: results.extend(s.launch().measure([w], QUICK)))
            for s, w in zip((first, second), wide, strict=True)
        ]
        for thread in at_once:
            thread.start()
        for thread in at_once:
            thread.join()
        assert all(isinstance(r, Measurement) for r in results)
        for spec, pid in zip(specs, pids, strict=True):
            assert all(cores <= frozenset(spec.cores) for cores in affinities(pid))


def test_a_slice_of_all_cores_has_a_thread_on_each() -> None:
    (spec,) = plan(SliceRequest("cpu", 100)).slices
    with CpuSlice(spec) as made:
        pid = made.prove().runner_pid
        (result,) = made.launch().measure([wide_kernel(spec)], QUICK)
        assert isinstance(result, Measurement)
        own = [cores for cores in affinities(pid) if len(cores) == 1]
        assert frozenset().union(*own, *affinities(pid)) == frozenset(spec.cores)


def wide_kernel(spec: SliceSpec) -> Build:
    """Build a kernel that uses every thread of its runtime."""
    from build_fixtures import candidate_of, new_schedule
    from tvm import te

    data = te.placeholder((4096, 64), name="data")
    twice = te.compute((4096, 64), lambda i, j: data[i, j] * 2.0, name="twice")
    task = task_of([data, twice], target_of(spec))
    schedule = new_schedule(task)
    schedule.parallel(schedule.get_loops(schedule.get_sblock("twice"))[0])
    return built(build_candidate(task, candidate_of(task, schedule)))


def test_a_share_below_one_core_says_what_is_enough() -> None:
    planned = CpuSlice.plan(SliceRequest("cpu", 1)) if host.facts().usable_cores < 100 else None
    if planned is None:
        pytest.skip("1% of this machine is a core")
    assert planned.slices == ()
    assert f"give at least {pct_of('cpu')}%" in planned.problem


def test_cores_that_are_not_there_are_refused() -> None:
    spec = dataclasses.replace(plan(SliceRequest("cpu", 100)).slices[0], cores=(0, 4095))
    with CpuSlice(spec) as made, pytest.raises(HostError, match=r"asked for the cores \[0, 4095\]"):
        made.prove()


# --- simulated ---------------------------------------------------------------------------------


def simulated(faults: str = "") -> SimulatedSlice:
    spec = plan(SliceRequest("simulated", 50)).slices[0]
    return SimulatedSlice(dataclasses.replace(spec, environment=((FAULTS_VARIABLE, faults),)))


def imagined(number: int) -> Build:
    found = Candidate("0" * 12, f"{number:08x}" + "0" * 8, METASCHEDULE)
    return Build(found, b"", "", 0.1, (), (), "llvm")


def test_a_simulated_time_follows_from_the_candidate_alone() -> None:
    builds = [imagined(n) for n in (1, 1 << 31, 0xFFFFFFFF)]
    first, second = (simulated().launch().measure(builds, SEARCH) for _ in range(2))
    assert first == second
    for build, result in zip(builds, first, strict=True):
        assert isinstance(result, Measurement)
        assert result.run_secs[0] == simulated_secs(build.candidate)


def test_simulated_faults_come_on_cue() -> None:
    builds = [imagined(n) for n in range(1, 23)]
    results = simulated("crash:7,timeout:11").launch().measure(builds, SEARCH)
    for build, result in zip(builds, results, strict=True):
        number = number_of(build.candidate.candidate_id)
        found = result.kind if isinstance(result, Failure) else None
        expected = Kind.CRASH if number % 7 == 0 else Kind.TIMEOUT if number % 11 == 0 else None
        assert found is expected
