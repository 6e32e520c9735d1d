"""Compute in fp32 what a file has in 16 bits: weights and all that lies between the operators.

Inputs and outputs of the model keep the file's types, and are cast. So is what a kernel takes and
gives that the graph brings along as a loop nest, which is of its own types.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tvm import relax
    from tvm.ir import IRModule

_WIDE = "float32"
_NARROW = frozenset(("float16", "bfloat16"))


def widen(mod: IRModule) -> IRModule:
    """Return `mod` with operators of `main` in fp32 that were in fp16 or bf16; itself if none were.

    A graph that branches on values is left as it is: it cannot be tuned.
    """
    from tvm import relax

    main = mod["main"]
    found: set[str] = set()

    def visit(expr: relax.Expr) -> None:
        found.update(_types(getattr(expr, "ty", None)))
        if isinstance(expr, relax.If):
            found.add("If")

    relax.analysis.post_order_visit(main, visit)
    if "If" in found or not found & _NARROW:
        return mod
    return _widened(mod)


def _widened(mod: IRModule) -> IRModule:
    from tvm import relax

    main = mod["main"]
    builder = relax.BlockBuilder(mod)
    new: dict[Any, Any] = {}
    with builder.function("wide", list(main.params), attrs=dict(main.attrs or {})):
        with builder.dataflow():
            for param in main.params:
                new[param] = _cast(param, param.ty, builder)
            for block in main.body.blocks:
                for binding in block.bindings:
                    new[binding.var] = builder.emit(_value(binding.value, new, builder))
            result = _narrowed(_substituted(main.body.body, new), main.ret_ty, builder)
            out = builder.emit_output(result)
        builder.emit_func_output(out)
    made = builder.get()
    wide = made["wide"].with_attr("global_symbol", "main")
    made.update_func(made.get_global_var("main"), wide)
    del made[made.get_global_var("wide")]
    return made


def _value(value: Any, new: Mapping[Any, Any], builder: Any) -> Any:
    from tvm import relax
    from tvm.ir import Op

    if not isinstance(value, relax.Call):
        return _substituted(value, new)
    name = value.op.name if isinstance(value.op, Op) else ""
    if not name.startswith("relax.") or name.startswith("relax.call_"):
        return _as_it_was(value, new, builder)
    arguments = [_substituted(a, new) for a in value.args]
    if name == "relax.astype":  # from one that is wide by now, or to one that is no more
        dtype = str(value.attrs.dtype)
        wide = _WIDE if dtype in _NARROW else dtype
        is_so = _types(getattr(arguments[0], "ty", None)) == {wide}
        return arguments[0] if is_so else relax.op.astype(arguments[0], wide)
    return relax.Call(value.op, arguments, _wide_attrs(value.attrs), ty_args=value.ty_args)


def _as_it_was(call: relax.Call, new: Mapping[Any, Any], builder: Any) -> Any:
    """Return a call of a kernel with the types that it has, between casts."""
    from tvm import relax

    arguments = [
        relax.Tuple([_narrowed(_substituted(f, new), f.ty, builder) for f in a.fields])
        if isinstance(a, relax.Tuple)
        else _narrowed(_substituted(a, new), a.ty, builder)
        for a in call.args
    ]
    made = builder.emit(relax.Call(call.op, arguments, call.attrs, ty_args=call.ty_args))
    return _cast(made, made.ty, builder)


def _wide_attrs(attrs: Any) -> Any:
    """Return an operator's attributes with float32 where they name a type of 16 bits."""
    import tvm

    if attrs is None:
        return None
    fields = {name: getattr(attrs, name) for name in dir(attrs) if name.endswith("dtype")}
    narrow = {name for name, dtype in fields.items() if str(dtype) in _NARROW}
    if not narrow:
        return attrs
    document = tvm.ir.save_json(attrs)
    for dtype in {str(fields[name]) for name in narrow}:
        document = document.replace(f'"{dtype}"', f'"{_WIDE}"')
    return tvm.ir.load_json(document)


def _substituted(expr: Any, new: Mapping[Any, Any]) -> Any:
    from tvm import relax, tirx
    from tvm.ir import GenericConst

    if isinstance(expr, relax.Var):
        return new.get(expr, expr)
    if isinstance(expr, relax.Tuple):
        return relax.Tuple([_substituted(f, new) for f in expr.fields])
    if isinstance(expr, relax.TupleGetItem):
        return relax.TupleGetItem(_substituted(expr.tuple_value, new), expr.index)
    if isinstance(expr, GenericConst) and str(expr.value.dtype) in _NARROW:
        return relax.const(expr.value.numpy().astype(_WIDE), _WIDE)
    if isinstance(expr, tirx.FloatImm) and str(expr.ty.dtype) in _NARROW:
        return tirx.FloatImm(_WIDE, expr.value)
    return expr


def _cast(value: Any, ty: Any, builder: Any) -> Any:
    """Return a value, or several, in fp32 where it is of 16 bits."""
    from tvm import relax

    if isinstance(ty, relax.TupleType):
        fields = [
            _cast(builder.emit(relax.TupleGetItem(value, i)), field, builder)
            for i, field in enumerate(ty.fields)
        ]
        return relax.Tuple(fields)
    return relax.op.astype(value, _WIDE) if _types(ty) & _NARROW else value


def _narrowed(value: Any, ty: Any, builder: Any) -> Any:
    """Return a value in the type that it had."""
    from tvm import relax

    if isinstance(ty, relax.TupleType):
        fields = (
            value.fields
            if isinstance(value, relax.Tuple)
            else [relax.TupleGetItem(value, i) for i in range(len(ty.fields))]
        )
        narrow = [
            _narrowed(builder.emit(field), of, builder)
            for field, of in zip(fields, ty.fields, strict=True)
        ]
        return relax.Tuple(narrow)
    (dtype,) = _types(ty) or ("",)
    if dtype not in _NARROW:
        return value
    return builder.emit(relax.op.astype(value, dtype))


def _types(ty: Any) -> set[str]:
    from tvm import relax

    if isinstance(ty, relax.TupleType):
        return {dtype for field in ty.fields for dtype in _types(field)}
    return {str(ty.dtype)} if isinstance(ty, relax.TensorType) else set()
