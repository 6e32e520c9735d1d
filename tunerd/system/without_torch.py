"""Keep PyTorch out of processes that are tunerd's own.

TVM imports PyTorch wherever it is installed, to pass PyTorch's tensors faster (tvm_ffi/__init__.py
and tvm/relax/base_py_module.py). No tensor here is PyTorch's, and the import is most of what a
slice's runner starts with (results, "What a start takes").

Nor does tvm/runtime/__init__.py find `disco` there, which it imports before the library of that is
loaded: it fails, and goes on without. To fail takes a fifth of a second, in which all libraries are
read for the backtrace of an error that nobody sees. It is the first error, which alone takes so
long: where TVM finds no CUDA, another one of its import is. Who imports `disco` later gets it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType


def keep_torch_from_tvm() -> None:
    """Let TVM, and nobody else in this process, find no PyTorch, and no `disco` while it starts.

    Call it before TVM is imported.

    Not for processes of users, who may give their tensors to TVM: `tunerd.load` does not call it.
    """
    if not any(isinstance(finder, _WithoutTorch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WithoutTorch())


class _WithoutTorch(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        if fullname == "tvm.runtime.disco" and _importer() == "tvm.runtime":
            raise ModuleNotFoundError("TVM does without it, sooner so", name=fullname)
        if fullname == "torch" and _importer().partition(".")[0] in ("tvm", "tvm_ffi"):
            raise ModuleNotFoundError("TVM does without PyTorch here", name="torch")


def _importer() -> str:
    """Return the name of the module that is importing, "" where it is none."""
    frame = sys._getframe(2)  # of what called find_spec
    while frame.f_code.co_filename.startswith("<frozen importlib") and frame.f_back:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))
