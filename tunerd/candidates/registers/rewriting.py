"""A task's module with other loops, and its expressions with other values for those."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tvm.ir import IRModule

_BINARY = frozenset((
    "Add", "Sub", "Mul", "Div", "Mod", "FloorDiv", "FloorMod", "Max", "Min", "EQ", "NE", "LT", "LE",
    "GT", "GE", "And", "Or",
))  # fmt: skip


def with_loops(
    mod: IRModule, sums: str, stored: str, written: Callable[[Any, Any], Any]
) -> IRModule:
    """Return a module of one function with other loops in place of those of its sums.

    mod: its blocks are the sums, whatever is computed before or behind them, and `stored`.
    sums: the block of the sums.
    stored: the block that stores what is made of the sums, each at its place; the sums themselves,
        or one that is computed with them.
    written: returns the loops, given both blocks.
    """
    from tvm import ir, tirx
    from tvm.s_tir import SBlock, SBlockRealize

    (name,) = mod.get_global_vars()
    root = mod[name].body.block
    nests = [*root.body] if isinstance(root.body, tirx.SeqStmt) else [root.body]
    blocks = {str(block.name_hint): block for block in map(block_in, nests)}
    loops = written(blocks[sums], blocks[stored])
    gone = blocks[sums].writes[0].source if stored != sums else None
    made = []
    for nest in nests:
        hint = block_in(nest).name_hint
        if hint == sums:
            made.append(loops)
        elif hint != stored:
            made.append(nest)
    buffers = [each for each in root.alloc_buffers if gone is None or not each.same_as(gone)]
    block = SBlock(
        [], root.reads, root.writes, root.name_hint, tirx.stmt_seq(*made), None, buffers, None,
        root.annotations,
    )  # fmt: skip
    realized = SBlockRealize([], tirx.const(True, "bool"), block)
    return ir.IRModule({name: mod[name].with_body(realized)})


def block_in(nest: Any) -> Any:
    """Return the block of a nest of loops around one."""
    from tvm.s_tir import SBlockRealize

    while not isinstance(nest, SBlockRealize):
        nest = nest.body
    return nest.block


class Rewriting:
    """Expressions with other values for a block's loops.

    values: of each loop.
    column: the loop of the columns, how many a group has, and the group, where that is known.
    """

    def __init__(
        self, values: Mapping[Any, Any], column: tuple[Any, int, Any] | None = None
    ) -> None:
        self._values, self._column = values, column
        self._sums: tuple[Any, Any] | None = None  # the buffer of sums, and what is read of it

    def stored(self, block: Any, sums: Any, value: Any) -> Any:
        """Return what stores a value of sums, or what a block behind them makes of it.

        sums: their block, which `block` may be.
        """
        from tvm import tirx

        if not block.same_as(sums):
            self._sums = sums.writes[0].source, value
            value = self.value_of(block.body.value)
        return tirx.BufferStore(block.body.buffer, value, self.values_of(block.body.indices))

    def values_of(self, expressions: Sequence[Any]) -> list[Any]:
        return [self.value_of(each) for each in expressions]

    def value_of(self, node: Any) -> Any:
        """Return an expression's value; ValueError for one of a kind that is not known."""
        from tvm import ir, tirx

        kind = type(node).__name__
        if kind == "Var":
            return self._values.get(node, node)
        if kind in ("IntImm", "FloatImm", "StringImm"):
            return node
        if kind in _BINARY:
            if (group := self._group_of(node)) is not None:
                return group
            return type(node)(self.value_of(node.a), self.value_of(node.b))
        if kind == "TensorLoad":
            if self._sums is not None and node.source.same_as(self._sums[0]):
                return self._sums[1]
            return tirx.BufferLoad(node.source, self.values_of(node.indices))
        if kind == "Cast":
            return tirx.Cast(str(node.ty.dtype), self.value_of(node.value))
        if kind == "Not":
            return tirx.Not(self.value_of(node.a))
        if kind == "Select":
            parts = (node.condition, node.true_value, node.false_value)
            return tirx.Select(*self.values_of(parts))
        if kind == "Let":
            return tirx.Let(node.var, self.value_of(node.value), self.value_of(node.body))
        if kind == "Call":
            return ir.Call(node.op, self.values_of(node.args), node.attrs, ret_ty=node.ty)
        raise ValueError(f"it has a {kind}")

    def _group_of(self, node: Any) -> Any:
        """Return the group where a node divides the column by a group's columns.

        Then all lanes of a vector read the same, which is not to be found out again.
        """
        if self._column is None:
            return None
        column, size, group = self._column
        is_group = type(node).__name__ == "FloorDiv" and node.a.same_as(column)
        return group if is_group and getattr(node.b, "value", None) == size else None
