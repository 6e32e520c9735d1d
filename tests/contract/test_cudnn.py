"""Convolutions by cuDNN: what is matched, described, named and called.

A stand-in for cuDNN names plans, and computes graphs on the host.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.contract.test_triton import kernels
from tests.lib.build_fixtures import LLVM, built
from tests.lib.fake_cudnn import FakeCudnn
from tests.lib.library_tasks import default_and_tuned, gpu_task, on_host
from tunerd.artifacts.loading import map_weights
from tunerd.builder.build import build_candidate
from tunerd.candidates.base import SearchSettings
from tunerd.candidates.libraries.recipe import PlanRecipe
from tunerd.candidates.libraries.source import CublasLtSource, CudnnSource
from tunerd.frontend.kernels import Kernels
from tunerd.libraries import cudnn, naming, packages
from tunerd.libraries.cudnn_graphs import Configuration, ConvolutionCall, Image, described
from tunerd.libraries.packages import LibraryCallError, MissingLibraryError
from tunerd.runner.agreement import disagreement
from tunerd.runner.sampling import CpuDevice
from tunerd.system import spawn
from tunerd.system.targets import cuda_target
from tunerd.vocabulary import CUDNN, FP16, FP32, TF32, Candidate, Task, default_candidate

SOURCE = CudnnSource()
SETTINGS = SearchSettings(seed=0, threads=1, sms=52)
CHOSEN = Configuration(4, ((2, 8), (13, 1)), 0)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCudnn:
    made = FakeCudnn()
    monkeypatch.setattr(packages, "load", lambda name: made)
    monkeypatch.setattr(naming, "named", cudnn.configurations)  # in this process
    return made


def layer(attributes: dict[str, Any], filters: tuple[int, int, int, int], *more: Any) -> Any:
    """Return the nodes of a convolution with a bias, of more after it, and the shape of its w."""
    return [("Conv", ["x", "w", "b"], "c", attributes), *more], filters


RELU = ("Relu", ["c"], "y", {})
MATCHED = {
    "with a bias": layer({"pads": [1, 1, 1, 1]}, (12, 8, 3, 3)),
    "with ReLU": layer({"pads": [1, 1, 1, 1]}, (12, 8, 3, 3), RELU),
    "with strides": layer({"pads": [1, 1, 1, 1], "strides": [2, 2]}, (12, 8, 3, 3), RELU),
    "of one tap": layer({}, (12, 8, 1, 1), RELU),
    "of one tap, with strides": layer({"strides": [2, 2]}, (12, 8, 1, 1), RELU),
    "dilated, padded unequally": layer(
        {"pads": [0, 1, 2, 3], "dilations": [2, 1]}, (12, 8, 3, 3), RELU
    ),
    "of a row": layer({"pads": [0, 2, 0, 2]}, (12, 8, 1, 5), RELU),
    "in groups": layer({"pads": [1, 1, 1, 1], "group": 4}, (12, 2, 3, 3), RELU),
    "of each channel": layer({"pads": [1, 1, 1, 1], "group": 8}, (8, 1, 3, 3), RELU),
    "of each channel, twice": layer({"pads": [1, 1, 1, 1], "group": 8}, (16, 1, 3, 3), RELU),
    "with SiLU": layer(
        {"pads": [1, 1, 1, 1]},
        (12, 8, 3, 3),
        ("Sigmoid", ["c"], "s", {}),
        ("Mul", ["c", "s"], "y", {}),
    ),
    "with sigmoid": layer({"pads": [1, 1, 1, 1]}, (12, 8, 3, 3), ("Sigmoid", ["c"], "y", {})),
    "with a residual and ReLU": layer(
        {"pads": [1, 1, 1, 1]},
        (8, 8, 3, 3),
        ("Add", ["c", "x"], "a", {}),
        ("Relu", ["a"], "y", {}),
    ),
}


def convolution(name: str) -> Task:
    """Return the convolution of a model in fp32, for a GPU."""
    nodes, filters = MATCHED[name]
    found = kernels(nodes, {"x": (2, 8, 9, 11)}, {"w": filters, "b": filters[:1]}, precision=FP32)
    (task,) = (t for t in found.tasks if "conv" in t.name)
    return task


def by_plan(task: Task, chosen: Configuration = CHOSEN) -> Candidate:
    recipe = PlanRecipe(chosen, "9.28").text
    return Candidate.of_recipe(task.task_id, recipe, source=CUDNN)


def call_of(task: Task, chosen: Configuration = CHOSEN) -> ConvolutionCall:
    (made,) = SOURCE.lower(task, by_plan(task, chosen).recipe).calls
    return ConvolutionCall.parse(made.text)


@pytest.mark.parametrize("name", MATCHED)
def test_a_call_computes_what_the_default_computes(
    fake: FakeCudnn, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """On the host: its weights are laid out for the library, and its graph is computed."""
    on_host(monkeypatch)
    task = convolution(name)
    here = replace(task, target=LLVM)
    candidate = by_plan(task)
    lowered = SOURCE.lower(task, candidate.recipe)
    build = built(build_candidate(here, candidate, lowered=lowered))
    reference = built(build_candidate(here, default_candidate(here)))
    assert disagreement(CpuDevice([0]), reference, build) is None
    assert fake.ran == [4, 4]


def test_what_is_no_convolution_is_left_to_other_sources() -> None:
    without = replace(convolution("with ReLU"), weight_args=())
    with pytest.raises(ValueError, match="its filters are no weights of the model"):
        SOURCE.lower(without, by_plan(without).recipe)
    nodes, filters = layer(
        {"pads": [1, 1, 1, 1]}, (8, 8, 3, 3), ("Relu", ["c"], "r", {}), ("Add", ["r", "x"], "y", {})
    )
    found = kernels(nodes, {"x": (1, 8, 9, 9)}, {"w": filters, "b": (8,)}, precision=FP32)
    (task,) = (t for t in found.tasks if "conv" in t.name)
    with pytest.raises(ValueError, match="it is no convolution of cuDNN's"):
        SOURCE.lower(task, by_plan(task).recipe)


def test_padding_with_anything_but_zeros_around_the_image_is_refused() -> None:
    from tvm import te, topi

    data, taps = te.placeholder((1, 6, 6, 4), name="x"), te.placeholder((3, 3, 4, 8), name="w")
    shifted = topi.nn.pad(data, [0, 2, 1, 0], [0, 0, 1, 0], pad_value=1.0)
    made = [data, taps, topi.nn.conv2d_nhwc(shifted, taps, 1, 0, 1)]
    task = replace(gpu_task(made), weight_args=(1,))
    with pytest.raises(ValueError, match="what lies around its image is not 0"):
        SOURCE.lower(task, by_plan(task).recipe)


def test_a_call_is_the_same_after_it_was_text() -> None:
    image = Image("float16", (1, 7, 7, 64))
    call = ConvolutionCall(
        x=image,
        filters=(64, 3, 3, 64),
        y=image,
        strides=(1, 2),
        dilations=(2, 1),
        before=(0, 1),
        after=(2, 3),
        precision=FP16,
        activation="relu6",
        alpha=0.5,
        has_residual=True,
        has_bias=True,
        configuration=CHOSEN,
    )
    assert ConvolutionCall.parse(call.text) == call
    assert ConvolutionCall.parse(replace(call, configuration=None).text).configuration is None
    recipe = PlanRecipe(CHOSEN, "9.28")
    assert PlanRecipe.parse(recipe.text) == recipe


def test_a_graph_is_described_before_it_is_sent() -> None:
    call = call_of(convolution("with a residual and ReLU"))
    found = {each.name: each for each in described(call)}
    names = list(found)
    for each in found.values():
        for _, kind, values in each.attributes:
            if kind == 15:
                assert all(names.index(value) < names.index(each.name) for value in values)
    operations = ("convolve", "add residual", "add bias", "activate")
    assert found["graph"].attributes == ((801, 15, operations),)
    x = {name: values for name, _, values in found["x"].attributes}
    assert x[902] == (2, 8, 9, 11)  # n, c, h, w
    assert x[903] == (9 * 11 * 8, 1, 11 * 8, 8)
    assert x[907] == (False,)
    between = {name: values for name, _, values in found["before activate"].attributes}
    assert (between[901], between[907]) == ((0,), (True,))  # fp32, and nowhere in memory
    clipped = {each.name: each for each in described(replace(call, activation="relu6"))}
    assert (4, 5, (6.0,)) in clipped["how to activate"].attributes


def test_plans_are_proposed_as_the_heuristics_name_them_for_the_share(fake: FakeCudnn) -> None:
    task = replace(convolution("with ReLU"), precision=TF32)
    answer = SOURCE.search(SETTINGS).propose(task, 8)
    found = [PlanRecipe.parse(c.recipe).configuration for c in answer.candidates]
    assert found == [CHOSEN, Configuration(7, ((2, 5),), 256), Configuration(11, (), 12)]
    device = json.loads(fake.devices[0].rstrip(b"\0"))
    assert (device["multiProcessorCount"], device["deviceVer"]) == (52, 900)
    assert not fake.made  # nothing of it is left


def test_in_fp32_no_plan_has_operands_that_are_rounded(fake: FakeCudnn) -> None:
    answer = SOURCE.search(SETTINGS).propose(convolution("with ReLU"), 8)
    engines = [PlanRecipe.parse(c.recipe).configuration.engine for c in answer.candidates]
    assert engines == [11]


def test_a_search_says_why_it_has_no_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    old = replace(convolution("with ReLU"), target=cuda_target("7.0"))
    answer = SOURCE.search(SETTINGS).propose(old, 8)
    assert (answer.candidates, answer.exhausted) == ((), True)
    assert "nothing is known here of a GPU of sm_70" in answer.message


def test_plans_are_asked_for_in_a_process_that_sees_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its heuristics answer where cuDNN is, else what to install."""
    started = []
    start = spawn.start
    monkeypatch.setattr(naming, "_process", None)
    monkeypatch.setattr(
        spawn, "start", lambda *args, **options: started.append(options) or start(*args, **options)
    )
    task = convolution("with ReLU")
    for _ in range(2):
        answer = SOURCE.search(SETTINGS).propose(task, 8)
        assert answer.candidates or "cu" in answer.message
    assert [options["changes"] for options in started] == [{"CUDA_VISIBLE_DEVICES": ""}]
    process = naming._process
    assert process is not None
    process.kill()
    process.wait()
    with pytest.raises(LibraryCallError, match=r"asks cuDNN for its plans ended .exit status -9"):
        naming.named(call_of(task), "{}")


