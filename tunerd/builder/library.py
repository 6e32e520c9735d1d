"""Compiled code -> a shared library that loads without a compiler.

Host code is linked here, and CUDA kernels are embedded as cubins of the target's architecture.

TVM makes cubins only beside a GPU driver: what calls its compile callback is the CUDA module of
libtvm_runtime_cuda.so. Elsewhere it silently embeds CUDA source, to be compiled when the library is
loaded. That module gives its process a context on the first GPU, 518 MiB on an H200, by the
cudaSetDevice of its destructor: every tuner would be a tenant of the GPU, outside of MPS. So TVM
embeds source everywhere, which is compiled here, each kernel by itself, and put into the packed
bytes (`packed_imports`).
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunerd.builder import nvrtc
from tunerd.builder.packed_imports import with_cubins, with_kernels
from tunerd.candidates.base import DeviceKernel
from tunerd.errors import HostError

if TYPE_CHECKING:
    from tvm.runtime import Executable, Module

_CUDA_MODULE = "ffi.Module.create.cuda"  # without it, TVM takes its stand-in, which holds source
_NEAREST, _VECTORIZABLE = "tirx.nearbyint", "TVectorizable"
_CHANGING = threading.Lock()  # held while TVM's tables are read and changed
NO_LINKER = (
    "Builds need a linker: neither `ld` nor a C compiler is on the PATH. "
    "Install one, for example with: apt-get install binutils"
)


@functools.cache
def load_tvm() -> Any:
    """Import TVM with its CUDA libraries in reach, and take from it what makes a CUDA context.

    Threads may call it at the same time: a cache lets all of them in that come before its value.
    """
    nvrtc.preload()
    import tvm
    import tvm.tirx
    from tvm_ffi.registry import remove_global_func

    with _CHANGING:
        if tvm.get_global_func(_CUDA_MODULE, allow_missing=True) is not None:
            remove_global_func(_CUDA_MODULE)
        _vectorize_roundings()
    return tvm


def _vectorize_roundings() -> None:
    """Let loops that round be vectors. TVM splits one into scalars where an operator is not known.

    What quantizes rounds to the nearest even integer, as no other operator does.
    """
    from tvm.ir import Op, register_op_attr

    if not Op.get(_NEAREST).get_attr(_VECTORIZABLE):
        register_op_attr(_NEAREST, _VECTORIZABLE, True)


def export_library(
    module: Module | Executable,
    path: Path,
    *,
    arch: str | None,
    threads: int = 1,
    kernels: Sequence[DeviceKernel] = (),
    objects: Sequence[bytes] = (),
) -> str:
    """Write compiled code as a shared library that loads without a compiler.

    For one task, or a whole model, whose CUDA kernels are compiled in so many `threads`, and which
    launches `kernels`, too. `objects` are object files with more of its functions, where the module
    has one itself. `arch` is the GPU architecture ("sm_90"), None on CPUs. Returns the
    compiler's name as `Build.compiler` has it.
    """
    compilers = {"llvm" if arch is None else "nvrtc"}
    own = {kernel.symbol: kernel for kernel in kernels}

    def pack(root: Module, _system: bool, prefix: str, workspace: str) -> str:
        from tvm.runtime import _ffi_api

        blob = _ffi_api.ModulePackImportsToTensor(root).numpy().tobytes()
        for device in root._collect_from_import_tree(lambda m: m.kind == "cuda"):
            source = device.inspect_source("cuda")
            cubins = nvrtc.compile_kernels(source, arch or _current_arch(), threads=threads)
            compilers.update(cubin.compiler for cubin in cubins.values())
            blob = with_cubins(blob, source.encode(), {n: c.code for n, c in cubins.items()})
        if own:
            blob = with_kernels(blob, own.values())
        tvm = load_tvm()
        hosts = root._collect_from_import_tree(lambda m: m.kind == "llvm")
        # A model that hands its inputs through has no kernel, and no code of the host's.
        host = hosts[0].get_function("_get_target_string")() if hosts else None
        code = tvm.get_global_func("codegen.codegen_blob")(
            blob, False, host or str(tvm.target.Target("llvm")), prefix
        )
        target_path = f"{workspace}/{prefix}devc.o"
        code.write_to_file(target_path)
        return target_path

    if own and not getattr(module, "mod", module).imports:
        # Code of the host alone: TVM would pack nothing.
        compilers = {kernel.compiler for kernel in kernels}
        with tempfile.TemporaryDirectory(prefix="tunerd-pack-", dir=path.parent) as folder:
            packed = pack(getattr(module, "mod", module), False, "", folder)
            module.export_library(str(path), fcompile=_link, addons=[packed])
        return min(compilers)
    with tempfile.TemporaryDirectory(prefix="tunerd-objects-") as folder:
        more = [Path(folder, f"{number}.o") for number in range(len(objects))]
        for place, content in zip(more, objects, strict=True):
            place.write_bytes(content)
        addons = [str(place) for place in more] or None
        module.export_library(str(path), fcompile=_link, fpack_imports=pack, addons=addons)
    return max(compilers, key=("llvm", "nvrtc", "nvrtc-fallback").index)


@dataclasses.dataclass(frozen=True)
class _Linker:
    program: str
    libraries: tuple[str, ...]


@functools.cache
def linker() -> _Linker | None:
    """Choose the linker itself: a compiler's driver takes 4 to 6 times as long for one object.

    Unlike the driver it is told no libraries. The one that matters is libm, as this process has
    loaded it: code that names no version of `expf` would bind to the oldest in glibc, which checks
    for errors. Measured by scripts/lab/compile/kernels.py.
    """
    if program := shutil.which("ld"):
        with open("/proc/self/maps") as maps:
            loaded = {line.split()[-1] for line in maps if "/" in line}
        libraries = sorted(path for path in loaded if Path(path).name == "libm.so.6")
        return _Linker(program, ("--as-needed", *libraries))
    driver = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    return _Linker(driver, ("-lm",)) if driver else None


def _link(output: str, objects: list[str], **_options: Any) -> None:
    chosen = linker()
    if chosen is None:
        raise HostError(NO_LINKER)
    command = [chosen.program, "-shared", "-o", output, *objects, *chosen.libraries]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == -signal.SIGTERM:  # `ray job stop` sends it to a driver's children, too
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        if os.strerror(errno.ENOSPC) in done.stderr:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), output)
        raise RuntimeError(f"{command[0]} failed: {done.stderr}")


def _current_arch() -> str:
    from tvm.support import nvcc
    from tvm.target import Target

    version = nvcc.get_target_compute_version(Target.current(allow_none=True))
    return f"sm_{version.replace('.', '')}"
