"""The recipe for Triton's Python backend: its life, batches, errors, metrics and a load."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

from tests.lib import ROOT
from tests.lib import triton_stand_in as triton
from tests.lib.artifact_fixtures import LLVM, model_of
from tests.lib.colocation_plans import artifact, inputs, plan_of
from tunerd.artifacts.compile import compile_artifact
from tunerd.artifacts.loading import load
from tunerd.colocation import Plan
from tunerd.errors import InputError
from tunerd.frontend.relax.lowering import lower
from tunerd.frontend.tasks import extract_tasks
from tunerd.vocabulary import Arrays

RECIPES = ROOT / "recipes" / "serving"
sys.path.insert(0, str(RECIPES))
sys.modules["triton_python_backend_utils"] = triton
import triton_config  # noqa: E402
import triton_model  # noqa: E402

MEMBERS: dict[str, dict[str, Any]] = {"first": {}, "second": {"tenants": ["shop", "press"]}}
SLICES = {name: {"share": 50} | more for name, more in MEMBERS.items()}
WAIT_SECS = 120


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


def written(plan: Plan, folder: Path) -> str:
    plan.write(folder / "plan.yaml")
    return triton_config.config_of(folder / "plan.yaml")


@pytest.fixture
def server(root: Path, tmp_path: Path) -> Iterator[triton.Server]:
    config = written(plan_of(root, MEMBERS, kind="time"), tmp_path)
    made = triton.Server(triton_model.TritonPythonModel(), config)
    yield made
    made.unload()


def batched(*given: Arrays) -> Arrays:
    return {name: np.stack([each[name] for each in given]) for name in given[0]}


def same(found: Arrays, expected: Arrays) -> bool:
    return found.keys() == expected.keys() and all(
        np.array_equal(found[name], expected[name]) for name in expected
    )


def expected(root: Path, nth: int, *seeds: int) -> Arrays:
    model = load(artifact(root, nth))
    return batched(*(model(inputs(seed)) for seed in seeds))


def test_the_inferences_of_a_request_are_answered_in_order(
    server: triton.Server, root: Path
) -> None:
    given = batched(inputs(1), inputs(2), inputs(3))
    answer = server.infer(given, member="second", tenant="press").result(WAIT_SECS)
    assert answer.error is None
    assert same(answer.outputs, expected(root, 1, 1, 2, 3))
    chosen = server.infer(given, member="first", outputs=["scores"]).result(WAIT_SECS)
    assert same(chosen.outputs, {"scores": expected(root, 0, 1, 2, 3)["scores"]})


@pytest.mark.parametrize(
    ("said", "code", "why"),
    [
        ({"member": "nobody"}, triton.TritonError.INVALID_ARG, "there is no member 'nobody'"),
        ({}, triton.TritonError.INVALID_ARG, "say in the parameter `member`"),
        ({"member": "second", "tenant": "x"}, triton.TritonError.INVALID_ARG, "no tenant 'x'"),
        ({"member": "first", "is_cancelled": True}, triton.TritonError.CANCELLED, "not want"),
    ],
)
def test_an_error_is_of_its_request_alone(
    server: triton.Server, root: Path, said: dict[str, Any], code: int, why: str
) -> None:
    given = batched(inputs(1))
    asked = [
        server.infer(given, **said) for said in ({"member": "first"}, said, {"member": "first"})
    ]
    before, wrong, after = (future.result(WAIT_SECS) for future in asked)
    assert wrong.error is not None
    assert wrong.error.code == code
    assert why in str(wrong.error)
    for answer in (before, after):
        assert same(answer.outputs, expected(root, 0, 1))


def test_a_deadline_that_cannot_be_met_is_unavailable(root: Path, tmp_path: Path) -> None:
    config = written(plan_of(root, {"only": {}}, kind="regulated"), tmp_path)
    server = triton.Server(triton_model.TritonPythonModel(), config)
    late = server.infer(batched(inputs()), timeout_us=1).result(WAIT_SECS)
    assert late.error is not None
    assert late.error.code == triton.TritonError.UNAVAILABLE
    assert "after its deadline" in str(late.error)
    answer = server.infer(batched(inputs())).result(WAIT_SECS)  # the only member needs no name
    assert answer.error is None
    server.unload()
    assert triton.metric("tunerd_requests_total", model="only", outcome="refused") == 1
    assert triton.metric("tunerd_requests_total", model="only", outcome="completed") == 1
    assert triton.metric("tunerd_request_seconds_sum", model="only") > 0
    assert triton.metric("tunerd_planned_bytes", model="only") > 0
    assert triton.metric("tunerd_faults_total") == 0


def test_unloading_answers_what_has_come(root: Path, tmp_path: Path) -> None:
    config = written(plan_of(root, MEMBERS, kind="time"), tmp_path)
    model = triton_model.TritonPythonModel()
    server = triton.Server(model, config)
    futures = [server.infer(batched(inputs(1)), member="first") for _ in range(20)]
    server.unload()
    assert all(same(f.result(0).outputs, expected(root, 0, 1)) for f in futures)
    assert not model._engine.is_open


@pytest.mark.parametrize("place", ["in-process", "processes"])
def test_many_callers_of_slices_of_cores_have_the_answers_of_their_own(
    root: Path, tmp_path: Path, place: str
) -> None:
    config = written(plan_of(root, SLICES, kind="space", place=place), tmp_path)
    model = triton_model.TritonPythonModel()
    server = triton.Server(model, config)
    known = {
        (name, seed): expected(root, nth, seed)
        for nth, name in enumerate(MEMBERS)
        for seed in range(4)
    }
    wrong: list[tuple[str, int]] = []

    def client(name: str, seed: int) -> None:
        for _ in range(25):
            answer = server.infer(batched(inputs(seed)), member=name).result(WAIT_SECS)
            if answer.error is not None or not same(answer.outputs, known[name, seed]):
                wrong.append((name, seed))

    clients = [threading.Thread(target=client, args=key) for key in known]
    for each in clients:
        each.start()
    for each in clients:
        each.join()
    server.unload()
    assert not wrong
    assert len({proof.which for proof in model._engine.stats().proofs}) == 2  # each its own cores
    assert max(server.batches) > 1  # what had come meanwhile came together
    assert triton.metric("tunerd_requests_total", model="second", outcome="completed") == 100


# --- the configuration ------------------------------------------------------------------------


def other(root: Path, name: str, *, of_x: tuple[int, ...]) -> Path:
    """Compile a model with an input x of another shape, and no other."""
    folder = root / name
    if not folder.exists():
        nodes = [helper.make_node("Relu", ["x"], ["y"])]
        model = model_of(nodes, {}, inputs={"x": of_x}, outputs={"y": of_x})
        lowered = lower(model, LLVM)
        compile_artifact(
            lowered, extract_tasks(lowered, LLVM), {}, LLVM, folder, model=model, pct=100
        )
    return folder


def test_members_that_differ_are_one_model_with_optional_and_ragged_inputs(
    root: Path, tmp_path: Path
) -> None:
    plan = plan_of(root, {"first": {}}, kind="time")
    relu = plan.members[0].model_copy(
        update={"name": "relu", "artifact": other(root, "relu", of_x=(2, 3, 4, 4))}
    )
    config = written(plan.model_copy(update={"members": (*plan.members, relu)}), tmp_path)
    said = triton.parsed(config)
    x, offset = said["input"]
    assert (x["name"], x["dims"], x.get("optional")) == ("x", [2, 3, -1, -1], None)
    assert (offset["name"], offset["dims"], offset["optional"]) == ("offset", [2, 10], True)
    assert all(entry["allow_ragged_batch"] for entry in said["input"])
    assert said["backend"] == "python"
    assert said["model_transaction_policy"] == {"decoupled": False}
    assert said["instance_group"] == [{"kind": "KIND_CPU", "count": 1}]
    server = triton.Server(triton_model.TritonPythonModel(), config)
    values = np.random.default_rng(0).standard_normal((1, 2, 3, 4, 4)).astype("float32")
    answer = server.infer({"x": values}, member="relu").result(WAIT_SECS)
    server.unload()
    assert same(answer.outputs, {"y": np.maximum(values, 0)})


def test_members_that_give_one_name_to_unlike_tensors_are_told_so(
    root: Path, tmp_path: Path
) -> None:
    plan = plan_of(root, {"first": {}}, kind="time")
    flat = plan.members[0].model_copy(
        update={"name": "flat", "artifact": other(root, "flat", of_x=(8,))}
    )
    with pytest.raises(InputError, match=r"input 'x' is float32\[2, 3, 8, 8\] of first and"):
        written(plan.model_copy(update={"members": (*plan.members, flat)}), tmp_path)


def test_the_configuration_is_written_by_a_command(root: Path, tmp_path: Path) -> None:
    config = written(plan_of(root, MEMBERS, kind="time"), tmp_path)
    command = [sys.executable, RECIPES / "triton_config.py", tmp_path / "plan.yaml"]
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert done.stdout == config
    wrong = subprocess.run([*command[:2], tmp_path / "none.yaml"], capture_output=True, text=True)
    assert wrong.returncode == 1


@pytest.mark.parametrize(
    ("visible", "device", "seen"), [("", 1, "1"), ("2,3", 1, "3"), ("GPU-a", 0, "GPU-a")]
)
def test_an_instance_sees_its_gpu_alone(
    monkeypatch: pytest.MonkeyPatch, visible: str, device: int, seen: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    triton_model._see_only(device)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen
