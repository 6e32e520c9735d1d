"""Triton's templates: a kernel's text computes what TVM's own lowering of the task does."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.lib import IS_NIGHTLY, triton_in_numpy
from tunerd.builder.library import load_tvm
from tunerd.candidates import registry
from tunerd.candidates.base import DeviceKernel, SearchSettings
from tunerd.candidates.nests.nest import NotANest, nest_of
from tunerd.candidates.triton.launch import Launch
from tunerd.candidates.triton.source import Recipe, Template, templates_of
from tunerd.frontend.kernels import Kernels, kernels_of
from tunerd.frontend.model import FixedModel, model_digest
from tunerd.frontend.onnx.onnx_graph import OnnxGraph
from tunerd.system.arrays import KERNEL_TOLERANCES, comparison_values, rounded
from tunerd.system.targets import cpu_target_json, cuda_target
from tunerd.vocabulary import TRITON, Task, TensorSpec

Node = tuple[str, list[str], str, dict[str, Any]]  # operator, inputs, output, attributes


def task_of(
    nodes: list[Node],
    inputs: dict[str, tuple[int, ...]],
    weights: dict[str, tuple[int, ...]],
    *,
    precision: str,
) -> Task:
    """Return the task of a model's largest kernel."""
    return max(kernels(nodes, inputs, weights, precision=precision).tasks, key=lambda t: t.flops)


def kernels(
    nodes: list[Node],
    inputs: dict[str, tuple[int, ...]],
    weights: dict[str, tuple[int, ...]],
    *,
    precision: str,
) -> Kernels:
    """Lower a model for a GPU."""
    rng = np.random.default_rng(0)
    graph = helper.make_graph(
        [helper.make_node(op, ins, [out], **attributes) for op, ins, out, attributes in nodes],
        "g",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in inputs.items()],
        [helper.make_tensor_value_info(nodes[-1][2], TensorProto.FLOAT, None)],
        [
            numpy_helper.from_array(rng.standard_normal(s).astype(np.float32) * 0.2, n)
            for n, s in weights.items()
        ],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    proto = onnx.shape_inference.infer_shapes(proto)
    specs = tuple(TensorSpec(n, s, "float32") for n, s in inputs.items())
    model = FixedModel("m", model_digest(proto), specs, OnnxGraph(proto), precision=precision)
    return kernels_of(model, cuda_target("9.0"))


def conv(**attributes: Any) -> Callable[[], list[Node]]:
    return lambda: [
        ("Conv", ["x", "w", "b"], "c", attributes),
        ("Relu", ["c"], "y", {}),
    ]


CASES: dict[str, tuple[list[Node], dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]] = {
    "convolution": (
        conv(pads=[1, 1, 1, 1])(),
        {"x": (1, 32, 9, 11)},
        {"w": (40, 32, 3, 3), "b": (40,)},
    ),
    "strided": (
        conv(pads=[1, 1, 1, 1], strides=[2, 2])(),
        {"x": (2, 24, 9, 9)},
        {"w": (16, 24, 3, 3), "b": (16,)},
    ),
    "dilated": (
        conv(pads=[2, 2, 2, 2], dilations=[2, 2])(),
        {"x": (1, 16, 8, 8)},
        {"w": (24, 16, 3, 3), "b": (24,)},
    ),
    "stem": (
        conv(pads=[3, 3, 3, 3], strides=[2, 2])(),
        {"x": (1, 3, 20, 20)},
        {"w": (16, 3, 7, 7), "b": (16,)},
    ),
    "pointwise with a residual": (
        [
            ("Conv", ["x", "w", "b"], "c", {}),
            ("Add", ["c", "r"], "s", {}),
            ("Sigmoid", ["s"], "g", {}),
            ("Mul", ["s", "g"], "y", {}),
        ],
        {"x": (1, 48, 7, 7), "r": (1, 64, 7, 7)},
        {"w": (64, 48, 1, 1), "b": (64,)},
    ),
    "depthwise": (
        conv(pads=[1, 1, 1, 1], group=24)(),
        {"x": (1, 24, 9, 9)},
        {"w": (24, 1, 3, 3), "b": (24,)},
    ),
    "matrix product with GELU": (
        [
            ("MatMul", ["x", "w"], "m", {}),
            ("Add", ["m", "b"], "a", {}),
            ("Mul", ["a", "k"], "d", {}),
            ("Erf", ["d"], "e", {}),
            ("Add", ["e", "one"], "f", {}),
            ("Mul", ["a", "f"], "y", {}),
        ],
        {"x": (1, 33, 64)},
        {"w": (64, 96), "b": (96,), "k": (), "one": ()},
    ),
    "batched product": (
        [("MatMul", ["x", "z"], "y", {})],
        {"x": (2, 3, 20, 32), "z": (2, 3, 32, 24)},
        {},
    ),
    "product with a vector": (
        [("MatMul", ["x", "w"], "m", {}), ("Add", ["m", "b"], "y", {})],
        {"x": (1, 320)},
        {"w": (320, 36), "b": (36,)},
    ),
    "max pool": (
        [
            (
                "MaxPool",
                ["x"],
                "y",
                {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]},
            )
        ],
        {"x": (1, 16, 9, 9)},
        {},
    ),
    "mean of an image": (
        [("ReduceMean", ["x"], "y", {"keepdims": 1})],
        {"x": (1, 6, 12, 15)},
        {},
    ),
    "softmax": ([("Softmax", ["x"], "y", {"axis": -1})], {"x": (2, 5, 50)}, {}),
    "layer norm": (
        [("LayerNormalization", ["x", "s", "b"], "y", {"axis": -1})],
        {"x": (1, 7, 96)},
        {"s": (96,), "b": (96,)},
    ),
    "transpose": ([("Transpose", ["x"], "y", {"perm": [0, 2, 1]})], {"x": (3, 20, 33)}, {}),
    "product of 197 rows": (
        [("MatMul", ["x", "w"], "m", {}), ("Add", ["m", "b"], "y", {})],
        {"x": (1, 197, 48)},
        {"w": (48, 40), "b": (40,)},
    ),
    "product with a transposed weight": (
        [("Gemm", ["x", "w", "b"], "y", {"transB": 1})],
        {"x": (20, 64)},
        {"w": (48, 64), "b": (48,)},
    ),
}


@pytest.fixture(scope="module")
def tvm() -> Any:
    return load_tvm()


def with_precisions(*others: str) -> list[tuple[str, str]]:
    """Return each case in fp16 and in one of the others, which read and round otherwise.

    Nightly in all of them.
    """
    return [
        (case, precision)
        for nth, case in enumerate(CASES)
        for precision in ("fp16", *(others if IS_NIGHTLY else [others[nth % len(others)]]))
    ]


@pytest.mark.parametrize(("case", "precision"), with_precisions("bf16", "tf32", "fp32"))
def test_a_kernel_computes_its_task(case: str, precision: str, tvm: Any) -> None:
    nodes, inputs, weights = CASES[case]
    task = task_of(nodes, inputs, weights, precision=precision)
    templates = templates_of(task)
    assert not isinstance(templates, str), templates
    for name, template in templates.items():
        cuts = list(template.tiles())
        assert cuts, f"{name} has no way to cut it"
        for cut in random.Random(0).sample(cuts, min(4, len(cuts))):
            require_agreement(task, template, cut, tvm)
        for cut in [c for c in cuts if getattr(c, "splits", 1) > 1][:1]:
            require_agreement(task, template, cut, tvm, backwards=True)


@pytest.mark.parametrize("case", ["convolution", "batched product"])
def test_products_in_tf32_are_rounded_and_not_made_smaller(case: str, tvm: Any) -> None:
    """Cut off instead, as tensor cores do, all of them are too small by some 2^-11."""
    nodes, inputs, weights = CASES[case]
    task = task_of(nodes, inputs, weights, precision="tf32")
    template = templates_of(task)["product"]  # type: ignore[index]
    given = []
    for i, spec in enumerate(task.args):
        array = np.abs(comparison_values(spec, 0, i)) + np.float32(0.5)
        given.append(rounded(array, "tf32") if i in task.weight_args else array)
    found = [array.copy() for array in given]
    expected = _by_tvm(task, given, tvm)[-1].astype(np.float64)
    cut = next(iter(template.tiles()))
    triton_in_numpy.run_all(template.launches(cut, "k"), found)
    smaller = 1 - found[-1].astype(np.float64).sum() / expected.sum()
    assert abs(smaller) < 5e-5


