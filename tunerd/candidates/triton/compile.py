"""The text of a Triton kernel -> a cubin, on a machine that needs no GPU."""

from __future__ import annotations

import atexit
import functools
import linecache
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tunerd.candidates.triton.code import POINTERS

CACHE = "TUNERD_TRITON_CACHE"  # of the environment: a folder that processes share
_ALIGNED = 16  # bytes, to which each tensor of TVM's lies at least
_MAX_SHARED_BYTES = 227 << 10  # of a block of threads


# A tile's place among those of a loop, in Triton's representation for GPUs, and who reads it.
_TILE = re.compile(r"(%\S+) = ttg\.memdesc_index (%\S+)\[")
_MULTIPLIED = re.compile(r"ttng\.warp_group_dot (%\S+)(?: \* |, )(%[^\s,]+).*isAsync = true")
_READ = re.compile(r"ttg\.local_load (%[^\s,]+)")


class TooMuchSharedMemory(ValueError):
    """A kernel would need more of it than a block of threads may have."""


class UnsafePipeline(ValueError):
    """Triton would overwrite a tile while tensor cores may still read it."""


@dataclass(frozen=True)
class Compiled:
    cubin: bytes = field(repr=False)
    shared_bytes: int
    threads: int


def compile_kernel(
    text: str, name: str, dtypes: Sequence[str], *, arch: str, warps: int, stages: int
) -> Compiled:
    """Compile a kernel whose parameters are pointers to tensors of these types.

    Raises what Triton raises, TooMuchSharedMemory and UnsafePipeline.
    """
    types = [POINTERS[d] for d in dtypes]
    built = build(text, name, types, arch=arch, warps=warps, stages=stages)
    return Compiled(built.asm["cubin"], built.metadata.shared, 32 * built.metadata.num_warps)


def build(text: str, name: str, types: Sequence[str], *, arch: str, warps: int, stages: int) -> Any:
    """Return what Triton makes of a kernel, with each step's text; raises as `compile_kernel`.

    types: Triton's, of each parameter.
    """
    triton = load()
    triton.knobs.cache.dir = os.environ.get(CACHE) or _own_cache()
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = _function(text, name)
    signature = dict(zip(function.arg_names, types, strict=True))
    aligned = [i for i, t in enumerate(types) if t.startswith("*")]
    attrs = {(i,): [["tt.divisibility", _ALIGNED]] for i in aligned}
    source = ASTSource(function, signature, constexprs={}, attrs=attrs)
    target = GPUTarget("cuda", int(arch.removeprefix("sm_").rstrip("af")), 32)
    options = {"num_warps": warps, "num_stages": stages}
    built = triton.compile(source, target=target, options=options)
    facts = built.metadata
    if facts.global_scratch_size or facts.profile_scratch_size:
        raise ValueError("the kernel wants scratch memory of Triton's own, which nobody gives it")
    if facts.shared > _MAX_SHARED_BYTES:
        raise TooMuchSharedMemory(
            f"the kernel needs {facts.shared} bytes of shared memory, and a block has "
            f"{_MAX_SHARED_BYTES}"
        )
    if shared := _read_twice(built.asm["ttgir"]):
        raise UnsafePipeline(
            f"asynchronous products and other instructions read the tiles {', '.join(shared)},"
            " which Triton overwrites one step too early (triton-lang/triton, issue 6691)"
        )
    return built


def _read_twice(ttgir: str) -> list[str]:
    """Return the shared memory that asynchronous products read, and something else in their loop.

    Triton 3.6 makes it one tile too small then. A test would not find that: a kernel is wrong only
    where a copy is faster than a product.
    """
    tile_of = dict(_TILE.findall(ttgir))
    multiplied = {tile_of.get(n) for pair in _MULTIPLIED.findall(ttgir) for n in pair}
    read = {tile_of.get(n) for n in _READ.findall(ttgir)}
    return sorted(n for n in multiplied & read if n is not None)


@functools.cache
def load() -> Any:
    """Import Triton. Its cache is of this process alone, or of those that share a folder for it.

    A run's do: what a tuner has compiled costs the process that compiles the model some
    milliseconds, where compiling it again costs half a second, much of it with the GIL.
    """
    import triton

    triton.knobs.compilation.disable_line_info = True  # cubins of a fifth of the size
    return triton


@functools.cache
def _own_cache() -> str:
    folder = tempfile.mkdtemp(prefix="tunerd-triton-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _function(text: str, name: str) -> Any:
    """Return the JIT function of a text, which Triton reads by the inspect module."""
    import triton.language as tl

    file_name = f"<tunerd {name}>"
    lines = text.splitlines(keepends=True)
    linecache.cache[file_name] = (len(text), None, lines, file_name)
    space: dict[str, Any] = {"tl": tl}
    exec(compile(text, file_name, "exec"), space)
    return load().JITFunction(space[name])
