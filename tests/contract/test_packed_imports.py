"""Machine code among the imports of a library, as TVM reads it where the library is loaded."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lib.artifact_fixtures import CUDA, tiny_convnet
from tunerd.artifacts.compile import compile_artifact
from tunerd.artifacts.manifest import LIBRARY
from tunerd.builder import nvrtc
from tunerd.builder.build import build_problem
from tunerd.builder.packed_imports import with_cubins
from tunerd.frontend.relax.lowering import lower
from tunerd.frontend.tasks import extract_tasks

pytestmark = pytest.mark.skipif(
    build_problem(CUDA) is not None, reason=f"no CUDA build: {build_problem(CUDA)}"
)

# TVM has a loader of CUDA modules beside a GPU's driver only. This one shows what it is given.
LOAD = """
import base64, json, sys
import tvm

create = tvm.get_global_func("runtime.SourceModuleCreate")
tvm.register_global_func(
    "ffi.Module.load_from_bytes.cuda", lambda body: create(base64.b64encode(body).decode(), "cuda")
)

def shown(module):
    body = module.inspect_source() if module.kind == "source" else ""
    return [module.kind, body, [shown(each) for each in module.imports]]

print(json.dumps(shown(tvm.runtime.load_module(sys.argv[1]))))
"""


def cuda_modules(folder: Path) -> list[bytes]:
    """Compile a model for CUDA; return the bytes of the modules that its library loads."""
    model = tiny_convnet()
    lowered = lower(model, CUDA)
    tasks = extract_tasks(lowered, CUDA)
    compile_artifact(lowered, tasks, {}, CUDA, folder, model=model, pct=40)
    command = [sys.executable, "-c", LOAD, folder / LIBRARY]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)

    def bodies(module: list[Any]) -> Iterator[bytes]:
        kind, body, imports = module
        if kind == "source":
            yield base64.b64decode(body)
        for each in imports:
            yield from bodies(each)

    return list(bodies(json.loads(done.stdout)))


def kernels_in(body: bytes) -> list[str]:
    """Return the kernels whose machine code is in a module."""
    return [name.split(b"\0")[0].decode() for name in body.split(b".text.")[1:]]


def test_each_kernel_of_a_model_is_a_module_of_its_own(tmp_path: Path) -> None:
    bodies = cuda_modules(tmp_path / "artifact")
    names = []
    for body in bodies:
        assert body[8:13] == b"cubin"
        assert body[13:21] == (1).to_bytes(8, "little")  # functions
        (name,) = set(kernels_in(body))
        assert body[29:].startswith(name.encode())
        names.append(name)
    assert len(set(names)) == len(names) > 3


def test_kernels_that_share_machine_code_share_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def together(source: str, arch: str, *, threads: int = 1) -> dict[str, nvrtc.Cubin]:
        cubin = nvrtc.compile_cubin(source, arch)
        return dict.fromkeys(nvrtc.kernel_sources(source), cubin)

    monkeypatch.setattr(nvrtc, "compile_kernels", together)
    (body,) = cuda_modules(tmp_path / "artifact")
    functions = int.from_bytes(body[13:21], "little")
    assert functions == len(set(kernels_in(body))) > 3


def test_a_library_without_the_source_is_refused() -> None:
    nothing = (24).to_bytes(8, "little") + (1).to_bytes(8, "little") + bytes(16)
    with pytest.raises(ValueError, match="no CUDA module"):
        with_cubins(nothing, b"source", {})
