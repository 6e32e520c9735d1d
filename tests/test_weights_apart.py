"""Large weights in a file of their own: what is in the graph, who finds them, and for how long."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from artifact_fixtures import LLVM
from models import floats, model
from onnx import helper, numpy_helper

from tunerd.errors import ModelError
from tunerd.frontend.model import FixedModel, read_model, simplified
from tunerd.frontend.onnx import memory
from tunerd.frontend.onnx.onnx_graph import OnnxGraph
from tunerd.frontend.onnx.reference import Reference
from tunerd.frontend.onnx.uncertainty import ways_of
from tunerd.frontend.onnx.weights import LEAST_BYTES, tensors_apart, values_of, whole
from tunerd.frontend.process import Lowering
from tunerd.frontend.relax.lowering import lower
from tunerd.vocabulary import Packed

WIDE = 2200  # its product has weights of more than LEAST_BYTES


def product() -> onnx.ModelProto:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["product"]),
        helper.make_node("Add", ["product", "shift"], ["shifted"]),
        helper.make_node("MatMul", ["shifted", "v"], ["y"]),
    ]
    return model(
        nodes,
        inputs={"x": (2, WIDE)},
        outputs={"y": (2, 3)},
        weights={"w": floats(WIDE, WIDE), "shift": floats(2, 1), "v": floats(WIDE, 3)},
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("apart") / "net.onnx"
    onnx.save(product(), path)
    return path


@pytest.fixture
def fixed(path: Path) -> FixedModel:
    return read_model(path)


def graph_of(fixed: FixedModel) -> OnnxGraph:
    assert isinstance(fixed.graph, OnnxGraph)
    return fixed.graph


def test_a_large_weight_is_no_part_of_the_graph_that_is_copied(fixed: FixedModel) -> None:
    proto = graph_of(fixed).proto
    assert {tensor.name for tensor in tensors_apart(proto)} >= {"w"}
    assert proto.ByteSize() < LEAST_BYTES // 10
    (w,) = (tensor for tensor in proto.graph.initializer if tensor.name == "w")
    np.testing.assert_array_equal(values_of(w), floats(WIDE, WIDE))


def test_small_models_stay_as_they_are(tmp_path: Path) -> None:
    small = model(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        inputs={"x": (2, 80)},
        outputs={"y": (2, 80)},
        weights={"w": floats(80, 80)},
    )
    onnx.save(small, tmp_path / "net.onnx")
    graph = graph_of(read_model(tmp_path / "net.onnx"))
    assert graph.weights is None
    assert not list(tensors_apart(graph.proto))


@pytest.mark.parametrize("optimize", [True, False])
def test_onnx_runtime_gives_the_same(fixed: FixedModel, optimize: bool) -> None:
    feed = {"x": floats(2, WIDE)}
    expected = Reference(product()).run(feed)["y"]
    got = Reference(graph_of(fixed).proto, optimize=optimize).run(feed)["y"]
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_every_other_way_to_compute_it_finds_the_weights(fixed: FixedModel) -> None:
    graph, feed = graph_of(fixed), {"x": floats(2, WIDE)}
    (expected,) = graph.run([feed])
    ways = ways_of(graph.proto, [feed])
    for way in ways.others:
        np.testing.assert_allclose(way[0]["y"], expected["y"], rtol=1e-3, atol=1e-4)
    (rounded,) = graph.with_rounded_weights("fp16").run([feed])
    assert 0 < np.abs(rounded["y"] - expected["y"]).max() < 1e-2


def test_what_is_written_to_a_file_has_all_weights(fixed: FixedModel) -> None:
    graph = graph_of(fixed)
    written = onnx.ModelProto.FromString(graph.to_bytes())
    values = {t.name: numpy_helper.to_array(t) for t in written.graph.initializer}
    np.testing.assert_array_equal(values["w"], floats(WIDE, WIDE))
    assert whole(written) is written


def test_the_digest_is_that_of_the_file(path: Path, tmp_path: Path) -> None:
    moved = tmp_path / "external.onnx"
    onnx.save(product(), moved, save_as_external_data=True, location="w.bin", size_threshold=1024)
    assert read_model(moved).digest == read_model(path).digest


def test_lowering_takes_the_weights_where_they_are_mapped(fixed: FixedModel) -> None:
    lowered = lower(simplified(fixed), LLVM)
    assert any(
        weight.shape == (WIDE, WIDE) and np.array_equal(weight, floats(WIDE, WIDE))
        for weight in lowered.weights.values()
    )


@pytest.mark.slow
def test_the_process_that_lowers_gets_the_open_file(fixed: FixedModel) -> None:
    kernels = Lowering(fixed, LLVM).result()
    assert kernels.model.notes == ()
    assert any(
        np.array_equal(weight, floats(WIDE, WIDE)) for weight in kernels.lowered.weights.values()
    )


def test_another_process_makes_the_same_graph_of_it(fixed: FixedModel) -> None:
    packed = graph_of(fixed).packed()
    assert packed.fd is not None
    again = OnnxGraph.from_packed(Packed(packed.content, "another", os.dup(packed.fd)))
    assert again.weights is not None
    assert again.proto == graph_of(fixed).proto


def test_the_file_goes_with_the_graph(path: Path) -> None:
    fixed = read_model(path)
    fd = graph_of(fixed).packed().fd
    assert fd is not None
    assert os.fstat(fd).st_nlink == 0  # it has no name that a kill could leave behind
    del fixed
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_too_little_memory_is_said_before_the_file_is_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "memory_bytes", lambda: 580 << 20)
    with pytest.raises(ModelError, match=r"takes up to 0\.6 GiB, and this machine has 0\.6 GiB"):
        read_model(path)
