"""Builds for llvm: numbers of the loaded library, failures, threads."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.lib import ROOT
from tests.lib.build_fixtures import (
    built,
    candidate_of,
    conv_task,
    default_of,
    matmul_task,
    new_schedule,
    random_inputs,
    tiled_matmul,
)
from tunerd.builder import build, library
from tunerd.candidates.base import LoweredKernel
from tunerd.errors import HostError
from tunerd.vocabulary import METASCHEDULE, Build, Candidate, Failure, Kind, Stage, TensorSpec

# Runs where a slice would: a fresh process that has neither a compiler nor tunerd.
LOAD_AND_RUN = """
import sys
import numpy as np
import tvm
library, inputs, output = sys.argv[1:]
args = [tvm.runtime.tensor(array) for array in np.load(inputs).values()]
tvm.runtime.load_module(library)["main"](*args)
np.save(output, args[-1].numpy())
"""

LOAD_AT_ONCE = """
import sys
import threading
import tvm.tirx  # so that all come at once to what follows
from tunerd.builder.library import load_tvm
sys.setswitchinterval(1e-6)
together, failed = threading.Barrier(16), []

def load():
    together.wait()
    try:
        load_tvm()
    except Exception as error:
        failed.append(error)

threads = [threading.Thread(target=load) for _ in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
sys.exit(f"{failed[0]}" if failed else 0)
"""


def run_elsewhere(made: Build, inputs: list[np.ndarray], folder: Path) -> np.ndarray:
    library = folder / "kernel.so"
    library.write_bytes(made.library)
    output = np.zeros(made.args[-1].shape, made.args[-1].dtype)
    np.savez(folder / "inputs.npz", *inputs, output)
    environment = {**os.environ, "PATH": "/nowhere", "PYTHONPATH": ""}
    command = [sys.executable, "-c", LOAD_AND_RUN, library, "inputs.npz", "output.npy"]
    subprocess.run(command, check=True, cwd=folder, env=environment, timeout=120)
    return np.load(folder / "output.npy")


def numpy_conv(data: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    padded = np.pad(data, ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
    return np.maximum(np.einsum("nhwcyx,yxcf->nhwf", windows, weight) + bias, 0)


def test_the_default_of_a_convolution_runs_right_without_a_compiler(tmp_path: Path) -> None:
    task = conv_task()
    made = built(build.build_candidate(task, default_of(task)))
    inputs = random_inputs(task)
    output = run_elsewhere(made, list(inputs.values()), tmp_path)
    np.testing.assert_allclose(output, numpy_conv(**inputs), rtol=1e-4, atol=1e-4)
    assert made.compiler == "llvm"
    assert made.args == task.args
    assert made.build_secs > 0
    assert made.library_sha256 == hashlib.sha256(made.library).hexdigest()


def test_a_candidate_is_built_as_its_trace_says(tmp_path: Path) -> None:
    task = matmul_task(after="exp")  # exp: a function of libm
    made = built(build.build_candidate(task, candidate_of(task, tiled_matmul(task))))
    plain = built(build.build_candidate(task, default_of(task)))
    inputs = {name: 0.1 * array for name, array in random_inputs(task).items()}
    output = run_elsewhere(made, list(inputs.values()), tmp_path)
    expected = np.exp(inputs["left"] @ inputs["right"])
    np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5)
    assert made.library != plain.library


def test_a_scheduled_module_builds_to_what_its_trace_builds_to() -> None:
    task = matmul_task()
    schedule = tiled_matmul(task)
    candidate = candidate_of(task, schedule)
    from_trace = built(build.build_candidate(task, candidate))
    from_module = built(build.build_candidate(task, candidate, lowered=LoweredKernel(schedule.mod)))
    assert from_module.library == from_trace.library


def test_a_layout_rewrite_changes_the_weights_that_the_library_takes(tmp_path: Path) -> None:
    task = matmul_task(weights=(1,))
    schedule = new_schedule(task)
    i, j, k = schedule.get_loops(schedule.get_sblock("T_matmul_NN"))
    j_outer, j_inner = schedule.split(j, [None, 16])
    schedule.reorder(i, j_outer, k, j_inner)
    from tvm.s_tir.meta_schedule.postproc import RewriteLayout

    schedule.enter_postproc()
    assert RewriteLayout().apply(schedule)
    made = built(build.build_candidate(task, candidate_of(task, schedule)))
    assert made.args[1] == TensorSpec("right", (3, 64, 16), "float32")
    inputs = random_inputs(task)
    packed = np.ascontiguousarray(inputs["right"].reshape(64, 3, 16).transpose(1, 0, 2))
    output = run_elsewhere(made, [inputs["left"], packed], tmp_path)
    np.testing.assert_allclose(output, inputs["left"] @ inputs["right"], rtol=1e-4, atol=1e-4)


def test_a_trace_that_does_not_apply_is_a_failure_of_the_build() -> None:
    task = matmul_task()
    trace = candidate_of(task, tiled_matmul(task)).recipe.replace("T_matmul_NN", "nothing")
    failure = build.build_candidate(task, Candidate(task.task_id, "1" * 16, METASCHEDULE, trace))
    assert isinstance(failure, Failure)
    assert (failure.stage, failure.kind) == (Stage.BUILD, Kind.COMPILE)
    assert "Cannot find a block" in failure.message


def test_the_message_of_a_failure_is_short() -> None:
    task = matmul_task()
    failure = build.build_candidate(
        task, Candidate(task.task_id, "3" * 16, METASCHEDULE, json.dumps([["no" * 5000], []]))
    )
    assert isinstance(failure, Failure)
    assert len(failure.message) <= 2000


def test_a_trace_that_is_no_trace_is_a_failure_of_the_build() -> None:
    task = matmul_task()
    failure = build.build_candidate(task, Candidate(task.task_id, "2" * 16, METASCHEDULE, "[1]"))
    assert isinstance(failure, Failure)
    assert (failure.stage, failure.kind) == (Stage.BUILD, Kind.COMPILE)


def test_a_build_over_its_time_is_a_failure_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    task = conv_task()
    failure = build.build_candidate(task, default_of(task), timeout_secs=0)
    assert isinstance(failure, Failure)
    assert (failure.stage, failure.kind) == (Stage.BUILD, Kind.TIMEOUT)
    assert sum("build abandoned" in message for message in caplog.messages) == 1


def test_threads_build_what_one_thread_builds() -> None:
    tasks = [conv_task(), matmul_task(), matmul_task(after="exp"), matmul_task(after="tanh")]
    alone = [built(build.build_candidate(t, default_of(t))).library_sha256 for t in tasks]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda t: build.build_candidate(t, default_of(t)), tasks * 3))
    assert [built(result).library_sha256 for result in together] == alone * 3


def test_a_linker_that_is_asked_to_end_links_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What stops a job sends SIGTERM to all of a driver's children, and the driver drains.
    linker = tmp_path / "ld"
    linker.write_text(
        '#!/bin/sh\nif [ ! -e "$0.asked" ]; then : > "$0.asked"; kill -TERM $$; fi\n: > "$3"\n'
    )
    linker.chmod(0o700)
    monkeypatch.setattr(library, "linker", lambda: library._Linker(str(linker), ()))
    library._link(str(tmp_path / "library.so"), [])
    assert (tmp_path / "library.so").exists()


def test_without_a_linker_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    task = matmul_task()
    monkeypatch.setenv("PATH", "/nowhere")
    library.linker.cache_clear()
    try:
        with pytest.raises(HostError, match="apt-get install binutils"):
            build.build_candidate(task, default_of(task))
    finally:
        library.linker.cache_clear()


def test_the_slow_import_of_tensor_intrinsics_is_left_out() -> None:
    script = (
        "import sys\n"
        "from tests.lib.build_fixtures import *\n"
        "task = conv_task(); built(build.build_candidate(task, default_of(task)))\n"
        "assert 'tvm.s_tir.tensor_intrin' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120, cwd=ROOT)


def test_threads_may_load_tvm_at_the_same_time() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LOAD_AT_ONCE], cwd=ROOT, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
