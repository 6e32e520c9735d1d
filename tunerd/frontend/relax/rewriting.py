"""A module whose `main` is written anew, binding after binding."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tvm.ir import IRModule

TAKES_AN_EPILOGUE = 4  # kOutEWiseFusable of relax/ir/op_attr_types.h: as a product

_open = threading.Lock()  # TVM has one stack of builders for all threads


def written(
    builder: Any,
    old: Any,
    params: Sequence[Any],
    bind: Callable[[Any, Any], None],
    value: Callable[[Any], Any],
) -> IRModule:
    """Return the module of a Relax builder with a `main` in place of another, of its attributes.

    Args:
        params: of the new one.
        bind: takes each variable of the old one and what it is bound to, and emits what it is now.
        value: returns what the old one's result is now.
    """
    with _open, builder.function("main", list(params), attrs=dict(old.attrs or {})):
        with builder.dataflow():
            for block in old.body.blocks:
                for binding in block.bindings:
                    bind(binding.var, binding.value)
            out = builder.emit_output(value(old.body.body))
        builder.emit_func_output(out)
    made: IRModule = builder.get()
    return made