@pytest.mark.parametrize(
    ("chosen", "sentence"),
    [
        (Configuration(99, (), 0), "refuses engine: status of a fake .status 3000., because"),
        (Configuration(4, ((2, 9),), 0), "refuses config: status of a fake"),
        (Configuration(7, ((2, 5),), 255), "it needs a workspace of 256 bytes, not 255"),
    ],
)
def test_a_plan_that_cannot_be_made_again_is_refused(
    fake: FakeCudnn, chosen: Configuration, sentence: str
) -> None:
    call = call_of(convolution("with ReLU"), chosen)
    said = f"by engine {chosen.engine} with knobs .* cannot be made again here: .*{sentence}"
    with pytest.raises(LibraryCallError, match=said):
        cudnn.Handle().plan(call.text)
    assert not fake.made  # nothing of it is left


def test_a_call_is_queued_on_the_stream_that_it_is_given(fake: FakeCudnn) -> None:
    task = convolution("with ReLU")
    arrays = [np.zeros(spec.shape, spec.dtype) for spec in (*task.args, task.args[-1])]
    plan = cudnn.Handle().plan(call_of(task).text)
    kept = len(fake.made)
    for stream in (7, 8):
        plan([array.ctypes.data for array in arrays], stream)
    assert fake.streams == [7, 8]
    assert len(fake.made) == kept


