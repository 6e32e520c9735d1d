"""Models that share a real GPU: each caller has the answer of its own model, on every stream."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tunerd
from tests.lib.colocation_plans import compiled_for_the_gpu, cuda_artifact, inputs, lookup
from tunerd.artifacts import parts, staging
from tunerd.artifacts.segments import Pauses, SegmentedCapture
from tunerd.colocation import Engine, Plan
from tunerd.colocation.bench import bench
from tunerd.colocation.places.cuda_streams import CudaStreamsPlace
from tunerd.colocation.places.gpu_context import GpuContext
from tunerd.colocation.places.green_contexts import GreenContexts
from tunerd.colocation.places.mps import MpsPlace
from tunerd.colocation.plan import LoadChoice
from tunerd.system.cuda_driver import checked
from tunerd.vocabulary import TensorSpec

pytestmark = pytest.mark.gpu

WAIT_SECS = 60
MEMBERS = 4


@pytest.fixture(scope="module")
def root(needs_gpu: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny artifacts for the first GPU, each with weights of its own."""
    return tmp_path_factory.mktemp("members")


def names_and_paths(root: Path) -> dict[str, Path]:
    return {f"a{seed}": cuda_artifact(root, seed) for seed in range(MEMBERS)}


IN_SEGMENTS = {"kind": "regulated", "segment_us": 1}  # a kernel each


@pytest.mark.parametrize("place", ["in-process", "mps"])
@pytest.mark.parametrize(
    "policy",
    [*({"kind": kind} for kind in ("time", "streams", "space", "ordered")), IN_SEGMENTS],
    ids=lambda policy: policy["kind"],
)
def test_outputs_of_tenants_are_never_mixed_on_a_gpu(
    policy: dict[str, Any], place: str, root: Path
) -> None:
    paths = names_and_paths(root)
    expected = {
        (name, seed): tunerd.load(path)(inputs(seed))
        for name, path in paths.items()
        for seed in range(3)
    }
    with Engine(plan_of(paths, policy, place)) as engine:
        asked = [
            (key, engine.submit(key[0], inputs(key[1]))) for _ in range(20) for key in expected
        ]
        answers = [(key, future.result(WAIT_SECS)) for key, future in asked]
        stats, resident = engine.stats(), engine.memory_bytes()
    for key, answer in answers:
        near = [
            other
            for other, known in expected.items()
            if all(np.array_equal(answer[output], known[output]) for output in known)
        ]
        assert near == [key]
    in_parts = policy["kind"] in ("space", "ordered")
    mechanism = "mps" if place == "mps" else "green context" if in_parts else "stream"
    assert {p.mechanism for p in stats.proofs} == {mechanism}
    assert resident.keys() == set(paths)


