"""Host code of a task that calls packed functions: kernels by their symbols, or a library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tunerd.candidates.base import ENTRY
from tunerd.vocabulary import TensorSpec

if TYPE_CHECKING:
    from tvm.ir import IRModule


def calling(specs: Sequence[TensorSpec], *calls: tuple[str, Sequence[str]]) -> IRModule:
    """Return a module whose ENTRY takes tensors of these specs, and makes calls in their order.

    A call is the name of a packed function and its arguments as TVMScript; `pointer(i)` is that of
    the i-th tensor.
    """
    import tvm

    params = ", ".join(
        f'a{i}: T.Buffer({tuple(spec.shape)}, "{spec.dtype}")' for i, spec in enumerate(specs)
    )
    made = "\n".join(
        f'    T.evaluate(T.call_packed("{name}", {", ".join(passed)}))' for name, passed in calls
    )
    text = f"""
# from tvm.script import tirx as T
@T.prim_func
def {ENTRY}({params}):
    T.func_attr({{"tirx.noalias": True, "tirx.is_scheduled": True, "global_symbol": "{ENTRY}"}})
{made}
"""
    return tvm.IRModule({ENTRY: tvm.script.from_source(text)})


def pointer(number: int) -> str:
    return f"a{number}.data"
