"""TVM's runtime alone, as slices' runners have it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.lib import ROOT

ALONE = """
import json, sys
from tunerd.runner.tvm_runtime import import_runtime

import_runtime()
import tvm
import_runtime()  # again: nothing
has = [bool(tvm.get_global_func(name, allow_missing=True)) for name in sys.argv[1:]]
print(json.dumps([tvm.base._RUNTIME_ONLY, has]))
"""


def test_a_runner_has_what_runs_models_and_no_compiler() -> None:
    runs = ("vm.builtin.alloc_storage", "tvm.contrib.sort.sort", "runtime.config_threadpool")
    compiles = ("target.build.llvm", "codegen.codegen_blob")
    ended = subprocess.run(
        [sys.executable, "-c", ALONE, *runs, *compiles],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == [True, [True] * len(runs) + [False] * len(compiles)]
