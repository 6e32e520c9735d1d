"""What one process has compiled by Triton, another takes from the folder that they share."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tunerd.candidates.triton import compile
from tunerd.candidates.triton.compile import CUBINS, Compiled, compile_kernel

TEXT = """def k(p0, p1):
    at = tl.program_id(0) * 64 + tl.arange(0, 64)
    tl.store(p1 + at, tl.load(p0 + at) * 2.0)
"""
ELSEWHERE = """
import sys
from tunerd.candidates.triton.compile import compile_kernel
compile_kernel(sys.argv[1], "k", ["float32"] * 2, arch="sm_90", warps=1, stages=1)
"""


def compiled() -> Compiled:
    return compile_kernel(TEXT, "k", ["float32"] * 2, arch="sm_90", warps=1, stages=1)


def test_a_kernel_that_another_process_compiled_is_not_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cubins"
    monkeypatch.setenv(CUBINS, str(folder))
    subprocess.run([sys.executable, "-c", ELSEWHERE, TEXT], check=True)
    (theirs,) = folder.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(compile, "build", None)
        shared = compiled()
    monkeypatch.delenv(CUBINS)
    assert compiled() == shared
    assert list(folder.iterdir()) == [theirs]


def test_a_cubin_is_of_its_text_and_options_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CUBINS, str(tmp_path))
    one = compiled()
    more = compile_kernel(TEXT, "k", ["float32"] * 2, arch="sm_90", warps=2, stages=1)
    assert (one.threads, more.threads) == (32, 64)
    assert len(list(tmp_path.iterdir())) == 2


def test_nothing_of_triton_s_own_cache_stays() -> None:
    compiled()
    assert not list(Path(compile.load().knobs.cache.dir).iterdir())


def test_threads_that_want_the_same_kernel_at_once_all_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(CUBINS, raising=False)
    with ThreadPoolExecutor(8) as threads:
        found = [threads.submit(compiled) for _ in range(24)]
        assert {each.result() for each in found} == {compiled()}
