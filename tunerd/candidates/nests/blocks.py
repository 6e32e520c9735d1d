"""The blocks of an unscheduled kernel, in the order in which they run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tvm.ir import Expr
    from tvm.s_tir import SBlock
    from tvm.tirx import PrimFunc

REDUCE = 2  # tirx.IterVar.CommReduce


def spatial_of(block: SBlock) -> list[Any]:
    """Return the iterators of what a block computes, in order."""
    return [v for v in block.iter_vars if int(v.iter_type) != REDUCE]


def reduced_of(block: SBlock) -> list[Any]:
    """Return the iterators over which a block reduces, in order."""
    return [v for v in block.iter_vars if int(v.iter_type) == REDUCE]


def blocks_of(function: PrimFunc) -> list[tuple[SBlock, Expr | bool]]:
    """Return the blocks below a kernel's root with their predicates, not those inside of them."""
    found: list[tuple[Any, Any]] = []

    def visit(node: Any) -> None:
        from tvm import s_tir, tirx

        if isinstance(node, s_tir.SBlockRealize):
            found.append((node.block, node.predicate))
        elif isinstance(node, tirx.SeqStmt):
            for each in node:
                visit(each)
        elif isinstance(node, tirx.For):
            visit(node.body)

    visit(function.body.block.body)
    return found
