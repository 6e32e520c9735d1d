"""Store what passes between kernels in 16 bits; kernels compute in fp32 as before.

It works on fused kernels, so that no operator needs a version of its own: a parameter of a kernel
becomes a tensor of 16 bits that is widened as it is read or rounded as it is written, and all that
is in between stays as it was. So sums, softmax and norms are in fp32, and a product of two widened
operands, summed in fp32, is what tensor cores compute. Nothing else decides what stays fp32:

- inputs and outputs of the model, which keep the file's types;
- what has few values, as means and variances: their bytes are nothing, and their digits matter;
  unless they only become a part of many;
- what has few values for each sample and leads to outputs by one layer at most, as the features
  before the last layer and the scores after it, so that a batch changes nothing there;
- weights with one dimension, as biases and scales, and those that 16 bits cannot hold;
- results of kernels with several, unless these are what it only cuts a tensor into, and all that
  is no fp32.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tunerd.frontend.relax.rewriting import written
from tunerd.vocabulary import BF16, FP16, STORED_AS, Arrays

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.tirx import PrimFunc

FEW = 4096  # values, up to which a tensor stays fp32
DTYPES = {FP16: "float16", BF16: "bfloat16"}

_WIDE, _FEW = "float32", "few values"
_LAST = "few values of a sample, before or after the last layer"
_FP16_MAX = 65504.0
_NAMED = 3  # tensors of each reason, in the sentence on what stays fp32
# What kernels sum, by parts of their names.
_SUMS = {
    "sums of products": ("_matmul", "_conv", "_dense", "_einsum", "_attention"),
    "softmax": ("_softmax", "_attention"),
    "norms": ("_norm",),
    "other reductions": ("_mean", "_sum", "_variance", "_std", "_avg_pool"),
}


def store_in(
    mod: IRModule, weights: Arrays, precision: str, *, inputs: Sequence[str]
) -> tuple[IRModule, Arrays, tuple[str, ...]]:
    """Return a module of fused kernels and its weights with 16 bits between kernels.

    `main` takes the inputs, which have these names in the file, and then the weights. The sentences
    say what stays fp32.
    """
    plan = _Plan(mod, weights, DTYPES[precision], inputs)
    return plan.rewritten()


class _Plan:
    """Which values of `main` are stored in 16 bits."""

    def __init__(self, mod: IRModule, weights: Arrays, dtype: str, inputs: Sequence[str]) -> None:
        self._mod, self._weights, self._dtype = mod, weights, dtype
        self._main = mod["main"]
        self._inputs, self._num_inputs = inputs, len(inputs)
        self._params = frozenset(self._main.params)
        self._root: dict[Any, Any] = {}  # variable -> the variable whose memory it is
        self._wide: dict[Any, str] = {}  # such a variable that stays fp32, and why
        self._functions: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._decide()

    def _bindings(self) -> list[Any]:
        return [b for block in self._main.body.blocks for b in block.bindings]

    def _decide(self) -> None:
        from tvm import relax

        params = list(self._main.params)
        for param in params[: self._num_inputs]:
            self._keep(param, "an input of the model")
        for param in params[self._num_inputs :]:
            self._root[param] = param
            if reason := _weight_stays(self._weights[str(param.name)], self._dtype):
                self._wide[param] = reason
        for binding in self._bindings():
            var, value = binding.var, binding.value
            if _is_kernel(value):
                self._root[var] = var
                if not isinstance(var.ty, relax.TensorType):
                    self._wide[var] = "of a kernel with several results"
                elif math.prod(int(d) for d in var.ty.shape) <= FEW:
                    self._wide[var] = _FEW
            elif _is_view(value):
                self._root[var] = self._root_of(value.args[0])
            elif isinstance(value, relax.TupleGetItem):
                self._root[var] = var
            else:  # a tuple, another name of an output
                self._root[var] = var
                self._wide.setdefault(var, "used as it is")
                for used in _variables(value):
                    self._keep(used, "an output of the model, or used as it is")
        for used in _variables(self._main.body.body):
            self._keep(used, "an output of the model")
        self._keep_the_last()
        self._store_fields()
        self._round_what_is_joined()

    def _keep_the_last(self) -> None:
        """Keep what leads to outputs by one layer at most and has few values for each sample.

        A layer is a kernel that reads a weight of several dimensions. What only joins or cuts
        stores what it reads, or could not be left out.
        """
        from tvm import relax

        from tunerd.frontend.relax.joins import cut_by, joined_axis

        samples = self._samples()
        layers: dict[Any, int] = {}  # at most, from a variable to an output
        for binding in reversed(self._bindings()):
            value, root = binding.value, self._root_of(binding.var)
            own = layers.get(root, 0)
            if _is_kernel(value):
                kernel = self._mod[value.args[0]]
                is_moved = cut_by(kernel) is not None or joined_axis(kernel) is not None
                if own <= 1 and not is_moved and isinstance(root.ty, relax.TensorType):
                    size = math.prod(int(d) for d in root.ty.shape)
                    if size <= FEW * samples:
                        self._keep(root, _LAST)
                own += any(self._is_matrix(a) for a in value.args[1])
            for used in _variables(value):
                layers[self._root_of(used)] = max(layers.get(self._root_of(used), 0), own)

    def _samples(self) -> int:
        """Return the batch: the first dimension of all inputs and outputs, or 1."""
        from tvm import relax

        returned = self._main.ret_ty
        outputs = returned.fields if isinstance(returned, relax.TupleType) else [returned]
        types = [*(p.ty for p in self._main.params[: self._num_inputs]), *outputs]
        first = {int(next(iter(t.shape), 1)) for t in types if isinstance(t, relax.TensorType)}
        return first.pop() if len(first) == 1 else 1

    def _is_matrix(self, var: Any) -> bool:
        """Say whether a variable is a weight of several dimensions."""
        array = self._weights.get(str(var.name)) if var in self._params else None
        return array is not None and sum(d > 1 for d in array.shape) > 1

    def _store_fields(self) -> None:
        """Store all pieces of a tensor as it is stored, and fields of other tuples as they are."""
        from tvm import relax

        from tunerd.frontend.relax.joins import cut_by

        values = {b.var: b.value for b in self._bindings()}
        fields: dict[Any, list[Any]] = {}
        for var, value in values.items():
            if isinstance(value, relax.TupleGetItem):
                fields.setdefault(value.tuple_value, []).append(var)
        for whole, pieces in fields.items():
            call: Any = values.get(whole)
            is_cut = _is_kernel(call) and cut_by(self._mod[call.args[0]]) is not None
            is_kept = not is_cut or any(piece in self._wide for piece in pieces)
            if is_kept or self._stored(call.args[1][0]) != self._dtype:
                for piece in pieces:
                    self._keep(piece, "used as it is")
            else:
                del self._wide[whole]

    def _round_what_is_joined(self) -> None:
        """Round few values where they are made that nothing but a concatenation reads.

        It rounds them otherwise, and could not be left out.
        """
        from tunerd.frontend.relax.joins import joined_axis

        calls = [(b.var, b.value) for b in self._bindings() if _is_kernel(b.value)]
        values = [*(b.value for b in self._bindings()), self._main.body.body]
        reads = Counter(var for value in values for var in _variables(value))
        for whole, call in calls:
            if self._stored(whole) != self._dtype or joined_axis(self._mod[call.args[0]]) is None:
                continue
            for piece in call.args[1]:
                if reads[piece] == 1 and self._wide.get(piece) in (_FEW, _LAST):
                    del self._wide[piece]

    def _root_of(self, var: Any) -> Any:
        return self._root.setdefault(var, var)

    def _keep(self, var: Any, why: str) -> None:
        self._wide.setdefault(self._root_of(var), why)

    def _stored(self, expr: Any) -> str:
        """Return the type in which a value will be stored."""
        from tvm import relax

        if not isinstance(expr.ty, relax.TensorType):
            return ""
        own = str(expr.ty.dtype)
        is_narrow = own == _WIDE and expr in self._root and self._root[expr] not in self._wide
        return self._dtype if is_narrow else own

    def rewritten(self) -> tuple[IRModule, Arrays, tuple[str, ...]]:
        import tvm
        from tvm import relax

        new: dict[Any, Any] = {}
        params = []
        for param in self._main.params:
            stored = self._stored(param)
            own = relax.Var(str(param.name), relax.TensorType(param.ty.shape, stored))
            params.append(own)
            new[param] = own
        builder = relax.BlockBuilder()
        names: dict[str, int] = {}

        def bind(var: Any, value: Any) -> None:
            new[var] = builder.emit(self._value(value, var, new, builder, names), var.name)

        mod = written(builder, self._main, params, bind, lambda body: _substituted(body, new))
        weights = {
            name: narrowed(array, self._stored(param))
            for param, (name, array) in zip(
                self._main.params[self._num_inputs :], self._ordered(), strict=True
            )
        }
        return tvm.relax.transform.DeadCodeElimination()(mod), weights, self._sentences()

    def _ordered(self) -> list[tuple[str, np.ndarray[Any, Any]]]:
        names = [str(p.name) for p in self._main.params[self._num_inputs :]]
        return [(name, self._weights[name]) for name in names]

    def _value(
        self, value: Any, var: Any, new: Mapping[Any, Any], builder: Any, names: dict[str, int]
    ) -> Any:
        from tvm import relax

        if not _is_kernel(value):
            return _substituted(value, new)
        gvar, arguments = value.args[0], list(value.args[1])
        several = not isinstance(var.ty, relax.TensorType)
        stored = [self._stored(a) for a in arguments]
        results = [self._stored(var)]
        if several:
            is_kept = var in self._wide
            results = [str(f.dtype) if is_kept else self._dtype for f in var.ty.fields]
        function = self._function(gvar, (*stored, *results), builder, names, results=len(results))
        types = [
            relax.TensorType(t.shape, dtype)
            for t, dtype in zip(var.ty.fields if several else [var.ty], results, strict=True)
        ]
        return relax.call_tir(
            function,
            relax.Tuple([new.get(a, a) for a in arguments]),
            types if several else types[0],
        )

    def _function(
        self,
        gvar: Any,
        dtypes: tuple[str, ...],
        builder: Any,
        names: dict[str, int],
        *,
        results: int,
    ) -> Any:
        """Return the kernel with parameters of these types, once for each."""
        key = (str(gvar.name_hint), dtypes)
        if key not in self._functions:
            count = names[key[0]] = names.get(key[0], -1) + 1
            name = key[0] if not count else f"{key[0]}_v{count}"
            function = with_types(self._mod[gvar], dtypes, results=results)
            self._functions[key] = builder.add_func(function, name)
        return self._functions[key]

    def _sentences(self) -> tuple[str, ...]:
        roots = [r for r in dict.fromkeys(self._root.values()) if _dtype_of(r) == _WIDE]
        kept: dict[str, list[Any]] = {}
        for root in roots:
            if root in self._wide:
                kept.setdefault(self._wide[root], []).append(root)
        total = sum(map(len, kept.values()))
        said = f"{len(roots) - total} tensors between kernels and weights{STORED_AS}{self._dtype}"
        if kept:
            why = ", ".join(f"{len(of)} {r} ({self._names(of)})" for r, of in sorted(kept.items()))
            said += f"; {total} stay {_WIDE}: {why}"
        return (f"{said}; {self._computed()}",)

    def _names(self, roots: Sequence[Any]) -> str:
        """Name some tensors: inputs as the file does, others by a kernel.

        It is the one that writes them or, of weights, reads them first.
        """
        found = dict(zip(self._main.params, self._inputs, strict=False))
        for binding in self._bindings():
            value = binding.value
            if _is_kernel(value):
                name = found[binding.var] = str(value.args[0].name_hint)
                for used in value.args[1]:
                    found.setdefault(used, name)
            else:
                for used in _variables(value):
                    found.setdefault(binding.var, found.get(used, used.name))
        names = list(dict.fromkeys(str(found.get(root, root.name)) for root in roots))
        rest = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        return ", ".join(names[:_NAMED]) + rest

    def _computed(self) -> str:
        """Say in what kernels compute, and which sums that is of."""
        values = [b.value for b in self._bindings() if _is_kernel(b.value)]
        kernels = [f"_{value.args[0].name_hint}" for value in values]
        sums = [what for what, of in _SUMS.items() if any(p in k for p in of for k in kernels)]
        *first, last = sums or [""]
        among = " and ".join(filter(None, (", ".join(first), last)))
        said = f"all floats are computed in {_WIDE}{', with ' if among else ''}{among}"
        if "sums of products" not in sums:
            return said
        return f"{said}; tensor cores take operands of products as {self._dtype}"


def _dtype_of(var: Any) -> str:
    return str(getattr(var.ty, "dtype", ""))


def narrowed(array: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """Return weights as they are stored; bfloat16 by the type of ml_dtypes, which TVM takes."""
    if dtype == "bfloat16":
        import ml_dtypes

        return array.astype(ml_dtypes.bfloat16)
    return array if str(array.dtype) == dtype else array.astype(dtype)


def _weight_stays(array: np.ndarray[Any, Any], dtype: str) -> str:
    if str(array.dtype) != _WIDE:
        return "of another type"
    if sum(d > 1 for d in array.shape) < 2:
        return "a bias, a scale or another vector"
    if dtype == "float16" and not (np.abs(array).max(initial=0.0) <= _FP16_MAX):
        return "out of the range of fp16"
    return ""


def _is_kernel(value: Any) -> bool:
    return getattr(getattr(value, "op", None), "name", "") == "relax.call_tir"


def _is_view(value: Any) -> bool:
    return getattr(getattr(value, "op", None), "name", "") == "relax.reshape"


def _variables(expr: Any) -> list[Any]:
    from tvm import relax

    found = []

    def visit(node: Any) -> None:
        if isinstance(node, relax.Var) and isinstance(node.ty, relax.TensorType | relax.TupleType):
            found.append(node)

    relax.analysis.post_order_visit(expr, visit)
    return found


def _substituted(expr: Any, new: Mapping[Any, Any]) -> Any:
    from tvm import relax

    if isinstance(expr, relax.Var):
        return new.get(expr, expr)
    if isinstance(expr, relax.Tuple):
        return relax.Tuple([_substituted(f, new) for f in expr.fields])
    if isinstance(expr, relax.TupleGetItem):
        return relax.TupleGetItem(_substituted(expr.tuple_value, new), expr.index)
    if _is_view(expr):
        return relax.op.reshape(_substituted(expr.args[0], new), expr.args[1])
    if isinstance(expr, relax.Call):
        arguments = [_substituted(a, new) for a in expr.args]
        return relax.Call(expr.op, arguments, expr.attrs, ty_args=expr.ty_args)
    return expr


# --- kernels -----------------------------------------------------------------------------------


def with_types(function: PrimFunc, dtypes: Sequence[str], *, results: int = 1) -> PrimFunc:
    """Return a kernel whose parameters have these types; what it computes stays as it is.

    A parameter of another type than before is copied, with a cast, from or into what it was, which
    becomes memory of the kernel's own; the copies are then computed where they are used.
    """
    from tvm import s_tir, tirx

    own = [str(p.ty.dtype) for p in function.params]
    if own == list(dtypes):
        return function
    root = function.body.block
    params, inside, before, after = [], [], [], []
    last = len(own) - results
    for i, (param, dtype) in enumerate(zip(function.params, dtypes, strict=True)):
        if str(param.ty.dtype) == dtype:
            params.append(param)
            continue
        outside = tirx.decl_buffer(list(param.ty.shape), dtype, str(param.name))
        params.append(outside)
        inside.append(param)
        name = f"cast_{param.name}"
        if i < last:
            before.append(_cast(outside, param, name))
        else:
            after.append(_cast(param, outside, name))
    steps = list(root.body) if isinstance(root.body, tirx.SeqStmt) else [root.body]
    block = s_tir.SBlock(
        [],
        [],
        [],
        root.name_hint,
        tirx.SeqStmt([*before, *steps, *after]),
        alloc_buffers=[*root.alloc_buffers, *inside],
        annotations=root.annotations,
    )
    body = s_tir.SBlockRealize([], True, block)
    made = tirx.PrimFunc(params, body, function.ret_type, function.attrs)
    return _inlined(made)


def _cast(source: Any, target: Any, name: str) -> Any:
    """Return the loops that copy a tensor into one of another type."""
    import tvm
    from tvm import s_tir, tirx

    extents = [int(d) for d in source.ty.shape]
    loops = [tirx.Var(f"i{n}", "int64") for n in range(len(extents))]
    axes = [tirx.Var(f"v{n}", "int64") for n in range(len(extents))]
    iters = [
        tirx.IterVar(tvm.ir.Range(tirx.IntImm("int64", 0), tirx.IntImm("int64", extent)), axis, 0)
        for axis, extent in zip(axes, extents, strict=True)
    ]
    one = tirx.IntImm("int64", 1)
    at = [tvm.ir.Range.from_min_extent(axis, one) for axis in axes]
    value = tirx.Cast(str(target.ty.dtype), tirx.BufferLoad(source, axes))
    block = s_tir.SBlock(
        iters,
        [tirx.BufferRegion(source, at)],
        [tirx.BufferRegion(target, at)],
        name,
        tirx.BufferStore(target, value, axes),
    )
    body: Any = s_tir.SBlockRealize(loops, True, block)
    for loop, extent in reversed(list(zip(loops, extents, strict=True))):
        zero, size = tirx.IntImm("int64", 0), tirx.IntImm("int64", extent)
        body = tirx.For(loop, zero, size, tirx.ForKind.SERIAL, body)
    return body


def _inlined(function: PrimFunc) -> PrimFunc:
    """Compute copies where they are used, as far as a schedule may."""
    import tvm
    from tvm.s_tir import Schedule

    schedule = Schedule(tvm.IRModule({"main": function}), error_render_level="none")
    for block in schedule.get_child_blocks(schedule.get_sblock("root")):
        name = str(schedule.get(block).name_hint)
        if not name.startswith("cast_"):
            continue
        for inline in (schedule.compute_inline, schedule.reverse_compute_inline):
            try:
                inline(block)
            except Exception:  # of a reduction, whose sum stays in fp32 until it is complete
                continue
            break
    return schedule.mod["main"]
