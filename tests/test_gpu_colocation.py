"""Models that share a real GPU: each caller has the answer of its own model, on every stream."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from artifact_fixtures import tiny_convnet
from colocation_plans import inputs

import tunerd
from tunerd.artifacts.compile import compile_artifact
from tunerd.artifacts.segments import Pauses, SegmentedCapture
from tunerd.colocation import Engine, Plan
from tunerd.colocation.places.gpu_context import GpuContext
from tunerd.colocation.places.green_contexts import GreenContexts
from tunerd.frontend.relax.lowering import lower
from tunerd.frontend.tasks import extract_tasks
from tunerd.slices import plan
from tunerd.slices.whole import WholeSlice
from tunerd.vocabulary import SliceRequest

pytestmark = pytest.mark.gpu

WAIT_SECS = 60
MEMBERS = 4


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny artifacts for the first GPU, each with weights of its own."""
    usable = WholeSlice.usability()
    if not usable.ok:
        pytest.skip(usable.why)
    target = plan(SliceRequest("whole", 100)).target
    folder = tmp_path_factory.mktemp("members")
    for seed in range(MEMBERS):
        model = tiny_convnet(seed)
        lowered = lower(model, target)
        tasks = extract_tasks(lowered, target)
        compile_artifact(lowered, tasks, {}, target, folder / f"a{seed}", model=model, pct=100)
    return folder


IN_SEGMENTS = {"kind": "regulated", "segment_us": 1}  # a kernel each


@pytest.mark.parametrize(
    "policy",
    [*({"kind": kind} for kind in ("time", "streams", "space", "ordered")), IN_SEGMENTS],
    ids=lambda policy: policy["kind"],
)
def test_outputs_of_tenants_are_never_mixed_on_a_gpu(policy: dict[str, Any], root: Path) -> None:
    names = [f"a{seed}" for seed in range(MEMBERS)]
    document = {
        "device": "cuda",
        "policy": policy,
        "members": [{"name": name, "artifact": root / name} for name in names],
    }
    expected = {
        (name, seed): tunerd.load(root / name)(inputs(seed))
        for name, seed in itertools.product(names, range(3))
    }
    with Engine(Plan.model_validate(document)) as engine:
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
    assert {p.mechanism for p in stats.proofs} == {"green context" if in_parts else "stream"}
    assert resident.keys() == set(names)


def test_shares_change_on_a_gpu_in_milliseconds_and_no_request_is_lost(root: Path) -> None:
    shares = {"a0": (25, [50]), "a1": (25, [13]), "a2": (25, [25])}
    members = [
        {"name": name, "artifact": root / name, "share": share, "shares": others}
        for name, (share, others) in shares.items()
    ]
    document = {"device": "cuda", "policy": {"kind": "space"}, "members": members}
    expected = {
        (name, seed): tunerd.load(root / name)(inputs(seed))
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

    model = tunerd.load(root / "a0")
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
