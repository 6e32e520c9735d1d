"""The text of a Triton kernel -> a cubin, on a machine that needs no GPU."""

from __future__ import annotations

import atexit
import functools
import linecache
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tunerd.candidates.triton.code import POINTERS

_ALIGNED = 16  # bytes, to which each tensor of TVM's lies at least


class TooMuchSharedMemory(ValueError):
    """A kernel would need more of it than a block of threads may have."""


@dataclass(frozen=True)
class Compiled:
    cubin: bytes = field(repr=False)
    shared_bytes: int
    threads: int


def compile_kernel(
    text: str,
    name: str,
    dtypes: Sequence[str],
    *,
    arch: str,
    warps: int,
    stages: int,
    max_shared_bytes: int = 227 << 10,
) -> Compiled:
    """Compile a kernel whose parameters are pointers to tensors of these types.

    Raises what Triton raises, and TooMuchSharedMemory.
    """
    triton = load()
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = _function(text, name)
    names = function.arg_names
    signature = {n: POINTERS[d] for n, d in zip(names, dtypes, strict=True)}
    attrs = {(i,): [["tt.divisibility", _ALIGNED]] for i in range(len(names))}
    source = ASTSource(function, signature, constexprs={}, attrs=attrs)
    target = GPUTarget("cuda", int(arch.removeprefix("sm_").rstrip("af")), 32)
    options = {"num_warps": warps, "num_stages": stages}
    built = triton.compile(source, target=target, options=options)
    facts = built.metadata
    if facts.global_scratch_size or facts.profile_scratch_size:
        raise ValueError("the kernel wants scratch memory of Triton's own, which nobody gives it")
    if facts.shared > max_shared_bytes:
        raise TooMuchSharedMemory(
            f"the kernel needs {facts.shared} bytes of shared memory, and a block has "
            f"{max_shared_bytes}"
        )
    return Compiled(built.asm["cubin"], facts.shared, 32 * facts.num_warps)


@functools.cache
def load() -> Any:
    """Import Triton, with a cache of this process alone: kernels are stored as builds."""
    import triton

    folder = tempfile.mkdtemp(prefix="tunerd-triton-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    triton.knobs.cache.dir = folder
    triton.knobs.compilation.disable_line_info = True  # cubins of a fifth of the size
    return triton


def _function(text: str, name: str) -> Any:
    """Return the JIT function of a text, which Triton reads by the inspect module."""
    import triton.language as tl

    file_name = f"<tunerd {name}>"
    lines = text.splitlines(keepends=True)
    linecache.cache[file_name] = (len(text), None, lines, file_name)
    space: dict[str, Any] = {"tl": tl}
    exec(compile(text, file_name, "exec"), space)
    return load().JITFunction(space[name])
