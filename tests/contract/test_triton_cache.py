"""What one process has compiled by Triton, another takes from the folder that they share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tunerd.candidates.triton.compile import CACHE, compile_kernel

TEXT = """def k(p0, p1):
    at = tl.program_id(0) * 64 + tl.arange(0, 64)
    tl.store(p1 + at, tl.load(p0 + at) * 2.0)
"""
ELSEWHERE = """
import sys
from tunerd.candidates.triton.compile import compile_kernel
compile_kernel(sys.argv[1], "k", ["float32"] * 2, arch="sm_90", warps=1, stages=1)
"""


def files(folder: Path) -> dict[str, int]:
    """Return every file, and when it was written."""
    return {
        str(path.relative_to(folder)): path.stat().st_mtime_ns
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_kernel_that_another_process_compiled_is_not_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path))
    subprocess.run([sys.executable, "-c", ELSEWHERE, TEXT], check=True)
    theirs = files(tmp_path)
    assert any(name.endswith(".cubin") for name in theirs)
    shared = compile_kernel(TEXT, "k", ["float32"] * 2, arch="sm_90", warps=1, stages=1)
    assert files(tmp_path) == theirs
    monkeypatch.delenv(CACHE)
    own = compile_kernel(TEXT, "k", ["float32"] * 2, arch="sm_90", warps=1, stages=1)
    assert own == shared
    assert files(tmp_path) == theirs
