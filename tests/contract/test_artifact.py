"""From a lowered model and the winners of its tasks to an artifact folder."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

import tunerd
from tests.lib import ROOT
from tests.lib.artifact_fixtures import (
    CORES,
    CUDA,
    LLVM,
    matmul_winner,
    model_of,
    tiny_artifact,
    tiny_convnet,
)
from tunerd.artifacts.compile import compile_artifact, finish_manifest, write_weights
from tunerd.artifacts.loading import map_weights
from tunerd.artifacts.manifest import LIBRARY, MANIFEST, WEIGHTS, read_manifest, sha256_of
from tunerd.artifacts.scheduling import schedule
from tunerd.builder.build import build_candidate, build_problem
from tunerd.candidates.default import default_schedule
from tunerd.errors import FolderError, InputError
from tunerd.frontend.onnx.onnx_graph import OnnxGraph
from tunerd.frontend.onnx.reference import Reference
from tunerd.frontend.relax.lowering import Lowered, lower
from tunerd.frontend.tasks import extract_tasks
from tunerd.runs.finals.verify import verify
from tunerd.system.arrays import dtype_of, verification_inputs
from tunerd.vocabulary import (
    DEFAULT_SOURCE,
    Arrays,
    Build,
    Candidate,
    Model,
    TargetSpec,
    Task,
    TensorSpec,
    default_candidate,
)
from tunerd.vocabulary.outcome import Comparison, Latency, Outcome, TaskOutcome, Verification
from tunerd.vocabulary.verdict import Verdict

pytestmark = pytest.mark.filterwarnings("ignore::tunerd.MismatchWarning")
needs_cuda = pytest.mark.skipif(
    build_problem(CUDA) is not None, reason=f"no CUDA build: {build_problem(CUDA)}"
)


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_convnet()


@pytest.fixture(scope="module")
def lowered(model: Model) -> Lowered:
    return lower(model, LLVM)


@pytest.fixture(scope="module")
def tasks(lowered: Lowered) -> tuple[Task, ...]:
    return extract_tasks(lowered, LLVM)


@pytest.fixture(scope="module")
def winner(tasks: tuple[Task, ...]) -> Candidate:
    return matmul_winner(tasks)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "artifact"
    tiny_artifact(folder)
    return folder


def test_a_tuned_artifact_agrees_with_onnx_runtime(artifact: Path, model: Model) -> None:
    result = verify(tunerd.load(artifact), model)
    assert result.verdict is Verdict.RIGHT, result.message


def test_the_folder_holds_three_files_and_no_pickle(artifact: Path) -> None:
    assert sorted(f.name for f in artifact.iterdir()) == sorted((MANIFEST, LIBRARY, WEIGHTS))
    assert [f.name for f in artifact.parent.iterdir()] == ["artifact"]


def test_the_manifest_says_what_was_tuned_for_which_share(
    artifact: Path, model: Model, winner: Candidate
) -> None:
    manifest = read_manifest(artifact)
    assert manifest["model"] == {"name": "tiny", "digest": model.digest}
    assert manifest["share"]["pct"] == 50
    assert manifest["share"]["sm_counts"] == [CORES.sm_count]
    assert manifest["share"]["mechanism"] == "affinity"
    assert manifest["versions"]["tvm"] == "0.27.0.post1"
    assert manifest["files"] == {n: sha256_of(artifact / n) for n in (LIBRARY, WEIGHTS)}
    tuned = [t for t in manifest["tasks"] if t["origin"] == "search"]
    assert [(t["candidate_id"], t["kernels"]) for t in tuned] == [(winner.candidate_id, 1)]
    assert manifest["hit_rate"] == pytest.approx(1 / len(manifest["tasks"]))


@pytest.mark.parametrize(("precision", "dtype"), [("fp16", "float16"), ("bf16", "bfloat16")])
def test_the_manifest_says_what_stays_in_fp32(tmp_path: Path, precision: str, dtype: str) -> None:
    tiny_artifact(tmp_path / "a", tuned=False, precision=precision)
    manifest = read_manifest(tmp_path / "a")
    assert manifest["precision"] == precision
    (said,) = (note for note in manifest["notes"] if f"are stored as {dtype}" in note)
    stored, kept, computed, operands = said.split("; ")
    assert int(stored.split()[0]) > 0
    assert re.match(r"\d+ stay float32: ", kept)
    assert "2 a bias, a scale or another vector (fused_conv2d_add_relu, fused_matmul" in kept
    assert "2 an input of the model (x, offset)" in kept
    assert re.search(r"5 few values \(\w+, \w+, \w+ and 2 more\)", kept)
    assert computed == (
        "all floats are computed in float32, with sums of products and other reductions"
    )
    assert operands == f"tensor cores take operands of products as {dtype}"


def test_the_manifest_has_each_note_once(tmp_path: Path) -> None:
    model = dataclasses.replace(tiny_convnet(), precision="fp16")
    lowered = lower(model, LLVM)
    assert lowered.notes
    noted = dataclasses.replace(model, notes=("the batch is 2", *lowered.notes))
    compile_artifact(lowered, (), {}, LLVM, tmp_path / "a", model=noted, pct=50)
    assert read_manifest(tmp_path / "a")["notes"] == ["the batch is 2", *lowered.notes]


def test_the_manifest_says_what_lies_between_the_kernels(artifact: Path) -> None:
    maps_bytes = 2 * 8 * 8 * 8 * 4  # the result of the convolution
    said = json.loads((artifact / "manifest.json").read_text())["storage_bytes"]
    assert maps_bytes <= said < 20 * maps_bytes


def test_only_the_kernel_of_the_winner_is_scheduled(
    lowered: Lowered, tasks: tuple[Task, ...], winner: Candidate
) -> None:
    before = {v.name_hint: f for v, f in lowered.mod.functions_items()}
    made = schedule(lowered.mod, tasks, {winner.task_id: winner}, LLVM)
    mod, hits = made.mod, made.hits
    after = {v.name_hint: f for v, f in mod.functions_items()}
    (own,) = [n for n, f in after.items() if "T.vectorized" in f.script()]
    assert "matmul" in own
    assert "global_symbol" not in after[own].attrs
    marked = [n for n, f in after.items() if f.attrs and f.attrs.get("tirx.is_scheduled")]
    assert own in marked
    assert all(after[n].same_as(f) for n, f in before.items() if n not in marked)
    assert all(count == 1 for count in hits.values())


@pytest.mark.parametrize("has_default", [False, True])
def test_a_task_without_a_tuned_winner_keeps_its_default(
    lowered: Lowered, tasks: tuple[Task, ...], *, has_default: bool
) -> None:
    defaults = {t.task_id: Candidate(t.task_id, "0" * 16, DEFAULT_SOURCE) for t in tasks}
    import tvm
    import tvm_ffi

    mod = schedule(lowered.mod, tasks, defaults if has_default else {}, LLVM).mod
    right = default_schedule(lowered.mod, tvm.target.Target(LLVM.json))
    assert tvm_ffi.structural_equal(mod, right)


def test_the_default_model_has_no_hits_and_is_right(tmp_path: Path, model: Model) -> None:
    tiny_artifact(tmp_path / "default", tuned=False)
    assert read_manifest(tmp_path / "default")["hit_rate"] == 0.0
    assert verify(tunerd.load(tmp_path / "default"), model).verdict is Verdict.RIGHT


def test_a_winner_of_another_model_is_refused(
    lowered: Lowered, tasks: tuple[Task, ...], winner: Candidate
) -> None:
    foreign = {"f" * 12: dataclasses.replace(winner, task_id="f" * 12)}
    with pytest.raises(InputError, match=r"ffffffffffff cover no kernel of this model"):
        schedule(lowered.mod, tasks, foreign, LLVM)


def test_a_trace_that_does_not_apply_is_refused_by_name(
    lowered: Lowered, tasks: tuple[Task, ...], winner: Candidate
) -> None:
    (other, *_) = (t for t in tasks if t.task_id != winner.task_id)
    with pytest.raises(InputError, match=f"does not apply to task {other.name}"):
        schedule(lowered.mod, tasks, {other.task_id: winner}, LLVM)


def test_an_artifact_is_replaced_by_a_new_one(tmp_path: Path) -> None:
    tiny_artifact(tmp_path / "a", tuned=False)
    tiny_artifact(tmp_path / "a", tuned=True)
    assert read_manifest(tmp_path / "a")["hit_rate"] > 0
    assert [f.name for f in tmp_path.iterdir()] == ["a"]


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FolderError, match="no artifact"):
        tiny_artifact(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_run_killed_while_it_writes_leaves_no_artifact(tmp_path: Path) -> None:
    folder = tmp_path / "artifact"
    script = f"""