def test_weights_of_products_are_rounded_to_tf32_and_biases_stay() -> None:
    nodes, inputs, weights = CASES["convolution"]
    exact, cut = (
        kernels(nodes, inputs, weights, precision=p).lowered.weights for p in ("fp32", "tf32")
    )
    for name, array in cut.items():
        expected = exact[name] if array.ndim == 1 else rounded(exact[name], "tf32")
        assert np.array_equal(array, expected), name
    assert any(not np.array_equal(exact[name], cut[name]) for name in cut)


def test_products_by_tensor_cores_are_of_what_has_rows(tvm: Any) -> None:
    for case, expected in {
        "convolution": {"product"},
        "stem": {"product"},
        "batched product": {"product"},
        "depthwise": {"loops"},
        "softmax": {"rows"},
        "layer norm": {"rows"},
    }.items():
        nodes, inputs, weights = CASES[case]
        templates = templates_of(task_of(nodes, inputs, weights, precision="fp16"))
        assert set(templates) == expected, case


def test_a_product_with_a_transposed_weight_is_one_kernel_of_the_template(tvm: Any) -> None:
    nodes, inputs, weights = CASES["product with a transposed weight"]
    found = kernels(nodes, inputs, weights, precision="fp16")
    (task,) = found.tasks
    assert set(templates_of(task)) == {"product"}
    assert found.lowered.mod["main"].script().count("R.call_tir") == 1


def test_a_split_product_has_the_same_bits_in_any_order_of_its_blocks(tvm: Any) -> None:
    nodes, inputs, weights = CASES["convolution"]
    task = task_of(nodes, inputs, weights, precision="fp16")
    template = templates_of(task)["product"]  # type: ignore[index]
    given = [comparison_values(spec, 0, i) for i, spec in enumerate(task.args)]
    cuts = [cut for cut in template.tiles() if cut.splits > 2]
    for cut in random.Random(0).sample(cuts, 2):
        found = []
        for backwards in (False, True):
            arrays = [array.copy() for array in given]
            scratch = [np.zeros(4096, np.int32), np.zeros(template.workspace(cut), np.float32)]
            triton_in_numpy.run_all(
                template.launches(cut, "k"), [*arrays, *scratch], backwards=backwards
            )
            found.append(arrays[-1].tobytes())
        assert found[0] == found[1], cut


def test_fp32_takes_no_tensor_cores(tvm: Any) -> None:
    nodes, inputs, weights = CASES["convolution"]
    found = templates_of(task_of(nodes, inputs, weights, precision="fp32"))
    assert isinstance(found, str) or "product" not in found


def require_agreement(
    task: Task, template: Template, cut: Any, tvm: Any, *, backwards: bool = False
) -> None:
    """Run a kernel's text, and TVM's lowering of the task, on equal arguments."""
    specs = task.args
    dtypes = {"bfloat16": np.float32}
    given = []
    for i, spec in enumerate(specs):
        own = replace(spec, dtype="float32") if spec.dtype in dtypes else spec
        array = comparison_values(own, 0, i)
        given.append(array.astype(triton_in_numpy.Language.bfloat16) if own is not spec else array)
    given[-1][...] = 0  # also where a kernel that writes a part of a tensor leaves it alone
    expected = [np.asarray(a).astype(np.float32) for a in _by_tvm(task, given, tvm)]
    found = [array.copy() for array in given]
    scratch: list[np.ndarray] = []
    if template.workspace(cut):
        scratch = [np.zeros(4096, np.int32), np.full(template.workspace(cut), np.nan, np.float32)]
    launches = template.launches(cut, "kernel")
    triton_in_numpy.run_all(launches, [*found, *scratch], backwards=backwards)
    if scratch:
        assert not scratch[0].any(), "counters are not zero again"
    rtol, atol = KERNEL_TOLERANCES["float32" if task.precision == "fp32" else "float16"]
    out = found[-1].astype(np.float32)
    scale = np.abs(expected[-1]).max()
    assert np.allclose(out, expected[-1], rtol=rtol, atol=atol * scale), _said(cut, launches)


