"""PyTorch under the guard of a GPU: a fake MPS daemon, a real guard, a runner on these cores."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.contract.test_pytorch import FAKE_TORCH
from tests.lib import PYTHON_PATH, ROOT
from tests.system.test_mps_slice import (  # noqa: F401  fixtures
    Make,
    fake,
    make,
)
from tunerd.runner.base import TorchModule
from tunerd.slices.mps import mps_slice
from tunerd.slices.mps.guard_client import Lease
from tunerd.vocabulary.outcome import EAGER

NET = """
import os
import torch

assert os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "40"
assert os.environ["CUDA_MPS_PIPE_DIRECTORY"]


class Net(torch.nn.Module):
    def forward(self, x):
        return x
"""


def test_pytorch_runs_in_a_client_of_its_own_that_has_the_share(
    make: Make,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((PYTHON_PATH, str(FAKE_TORCH))))
    command = (sys.executable, str(ROOT / "tests" / "lib" / "mps_runner.py"))
    acquire = functools.partial(Lease.acquire, runner_command=command)
    monkeypatch.setattr(mps_slice.Lease, "acquire", acquire)
    (tmp_path / "net.py").write_text(NET)
    x = {"x": np.zeros((2, 2), np.float32)}
    module = TorchModule(f"{tmp_path}/net.py:Net", "fp16", x, x)
    measured = make()
    first = measured.prove().runner_pid
    said = measured.launch().prepare_pytorch(EAGER, module, anew=True, limit_secs=60.0)
    assert isinstance(said, str), said
    assert measured.prove().runner_pid != first
