"""TVM's lowering of kernels to code, without one pass for those on tensor cores.

StorageRewrite lets a product's sum in fp32 take the shared memory of its operands of 16 bits, and
the pass after it, which makes addresses of typed buffers, refuses that: of 130 candidates of ten
operations 26 were lowered with the pass, and 129 without it. Other kernels keep it: it saves them
shared memory.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tvm.ir import IRModule

_NAME = "tunerd"


@functools.cache
def tir_pipeline() -> str:
    """Return the name by which `tvm.tirx.build` and `relax.build` find it."""
    import tvm
    from tvm.tirx import compilation_pipeline as pipelines

    stock, for_hosts, for_devices = pipelines.get_tir_pipeline("s_tir")

    def lowered(mod: IRModule, context: Any) -> IRModule:
        functions = dict(mod.functions_items())
        tensorized = {v: f for v, f in functions.items() if _is_tensorized(f)}
        if not tensorized:
            return stock(mod)
        others = {v: f for v, f in functions.items() if v not in tensorized}
        config = {**dict(context.config), "tirx.disable_storage_rewrite": True}
        with tvm.transform.PassContext(opt_level=context.opt_level, config=config):
            found = stock(tvm.IRModule(tensorized, attrs=mod.attrs))
        if others:
            found.update(stock(tvm.IRModule(others, attrs=mod.attrs)))
        return found

    whole = tvm.transform.module_pass(lowered, opt_level=0, name=_NAME)
    pipelines.PIPELINE_MAP[_NAME] = lambda: (whole, for_hosts, for_devices)
    return _NAME


def _is_tensorized(function: Any) -> bool:
    """Say whether a kernel has memory of tensor cores."""
    from tvm import s_tir, tirx
    from tvm_ffi import structural_walk

    scopes: set[str] = set()

    def visit(block: Any) -> None:
        scopes.update(str(buffer.scope()) for buffer in block.alloc_buffers)

    if isinstance(function, tirx.PrimFunc):
        structural_walk(function.body, (s_tir.SBlock, visit))
    return any(scope.startswith("wmma.") for scope in scopes)
