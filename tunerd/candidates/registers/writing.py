"""Statements of TIR that schedules cannot say: loops that are written, with indices of one type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class Writing:
    """Writes loops and indices.

    dtype: the type of all indices.
    """

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    def index(self, value: int) -> Any:
        from tvm import tirx

        return tirx.IntImm(self.dtype, value)

    def var(self, name: str) -> Any:
        from tvm import tirx

        return tirx.Var(name, self.dtype)

    def loop(self, number: Any, count: int, body: Any, *, is_parallel: bool = False) -> Any:
        from tvm import tirx

        kind = tirx.ForKind.PARALLEL if is_parallel else tirx.ForKind.SERIAL
        return tirx.For(number, self.index(0), self.index(count), kind, body)

    def vector(self, lanes: int, store: Callable[[Any], Any]) -> Any:
        """Return what stores one vector. store: what stores a lane, given its number."""
        from tvm import tirx

        lane = self.var("lane")
        kind = tirx.ForKind.VECTORIZED
        return tirx.For(lane, self.index(0), self.index(lanes), kind, store(lane))

    def unfused(self, number: Any, counts: Sequence[int]) -> list[Any]:
        """Return the indices of loops that are fused into one."""
        from tvm import tirx

        found, rest = [], number
        for count in reversed(counts):
            is_one = count == 1
            found.append(self.index(0) if is_one else tirx.floormod(rest, self.index(count)))
            rest = rest if is_one else tirx.floordiv(rest, self.index(count))
        return found[::-1]


def buffer(name: str, *shape: int, dtype: str = "float32") -> Any:
    """Return memory for values."""
    from tvm import tirx

    return tirx.decl_buffer(shape, dtype, name=name)


def block(name: str, statements: Sequence[Any], buffers: Sequence[Any]) -> Any:
    """Return statements with the memory that they alone use."""
    from tvm import tirx
    from tvm.s_tir import SBlock, SBlockRealize

    made = SBlock([], [], [], name, tirx.stmt_seq(*statements), None, buffers)
    return SBlockRealize([], tirx.const(True, "bool"), made)


def zero(to: Any, lane: Any) -> Any:
    """Return what stores zero in a lane of a vector."""
    from tvm import tirx

    return tirx.BufferStore(to, tirx.const(0, str(to.dtype)), [lane])
