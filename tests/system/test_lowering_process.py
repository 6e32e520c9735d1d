"""A model that is lowered in a process of its own."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm_ffi

from tests.lib import PYTHON_PATH
from tests.lib.lowered import LLVM
from tests.lib.models import conv_net, not_imported
from tests.lib.waiting import until
from tunerd.errors import InfrastructureError, InputError, ModelError
from tunerd.frontend.kernels import Extracted, Selection, kernels_of
from tunerd.frontend.model import FixedModel, read_model
from tunerd.frontend.process import Lowerer, Lowering
from tunerd.vocabulary import TargetSpec

FILE = "net.onnx"
# Prints the pid of a process that lowers, and is killed.
KILLED = """
import os, signal, sys
from pathlib import Path
from tunerd.frontend.process import Lowering
from tunerd.frontend.model import read_model
from tunerd.vocabulary import TargetSpec
lowering = Lowering(read_model(Path(sys.argv[1])), TargetSpec("llvm", sys.argv[2]))
print(lowering.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def fixed(tmp_path: Path) -> FixedModel:
    onnx.save(conv_net(), tmp_path / FILE)
    return read_model(tmp_path / FILE)


def test_it_gives_what_lowering_here_gives(fixed: FixedModel) -> None:
    here, lowering = kernels_of(fixed, LLVM), Lowering(fixed, LLVM)
    assert lowering.extracted() == Extracted(here.tasks, here.touched_bytes)
    there = lowering.result()
    assert there.tasks == here.tasks
    assert there.model == here.model
    assert there.model.graph is fixed.graph  # as its author wrote it
    assert there.touched_bytes == here.touched_bytes
    assert tvm_ffi.structural_equal(there.lowered.mod, here.lowered.mod, map_free_vars=True)
    assert there.lowered.weights.keys() == here.lowered.weights.keys()
    for name, weight in here.lowered.weights.items():
        np.testing.assert_array_equal(there.lowered.weights[name], weight)


def test_a_process_that_was_started_before_lowers_one_model(fixed: FixedModel) -> None:
    with Lowerer() as lowerer:
        lowering = Lowering(fixed, LLVM, lowerer=lowerer)
        assert lowering.pid == lowerer.process.pid
        assert lowering.result().tasks
        lowering.close()
    with Lowerer() as unused:
        pass
    assert unused.process.returncode == -signal.SIGKILL


def test_a_selection_is_made_of_its_tasks_and_one_of_another_model_refused(
    fixed: FixedModel,
) -> None:
    tasks = kernels_of(fixed, LLVM).tasks
    lowered = Lowering(fixed, LLVM).result().tasks
    assert Selection((tasks[1].task_id,), 8).among(lowered) == tasks[1:2]
    with pytest.raises(InputError, match="the model has no task 0123456789ab"):
        Selection(("0123456789ab",), 8).among(lowered)


def test_its_errors_and_its_log_come_here(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    onnx.save(not_imported(), tmp_path / FILE)
    caplog.set_level(logging.INFO, "tunerd")
    with pytest.raises(ModelError, match=r"TVM cannot import net: .*MaxUnpool"):
        Lowering(read_model(tmp_path / FILE), LLVM).result()
    (record,) = [r for r in caplog.records if r.name == "tunerd.frontend.relax.importing"]
    assert "import failed" in record.getMessage()
    assert "Traceback" in record.getMessage()


def test_what_kills_it_is_said(fixed: FixedModel) -> None:
    lowering = Lowering(fixed, LLVM)
    os.kill(lowering.pid, signal.SIGKILL)
    for wanted in (lowering.extracted, lowering.result):
        with pytest.raises(InfrastructureError, match="SIGKILL ended the process that lowers"):
            wanted()
    assert isinstance(lowering.problem, InfrastructureError)


def test_what_is_sent_to_a_whole_job_does_not_end_it(fixed: FixedModel) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    lowering = Lowering(fixed, LLVM)
    for number in (signal.SIGINT, signal.SIGTERM):  # also before it has begun
        os.kill(lowering.pid, number)
    assert lowering.result().tasks
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_a_bug_is_told_with_where_it_is(fixed: FixedModel) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)Traceback.*no-such-target"):
        Lowering(fixed, TargetSpec("llvm", '{"kind": "no-such-target"}')).result()


def test_closing_ends_it_and_may_be_repeated(fixed: FixedModel) -> None:
    lowering = Lowering(fixed, LLVM)
    for _ in range(2):
        lowering.close()
    assert not Path(f"/proc/{lowering.pid}").exists()


def test_it_does_not_outlive_its_parent(fixed: FixedModel, tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path / FILE), LLVM.json]
    ended = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": PYTHON_PATH}
    )
    assert ended.returncode == -signal.SIGKILL
    pid = int(ended.stdout)
    until(lambda: not Path(f"/proc/{pid}").exists())
