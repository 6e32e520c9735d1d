"""PyTorch itself beside a tuned model, at a share of a real GPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

import tunerd
from tests.lib.artifact_fixtures import model_of
from tunerd.frontend.onnx.onnx_graph import OnnxGraph
from tunerd.vocabulary.outcome import PYTORCH, TUNED_BESIDE_PYTORCH

pytestmark = pytest.mark.gpu

NET = """
import numpy as np
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.from_numpy(np.load("weight.npy")))

    def forward(self, x):
        return torch.relu(nn.functional.conv2d(x, self.weight, padding=1))
"""


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_each_way_is_one_cuda_graph(tmp_path: Path, precision: str) -> None:
    weight = np.random.default_rng(0).normal(size=(32, 16, 3, 3)).astype(np.float32)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["v"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["v"], ["y"]),
    ]
    shape = (1, 16, 32, 32)
    model = model_of(nodes, {"w": weight}, inputs={"x": shape}, outputs={"y": (1, 32, 32, 32)})
    assert isinstance(model.graph, OnnxGraph)
    onnx.save(model.graph.proto, tmp_path / "net.onnx")
    np.save(tmp_path / "weight.npy", weight)
    (tmp_path / "net.py").write_text(NET)
    run = tunerd.tune(
        tmp_path / "net.onnx",
        gpu_pct=40,
        trials=4,
        out=tmp_path / "run",
        precision=precision,
        against=f"{tmp_path}/net.py:Net",
    )
    assert {latency.name for latency in run.latencies} > {*PYTORCH, TUNED_BESIDE_PYTORCH}
    assert all("one CUDA graph" in remark for remark in run.outcome.remarks)