import os, signal
from pathlib import Path
import tunerd.artifacts.compile
from tests.lib.artifact_fixtures import tiny_artifact

def die(weights, path):
    path.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)

tunerd.artifacts.compile.write_weights = die
tiny_artifact(Path({str(folder)!r}))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    assert not folder.exists()
    tiny_artifact(folder, tuned=False)
    assert [f.name for f in tmp_path.iterdir()] == ["artifact"]


def test_an_error_while_writing_leaves_the_old_artifact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_artifact(tmp_path / "a")
    before = read_manifest(tmp_path / "a")

    def fail(_weights: Arrays, _path: Path) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("tunerd.artifacts.compile.write_weights", fail)
    with pytest.raises(OSError, match="No space"):
        tiny_artifact(tmp_path / "a", tuned=False)
    assert read_manifest(tmp_path / "a") == before
    assert [f.name for f in tmp_path.iterdir()] == ["a"]


def test_weights_come_back_from_their_file_aligned_and_equal(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weights: Arrays = {
        "half": rng.normal(size=(3, 5)).astype("float16"),
        "wide": rng.normal(size=(7, 2)).T,
        "brain": rng.normal(size=(3, 5)).astype(dtype_of("bfloat16")),
        "ids": np.arange(5, dtype="int64"),
        "flags": np.array([True, False]),
        "scalar": np.array(3.5, dtype="float32"),
        "none": np.zeros((0, 4), "float32"),
    }
    write_weights(weights, tmp_path / "w")
    back = map_weights(tmp_path / "w")
    assert list(back) == list(weights)
    for name, array in weights.items():
        assert back[name].dtype == array.dtype
        assert back[name].shape == array.shape
        assert np.array_equal(back[name], array)
        assert back[name].ctypes.data % 64 == 0


def test_the_finished_manifest_holds_medians_and_verdicts(
    tmp_path: Path, model: Model, tasks: tuple[Task, ...], winner: Candidate
) -> None:
    folder = tmp_path / "a"
    tiny_artifact(folder)
    comparison = Comparison(Verdict.FASTER, 2e-3, 1e-3, 2.0, 1.9, 2.1)
    tuned = TaskOutcome(
        task_id=winner.task_id,
        name="matmul",
        weight=1,
        trials=16,
        failed=2,
        default_secs=2e-6,
        best_secs=1e-6,
        winner=winner,
        comparison=comparison,
        note="",
    )
    outcome = Outcome(
        model=model,
        target=LLVM,
        tasks=(tuned,),
        verification=Verification(Verdict.RIGHT, 3, 1e-3, 1e-4, 0.01, "all agree"),
        latencies=(Latency("tuned", (1e-3, 3e-3, 2e-3)), Latency("default", ())),
        end_to_end=comparison,
        artifact=str(folder),
    )
    finish_manifest(folder, outcome)
    manifest = read_manifest(folder)
    (entry,) = (t for t in manifest["tasks"] if t["task_id"] == winner.task_id)
    assert (entry["default_secs"], entry["best_secs"], entry["trials"]) == (2e-6, 1e-6, 16)
    assert manifest["verification"]["verdict"] == "right"
    assert manifest["end_to_end"]["verdict"] == "faster"
    assert manifest["latencies"][0] == {"name": "tuned", "median_secs": 2e-3, "samples": 3}
    assert sorted(f.name for f in folder.iterdir()) == sorted((MANIFEST, LIBRARY, WEIGHTS))
    tunerd.load(folder)


@needs_cuda
def test_a_cuda_artifact_holds_machine_code_and_graphs_and_no_source(
    tmp_path: Path, model: Model
) -> None:
    lowered = lower(model, CUDA)
    tasks = extract_tasks(lowered, CUDA)
    folder = compile_artifact(lowered, tasks, {}, CUDA, tmp_path / "cuda", model=model, pct=40)
    library = (folder / LIBRARY).read_bytes()
    assert b"cubin" in library
    assert b".nv.info" in library
    assert b"__global__" not in library
    assert b"vm.builtin.cuda_graph.run_or_capture" in library


CONVOLUTIONS = {
    "grouped, 1x1": ({"group": 4}, (16, 4, 1, 1), (1, 16, 6, 6)),
    "depthwise, one dimension": ({"group": 8, "pads": [1, 1]}, (8, 1, 3), (1, 8, 12)),
}


@needs_cuda
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_kernel_that_dlight_cannot_schedule_gets_its_simplest_rule(
    tmp_path: Path, name: str
) -> None:
    attributes, kernel, data = CONVOLUTIONS[name]
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], **attributes)]
    weights = {"w": np.ones(kernel)}
    model = model_of(nodes, weights, inputs={"x": data}, outputs={"y": data})
    lowered = lower(model, CUDA)
    tasks = extract_tasks(lowered, CUDA)
    for task in tasks:
        assert isinstance(build_candidate(task, default_candidate(task)), Build)
    compile_artifact(lowered, tasks, {}, CUDA, tmp_path / "cuda", model=model, pct=40)


