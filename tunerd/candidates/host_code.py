"""Host code of a task that calls packed functions: kernels by their symbols, or a library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tunerd.candidates.base import ENTRY
from tunerd.vocabulary import TensorSpec

if TYPE_CHECKING:
    from tvm.ir import IRModule

_L2_128B = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B: cuda.h


def calling(
    specs: Sequence[TensorSpec],
    *calls: tuple[str, Sequence[str]],
    before: Sequence[str] = (),
) -> IRModule:
    """Return a module whose ENTRY takes tensors of these specs, and makes calls in their order.

    A call is the name of a packed function and its arguments as TVMScript; `pointer(i)` is that of
    the i-th tensor. Lines of TVMScript come `before` them.
    """
    import tvm

    params = ", ".join(
        f'a{i}: T.Buffer({tuple(spec.shape)}, "{spec.dtype}")' for i, spec in enumerate(specs)
    )
    lines = [
        *before,
        *(f'T.evaluate(T.call_packed("{name}", {", ".join(passed)}))' for name, passed in calls),
    ]
    made = "\n".join(f"    {line}" for line in lines)
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


def tensor_map(
    name: str,
    data: str,
    *,
    dtype: str,
    shape: tuple[int, int],
    stride_bytes: int,
    box: Sequence[int],
    swizzle: int,
) -> list[str]:
    """Return lines that make a CUtensorMap of a matrix, on the stack, under a name.

    TVM's runtime makes it (runtime.cuTensorMapEncodeTiled): innermost extents come first there, and
    what is outside of the matrix is read as zeros.

    Args:
        data: the text of the pointer to the matrix.
        shape: whose second axis lies together, in elements.
        box: what is copied at once, in the order of `shape`.
        swizzle: a CUtensorMapSwizzle.
    """
    rows, columns = shape
    given = (f"T.int64({columns})", f"T.int64({rows})", f"T.int64({stride_bytes})")
    boxes = (str(box[1]), str(box[0]), "1", "1")
    how = f'descriptor_dtype="{dtype}", rank=2, swizzle={swizzle}, l2_promotion={_L2_128B}'
    return [
        f'{name}: T.let = T.tvm_stack_alloca("tensormap", 1)',
        f"T.evaluate(T.tensormap_encode_tiled({', '.join((name, data, *given, *boxes))}, {how}))",
    ]
