"""The threads and cores that a model on CPUs takes, and leaves to who calls it."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from tests.lib.artifact_fixtures import CORES, tiny_artifact
from tests.lib.build_fixtures import built, matmul_task
from tests.lib.fresh_python import run_python
from tunerd.builder.build import build_candidate
from tunerd.vocabulary import default_candidate

pytestmark = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="needs two cores to leave one alone"
)
WHERE = pytest.mark.parametrize("where", ["the thread that loaded it", "another thread"])


def called(where: str, *, loads: list[Path], before: str, body: str) -> list[str]:
    """Return what is printed by a process that loads models and has `body` run in a thread."""
    done = run_python(
        f"""
import os, threading
import numpy as np
import tvm
import tunerd
{before}
models = [tunerd.load(path) for path in {[str(path) for path in loads]!r}]
def ask(model):
    model(*(np.ones(spec.shape, spec.dtype) for spec in model.inputs))
def body():
    {body}
if {where!r} == "another thread":
    other = threading.Thread(target=body)
    other.start()
    other.join()
else:
    body()
print(os.sched_getaffinity(0))
"""
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_process_bound_to_a_core_stays_there(tmp_path: Path) -> None:
    tiny_artifact(tmp_path / "a")
    core = max(os.sched_getaffinity(0))
    done = run_python(
        f"""
import os
import numpy as np
import tunerd
model = tunerd.load({str(tmp_path / "a")!r})
model(*(np.ones(spec.shape, spec.dtype) for spec in model.inputs))
threads = (os.sched_getaffinity(int(t)) for t in os.listdir("/proc/self/task"))
print(sorted({{c for cores in threads for c in cores}}))
""",
        cores={core},
    )
    assert done.stdout.strip() == f"[{core}]", done.stderr


@WHERE
def test_a_call_leaves_the_thread_its_cores(tmp_path: Path, where: str) -> None:
    """What it starts later, threads and processes, has them too."""
    tiny_artifact(tmp_path / "a", proof=dataclasses.replace(CORES, sm_count=1))
    printed = called(
        where,
        loads=[tmp_path / "a"],
        before="print(os.sched_getaffinity(0))",
        body="ask(models[0]); print(os.sched_getaffinity(0))",
    )
    assert len(printed) == 3
    assert len(set(printed)) == 1


@WHERE
def test_each_model_runs_on_as_many_threads_as_it_was_tuned_for(tmp_path: Path, where: str) -> None:
    for count in (1, 2):
        proof = dataclasses.replace(CORES, sm_count=count)
        tiny_artifact(tmp_path / str(count), proof=proof)
    threads = 'print(tvm.get_global_func("runtime.NumThreads")())'
    printed = called(
        where,
        loads=[tmp_path / "1", tmp_path / "2"],
        before="",
        body=f"for model in (*models, models[0]): ask(model); {threads}",
    )
    assert printed[:3] == ["1", "2", "1"]


def test_a_kernel_that_is_measured_has_all_cores_after_a_model_of_one(tmp_path: Path) -> None:
    """And the model its one after the kernel, in a runner that measures both."""
    tiny_artifact(tmp_path / "a", proof=dataclasses.replace(CORES, sm_count=1))
    build = built(build_candidate(task := matmul_task(), default_candidate(task)))
    (tmp_path / "kernel.so").write_bytes(build.library)
    shapes = [(spec.shape, spec.dtype) for spec in build.args]
    printed = called(
        "the thread that loaded it",
        loads=[tmp_path / "a"],
        before=f"""
from pathlib import Path
from tunerd.runner.sampling import CpuDevice
device = CpuDevice(sorted(os.sched_getaffinity(0))[:2])
kernel = device.loaded(Path({str(tmp_path / "kernel.so")!r}))
def measure(): kernel([np.ones(shape, dtype) for shape, dtype in {shapes!r}])
def say(): print(tvm.get_global_func("runtime.NumThreads")())
""",
        body="ask(models[0]); say(); measure(); say(); ask(models[0]); say(); measure(); say()",
    )
    assert printed[:4] == ["1", "2", "1", "2"]
