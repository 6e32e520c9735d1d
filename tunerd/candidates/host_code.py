"""Host code of a task that calls one packed function: a kernel by its symbol, or a library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tunerd.candidates.base import ENTRY
from tunerd.vocabulary import TensorSpec

if TYPE_CHECKING:
    from tvm.ir import IRModule


def calling(name: str, specs: Sequence[TensorSpec], passed: Sequence[str]) -> IRModule:
    """Return a module whose ENTRY takes tensors of these specs, and calls a packed function.

    `passed` are the function's arguments as TVMScript; `pointer(i)` is that of the i-th tensor.
    """
    import tvm

    params = ", ".join(
        f'a{i}: T.Buffer({tuple(spec.shape)}, "{spec.dtype}")' for i, spec in enumerate(specs)
    )
    text = f"""
# from tvm.script import tirx as T
@T.prim_func
def {ENTRY}({params}):
    T.func_attr({{"tirx.noalias": True, "tirx.is_scheduled": True, "global_symbol": "{ENTRY}"}})
    T.evaluate(T.call_packed("{name}", {", ".join(passed)}))
"""
    return tvm.IRModule({ENTRY: tvm.script.from_source(text)})


def pointer(number: int) -> str:
    return f"a{number}.data"
