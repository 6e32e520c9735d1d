"""Libraries as candidates: what is matched, what is called, and what is said where one is missing.

A stand-in for cuBLASLt computes on the host what a call says.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tunerd
from tests.contract.test_sources import for_gpu
from tests.contract.test_triton import kernels
from tests.lib import report_runs
from tests.lib.artifact_fixtures import tiny_artifact
from tests.lib.build_fixtures import LLVM, built, conv_task, matmul_task, task_of
from tests.lib.fake_cublaslt import FakeCublasLt
from tunerd.artifacts.compile import compile_artifact
from tunerd.artifacts.libraries import library_needs, mismatches
from tunerd.artifacts.loading import LoadError, map_weights
from tunerd.artifacts.manifest import sealed
from tunerd.builder.build import build_candidate
from tunerd.builder.library import load_tvm
from tunerd.candidates import registry
from tunerd.candidates.base import SearchSettings
from tunerd.candidates.libraries.recipe import Recipe
from tunerd.errors import HostError, InputError
from tunerd.frontend.kernels import Kernels
from tunerd.libraries import calls, cublaslt, packages
from tunerd.libraries.cublaslt import MatmulCall, Matrix
from tunerd.libraries.packages import LibraryCallError
from tunerd.report import html
from tunerd.report.library_text import library_bars, library_text
from tunerd.report.markdown import run_markdown
from tunerd.report.table import outcome_json
from tunerd.report.task_section import task_section
from tunerd.report.view import View
from tunerd.runs.plan import plan_run
from tunerd.settings import TuneSettings
from tunerd.settings.option import checked
from tunerd.system.codec import value_from
from tunerd.system.targets import cuda_target
from tunerd.vocabulary import (
    CUBLASLT,
    FP16,
    FP32,
    LIBRARIES,
    METASCHEDULE,
    Build,
    Candidate,
    LibraryCall,
    Measurement,
    Result,
    Task,
    default_candidate,
    to_json,
)
from tunerd.vocabulary.outcome import Finalist, TaskOutcome

SOURCE = registry.SOURCES[CUBLASLT]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCublasLt:
    made = FakeCublasLt()
    monkeypatch.setattr(packages, "load", lambda name: made)
    return made


def on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have calls go where there is no GPU."""

    class Runtime:
        def cudaSetDevice(self, device: int) -> int:
            return 0

        def cudaGetDevice(self, place: Any) -> int:
            place._obj.value = 0
            return 0

    monkeypatch.setattr(calls, "_cudart", Runtime)
    monkeypatch.setattr(calls, "_handles", {})
    monkeypatch.setattr(calls, "_plans", {})


def default_and_tuned(
    found: Kernels, winners: Mapping[str, Candidate], folder: Path, x: Any
) -> list[Any]:
    """Compile a model in two folders, `default` and `tuned`, and return the output of each."""
    outputs = []
    for name, chosen in (("default", {}), ("tuned", winners)):
        made = compile_artifact(
            found.lowered,
            found.tasks,
            chosen,
            LLVM,
            folder / name,
            model=found.model,
            pct=40,
        )
        outputs.append(tunerd.load(made)(x)["y"])
    return outputs


def product(left: Any, right: Any, transposed: str = "NN") -> Any:
    from tvm import topi

    return topi.nn.matmul(
        left, right, transpose_a=transposed[0] == "T", transpose_b=transposed[1] == "T"
    )


