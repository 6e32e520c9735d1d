"""Keep PyTorch out of processes that are tunerd's own.

TVM imports PyTorch wherever it is installed, to pass PyTorch's tensors faster (tvm_ffi/__init__.py
and tvm/relax/base_py_module.py). No tensor here is PyTorch's, and the import is most of what a
slice's runner starts with (results, "What a start takes").

Nor does TVM meet an error of its own library on the way, which nobody sees: for the backtrace of
the first one all libraries are read, a fifth of a second. It finds no `disco` there, which it
imports before the library that it is of is loaded, fails, and goes on without
(tvm/runtime/__init__.py); who imports it later gets it. And for the names of operators in scripts
it asks the library for none that is not there, and gives none the name that it has
(tvm/tirx/script/builder/ir.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def keep_torch_from_tvm() -> None:
    """Let TVM, and nobody else in this process, find no PyTorch, and start without an error.

    Call it before TVM is imported.

    Not for processes of users, who may give their tensors to TVM: `tunerd.load` does not call it.
    """
    if not any(isinstance(finder, _WithoutTorch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WithoutTorch())


class _WithoutTorch(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "tvm.runtime.disco" and _importer() == "tvm.runtime":
            raise ModuleNotFoundError("TVM does without it, sooner so", name=fullname)
        if fullname == "torch" and _importer().partition(".")[0] in ("tvm", "tvm_ffi"):
            raise ModuleNotFoundError("TVM does without PyTorch here", name="torch")
        if fullname in _CHANGES:
            return _changed(PathFinder.find_spec(fullname, path, target), _CHANGES[fullname])
        return None


def _importer() -> str:
    """Return the name of the module that is importing, "" where it is none."""
    frame = sys._getframe(2)  # of what called find_spec
    while frame.f_code.co_filename.startswith("<frozen importlib") and frame.f_back:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))


def _changed(spec: ModuleSpec | None, change: Callable[[Any], None]) -> ModuleSpec | None:
    """Have a module changed at the end of its import."""
    if spec is None or spec.loader is None:
        return None
    loader: Any = spec.loader
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        change(module)

    loader.exec_module = exec_module
    return spec


def _ask_no_more_than_it_has(op: Any) -> None:
    """Have `tvm.ir.op` know by itself which operators there are, and which have their name."""
    get, register, known = op.Op.get, op.register_op_attr, set[str]()

    def get_known(op_name: str) -> Any:
        if op_name not in known and len(found := op.Op.list_op_names()) > len(known):
            known.update(map(str, found))
        if op_name not in known:
            raise AttributeError(f"Operator {op_name} is not registered")
        return get(op_name)

    def register_new(op_name: str, attr_key: str, value: Any = None, level: int = 10) -> Any:
        if attr_key == _NAME and op_name in known and get(op_name).get_attr(_NAME) == value:
            return value
        return register(op_name, attr_key, value, level)

    op.Op.get, op.register_op_attr = staticmethod(get_known), register_new


def _list_where_there_are_more(registry: Any) -> None:
    """Have `tvm_ffi.registry` list the names of functions where there are more than before.

    TVM does for each of fifty modules, and takes functions away nowhere.
    """
    names: list[str] = []

    def list_global_func_names() -> list[str]:
        name_at = registry.get_global_func("ffi.FunctionListGlobalNamesFunctor")()
        if (count := name_at(-1)) != len(names):
            names[:] = map(name_at, range(count))
        return list(names)

    registry.list_global_func_names = list_global_func_names


_NAME = "TScriptPrinterName"
_CHANGES: dict[str, Callable[[Any], None]] = {
    "tvm.ir.op": _ask_no_more_than_it_has,
    "tvm_ffi.registry": _list_where_there_are_more,
}
