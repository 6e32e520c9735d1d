"""TVM's runtime alone, as slices' runners have it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.lib import PYTHON_PATH

ALONE = """
import json, sys
from tunerd.runner.tvm_runtime import import_runtime

import_runtime()
import tvm
import_runtime()  # again: nothing
has = [bool(tvm.get_global_func(name, allow_missing=True)) for name in sys.argv[1:]]
from tvm_ffi.core import _object_type_key_to_index as index_of
types = [index_of(key) for key in ("ffi.Array", "ffi.Module", "no.Type")]
print(json.dumps([tvm.base._RUNTIME_ONLY, has, [index is not None for index in types]]))
"""


def test_a_runner_has_what_runs_models_and_no_compiler() -> None:
    runs = ("vm.builtin.alloc_storage", "tvm.contrib.sort.sort", "runtime.config_threadpool")
    compiles = ("target.build.llvm", "codegen.codegen_blob")
    ended = subprocess.run(
        [sys.executable, "-c", ALONE, *runs, *compiles],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": PYTHON_PATH},
    )
    assert ended.returncode == 0, ended.stderr
    is_alone, has, types = json.loads(ended.stdout)
    assert is_alone
    assert has == [True] * len(runs) + [False] * len(compiles)
    assert types == [True, True, False]