def tensors(name: str) -> list[Any]:
    """Return the tensors of a kernel, its result last."""
    load_tvm()
    from tvm import te, topi

    def place(*shape: int, name: str) -> Any:
        return te.placeholder(shape, name=name)

    x, w = place(6, 16, name="x"), place(16, 10, name="w")
    bias, residual = place(10, name="bias"), place(6, 10, name="residual")
    if name == "plain":
        return [x, w, product(x, w)]
    if name == "of columns that lie together":
        w = place(10, 16, name="w")
        return [x, w, product(x, w, "NT")]
    if name == "of rows that lie together":
        x = place(16, 6, name="x")
        return [x, w, product(x, w, "TN")]
    if name == "with a bias":
        return [x, w, bias, topi.add(product(x, w), bias)]
    if name == "with a bias and ReLU":
        return [x, w, bias, topi.nn.relu(topi.add(product(x, w), bias))]
    if name == "with a residual":
        return [x, w, residual, topi.add(residual, product(x, w))]
    if name == "with bias, residual and ReLU":
        summed = topi.add(topi.add(product(x, w), bias), residual)
        return [x, w, bias, residual, topi.nn.relu(summed)]
    if name == "scaled":
        return [x, w, topi.multiply(product(x, w), te.const(0.25, "float32"))]
    if name == "with GELU by tanh":
        return [x, w, bias, gelu(topi.add(product(x, w), bias))]
    if name == "with GELU by tanh, and no bias":
        return [x, w, gelu(product(x, w))]
    if name == "in batches":
        x, z = place(3, 6, 16, name="x"), place(3, 16, 10, name="z")
        return [x, z, topi.nn.batch_matmul(x, z, transpose_a=False, transpose_b=False)]
    if name == "in batches of one weight":
        x = place(3, 5, 16, name="x")
        k = te.reduce_axis((0, 16), "k")
        out = te.compute((3, 5, 10), lambda b, i, j: te.sum(x[b, i, k] * w[k, j], axis=k))
        return [x, w, out]
    if name == "of heads that lie beside each other":
        x, z = place(5, 3, 16, name="x"), place(7, 3, 16, name="z")
        k = te.reduce_axis((0, 16), "k")
        out = te.compute((3, 5, 7), lambda h, i, j: te.sum(x[i, h, k] * z[j, h, k], axis=k))
        return [x, z, out]
    if name == "as a convolution of one tap":
        data, weight = place(1, 5, 7, 16, name="data"), place(1, 1, 16, 10, name="weight")
        made = topi.nn.conv2d_nhwc(data, weight, 1, 0, 1)
        return [data, weight, bias, topi.nn.relu(topi.add(made, bias))]
    if name == "with a vector":
        x = place(1, 16, name="x")
        return [x, w, bias, topi.add(product(x, w), bias)]
    raise AssertionError(name)


def gelu(x: Any) -> Any:
    from tvm import te

    def of(value: Any) -> Any:
        inner = value + te.const(0.044715, "float32") * value * value * value
        return 0.5 * value * (1.0 + te.tanh(te.const(0.7978845608028654, "float32") * inner))

    return te.compute(x.shape, lambda *at: of(x(*at)))


MATCHED = (
    "plain",
    "of columns that lie together",
    "of rows that lie together",
    "with a bias",
    "with a bias and ReLU",
    "with a residual",
    "with bias, residual and ReLU",
    "scaled",
    "with GELU by tanh",
    "with GELU by tanh, and no bias",
    "in batches",
    "in batches of one weight",
    "of heads that lie beside each other",
    "as a convolution of one tap",
    "with a vector",
)


def gpu_task(made: list[Any], precision: str = FP32) -> Task:
    return replace(for_gpu(task_of(made), cuda_target("9.0")), precision=precision)


def lowered_call(task: Task, rank: int = 0, sms: int = 52) -> tuple[MatmulCall, list[int]]:
    """Return the call of a task, and the numbers of the arguments whose pointers it takes."""
    lowered = SOURCE.lower(task, Recipe(rank, sms, "").text)
    (made,) = lowered.calls
    main = lowered.mod["main"]
    names = [str(p.name) for p in main.params]
    passed = [str(argument).split(".")[0] for argument in main.body.value.args]
    return MatmulCall.parse(made.text), [names.index(p) for p in passed if p in names]


