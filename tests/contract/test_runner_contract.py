"""The contract of runners, kept by that of every slice that is usable here."""
# ruff: noqa: F811  fixtures are arguments

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.lib import ROOT
from tests.lib.artifact_fixtures import tiny_artifact
from tests.lib.build_fixtures import (
    built,
    default_of,
    endless,
    matmul_task,
    raising,
    suicide,
)
from tests.lib.slice_fixtures import (  # noqa: F401  fixtures
    broken,
    builds_for,
    kind,
    measured,
    named,
    spec,
    target_of,
    with_runner,
)
from tunerd.builder.build import build_candidate
from tunerd.frontend.onnx.reference import Reference
from tunerd.runner import client
from tunerd.runner.load import Load, Repeats
from tunerd.runner.profiles import final_profile
from tunerd.slices import plan
from tunerd.slices.base import Slice
from tunerd.slices.simulated import FAULTS_VARIABLE, SimulatedSlice, number_of, simulated_secs
from tunerd.system.arrays import random_inputs
from tunerd.testing.kernels import kernel
from tunerd.testing.slices import QUICK
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
)


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


def test_no_builds_bring_no_results(measured: Slice) -> None:
    assert measured.launch().measure([], QUICK) == []


def searched(build: Build) -> Build:
    """Return a build as one that a source proposed, and no default."""
    own = dataclasses.replace(build.candidate, source=METASCHEDULE)
    return dataclasses.replace(build, candidate=own)


def test_a_default_that_took_long_is_not_sampled_again_in_the_search(
    measured: Slice, spec: SliceSpec
) -> None:
    if spec.kind == "simulated":
        pytest.skip("simulated samples take no time, so none is left out")
    (slow,) = measured.launch().measure([kernel(target_of(spec), 1 << 26)], SEARCH)
    assert isinstance(slow, Measurement)
    if max(slow.run_secs) <= 0.02:
        pytest.skip("this device is too fast for this kernel")
    assert [secs for secs in slow.run_secs if secs > 0.02] == [slow.run_secs[-1]]


def test_a_kernel_far_slower_than_a_rival_of_its_task_gets_few_samples(
    measured: Slice, spec: SliceSpec
) -> None:
    if spec.kind == "simulated":
        pytest.skip("simulated samples take no time, so none is left out")
    fast, slow = (searched(kernel(target_of(spec), length)) for length in (64, 1 << 24))
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
    builds = [kernel(target_of(measured.spec), length) for length in (64, 1 << 22)]
    fast, slow = measured.launch().compare(builds, profile)
    assert isinstance(fast, Measurement)
    assert isinstance(slow, Measurement)
    assert (len(fast.run_secs), len(slow.run_secs)) == (8, 5)


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
    expected = Reference(model.graph.proto).run(inputs)
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


# --- work that is repeated --------------------------------------------------------------------


def went(result: Repeats | Failure) -> Repeats:
    assert isinstance(result, Repeats), result
    return result


def test_a_kernel_is_repeated_between_two_moments(measured: Slice) -> None:
    assert isinstance(measured.launch().load(Load(build=builds_for(measured.spec, 1)[0])), float)
    start_at = time.monotonic() + 0.05
    measured.launch().repeat(start_at, start_at + 0.2)
    ran = went(measured.launch().stop())
    assert len(ran.starts) > 3
    assert ran.starts[0] >= start_at
    assert all(s < start_at + 0.2 for s in ran.starts)
    assert all(e > s for s, e in zip(ran.starts, ran.ends, strict=True))


def test_work_without_an_end_goes_on_until_it_is_stopped_and_the_slice_measures_after(
    measured: Slice,
) -> None:
    (build,) = builds_for(measured.spec, 1)
    for _ in range(2):
        measured.launch().load(Load(build=build))
        measured.launch().repeat(0.0)
        went(measured.launch().stop())
    (result,) = measured.launch().compare([build], final_profile("warm"))
    assert not isinstance(result, Failure), result
    assert len(result.run_secs) >= 20


def test_a_model_is_repeated_an_inference_at_a_time(
    measured: Slice, artifact: tuple[str, Model]
) -> None:
    skip_on_gpu(measured.spec)
    assert isinstance(measured.launch().load(Load(artifact=artifact[0])), float)
    now = time.monotonic()
    measured.launch().repeat(now, now + 0.1)
    ran = went(measured.launch().stop())
    assert (ran.calls, ran.slice_id) == (1, measured.spec.slice_id)
    assert np.median(ran.secs) < 0.1


def test_work_that_does_not_load_is_a_failure_and_the_slice_lives(with_runner: Slice) -> None:
    (sound,) = builds_for(with_runner.spec, 1)
    assert isinstance(with_runner.launch().load(Load(build=broken(sound))), Failure)
    assert isinstance(with_runner.launch().load(Load(build=sound)), float)


def test_work_that_was_never_ready_does_not_begin(with_runner: Slice) -> None:
    with_runner.launch().repeat(0.0)
    ended = with_runner.launch().stop()
    assert isinstance(ended, Failure)
    assert "no work is ready" in ended.message


def test_work_is_one_thing() -> None:
    with pytest.raises(ValueError, match="either"):
        Load()


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
from tests.lib.build_fixtures import endless
from tests.lib.slice_fixtures import target_of
from tunerd.testing.slices import QUICK
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
        cwd=ROOT,
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
