"""The text of a Triton kernel -> a cubin, on a machine that needs no GPU.

The processes of a run share a folder of cubins: what a tuner has compiled costs the process that
compiles the model nothing, where compiling it again costs half a second, much of it with the GIL.
Triton's own cache has seven more files for each kernel, and is emptied after each.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import inspect
import json
import linecache
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tunerd.candidates.triton.code import POINTERS
from tunerd.candidates.triton.launch import Boxes, TensorMap
from tunerd.system.files import write_whole

CUBINS = "TUNERD_CUBINS"  # of the environment: the folder that a run's processes share
_ALIGNED = 16  # bytes, to which each tensor of TVM's lies at least
_MAX_SHARED_BYTES = 227 << 10  # of a block of threads

# Threads compile at once, but no kernel twice: the first to end would take the folder of Triton's
# cache away in which the other one still writes. A lock is of all whose digests begin alike.
_COMPILING = tuple(threading.Lock() for _ in range(256))

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
    maps: tuple[Boxes, ...] = ()

    def write(self, path: Path) -> None:
        """Write a file for `read`, whole or not at all."""
        facts = {"shared_bytes": self.shared_bytes, "threads": self.threads, "maps": self.maps}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(facts).encode() + b"\n" + self.cubin, sync=False, shared=True)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return what `write` wrote. Raises OSError where there is no such file."""
        told, _, cubin = path.read_bytes().partition(b"\n")
        facts = json.loads(told)
        maps = tuple(Boxes(tuple(block), swizzle) for block, swizzle in facts.pop("maps", ()))
        return cls(cubin, **facts, maps=maps)


def compile_kernel(
    text: str,
    name: str,
    dtypes: Sequence[str],
    *,
    arch: str,
    warps: int,
    stages: int,
    maps: Sequence[TensorMap] = (),
) -> Compiled:
    """Compile a kernel whose parameters are pointers to tensors of these types, from any thread.

    maps: that are parameters after them.
    Raises what Triton raises, TooMuchSharedMemory and UnsafePipeline.
    """
    types = [POINTERS[d] for d in dtypes] + [_described(m) for m in maps]
    said = json.dumps([load().__version__, text, name, types, arch, warps, stages])
    digest = hashlib.sha256(said.encode())
    path = _shared(digest.hexdigest())
    with _COMPILING[digest.digest()[0]]:
        if path is not None:
            with contextlib.suppress(OSError):
                return Compiled.read(path)
        built = build(text, name, types, arch=arch, warps=warps, stages=stages)
        facts = built.metadata
        found = Compiled(
            built.asm["cubin"],
            facts.shared,
            32 * facts.num_warps,
            tuple(Boxes(tuple(m["block_size"]), m["swizzle"]) for m in facts.tensordesc_meta or ()),
        )
        if path is not None:
            with contextlib.suppress(OSError):  # whoever wants it compiles it again
                found.write(path)
        return found


def _described(made: TensorMap) -> str:
    """Return Triton's type of a tensor map."""
    return f"tensordesc<{POINTERS[made.dtype].removeprefix('*')}[{made.block[0]}, {made.block[1]}]>"


def _shared(name: str) -> Path | None:
    folder = os.environ.get(CUBINS)
    return Path(folder, name) if folder else None


def build(text: str, name: str, types: Sequence[str], *, arch: str, warps: int, stages: int) -> Any:
    """Return what Triton makes of a kernel, with each step's text; raises as `compile_kernel`.

    types: Triton's, of each parameter.
    """
    triton = load()
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.cache import get_cache_manager

    function = _function(text, name)
    signature = dict(zip(function.arg_names, types, strict=True))
    aligned = [i for i, t in enumerate(types) if t.startswith("*")]
    attrs = {(i,): [["tt.divisibility", _ALIGNED]] for i in aligned}
    source = ASTSource(function, signature, constexprs={}, attrs=attrs)
    target = GPUTarget("cuda", int(arch.removeprefix("sm_").rstrip("af")), 32)
    options = {"num_warps": warps, "num_stages": stages}
    built = triton.compile(source, target=target, options=options)
    shutil.rmtree(get_cache_manager(built.hash).cache_dir, ignore_errors=True)
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
    """Import Triton, with a cache of this process alone."""
    import triton

    folder = tempfile.mkdtemp(prefix="tunerd-triton-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    triton.knobs.cache.dir = folder
    triton.knobs.compilation.disable_line_info = True  # cubins of a fifth of the size
    return triton


def _function(text: str, name: str) -> Any:
    """Return the JIT function of a text, and of what it calls, by way of the inspect module."""
    import triton.language as tl

    file_name = f"<tunerd {name}>"
    lines = text.splitlines(keepends=True)
    linecache.cache[file_name] = (len(text), None, lines, file_name)
    space: dict[str, Any] = {"tl": tl, "__name__": __name__}
    exec(compile(text, file_name, "exec"), space)
    own = {n: load().JITFunction(each) for n, each in space.items() if inspect.isfunction(each)}
    space.update(own)
    return own[name]
