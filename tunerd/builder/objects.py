"""A model's kernels for CPUs as object files: each compiled by itself, in threads, and once.

Compiled in one module, as TVM does it, a model's kernels take one core. And models that are
compiled together, the tuned one and the one with default schedules, have many in common.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from tvm.target import Target
    from tvm.tirx import PrimFunc

OPT_LEVEL = 3


class Objects:
    """Compiles functions for CPUs and keeps what it compiled, until it is closed. Thread-safe.

    threads: how many functions are compiled at once; as many as the process has cores, if not
    given.
    """

    def __init__(self, threads: int = 0) -> None:
        self._pool = ThreadPoolExecutor(threads or len(os.sched_getaffinity(0)))
        self._lock = threading.Lock()  # held while what follows is looked at
        self._known: dict[tuple[int, str], list[tuple[PrimFunc, Future[bytes]]]] = defaultdict(list)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def of(self, functions: Iterable[PrimFunc], target: Target) -> list[Future[bytes]]:
        """Return the object files of functions, whose symbols are their names, once they are there.

        A future raises what TVM raises for what it cannot compile.
        """
        return [self._one(function, target) for function in functions]

    def _one(self, function: PrimFunc, target: Target) -> Future[bytes]:
        import tvm_ffi

        key = tvm_ffi.structural_hash(function), str(target)
        with self._lock:
            for known, found in self._known[key]:
                if tvm_ffi.structural_equal(known, function):
                    return found
            found = self._pool.submit(_compiled, function, target)
            self._known[key].append((function, found))
        return found


def _compiled(function: PrimFunc, target: Target) -> bytes:
    import tvm

    name = str(function.attrs["global_symbol"])
    with target, tvm.transform.PassContext(opt_level=OPT_LEVEL):
        built: Any = tvm.tirx.build(tvm.IRModule({name: function}), target=target)
    with tempfile.TemporaryDirectory(prefix="tunerd-object-") as folder:
        path = Path(folder, "kernel.o")
        built.write_to_file(str(path))
        return path.read_bytes()