@pytest.mark.parametrize(
    ("is_in_wheel", "said"),
    [
        (True, "cuDNN is here, and needs another library: cuBLASLt .*: pip install nvidia-cublas,"),
        (False, "cuDNN 9.12.0 or newer is needed, .*: pip install nvidia-cudnn-cu13,"),
    ],
)
def test_cudnn_is_missing_where_what_it_needs_is(
    is_in_wheel: bool, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = tmp_path / "libcudnn.so.9"
    library.touch()
    wheels = {CUDNN: [library]} if is_in_wheel else {}
    monkeypatch.setattr(packages, "wheel_version", lambda name: "9" if name in wheels else "")
    monkeypatch.setattr(packages, "_in_wheels", lambda package: wheels.get(package.name, ()))
    monkeypatch.setattr(packages, "_places", lambda package: iter(()))
    packages.load.cache_clear()
    assert re.match(said, str(packages.missing(CUDNN)))
    with pytest.raises(MissingLibraryError, match=said):
        packages.load(CUDNN)


# --- artifacts ---------------------------------------------------------------------------------


def two_convolutions(precision: str) -> Kernels:
    nodes: list[Any] = [
        ("Conv", ["x", "w1", "b1"], "a", {"pads": [1, 1, 1, 1]}),
        ("Relu", ["a"], "b", {}),
        ("Conv", ["b", "w2", "b2"], "c", {"pads": [1, 1, 1, 1]}),
        ("Relu", ["c"], "d", {}),
        ("Conv", ["d", "w2", "b2"], "e", {"pads": [1, 1, 1, 1]}),
        ("Add", ["e", "d"], "f", {}),
        ("Relu", ["f"], "y", {}),
    ]
    weights = {"w1": (48, 8, 3, 3), "b1": (48,), "w2": (48, 48, 3, 3), "b2": (48,)}
    return kernels(nodes, {"x": (1, 8, 12, 12)}, weights, precision=precision)


@pytest.mark.filterwarnings("ignore::tunerd.MismatchWarning")
@pytest.mark.parametrize("precision", [FP32, FP16])
def test_a_model_that_calls_cudnn_computes_what_the_default_model_does(
    fake: FakeCudnn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, precision: str
) -> None:
    """On the host. Filters are in the artifact as the library takes them, and only so."""
    on_host(monkeypatch)
    found = two_convolutions(precision)
    winners = {t.task_id: by_plan(t) for t in found.tasks if not isinstance(SOURCE.matched(t), str)}
    x = np.random.default_rng(0).standard_normal((1, 8, 12, 12)).astype(np.float32)
    models = default_and_tuned(found, winners, folder=tmp_path)
    outputs = [model(x)["y"] for model in models]
    manifest = json.loads((tmp_path / "tuned" / "manifest.json").read_text())
    np.testing.assert_allclose(outputs[1], outputs[0], rtol=1e-2, atol=1e-2)
    assert len(fake.ran) == len(winners) >= 2
    (need,) = manifest["libraries"]
    assert (need["name"], need["package"]) == (CUDNN, "nvidia-cudnn-cu13")
    ordered = [name for name in manifest["weights"] if name.endswith("_3012")]
    weights = [map_weights(tmp_path / n / "weights.bin") for n in ("default", "tuned")]
    for name in ordered:
        origin = name.removesuffix("_3012")
        np.testing.assert_array_equal(weights[1][name], weights[0][origin].transpose(3, 0, 1, 2))
    assert any(name.removesuffix("_3012") not in manifest["weights"] for name in ordered)


def test_a_convolution_of_one_tap_is_for_both_libraries() -> None:
    task = convolution("of one tap")
    for source in (CublasLtSource(), SOURCE):
        assert not isinstance(source.matched(task), str)
    assert isinstance(CublasLtSource().matched(convolution("with ReLU")), str)
