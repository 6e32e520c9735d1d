"""Calls of kernels that TVM did not make, in a model that it compiles.

A call of such a kernel is one of its host code, a function of TIR like any other. Scratch memory of
floats becomes a second result of the call, which TVM's memory planner lays over other tensors that
are not needed meanwhile. Counters become one more weight of the model, which is zero and which each
kernel leaves so: all calls of a model are on one stream, and share it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tvm import relax, tirx, topi
from tvm.ir import GlobalVar, IRModule
from tvm.relax.expr_functor import PyExprMutator, mutator

from tunerd.artifacts.manifest import COUNTERS
from tunerd.candidates.base import ENTRY, LoweredKernel
from tunerd.vocabulary import Arrays, Layout, TensorSpec, winograd

# The second has the tensor that it writes as its last argument.
CALLS = ("relax.call_tir", IN_PLACE := "relax.call_tir_inplace")


@dataclass(frozen=True)
class WithKernels:
    """A module that calls kernels that TVM did not make, and what it takes in addition."""

    mod: IRModule
    counters: Arrays = field(default_factory=dict)  # weights
    # Weights by name: which one they are, and in which type.
    casts: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    # Likewise, in which layout; those that nothing takes as they were are gone.
    layouts: Mapping[str, tuple[str, Layout]] = field(default_factory=dict)
    gone: frozenset[str] = frozenset()


def with_device_kernels(mod: IRModule, lowered: Mapping[GlobalVar, LoweredKernel]) -> WithKernels:
    """Replace kernels of a module."""
    counters = _counters(lowered)
    var = (
        relax.Var(COUNTERS, relax.TensorType(counters.shape, counters.dtype)) if counters else None
    )
    mutate = _Calls(mod, {gvar.name_hint: kernel for gvar, kernel in lowered.items()}, var)
    main = mutate.visit_expr(mod["main"])
    cast = {str(v.name): (name, dtype) for (name, dtype), v in mutate.casts.items()}
    laid_out = {str(v.name): (name, own) for (name, own), v in mutate.layouts.items()}
    used = {str(v.name) for v in relax.analysis.free_vars(main.body)}
    gone = frozenset(name for name, _ in laid_out.values()) - used
    if var is not None or cast or laid_out:
        params = [p for p in main.params if str(p.name) not in gone]
        params += [*mutate.casts.values(), *mutate.layouts.values()]
        params += [] if var is None else [var]
        main = relax.Function(params, main.body, main.ret_ty, main.is_pure, main.attrs)
    mod = mutate.builder_.get()
    mod.update_func(mod.get_global_var("main"), main)
    for gvar in lowered:
        del mod[gvar]
    zeros = {COUNTERS: np.zeros(counters.shape, counters.dtype)} if counters else {}
    return WithKernels(mod, zeros, cast, laid_out, gone)


def _counters(lowered: Mapping[GlobalVar, LoweredKernel]) -> TensorSpec | None:
    found = {s for k in lowered.values() for s in k.scratch if _is_counter(s)}
    if len({s.shape for s in found}) > 1:
        raise ValueError("kernels of one model want counters of several sizes")
    return next(iter(found), None)


def _is_counter(spec: TensorSpec) -> bool:
    return np.dtype(spec.dtype).kind in "iu"


def _function(old: Any, kernel: LoweredKernel) -> Any:
    """Return host code that takes counters before its result, and a workspace after it."""
    made = kernel.mod[ENTRY]
    params = list(made.params)
    scratch = dict(zip(kernel.scratch, params[len(params) - len(kernel.scratch) :], strict=True))
    own = params[: len(params) - len(kernel.scratch)]
    counters = [p for spec, p in scratch.items() if _is_counter(spec)]
    workspaces = [p for spec, p in scratch.items() if not _is_counter(spec)]
    params = [*own[:-1], *counters, own[-1], *workspaces]
    function = tirx.PrimFunc(params, made.body, made.ret_type, made.attrs)
    function = function.without_attr("global_symbol")
    for key, value in (old.attrs or {}).items():
        function = function.with_attr(key, value)
    return function.with_attr("tirx.is_scheduled", True)


@mutator
class _Calls(PyExprMutator):  # type: ignore[misc]
    """Gives calls of kernels with scratch memory what they take and leave in addition."""

    def __init__(
        self, mod: IRModule, kernels: Mapping[str, LoweredKernel], counters: relax.Var | None
    ) -> None:
        super().__init__(mod)
        self._kernels, self._counters = kernels, counters
        self._mod = mod
        self._weights = {str(p.name) for p in mod["main"].params}
        self.casts: dict[tuple[str, str], relax.Var] = {}  # of weights, by their names and types
        self.layouts: dict[tuple[str, Layout], relax.Var] = {}  # likewise, and layouts
        self._added: dict[str, GlobalVar] = {}

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        visited = self.visit_expr_post_order(call)
        if getattr(call.op, "name", "") not in CALLS:
            return visited
        name = str(call.args[0].name_hint)
        kernel = self._kernels.get(name)
        if kernel is None:
            return visited
        if name not in self._added:  # another variable: its type says other parameters
            function = _function(self._mod[name], kernel)
            self._added[name] = self.builder_.add_func(
                function, f"{name}_{kernel.symbol or 'packed'}"
            )
        arguments = list(visited.args[1])
        written = [arguments.pop()] if call.op.name == IN_PLACE else []
        for number, dtype in kernel.casts:
            arguments[number] = self._cast(arguments[number], dtype)
        for number, layout in kernel.layouts:
            arguments[number] = self._laid_out(arguments[number], layout)
        arguments += [self._counters for spec in kernel.scratch if _is_counter(spec)]
        results = [call.ty] + [
            relax.TensorType(spec.shape, spec.dtype)
            for spec in kernel.scratch
            if not _is_counter(spec)
        ]
        of = results if len(results) > 1 else call.ty
        given = relax.Tuple([*arguments, *written])
        if written:
            own = [len(arguments), *[-1] * (len(results) - 1)]
            made = relax.op.call_tir_inplace(self._added[name], given, own, of)
        else:
            made = relax.call_tir(self._added[name], given, of)
        return made if len(results) == 1 else relax.TupleGetItem(self.builder_.emit(made), 0)

    def _cast(self, value: relax.Expr, dtype: str) -> relax.Expr:
        """Return a weight in another type: one more weight, or else a kernel that casts it."""
        name = str(getattr(value, "name", ""))
        if name not in self._weights:
            return self.builder_.emit_te(topi.cast, value, dtype)
        if (name, dtype) not in self.casts:
            self.casts[name, dtype] = relax.Var(
                f"{name}_{dtype}", relax.TensorType(value.ty.shape, dtype)
            )
        return self.casts[name, dtype]

    def _laid_out(self, value: relax.Expr, layout: Layout) -> relax.Expr:
        """Return a weight in another layout: one more weight, or else a kernel."""
        name = str(getattr(value, "name", ""))
        if name not in self._weights:
            if layout.winograd:
                value = self._transformed(value, layout.winograd)
            split = self.builder_.emit_te(topi.reshape, value, layout.split)
            return self.builder_.emit_te(topi.transpose, split, layout.axes)
        if (name, layout) not in self.layouts:
            is_split = len(layout.split) > len(value.ty.shape)
            parts = [name, *([f"winograd{layout.winograd}"] if layout.winograd else [])]
            parts += ["x".join(map(str, layout.split))] if is_split else []
            own_name = "_".join([*parts, "".join(map(str, layout.axes))])
            own_type = relax.TensorType(layout.shape, value.ty.dtype)
            self.layouts[name, layout] = relax.Var(own_name, own_type)
        return self.layouts[name, layout]

    def _transformed(self, filters: relax.Expr, outputs: int) -> relax.Expr:
        """Return filters as Winograd's algorithm transforms them, by one product."""
        matrix = winograd.of_both_axes(outputs).astype(str(filters.ty.dtype))
        columns = math.prod([int(extent) for extent in filters.ty.shape][2:])
        flat = self.builder_.emit_te(topi.reshape, filters, (len(matrix[0]), columns))
        return self.builder_.emit_te(topi.nn.matmul, relax.const(matrix), flat)