@pytest.mark.parametrize("name", MATCHED)
def test_a_call_computes_what_the_default_computes(
    fake: FakeCublasLt, name: str, tmp_path: Path
) -> None:
    made = tensors(name)
    task = task_of(made)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(s.shape).astype(s.dtype) for s in task.args]
    tvm = load_tvm()
    path = tmp_path / "kernel.so"
    path.write_bytes(built(build_candidate(task, default_candidate(task))).library)
    given = [tvm.runtime.tensor(a) for a in arrays]
    tvm.runtime.load_module(str(path))["main"](*given)
    call, numbers = lowered_call(gpu_task(made))
    workspace = np.zeros(1, np.float32)
    pointers = [[*arrays, workspace][i].ctypes.data for i in numbers]
    cublaslt.Handle().plan(call.text)(pointers, 7)
    np.testing.assert_allclose(arrays[-1], given[-1].numpy(), rtol=1e-4, atol=1e-4)
    assert fake.streams == [7]
    assert fake.targets == [52]
    assert fake.workspaces == [cublaslt.WORKSPACE_BYTES]


def refused() -> Iterator[tuple[str, list[Any]]]:
    load_tvm()
    from tvm import te, topi

    x, w = te.placeholder((6, 16), name="x"), te.placeholder((16, 10), name="w")
    bias = te.placeholder((6, 1), name="bias")
    residual = te.placeholder((6, 10), name="residual")
    yield "a bias of rows", [x, w, bias, topi.add(topi.nn.matmul(x, w), bias)]
    yield "sigmoid", [x, w, topi.sigmoid(topi.nn.matmul(x, w))]
    clipped = topi.clip(topi.nn.matmul(x, w), 0.0, 6.0)
    yield "ReLU up to six", [x, w, clipped]
    after = topi.add(topi.nn.relu(topi.nn.matmul(x, w)), residual)
    yield "a residual after ReLU", [x, w, residual, after]
    yield "no product", [x, topi.nn.relu(x)]


def test_what_the_library_does_not_do_is_left_to_other_sources() -> None:
    for _, made in refused():
        with pytest.raises(ValueError, match="it is no product of cuBLASLt's"):
            SOURCE.lower(gpu_task(made), Recipe(0, 52, "").text)
    with pytest.raises(ValueError, match="is computed before it is multiplied"):
        SOURCE.lower(for_gpu(conv_task(), cuda_target("9.0")), Recipe(0, 52, "").text)


def test_a_call_is_the_same_after_it_was_text() -> None:
    matrix = Matrix("float16", 10, 16, 12, 3)
    call = MatmulCall(
        a=matrix,
        b=matrix,
        c=matrix,
        d=matrix,
        transposed=(True, False),
        batch=4,
        precision=FP16,
        activation="relu",
        has_bias=True,
        alpha=0.5,
        sms=52,
        rank=3,
    )
    assert MatmulCall.parse(call.text) == call
    without = replace(call, c=None)
    assert MatmulCall.parse(without.text) == without


def test_the_structures_have_the_sizes_of_the_header() -> None:
    assert ctypes.sizeof(cublaslt.HeuristicResult) == 64 + 8 + 4 + 4 + 16


def test_ranks_are_proposed_until_the_heuristic_names_no_more() -> None:
    task = gpu_task(tensors("plain"))
    search = SOURCE.search(SearchSettings(seed=0, threads=1, sms=52))
    first = search.propose(task, 8).candidates
    assert [Recipe.parse(c.recipe).rank for c in first] == list(range(8))
    assert {Recipe.parse(c.recipe).sms for c in first} == {52}
    results = [Result(c, 1e-5 if i < 4 else None) for i, c in enumerate(first)]
    answer = search.propose(task, 8, results=results)
    assert (answer.candidates, answer.exhausted) == ((), True)
    assert answer.message == "the library names no more algorithms"


def test_all_ranks_are_proposed_once() -> None:
    task = gpu_task(tensors("plain"))
    search = SOURCE.search(SearchSettings(seed=0, threads=1, sms=52))
    found = [c for _ in range(5) for c in search.propose(task, 8).candidates]
    assert [Recipe.parse(c.recipe).rank for c in found] == list(range(cublaslt.RANKS))


def test_a_rank_that_the_heuristic_does_not_name_is_refused(fake: FakeCublasLt) -> None:
    fake.algorithms = 2
    call, _ = lowered_call(gpu_task(tensors("plain")), rank=2)
    with pytest.raises(LibraryCallError, match=r"names 2 algorithms .* and number 3"):
        cublaslt.Handle().plan(call.text)


