"""A model of scheduled kernels -> one that serves several tenants at once, each in a lane.

Tenants are models of one architecture with weights of their own. `main` of what comes back takes
the inputs, and returns the outputs, with the lanes as one more dimension in front; after the inputs
`slots`, then the weights of one tenant as they lie in its piece, flat. A lane's slot says where the
piece of its tenant is (`tunerd.builder.tenants`), so that one compiled model serves any tenants,
and nothing of it depends on how many there are.

`slots` come after the inputs because TVM captures kernels in a CUDA graph only where they read none
of these; whoever calls `main` keeps them, as the weights, where they are.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from tvm import relax, te
from tvm.ir import GenericConst, IRModule
from tvm.target import Target
from tvm.tirx import PrimFunc

from tunerd.artifacts.manifest import SLOTS
from tunerd.builder.tenants import for_tenants
from tunerd.candidates.base import ENTRY, LoweredKernel
from tunerd.candidates.default import default_schedule
from tunerd.candidates.host_code import calling
from tunerd.frontend.relax.rewriting import written
from tunerd.vocabulary import TensorSpec, in_lanes

if TYPE_CHECKING:
    from tvm.ir import GlobalVar


@dataclass(frozen=True)
class Foreign:
    """A kernel that TVM did not make, for as many lanes as the model is to have.

    weights: which arguments of the kernel for one model it takes as weights.
    """

    kernel: LoweredKernel
    weights: frozenset[int]


@dataclass(frozen=True)
class ForTenants:
    """A model of several lanes.

    foreign: its calls of kernels that TVM did not make, whose functions are none yet.
    """

    mod: IRModule
    foreign: Mapping[GlobalVar, LoweredKernel]


def model_for_tenants(
    mod: IRModule, foreign: Mapping[str, Foreign], count: int, target: Target
) -> ForTenants:
    """Return the model of `count` lanes.

    Args:
        mod: of one model; its kernels are scheduled, but for those in `foreign`, by their names.

    Raises ValueError where `main` does what no lowered model does.
    """
    return _Lanes(mod, foreign, count, target).model()


class _Lanes:
    """Rewrites one model's `main`, binding after binding."""

    def __init__(
        self, mod: IRModule, foreign: Mapping[str, Foreign], count: int, target: Target
    ) -> None:
        self._mod, self._known_foreign = mod, foreign
        self._count, self._target = count, target
        self._builder = relax.BlockBuilder()
        self._slots = relax.Var(SLOTS, relax.TensorType((count,), "int32"))
        # By their variable: values with a row for each lane, and weights.
        self._lanes: dict[Any, relax.Expr] = {}
        self._flat: dict[Any, relax.Var] = {}
        self._kernels: dict[tuple[str, frozenset[int]], GlobalVar] = {}
        self._foreign: dict[str, LoweredKernel] = {}

    def model(self) -> ForTenants:
        main = self._mod["main"]
        num_inputs = int(main.attrs["num_input"])
        inputs, weights = main.params[:num_inputs], main.params[num_inputs:]
        for var in inputs:
            self._lanes[var] = relax.Var(str(var.name), self._wide(var.ty))
        for var in weights:
            flat = relax.TensorType((math.prod(_shape(var.ty)),), str(var.ty.dtype))
            self._flat[var] = relax.Var(str(var.name), flat)
        params = [self._lanes[v] for v in inputs] + [self._slots]
        params += [self._flat[v] for v in weights]
        made = written(self._builder, main, params, self._bind, self._value)
        return ForTenants(
            made, {made.get_global_var(name): kernel for name, kernel in self._foreign.items()}
        )

    def _bind(self, var: relax.Var, value: relax.Expr) -> None:
        name = getattr(getattr(value, "op", None), "name", "")
        if value in self._flat:
            self._flat[var] = self._flat[value]
        elif name == "relax.reshape" and value.args[0] in self._flat:
            self._flat[var] = self._flat[value.args[0]]  # which has no shape
        elif name == "relax.reshape":
            shape = (self._count, *_shape(value.ty))
            self._lanes[var] = self._builder.emit(
                relax.op.reshape(self._value(value.args[0]), shape)
            )
        elif name == "relax.call_tir":
            self._lanes[var] = self._builder.emit(self._call(value))
        else:
            self._lanes[var] = self._value(value)

    def _value(self, value: relax.Expr) -> relax.Expr:
        """Return a value with a row for each lane."""
        if value in self._lanes:
            return self._lanes[value]
        if value in self._flat:
            self._lanes[value] = self._gathered(value)
            return self._lanes[value]
        if isinstance(value, relax.Tuple):
            return relax.Tuple([self._value(field) for field in value.fields])
        if isinstance(value, relax.TupleGetItem):
            return relax.TupleGetItem(self._value(value.tuple_value), value.index)
        if isinstance(value, GenericConst):
            rows = np.broadcast_to(value.value.numpy(), (self._count, *_shape(value.ty)))
            return relax.const(np.ascontiguousarray(rows), str(value.ty.dtype))
        raise ValueError(f"a model for several tenants has no {type(value).__name__}: {value}")

    def _call(self, call: relax.Call) -> relax.Expr:
        name, given = str(call.args[0].name_hint), list(call.args[1].fields)
        weights = frozenset(i for i, arg in enumerate(given) if arg in self._flat)
        if name in self._known_foreign:
            weights = self._known_foreign[name].weights
        kernel = self._kernel(name, weights)
        arguments = [self._flat[a] if i in weights else self._value(a) for i, a in enumerate(given)]
        made = self._wide(call.ty)
        types = list(made.fields) if isinstance(made, relax.TupleType) else made
        return relax.call_tir(kernel, relax.Tuple([self._slots, *arguments]), types)

    def _kernel(self, name: str, weights: frozenset[int]) -> GlobalVar:
        """Return the kernel of several lanes by which of its arguments are weights."""
        if (name, weights) not in self._kernels:
            function = self._mod[name]
            if name in self._known_foreign:
                function = self._stand_in(function, weights)
            else:
                function = self._for_tenants(function, weights)
            added = self._builder.add_func(function, name)
            self._kernels[name, weights] = added
            if name in self._known_foreign:
                kernel = self._known_foreign[name].kernel
                casts = tuple((number + 1, dtype) for number, dtype in kernel.casts)  # after slots
                self._foreign[str(added.name_hint)] = replace(kernel, casts=casts)
        return self._kernels[name, weights]

    def _for_tenants(self, function: PrimFunc, weights: Collection[int]) -> PrimFunc:
        is_cuda = str(self._target.kind.name) == "cuda"
        return for_tenants(function, weights, self._count, is_cuda=is_cuda)

    def _stand_in(self, function: PrimFunc, weights: Collection[int]) -> PrimFunc:
        """Return a function that takes what the kernel of several lanes takes, and does nothing."""
        specs = [TensorSpec(str(p.name), _shape(p), str(p.dtype)) for p in function.params]
        made = calling(in_lanes(specs, weights, self._count), ("none", ()))[ENTRY].without_attr(
            "global_symbol"
        )
        for key, value in (function.attrs or {}).items():
            made = made.with_attr(key, value)
        return made

    def _gathered(self, weight: relax.Var) -> relax.Expr:
        """Return a weight as a tensor with a row for each lane, of its tenant's."""
        there = te.placeholder(_shape(weight.ty), str(weight.ty.dtype), name="weight")
        rows = te.compute(there.shape, lambda *at: there(*at), name="rows")
        copy = te.create_prim_func([there, rows]).without_attr("global_symbol")
        copy = default_schedule(IRModule({ENTRY: copy}), self._target)[ENTRY]
        kernel = self._builder.add_func(self._for_tenants(copy, {0}), "gather")
        arguments = relax.Tuple([self._slots, self._flat[weight]])
        return self._builder.emit(relax.call_tir(kernel, arguments, self._wide(weight.ty)))

    def _wide(self, of: Any) -> Any:
        if isinstance(of, relax.TupleType):
            return relax.TupleType([self._wide(field) for field in of.fields])
        return relax.TensorType((self._count, *_shape(of)), str(of.dtype))


def _shape(of: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in of.shape)
