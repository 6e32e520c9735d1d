"""A model whose kernels write into the parts of what concatenations would join, and read parts.

`frontend.relax.joins` says what lies where. A kernel that reads or writes a part takes the root in
its place, and reaches its own elements of it; so each place makes another kernel, with the schedule
of the one that it was. The first that writes has the root allocated, the others write in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tvm import ir, relax, tirx
from tvm.ir import GlobalVar, IRModule
from tvm_ffi import structural_map, structural_walk

from tunerd.frontend.relax.joins import Joins, Part
from tunerd.frontend.relax.movement import op_name
from tunerd.frontend.relax.rewriting import written


class NotInPlace(ValueError):
    """A kernel cannot reach into roots, which are `roots`; empty where it may be any."""

    def __init__(self, message: str, roots: frozenset[Any] = frozenset()) -> None:
        super().__init__(message)
        self.roots = roots


@dataclass(frozen=True)
class InPlace:
    """A module without some of its concatenations and splits."""

    mod: IRModule
    # Kernels that reach into roots, by their names: what they were, and the roots.
    made_of: Mapping[str, tuple[str, frozenset[Any]]] = field(default_factory=dict)


def in_place(mod: IRModule, joins: Joins) -> InPlace:
    """Return `mod`, with nothing scheduled yet, with parts in place of what is joined or cut.

    Raises NotInPlace for a kernel that reaches a part in another way than by its elements.
    """
    return _Rewriter(mod, joins).result() if joins.left_out else InPlace(mod)


class _Rewriter:
    def __init__(self, mod: IRModule, joins: Joins) -> None:
        self._mod, self._joins = mod, joins
        self._builder = relax.BlockBuilder()
        self._new: dict[Any, Any] = {}  # what variables are now
        self._roots: dict[Any, Any] = {}  # by root: the variable that has all that was written
        self._kernels: dict[Any, GlobalVar] = {}  # by name, and the places of arguments
        self._made_of: dict[str, tuple[str, frozenset[Any]]] = {}

    def result(self) -> InPlace:
        main = self._mod["main"]
        for param in main.params:
            self._new[param] = param
        made = written(self._builder, main, main.params, self._bind, self._value)
        return InPlace(made, self._made_of)

    def _bind(self, var: Any, value: Any) -> None:
        if var in self._joins.left_out:
            return
        if op_name(value) != "relax.call_tir":
            self._new[var] = self._builder.emit(self._value(value), str(var.name))
            return
        arguments, part = list(value.args[1].fields), self._joins.parts.get(var)
        places = [self._joins.parts.get(each) for each in (*arguments, var)]
        kernel = self._kernel(value.args[0], places)
        given = [self._value(each) for each in arguments]
        if part is None:
            of = value.ty
            types = list(of.fields) if isinstance(of, relax.TupleType) else of
            made = relax.call_tir(kernel, relax.Tuple(given), types)
            self._new[var] = self._builder.emit(made, str(var.name))
            return
        before, whole = self._roots.get(part.root), part.root.ty
        if before is None:
            made = relax.call_tir(kernel, relax.Tuple(given), whole)
        else:
            own = relax.Tuple([*given, before])
            made = relax.op.call_tir_inplace(kernel, own, [len(given)], whole)
        self._roots[part.root] = self._builder.emit(made, str(var.name))

    def _value(self, value: Any) -> Any:
        if isinstance(value, relax.Var):
            part = self._joins.parts.get(value)
            return self._new[value] if part is None else self._roots[part.root]
        if isinstance(value, relax.Tuple):
            return relax.Tuple([self._value(each) for each in value.fields])
        if isinstance(value, relax.TupleGetItem):
            return relax.TupleGetItem(self._value(value.tuple_value), value.index)
        if op_name(value) == "relax.reshape":
            return relax.op.reshape(self._value(value.args[0]), value.args[1])
        return value

    def _kernel(self, old: GlobalVar, places: Sequence[Part | None]) -> GlobalVar:
        """Return a kernel whose parameters lie in these places."""
        name = str(old.name_hint)
        function = self._mod[old]
        inside = {
            i: place
            for i, (place, param) in enumerate(zip(places, function.params, strict=False))
            if place is not None and list(place.root.ty.shape) != list(param.ty.shape)
        }
        key = (name, *((i, p.root.ty.shape, p.axis, p.offset) for i, p in inside.items()))
        if key not in self._kernels:
            self._kernels[key] = self._builder.add_func(_reaching(function, inside), name)
        if inside:
            made = str(self._kernels[key].name_hint)
            _, roots = self._made_of.get(made, (name, frozenset()))
            self._made_of[made] = (name, roots | {part.root for part in inside.values()})
        return self._kernels[key]


def _reaching(function: tirx.PrimFunc, places: Mapping[int, Part]) -> tirx.PrimFunc:
    """Return a kernel that takes roots in place of some of its tensors."""
    if not places:
        return function
    moved: dict[Any, tuple[Any, Callable[[Any], Any]]] = {}
    params = list(function.params)
    for i, part in places.items():
        old, root = params[i], part.root.ty
        params[i] = tirx.decl_buffer(list(root.shape), str(root.dtype), str(old.name))
        moved[old] = (params[i], _shift(part))

    def load(node: Any) -> Any:
        to = moved.get(node.source)
        return node if to is None else tirx.BufferLoad(to[0], to[1](node.indices))

    def store(node: Any) -> Any:
        to = moved.get(node.buffer)
        return node if to is None else tirx.BufferStore(to[0], node.value, to[1](node.indices))

    def region(node: Any) -> Any:
        to = moved.get(node.source)
        if to is None:
            return node
        begins = to[1]([each.min for each in node.region])
        ranges = (
            ir.Range.from_min_extent(begin, each.extent)
            for begin, each in zip(begins, node.region, strict=True)
        )
        return tirx.BufferRegion(to[0], list(ranges))

    callbacks = ((ir.TensorLoad, load), (tirx.BufferStore, store), (ir.TensorRegion, region))
    body = structural_map(function.body, callbacks)
    left: set[Any] = set()
    structural_walk(body, (ir.Var, lambda var: left.update({var} & set(moved))))
    if left:
        names = ", ".join(sorted(str(buffer.name) for buffer in left))
        roots = frozenset(part.root for part in places.values())
        raise NotInPlace(f"a kernel reaches {names} in another way than by its elements", roots)
    return tirx.PrimFunc(params, body, function.ret_type, function.attrs)


def _shift(part: Part) -> Callable[[Any], Any]:
    """Return what makes indices of a part those of its root."""
    offset = tirx.IntImm("int64", part.offset)

    def shifted(indices: Any) -> list[Any]:
        found = list(indices)
        if part.offset:
            found[part.axis] = found[part.axis] + offset
        return found

    return shifted