def test_libraries_are_searched_only_where_they_are_asked_for() -> None:
    assert not set(registry.searched()) & set(LIBRARIES)
    assert CUBLASLT in registry.searched([CUBLASLT])


def test_a_build_says_what_it_calls() -> None:
    task = gpu_task(tensors("with a bias"))
    recipe = Recipe(1, 52, "").text
    build = built(build_candidate(task, Candidate.of_recipe(task.task_id, recipe, source=CUBLASLT)))
    (call,) = build.calls
    assert call.library == build.compiler == CUBLASLT
    assert MatmulCall.parse(call.text).rank == 1
    assert [s.name for s in build.scratch] == ["workspace"]
    assert call.text.encode() in build.library
    sent = json.loads(json.dumps(to_json(build)))
    assert value_from(Build, sent, library=build.library).calls == build.calls


def test_compiled_code_finds_the_function_and_hands_over_text_and_pointers(
    fake: FakeCublasLt, monkeypatch: pytest.MonkeyPatch
) -> None:
    tvm = load_tvm()
    made = tensors("with a bias")
    task = gpu_task(made)
    lowered = SOURCE.lower(task, Recipe(5, 52, "").text)
    host = tvm.tirx.build(lowered.mod, target=tvm.target.Target("llvm"))

    on_host(monkeypatch)
    calls.provide(lowered.calls, 0)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(s.shape).astype(s.dtype) for s in task.args]
    workspace = np.zeros(lowered.scratch[0].shape, np.float32)
    given = [tvm.runtime.tensor(a) for a in (*arrays, workspace)]
    host["main"](*given)
    x, w, bias, _ = arrays
    np.testing.assert_allclose(given[3].numpy(), x @ w + bias, rtol=1e-4, atol=1e-4)
    assert fake.ranks == [5]


# --- artifacts ---------------------------------------------------------------------------------


def pointwise() -> Kernels:
    """Lower two convolutions of one tap in fp16, the second with a residual, for a GPU."""
    nodes: list[Any] = [
        ("Conv", ["x", "w1", "b1"], "a", {"pads": [1, 1, 1, 1]}),
        ("Relu", ["a"], "b", {}),
        ("Conv", ["b", "w2", "b2"], "c", {}),
        ("Relu", ["c"], "d", {}),
        ("Conv", ["d", "w3", "b3"], "e", {}),
        ("Add", ["e", "b"], "f", {}),
        ("Relu", ["f"], "g", {}),
        ("Conv", ["g", "w4", "b1"], "y", {"pads": [1, 1, 1, 1]}),
    ]
    weights = {
        "w1": (64, 3, 3, 3),
        "b1": (64,),
        "w2": (32, 64, 1, 1),
        "b2": (32,),
        "w3": (64, 32, 1, 1),
        "b3": (64,),
        "w4": (64, 64, 3, 3),
    }
    return kernels(nodes, {"x": (1, 3, 14, 14)}, weights, precision=FP16)


def winner(task: Task) -> Candidate | None:
    recipe = Recipe(2, 52, "").text
    try:
        SOURCE.lower(task, recipe)
    except ValueError:
        return None
    return Candidate.of_recipe(task.task_id, recipe, source=CUBLASLT)


def test_an_artifact_names_what_it_calls_and_has_biases_in_its_type(tmp_path: Path) -> None:
    found = pointwise()
    winners = {t.task_id: w for t in found.tasks if (w := winner(t)) is not None}
    assert len(winners) == 2
    folder = compile_artifact(
        found.lowered,
        found.tasks,
        winners,
        found.tasks[0].target,
        tmp_path / "artifact",
        model=found.model,
        pct=40,
    )
    manifest = json.loads((folder / "manifest.json").read_text())
    (need,) = manifest["libraries"]
    assert need["name"] == CUBLASLT
    assert (need["package"], need["soname"]) == ("nvidia-cublas", "libcublasLt.so.13")
    assert need["least"] == "13.0.0"
    texts = [MatmulCall.parse(text) for text in need["calls"]]
    assert {(c.rank, c.sms, c.activation, c.has_bias) for c in texts} == {(2, 52, "relu", True)}
    assert sorted(c.c is not None for c in texts) == [False, True]
    rounded = [name for name in manifest["weights"] if name.endswith("_float16")]
    weights = map_weights(folder / "weights.bin")
    assert len(rounded) == 2
    for name in rounded:
        wide = weights[name.removesuffix("_float16")]
        np.testing.assert_array_equal(weights[name], wide.astype(np.float16))
    library = (folder / "model.so").read_bytes()
    assert all(text.encode() in library for text in need["calls"])