def _said(cut: Any, launches: Sequence[Launch]) -> str:
    return "\n".join([str(cut), *(launch.text for launch in launches)])


def _by_tvm(task: Task, arrays: list[np.ndarray], tvm: Any) -> list[np.ndarray]:
    from tunerd.frontend.relax.lowering import make_target

    module = tvm.tirx.build(tvm.ir.load_json(task.mod_json), target=make_target(cpu_target_json(1)))
    tensors = [tvm.runtime.tensor(array) for array in arrays]
    module["main"](*tensors)
    return [tensor.numpy() for tensor in tensors]


# --- the source --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def product(tvm: Any) -> Task:
    nodes, inputs, weights = CASES["convolution"]
    return task_of(nodes, inputs, weights, precision="fp16")


def test_a_recipe_says_all_of_a_candidate(product: Task) -> None:
    templates = templates_of(product)
    for name, template in templates.items():
        for cut in list(template.tiles())[:20]:
            recipe = Recipe(name, cut)
            assert Recipe.parse(recipe.text) == recipe


@pytest.mark.parametrize(
    "text", ["", "{}", '{"template":"product","version":0}', '{"template":"x","version":3}']
)
def test_what_is_no_recipe_is_refused(text: str) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        Recipe.parse(text)


def test_a_search_goes_from_the_estimate_to_what_was_measured(product: Task) -> None:
    from tunerd.vocabulary import Result

    search = registry.SOURCES[TRITON].search(SearchSettings(seed=0, threads=1, sms=52))
    known = []
    best = None
    for _ in range(8):
        proposal = search.propose(product, 8, results=known)
        assert len(proposal.candidates) == len({c.candidate_id for c in proposal.candidates}) == 8
        known = []
        for candidate in proposal.candidates:
            cut = json.loads(candidate.recipe)
            secs = 1e-6 * (1 + abs(cut["rows"] - 32) + abs(cut["splits"] - 4) + cut["warps"])
            known.append(Result(candidate, secs))
            best = min(best or secs, secs)
    search.propose(product, 8, results=known)
    assert best <= 5e-6  # of 5 to 100 by this measure


def test_a_search_ends_where_all_was_tried(tvm: Any) -> None:
    nodes, inputs, weights = CASES["softmax"]
    task = task_of(nodes, inputs, weights, precision="fp16")
    search = registry.SOURCES[TRITON].search(SearchSettings(seed=0, threads=1))
    count = len(list(templates_of(task)["rows"].tiles()))
    assert len(search.propose(task, count + 5).candidates) == count
    last = search.propose(task, 5)
    assert last.exhausted
    assert last.message


def test_kernels_of_other_forms_are_refused_with_a_reason(tvm: Any) -> None:
    from tvm.script import ir as I
    from tvm.script import tirx as T

    @I.ir_module
    class Module:
        @T.prim_func(s_tir=True)
        def main(a: T.Buffer((8,), "float32"), b: T.Buffer((8,), "float32")):  # type: ignore
            for i in T.grid(8):
                with T.sblock("x"):
                    v = T.axis.remap("S", [i])
                    T.reads(a[v])
                    T.writes(b[v])
                    b[v] = T.tan(a[v])

    with pytest.raises(NotANest, match="tan"):
        nest_of(Module)


def test_a_library_has_the_kernel_that_its_host_code_calls(product: Task) -> None:
    pytest.importorskip("triton")
    from tunerd.builder.build import build_candidate
    from tunerd.vocabulary import Build

    source = registry.SOURCES[TRITON]
    assert source.takes(product) is None
    search = source.search(SearchSettings(seed=0, threads=1, sms=12))
    candidates = search.propose(product, 400).candidates
    split = next(c for c in candidates if json.loads(c.recipe)["splits"] > 1)
    kernel = source.lower(product, split.recipe).kernels[0]
    assert isinstance(kernel, DeviceKernel)
    build = build_candidate(product, split)
    assert isinstance(build, Build), build
    assert kernel.symbol.encode() in build.library
    assert [s.dtype for s in build.scratch] == ["int32", "float32"]
    assert build.compiler.startswith("triton-")
    assert build.args == product.args