@pytest.mark.parametrize("policy", ["time", "streams", "space"])
def test_copies_beside_what_runs_are_those_of_their_request(
    policy: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_LARGE_BYTES", 1)  # as if the arrays were large
    paths = names_and_paths(root)
    seeds = range(8)
    expected = {
        (name, seed): tunerd.load(path)(inputs(seed))
        for name, path in paths.items()
        for seed in seeds
    }
    with Engine(plan_of(paths, {"kind": policy}, "in-process")) as engine:
        asked = [
            ((name, seed), engine.submit(name, inputs(seed)))
            for _ in range(20)
            for seed in seeds
            for name in paths
        ]
        answers = [(key, future.result(WAIT_SECS)) for key, future in asked]
    for key, answer in answers:
        assert all(np.array_equal(answer[n], expected[key][n]) for n in expected[key])


@pytest.mark.parametrize(
    "policy",
    [*({"kind": kind} for kind in ("time", "streams", "space")), IN_SEGMENTS],
    ids=lambda policy: policy["kind"],
)
def test_inputs_in_parts_are_those_of_their_request(
    policy: dict[str, Any], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_LARGE_BYTES", 1)
    monkeypatch.setattr(parts, "PART_BYTES", 16)  # as if the arrays were very large
    paths = names_and_paths(root)
    assert sum(array.nbytes for array in inputs(0).values()) > 32  # two parts
    expected = {
        (name, seed): tunerd.load(path)(inputs(seed))
        for name, path in paths.items()
        for seed in range(8)
    }
    with Engine(plan_of(paths, policy, "in-process")) as engine:
        asked = [
            ((name, seed), engine.submit(name, inputs(seed)))
            for _ in range(20)
            for name, seed in expected
        ]
        answers = [(key, future.result(WAIT_SECS)) for key, future in asked]
    for key, answer in answers:
        assert all(np.array_equal(answer[n], expected[key][n]) for n in expected[key])


@pytest.mark.parametrize(
    "policy",
    [*({"kind": kind} for kind in ("time", "streams", "space", "ordered")), IN_SEGMENTS],
    ids=lambda policy: policy["kind"],
)
def test_outputs_in_parts_are_those_of_their_request_for_as_long_as_they_are_kept(
    policy: dict[str, Any], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_LARGE_BYTES", 1)
    monkeypatch.setattr(parts, "PART_BYTES", 12)  # as if the arrays were very large
    paths = names_and_paths(root)
    expected = {
        (name, seed): tunerd.load(path)(inputs(seed))
        for name, path in paths.items()
        for seed in range(8)
    }
    sizes = {sum(array.nbytes for array in outputs.values()) for outputs in expected.values()}
    assert min(sizes) > 2 * 12
    kept: list[tuple[Any, Any]] = []
    with Engine(plan_of(paths, policy, "in-process")) as engine:
        for turn in range(20):
            asked = [
                ((name, seed), engine.submit(name, inputs(seed)))
                for seed in range(8)
                for name in paths
            ]
            for key, future in asked:
                answer = future.result(WAIT_SECS)
                assert all(np.array_equal(answer[n], expected[key][n]) for n in expected[key])
                if turn < 10:  # more than there is memory for; then those come back
                    kept.append((key, answer))
            del answer, asked
    for key, answer in kept:
        assert all(np.array_equal(answer[n], expected[key][n]) for n in expected[key])


def test_a_caller_may_write_where_the_gpu_reads(root: Path) -> None:
    paths = names_and_paths(root)
    with Engine(plan_of(paths, {"kind": "streams"}, "in-process")) as engine:
        buffers = [engine.input_buffers("a0") for _ in range(3)]
        for seed, buffer in enumerate(buffers):
            for name, array in inputs(seed).items():
                buffer[name][...] = array
        asked = [
            ((name, seed), engine.submit(name, buffers[seed]))
            for name, seed in itertools.product(paths, range(3))
        ]
        answers = [(key, future.result(WAIT_SECS)) for key, future in asked]
    for (name, seed), answer in answers:
        known = tunerd.load(paths[name])(inputs(seed))
        assert all(np.array_equal(answer[output], known[output]) for output in known)


def plan_of(paths: Mapping[str, Path], policy: Mapping[str, Any], place: str, **said: Any) -> Plan:
    members = [{"name": name, "artifact": path} | said for name, path in paths.items()]
    document = {"device": "cuda", "place": place, "policy": policy, "members": members}
    return Plan.model_validate(document)


@pytest.mark.parametrize(("policy", "count"), [("streams", 12), ("space", 8)])
def test_all_lanes_run_at_once(policy: str, count: int, root: Path) -> None:
    alike = list(names_and_paths(root).values())
    paths = {f"m{nth}": alike[nth % len(alike)] for nth in range(count)}
    plan_of(paths, {"kind": policy}, "in-process").write(root / "at-once.yaml")
    done = subprocess.run(
        [sys.executable, "-m", "tests.lib.at_once", str(root / "at-once.yaml")],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.stdout.split() == [str(count), str(count)], done.stderr


def test_a_fault_among_clients_of_mps_is_named_and_all_serve_again(root: Path) -> None:
    bad = compiled_for_the_gpu(lookup(), root / "lookup")
    paths = names_and_paths(root) | {"bad": bad}
    rows, far = np.zeros(4, "int64"), np.full(4, 1 << 32, "int64")
    with Engine(plan_of(paths, {"kind": "streams"}, "mps")) as engine:
        expected = {n: engine.submit(n, inputs()).result(WAIT_SECS) for n in paths if n != "bad"}
        engine.submit("bad", {"row": rows}).result(WAIT_SECS)
        asked = [(name, engine.submit(name, inputs())) for name in expected for _ in range(3)]
        fault = engine.submit("bad", {"row": far})
        asked += [(name, engine.submit(name, inputs())) for name in expected for _ in range(3)]
        assert "bad" in str(fault.exception(WAIT_SECS))
        for name, future in asked:
            found = future.result(WAIT_SECS)
            assert all(np.array_equal(found[n], expected[name][n]) for n in found)
        for name in expected:
            engine.submit(name, inputs()).result(WAIT_SECS)
        engine.submit("bad", {"row": rows}).result(WAIT_SECS)
        faults = engine.stats().faults
    assert {fault.member for fault in faults} <= {"", "bad"}
    assert faults[-1].member == "bad"
    assert all(fault.recovered_secs is not None for fault in faults)
    print("seconds until all served again:", [fault.recovered_secs for fault in faults])


def test_a_bench_says_what_a_fault_among_clients_of_mps_costs_the_others(
    root: Path, tmp_path: Path
) -> None:
    np.savez(tmp_path / "far.npz", row=np.full(4, 1 << 32, "int64"))
    bad = compiled_for_the_gpu(lookup(), root / "lookup-of-a-bench")
    fault = {"member": "bad", "after": 3.0, "inputs": tmp_path / "far.npz"}
    plan = plan_of(names_and_paths(root) | {"bad": bad}, {"kind": "streams"}, "mps")
    load = LoadChoice.model_validate({"duration": 20, "fault": fault})
    (result,) = bench(plan.model_copy(update={"load": load}), (), print).results
    assert result.outage is not None
    (taken,) = result.outage.rounds
    assert taken.out_secs is not None
    assert taken.served_again_secs is not None
    assert (taken.lost, taken.lost_own) == (0, 0)
    for other in result.outage.neighbours:
        assert other.before.per_sec
        assert other.during.per_sec is not None
        assert other.during.per_sec < other.before.per_sec
        assert other.after.per_sec
    print("an outage:", result.outage)


def test_a_client_of_mps_that_exceeds_its_time_is_evicted_and_its_neighbours_go_on(
    root: Path,
) -> None:
    paths = dict(list(names_and_paths(root).items())[:2])
    place = MpsPlace()
    plan = plan_of(paths, {"kind": "streams"}, "mps", limit_ms=300)
    with Engine(plan, place=place) as engine:
        pids = {seat.member: held.pid for seat, held in place._seats.items()}
        engine.submit("a0", inputs()).result(WAIT_SECS)
        os.kill(pids["a0"], signal.SIGSTOP)
        assert "exceeded its time" in str(engine.submit("a0", inputs()).exception(WAIT_SECS))
        for _ in range(50):
            engine.submit("a1", inputs()).result(WAIT_SECS)
        engine.submit("a0", inputs()).result(WAIT_SECS)
        engine.submit("a1", inputs()).result(WAIT_SECS)
        faults = engine.stats().faults
        now = {seat.member: held.pid for seat, held in place._seats.items()}
    assert [fault.member for fault in faults] == ["a0"], faults
    assert now["a1"] == pids["a1"]
    assert now["a0"] != pids["a0"]


@contextlib.contextmanager
def hung(stream: int) -> Iterator[None]:
    """Have nothing run on a stream that is launched there from now on, until the block ends."""
    from cuda.bindings import driver

    gpu = GpuContext()
    gate = gpu.pinned([TensorSpec("gate", (1,), "int32")])
    address, _ = gate.places["gate"]
    gate["gate"][0] = 0
    equal = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ
    checked(driver.cuStreamWaitValue32(stream, address, 1, equal))
    try:
        yield
    finally:
        gate["gate"][0] = 1
        checked(driver.cuStreamSynchronize(stream))


@pytest.mark.parametrize("policy", ["streams", "space"])
def test_what_hangs_in_one_process_is_evicted_and_its_neighbours_go_on(
    policy: str, root: Path
) -> None:
    paths = dict(list(names_and_paths(root).items())[:2])
    place = CudaStreamsPlace()
    plan = plan_of(paths, {"kind": policy}, "in-process", limit_ms=300)
    with Engine(plan, place=place) as engine:
        expected = {name: engine.submit(name, inputs()).result(WAIT_SECS) for name in paths}
        (lane,) = {seat.lane for seat in place._seats if seat.member == "a0"}
        with hung(place._tracks[lane].stream):
            assert "exceeded its time" in str(engine.submit("a0", inputs()).exception(WAIT_SECS))
            answers = [("a1", engine.submit("a1", inputs()).result(WAIT_SECS)) for _ in range(50)]
            answers.append(("a0", engine.submit("a0", inputs()).result(WAIT_SECS)))
        answers += [(name, engine.submit(name, inputs()).result(WAIT_SECS)) for name in paths]
        faults = engine.stats().faults
    for name, answer in answers:
        assert all(np.array_equal(answer[n], known) for n, known in expected[name].items())
    assert [fault.member for fault in faults] == ["a0"], faults


def test_an_engine_is_no_client_of_its_mps_daemon(root: Path) -> None:
    code = (
        "import sys, os, json; from tunerd.colocation import Engine, Plan\n"
        "import numpy as np\n"
        "with Engine(Plan.read(sys.argv[1])) as engine:\n"
        "    given = {s.name: np.zeros(s.shape, s.dtype) for s in engine.inputs_of('a0')}\n"
        "    engine.submit('a0', given).result(60)\n"
        "    held = list(engine._place._seats.values())[0].slice._held_lease()\n"
        "    print([held.request('attached', pid=p)['attached'] for p in\n"
        "           (os.getpid(), list(engine._place._seats.values())[0].pid)])\n"
    )
    path = root / "mps.yaml"
    plan_of({"a0": cuda_artifact(root, 0)}, {"kind": "time"}, "mps").write(path)
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=300
    )
    assert done.stdout.split("\n")[0] in ("[False, True]", "[None, None]"), done.stderr


def test_one_more_tenant_of_an_architecture_takes_its_weights_and_little_more(root: Path) -> None:
    paths = names_and_paths(root)
    with Engine(plan_of(paths, {"kind": "streams"}, "in-process")) as engine:
        resident = engine.memory_bytes()
    print(f"memory of tenants: {resident}")
    weights = (paths["a0"] / "weights.bin").stat().st_size
    for name in list(paths)[1:]:
        assert resident[name] <= weights + (20 << 20)


def test_shares_change_on_a_gpu_in_milliseconds_and_no_request_is_lost(root: Path) -> None:
    shares = {"a0": (25, [50]), "a1": (25, [13]), "a2": (25, [25])}
    paths = names_and_paths(root)
    members = [
        {"name": name, "artifact": paths[name], "share": share, "shares": others}
        for name, (share, others) in shares.items()
    ]
    document = {"device": "cuda", "policy": {"kind": "space"}, "members": members}
    expected = {
        (name, seed): tunerd.load(paths[name])(inputs(seed))
        for name, seed in itertools.product(shares, range(3))
    }
    answers: list[tuple[tuple[str, int], Any]] = []
    is_over = threading.Event()

    def client(key: tuple[str, int]) -> None:
        while not is_over.is_set():
            answers.append((key, engine.submit(key[0], inputs(key[1])).result(WAIT_SECS)))

    with Engine(Plan.model_validate(document)) as engine:
        clients = [threading.Thread(target=client, args=(key,)) for key in expected]
        for each in clients:
            each.start()
        took = []
        for turn in range(20):
            time.sleep(0.01)
            took.append(engine.reshare({"a0": 25 if turn % 2 else 50}, timeout_secs=WAIT_SECS))
        is_over.set()
        for each in clients:
            each.join()
        stats = engine.stats()
    print(f"shares changed in {sorted(took)} s")
    assert statistics.median(took) <= 0.005
    assert {proof.mechanism for proof in stats.proofs} == {"green context"}
    assert len(stats.proofs) == 6
    assert all(re.fullmatch(r"[\d,-]+", proof.which) for proof in stats.proofs)
    assert sum(member.completed for member in stats.members.values()) == len(answers)
    for (name, seed), answer in answers:
        for output, known in expected[name, seed].items():
            assert np.array_equal(answer[output], known)


def test_a_model_in_several_graphs_gives_the_same_answers_with_and_without_pauses(
    root: Path,
) -> None:
    class Noting(Pauses):
        def __init__(self, *, is_wanted: bool) -> None:
            self.is_wanted = is_wanted
            self.at: list[int] = []

        def wanted(self) -> bool:
            return self.is_wanted

        def pause(self, segment: int) -> None:
            self.at.append(segment)

    model = tunerd.load(cuda_artifact(root, 0))
    expected = [model(inputs(seed)) for seed in range(4)]
    whole = SegmentedCapture(model.captured(), inputs(), 1.0)
    made = SegmentedCapture(model.captured(), inputs(), 1e-6)
    count = len(made.segment_secs)
    assert len(whole.segment_secs) == 1 < count
    assert all(secs > 0 for secs in made.segment_secs)
    for seed, known in enumerate(expected):
        pausing, going_on = Noting(is_wanted=True), Noting(is_wanted=False)
        for found in (made(inputs(seed), pausing), made(inputs(seed), going_on)):
            assert all(np.array_equal(found[name], known[name]) for name in known)
        assert (pausing.at, going_on.at) == ([*range(1, count)], [])
    assert all(np.array_equal(whole(inputs(0), pausing)[n], expected[0][n]) for n in expected[0])


def test_parts_of_a_gpu_are_disjoint_and_their_graphs_stay_there(root: Path) -> None:
    gpu = GpuContext()
    contexts = GreenContexts()
    try:
        parts = contexts.cut([("small", 13), ("middle", 25), ("large", 50)])
        for part, other in itertools.combinations(parts, 2):
            assert not part.sms & other.sms
        for part in parts:
            assert len(part.sms) == part.sm_count < gpu.sm_count
    finally:
        contexts.close()