def test_a_weight_in_another_type_agrees_with_the_default(
    fake: FakeCublasLt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the host, where the stand-in computes; the kernel's bias is rounded for it."""
    from tunerd.runner.agreement import disagreement
    from tunerd.runner.sampling import CpuDevice

    on_host(monkeypatch)
    task = next(t for t in pointwise().tasks if winner(t) is not None)
    chosen = winner(task)
    assert chosen is not None
    lowered = SOURCE.lower(task, chosen.recipe)
    here = replace(task, target=LLVM)
    build = built(build_candidate(here, chosen, lowered=lowered))
    assert [s.dtype for s in build.args] == ["float16"] * len(build.args)
    reference = built(build_candidate(here, default_candidate(here)))
    assert disagreement(CpuDevice([0]), reference, build) is None
    assert fake.ranks == [2, 2]


@pytest.mark.filterwarnings("ignore::tunerd.MismatchWarning")
def test_a_model_that_calls_a_library_computes_what_the_default_model_does(
    fake: FakeCublasLt, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On the host, where the stand-in computes: biases, residual and workspace are in place."""
    on_host(monkeypatch)
    found = pointwise()
    winners = {t.task_id: w for t in found.tasks if (w := winner(t)) is not None}
    x = np.random.default_rng(0).standard_normal((1, 3, 14, 14)).astype(np.float32)
    outputs = default_and_tuned(found, winners, tmp_path, x)
    np.testing.assert_allclose(outputs[1], outputs[0], rtol=1e-2, atol=1e-2)
    assert fake.ranks == [2, 2]


@pytest.mark.filterwarnings("ignore::tunerd.MismatchWarning")
def test_an_artifact_is_not_loaded_without_its_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_artifact(tmp_path / "artifact")
    need = {"name": CUBLASLT, "title": "cuBLASLt", "version": "13.1.0", "calls": ["{}"]}
    said = json.loads((tmp_path / "artifact/manifest.json").read_text())
    monkeypatch.setattr(packages, "missing", lambda name: "pip install nvidia-cublas")
    for name, sentence in (
        (CUBLASLT, "the artifact calls a library: pip install nvidia-cublas"),
        ("other", "the library 'other', which this tunerd does not know"),
    ):
        changed = sealed(said | {"libraries": [need | {"name": name}]})
        (tmp_path / "artifact/manifest.json").write_text(json.dumps(changed))
        with pytest.raises(LoadError, match=sentence):
            tunerd.load(tmp_path / "artifact")


def test_another_version_than_that_of_the_tuning_is_said(fake: FakeCublasLt) -> None:
    manifest = {"libraries": library_needs([LibraryCall(CUBLASLT, "{}")])}
    assert list(mismatches(manifest)) == []
    fake.version = 130200
    assert list(mismatches(manifest)) == [
        "cuBLASLt is 13.2.0 here and was 13.10.0 where the artifact was made; it may choose other "
        "kernels"
    ]


# --- a library that is missing -----------------------------------------------------------------


def test_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "_places", lambda package: iter(()))
    packages.load.cache_clear()
    with pytest.raises(packages.MissingLibraryError) as raised:
        packages.load(CUBLASLT)
    said = str(raised.value)
    assert "cuBLASLt 13.0.0 or newer is needed, and libcublasLt.so.13 is not found here" in said
    assert "pip install nvidia-cublas" in said
    assert "[libraries]" in said


def test_an_old_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "_places", lambda package: iter(["libc.so.6"]))
    monkeypatch.setattr(packages, "_version_of", lambda library, package: 120804)
    packages.load.cache_clear()
    with pytest.raises(packages.MissingLibraryError, match=r"and cuBLASLt 12\.8\.4 is here"):
        packages.load(CUBLASLT)


def test_calls_of_a_missing_library_are_not_provided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "_places", lambda package: iter(()))
    packages.load.cache_clear()
    with pytest.raises(packages.MissingLibraryError):
        calls.provide([LibraryCall(CUBLASLT, "{}")], 0)


def test_a_source_says_that_its_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "missing", lambda name: "cuBLASLt is needed")
    assert SOURCE.takes(gpu_task(tensors("plain"))) == "cuBLASLt is needed"
    monkeypatch.setattr(packages, "missing", lambda name: None)
    assert SOURCE.takes(gpu_task(tensors("plain"))) is None
    assert SOURCE.takes(matmul_task()) == "cuBLASLt is for GPUs"


# --- what people ask for and see ---------------------------------------------------------------


def settings(**given: Any) -> TuneSettings:
    return checked(TuneSettings, {"model": Path("m.onnx"), **given})


def test_libraries_are_given_as_a_list_of_names() -> None:
    assert settings(gpu_pct=40).libraries == ()
    assert settings(gpu_pct=40, libraries="cublaslt").libraries == (CUBLASLT,)
    with pytest.raises(InputError, match="--libraries 'mkl' is no library; give some of cublaslt"):
        settings(gpu_pct=40, libraries="cublaslt,mkl")
    with pytest.raises(InputError, match="--libraries are for GPUs"):
        settings(cpu_pct=40, libraries="cublaslt")


def test_a_run_whose_library_is_missing_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packages, "missing", lambda name: "pip install nvidia-cublas")
    with pytest.raises(HostError, match="--libraries cublaslt: pip install nvidia-cublas"):
        plan_run(settings(gpu_pct=40, libraries="cublaslt"))


def plain(text: str) -> str:
    return text.replace("\xa0", " ")


def finished(number: int, library_secs: float | None, best_secs: float, won: bool) -> TaskOutcome:
    source = CUBLASLT if won else METASCHEDULE
    measured = Measurement((library_secs or 0.0,) * 3, 1, "final-v1", "quiet", 1)
    return TaskOutcome(
        task_id=f"{number:012x}",
        name=f"matmul{number}",
        weight=2,
        trials=16,
        failed=0,
        default_secs=1e-3,
        best_secs=best_secs,
        winner=Candidate(f"{number:012x}", "1" * 16, source),
        comparison=None,
        note="",
        finalists=(Finalist("2" * 16, CUBLASLT, 1e-4, measured),) if library_secs else (),
    )


def test_what_a_library_would_take_is_said_of_each_task_and_of_all() -> None:
    tasks = [
        finished(0, 171e-6, 100e-6, won=False),
        finished(1, None, 50e-6, won=False),
        finished(2, 10e-6, 10e-6, won=True),
    ]
    texts = [library_text(t) for t in tasks]
    assert [plain(t) for t in texts] == ["cuBLASLt would take 171 µs", "", "by cuBLASLt"]
    (bar,) = library_bars(tasks)
    assert plain(bar.text) == (
        "cuBLASLt would take 362 µs for the 2 tasks that it computes, which take 220 µs as "
        "shipped; it ships in 1 of them"
    )
    (bar,) = library_bars(tasks[2:])
    assert plain(bar.text) == "cuBLASLt computes 1 task, in 20.0 µs, and ships in each"
    assert library_bars(tasks[1:2]) == ()


def test_reports_show_what_a_library_would_take() -> None:
    outcome = report_runs.gpu_outcome(tasks=2)
    own = replace(finished(0, 341e-6, 290e-6, won=False), weight=1)
    outcome = replace(outcome, tasks=(own, *outcome.tasks))
    said = "cuBLASLt would take 341 µs for the 1 task"
    view = report_runs.view(outcome)
    assert said in plain(html.page(View("tasks", [task_section(view)])))
    assert said in plain(run_markdown(view))
    document = outcome_json(outcome)
    assert document["libraries"][0]["secs"] == pytest.approx(341e-6)
    assert document["tasks"][0]["libraries_secs"] == {CUBLASLT: pytest.approx(341e-6)}
