"""TVM's runtime without its compiler, for processes that only run what others have compiled."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from tunerd.builder import nvrtc

_BESIDE = ("tvm_runtime_cuda", "tvm_runtime_extra")  # of GPUs; of sorting and the like


def import_runtime() -> None:
    """Import TVM with nothing but its runtime; where it is imported already, do nothing.

    It takes three fifths of the memory and core time of the whole (results, "What a start takes").
    What is missing can compile and read scripts, not run anything.
    """
    if "tvm" in sys.modules:
        return
    nvrtc.preload()
    os.environ["TVM_USE_RUNTIME_LIB"] = "1"  # tvm/base.py
    _look_types_up()
    from tvm.base import _LOADED_LIBS
    from tvm_ffi.libinfo import load_lib_ctypes

    # As TVM does by itself only where its compiler is there (tvm/backend).
    folder = Path(_LOADED_LIBS["tvm_runtime"]._name).resolve().parent
    for name in _BESIDE:
        with contextlib.suppress(OSError, RuntimeError):  # without a driver there is no CUDA
            load_lib_ctypes("tvm", name, "RTLD_LOCAL", extra_lib_paths=[folder])


def _look_types_up() -> None:
    """Have TVM find no type that is not there by itself, not by an error of its library.

    It has classes for all types, of which its runtime has a third; and for the backtrace of the
    first error all libraries are read, a fifth of a second.
    """
    from tvm_ffi import core
    from tvm_ffi.registry import get_registered_type_keys

    index_of, known = core._object_type_key_to_index, set[str]()

    def index_of_known(type_key: str) -> int | None:
        if type_key not in known and len(found := get_registered_type_keys()) > len(known):
            known.update(map(str, found))
        return index_of(type_key) if type_key in known else None

    core._object_type_key_to_index = index_of_known