@pytest.mark.parametrize("target", [LLVM, pytest.param(CUDA, marks=needs_cuda)])
def test_a_model_without_kernels_is_compiled(tmp_path: Path, target: TargetSpec) -> None:
    nodes = [helper.make_node("Identity", ["x"], ["y"])]
    model = model_of(nodes, {}, inputs={"x": (2, 3)}, outputs={"y": (2, 3)})
    lowered = lower(model, target)
    assert extract_tasks(lowered, target) == ()
    folder = compile_artifact(lowered, (), {}, target, tmp_path / "a", model=model, pct=50)
    if target is LLVM:
        x = np.arange(6, dtype=np.float32).reshape(2, 3)
        np.testing.assert_array_equal(tunerd.load(folder)(x)["y"], x)


@pytest.mark.slow
def test_a_real_network_compiles_and_agrees(tmp_path: Path) -> None:
    script = ROOT / "scripts" / "make-models"
    subprocess.run(
        [sys.executable, script, "light_squeezenet", "--out", tmp_path],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    proto = onnx.load(tmp_path / "light_squeezenet.onnx")
    model = Model(
        name="light_squeezenet",
        digest="0" * 64,
        inputs=(TensorSpec(proto.graph.input[0].name, (1, 3, 224, 224), "float32"),),
        outputs=(TensorSpec(proto.graph.output[0].name, (1, 1000, 1, 1), "float32"),),
        graph=OnnxGraph(proto),
    )
    outputs = Reference(proto).run(verification_inputs(model.inputs, 0))
    (shape,) = (o.shape for o in outputs.values())
    model = dataclasses.replace(
        model, outputs=(dataclasses.replace(model.outputs[0], shape=shape),)
    )
    lowered = lower(model, LLVM)
    folder = compile_artifact(
        lowered, extract_tasks(lowered, LLVM), {}, LLVM, tmp_path / "a", model=model, pct=50
    )
    result = verify(tunerd.load(folder), model)
    assert result.verdict is Verdict.RIGHT, result.message


def test_the_manifest_is_json_that_other_programs_read(artifact: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    json.loads((artifact / MANIFEST).read_text(), parse_constant=refuse)
