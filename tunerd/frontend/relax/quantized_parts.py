"""Concatenations of what is quantized behind them, as concatenations of bytes.

Each part is quantized where it is computed, instead of all of them in a kernel that reads floats.
What joins bytes is left out then, like any concatenation (`joins`). A pool reads values that are
dequantized: before one, they are that in each part, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import relax
from tvm.ir import IRModule
from tvm.relax.expr_functor import PyExprMutator, mutator

from tunerd.frontend.relax.movement import OF_TWO, Graph, op_name, shape_of

_BYTES = ("int8", "uint8")
_POOLS = ("relax.nn.avg_pool2d", "relax.nn.max_pool2d")  # they read what is dequantized


@dataclass(frozen=True)
class _Quantized:
    """A concatenation, and what is computed of each of its values behind it."""

    join: Any
    steps: tuple[Any, ...]


def quantize_parts(mod: IRModule) -> IRModule:
    """Return `mod` with concatenations in `main` behind what quantizes them.

    Those of which anything else is read stay, and those with a part that has other readers.
    """
    graph = Graph(mod)
    parts = _Parts(mod)
    parts.quantized = {}
    for binding in graph.bindings:
        if (found := _quantized(graph, binding.var)) is not None:
            parts.quantized[found.steps[-1].__chandle__()] = found
    if not parts.quantized:
        return mod
    main = parts.visit_expr(mod["main"])
    mod = mod.clone()
    mod.update_func(mod.get_global_var("main"), main)
    return relax.transform.DeadCodeElimination()(mod)


def _quantized(graph: Graph, var: Any) -> _Quantized | None:
    join = graph.call(var, "relax.concat")
    pieces = graph.value(join.args[0]) if join is not None else None
    if not isinstance(pieces, relax.Tuple) or not all(map(graph.is_used_once, pieces.fields)):
        return None
    steps: list[Any] = []
    count = 0  # of them until values are bytes
    while graph.is_used_once(var):
        (step,) = graph.users[var]
        if not _is_of_each(graph, step, var):
            if count and op_name(step) in _POOLS:
                count = len(steps)
            break
        steps.append(step)
        if op_name(step) == "relax.astype" and str(step.ty.dtype) in _BYTES:
            count = len(steps)
        var = graph.var_of(step)
    return _Quantized(join, tuple(steps[:count])) if count else None


def _is_of_each(graph: Graph, step: Any, var: Any) -> bool:
    """Whether an operator computes each value by itself, of one value and of numbers."""
    name = op_name(step)
    if name in ("relax.astype", "relax.round"):
        return True
    if name not in OF_TWO or not step.args[0].same_as(var) or shape_of(step) != shape_of(var):
        return False
    return graph.number(step.args[1]) is not None


@mutator
class _Parts(PyExprMutator):  # type: ignore[misc]
    quantized: dict[Any, _Quantized]

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        found = self.quantized.get(call.__chandle__())
        if found is None:
            return self.visit_expr_post_order(call)
        join = self.visit_expr_post_order(found.join)
        made = []
        for part in self._fields(join.args[0]):
            value = part
            for step in found.steps:
                value = self.builder_.emit(relax.Call(step.op, [value, *step.args[1:]], step.attrs))
            made.append(value)
        return relax.op.concat(made, join.attrs.axis)

    def _fields(self, parts: relax.Expr) -> list[relax.Expr]:
        found = self.lookup_binding(parts) if isinstance(parts, relax.Var) else parts
        return list(found.fields)
