"""Large weights in a file of their own: what is in the graph, who finds them, and for how long."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from tests.lib.artifact_fixtures import LLVM
from tests.lib.models import floats, model
from tunerd.errors import ModelError
from tunerd.frontend.model import FixedModel, read_model, simplified
from tunerd.frontend.onnx import file, memory, reference
from tunerd.frontend.onnx.onnx_graph import OnnxGraph
from tunerd.frontend.onnx.reference import Reference
from tunerd.frontend.onnx.uncertainty import ways_of
from tunerd.frontend.onnx.weights import LEAST_BYTES, tensors_apart, values_of, whole
from tunerd.frontend.process import Lowering
from tunerd.frontend.relax.lowering import lower
from tunerd.vocabulary import Packed

WIDE = 2200  # its product has weights of more than LEAST_BYTES


def product(shifts: int = 1) -> onnx.ModelProto:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["product"]),
        helper.make_node("Add", ["product", "shift"], ["shifted"]),
        helper.make_node("MatMul", ["shifted", "v"], ["y"]),
    ]
    return model(
        nodes,
        inputs={"x": (2, WIDE)},
        outputs={"y": (2, 3)},
        weights={"w": floats(WIDE, WIDE), "shift": floats(2, shifts), "v": floats(WIDE, 3)},
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


# --- more than a message holds -----------------------------------------------------------------


def saved_beside(proto: onnx.ModelProto, folder: Path) -> Path:
    """Save a model with its weights in a file of their own."""
    onnx.save(proto, folder / "net.onnx", save_as_external_data=True, size_threshold=0)
    return folder / "net.onnx"


def limit_messages(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    for module in (file, reference):
        monkeypatch.setattr(module, "MESSAGE_BYTES", size)


def test_weights_that_no_message_holds_are_never_in_one(
    fixed: FixedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_messages(monkeypatch, 1 << 20)
    large = read_model(saved_beside(product(), tmp_path))
    assert large.digest == fixed.digest
    graph = graph_of(large)
    assert {tensor.name for tensor in tensors_apart(graph.proto)} == {"v", "w"}
    assert graph.proto.ByteSize() < 1 << 20
    feed = {"x": floats(2, WIDE)}
    (found,), (expected,) = (simplified(m).graph.run([feed]) for m in (large, fixed))
    assert np.array_equal(found["y"], expected["y"])
    ways = [ways_of(graph_of(m).proto, [feed]) for m in (large, fixed)]
    for one, other in zip(ways[0].others, ways[1].others, strict=True):
        np.testing.assert_allclose(one[0]["y"], other[0]["y"], rtol=1e-4, atol=1e-5)
    weights = lower(simplified(large), LLVM).weights.values()
    assert any(np.array_equal(w, floats(WIDE, WIDE)) for w in weights)


def test_a_weight_that_must_be_in_a_message_and_is_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved_beside(product(WIDE), tmp_path)
    limit_messages(monkeypatch, 8 << 10)
    with pytest.raises(ModelError, match="at most 2 GiB can be in one file, and of weights beside"):
        read_model(path)


def test_a_file_that_ends_while_it_is_copied_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved_beside(product(), tmp_path)
    limit_messages(monkeypatch, 1 << 20)
    place = file._place

    def too_far(*arguments: Any) -> tuple[Path, int, int]:
        of, first, length = place(*arguments)
        return of, first + (LEAST_BYTES if length > LEAST_BYTES else 0), length

    monkeypatch.setattr(file, "_place", too_far)
    with pytest.raises(ModelError, match=r"cannot be copied: .* ends before w does; download its"):
        read_model(path)