def test_a_model_carries_its_kernels_and_their_counters(tvm: Any, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from tunerd.artifacts.compile import compile_artifact

    nodes, inputs, weights = CASES["convolution"]
    found = kernels(nodes, inputs, weights, precision="fp16")
    source = registry.SOURCES[TRITON]
    task = max(found.tasks, key=lambda t: t.flops)
    search = source.search(SearchSettings(seed=0, threads=1, sms=12))
    candidates = search.propose(task, 400).candidates
    split = next(c for c in candidates if json.loads(c.recipe)["splits"] > 1)
    folder = compile_artifact(
        found.lowered,
        found.tasks,
        {task.task_id: split},
        task.target,
        tmp_path / "artifact",
        model=found.model,
        pct=40,
    )
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["precision"] == "fp16"
    assert manifest["weights"][-1] == "tunerd_counters"
    (entry,) = (e for e in manifest["tasks"] if e["task_id"] == task.task_id)
    assert (entry["source"], entry["kernels"]) == (TRITON, 1)
    (kernel,) = source.lower(task, split.recipe).kernels
    assert kernel.symbol.encode() in (folder / "model.so").read_bytes()


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_model_for_tenants_has_counters_for_each_lane(
    tvm: Any, tmp_path: Path, lanes: int
) -> None:
    pytest.importorskip("triton")
    from tunerd.artifacts.compile import compile_artifact
    from tunerd.artifacts.launches import launches_of
    from tunerd.artifacts.scheduling import schedule

    nodes, inputs, weights = CASES["convolution"]
    found = kernels(nodes, inputs, weights, precision="fp16")
    tasks = tuple(task.for_tenants(lanes) for task in found.tasks)
    task = max(tasks, key=lambda t: t.flops)
    source = registry.SOURCES[TRITON]
    search = source.search(SearchSettings(seed=0, threads=1, sms=12))
    candidates = search.propose(task, 400).candidates
    split = next(c for c in candidates if json.loads(c.recipe)["splits"] > 1)
    winners = {task.task_id: split}
    scheduled = schedule(found.lowered.mod, tasks, winners, task.target, tenants=lanes)
    main = scheduled.mod["main"].script()
    (call,) = (line for line in main.splitlines() if "tunerd_product" in line)
    assert "(tunerd_slots, " in call
    assert "tunerd_counters)" in call
    symbols = {kernel.symbol for kernel in scheduled.kernels}
    by_tvm, launches = (launches_of(scheduled.mod, given) for given in ((), symbols))
    (own,) = [each for each in launches if each not in by_tvm]
    assert own["calls"] == 1
    assert own["blocks"] % (lanes * json.loads(split.recipe)["splits"]) == 0
    assert own["threads"] % 32 == 0
    folder = compile_artifact(
        found.lowered, tasks, winners, task.target, tmp_path / "artifact",
        model=found.model, pct=40, tenants=lanes,
    )  # fmt: skip
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["tenants"] == lanes
    assert manifest["counters"]["shape"][0] == lanes
    assert manifest["launches"] == launches
    assert "tunerd_counters" not in manifest["weights"]
    (kernel,) = source.lower(task, split.recipe, lanes).kernels
    assert kernel.symbol.encode() in (folder / "model.so").read_bytes()


def test_what_passes_between_kernels_is_stored_in_16_bits(tvm: Any) -> None:
    nodes, inputs, weights = CASES["convolution"]
    found = kernels(nodes, inputs, weights, precision="fp16")
    types = {name: str(array.dtype) for name, array in found.lowered.weights.items()}
    assert sorted(types.values()) == ["float16", "float32"]  # a kernel's weights, and its bias
    main = found.lowered.mod["main"]
    assert str(main.params[0].ty.dtype) == "float32"
    assert str(main.ret_ty.dtype) == "float32"
    assert any("stored as float16" in note for note in found.model.notes)
