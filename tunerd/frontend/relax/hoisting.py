"""Reshapes and selections of rows before what computes each row by itself.

A reshape between a product and the sum of a residual keeps these two kernels apart, and where only
one row of the result is wanted, as of a class token, all the others need not be computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import relax
from tvm.ir import IRModule
from tvm.relax.expr_functor import PyExprMutator, mutator

from tunerd.frontend.relax.constants import remove_redundant_reshapes
from tunerd.frontend.relax.movement import OF_ONE, OF_TWO, Graph, op_name, shape_of

# Dimensions that their other operands have at most.
_SINKS = {"relax.matmul": 2, "relax.nn.layer_norm": 1, "relax.add": 1, "relax.multiply": 1}

_OF_QUANTIZERS = frozenset(("relax.astype", "relax.round"))  # of one value each, too


@dataclass(frozen=True)
class _Move:
    """A change of what is before the last dimension."""

    before: tuple[int, ...]  # the dimensions but the last
    after: tuple[int, ...]
    axis: int = -1  # of which one place is taken; without it, all are kept
    at: int = 0
    order: tuple[int, ...] = ()  # of a transpose

    def applied(self, expr: relax.Expr, emit: Callable[[relax.Expr], relax.Var]) -> relax.Expr:
        shape = shape_of(expr) or ()
        if self.order:
            return relax.op.permute_dims(expr, [*self.order, len(self.order)])
        if self.axis >= 0:
            expr = emit(relax.op.strided_slice(expr, [self.axis], [self.at], [self.at + 1]))
        return relax.op.reshape(expr, (*self.after, shape[-1]))


def sink_moves_of_rows(mod: IRModule, *, transposes: bool = False) -> IRModule:
    """Return `mod` with reshapes moved down in `main`, so that kernels of one kind are alike."""
    sinker = _Sinker(mod)
    sinker.graph, sinker.transposes = Graph(mod), transposes
    main = sinker.visit_expr(mod["main"])
    mod = mod.clone()
    mod.update_func(mod.get_global_var("main"), main)
    return mod


def hoist_moves_of_rows(mod: IRModule, *, transposes: bool = False) -> IRModule:
    """Return `mod` with these moved up in `main`, as far as that needs no copies.

    With transposes, which are copies where they end up unless something reads or writes so.
    """
    kinds = ("relax.reshape", *(("relax.permute_dims",) if transposes else ()), "relax.take")
    for moves in kinds:  # rows that one took are not reshaped
        graph = Graph(mod)
        hoister = _Hoister(mod)
        hoister.graph, hoister.moves = graph, moves
        hoister.wanted = _wanted(graph, moves)
        main = hoister.visit_expr(mod["main"])
        mod = mod.clone()
        mod.update_func(mod.get_global_var("main"), main)
        mod = remove_redundant_reshapes(relax.transform.DeadCodeElimination()(mod))
    return mod


def _wanted(graph: Graph, moves: str) -> dict[int, _Move]:
    """Return, by address of a call, what all that read it make of it, where it may come before."""
    wanted: dict[int, _Move] = {}
    for binding in reversed(graph.bindings):
        call = binding.value
        found = {
            _read(graph, moves, user, binding.var, wanted)
            for user in graph.users.get(binding.var, ())
        }
        if len(found) == 1 and (move := found.pop()) is not None and _passes(graph, call, move):
            wanted[call.__chandle__()] = move
    # What would no longer follow its product, but a reshape of it, would be no part of its kernel.
    for binding in graph.bindings:
        call = binding.value
        is_anchor = op_name(call) in ("relax.matmul", "relax.nn.layer_norm")
        if call.__chandle__() in wanted and not is_anchor:
            sources = (graph.value(a) for a in call.args if isinstance(a, relax.Var))
            if not any(s.__chandle__() in wanted for s in sources):
                del wanted[call.__chandle__()]
    return wanted


def _read(graph: Graph, moves: str, user: Any, var: Any, wanted: dict[int, _Move]) -> _Move | None:
    """Return what a user makes of a variable; None where that is anything else."""
    if (move := _move_of(graph, user, moves)) is not None:
        return move
    move = wanted.get(user.__chandle__())
    shape = shape_of(var)
    is_row = move is not None and shape is not None and shape[:-1] == move.before
    return move if is_row and (_is_binary(user) or user.args[0].same_as(var)) else None


def _move_of(graph: Graph, call: Any, moves: str) -> _Move | None:
    """Return a call that changes only what is before the last dimension, as a move."""
    name, shape = op_name(call), shape_of(call)
    if name != moves:
        return None
    source = shape_of(call.args[0])
    if not source or not shape or source[-1] != shape[-1]:
        return None
    if name == "relax.reshape":
        return _Move(source[:-1], shape[:-1])
    if name == "relax.permute_dims":
        order = tuple(int(a) for a in call.attrs.axes or ())
        is_of_rows = order[-1:] == (len(source) - 1,)
        return _Move(source[:-1], shape[:-1], order=order[:-1]) if is_of_rows else None
    at = graph.number(call.args[1])
    axis = call.attrs.axis
    if at is None or axis is None or not 0 <= int(axis) < len(source) - 1:
        return None
    if not 0 <= at < source[int(axis)]:
        return None
    return _Move(source[:-1], shape[:-1], int(axis), int(at))


def _passes(graph: Graph, call: Any, move: _Move) -> bool:
    """Whether a call computes each row by itself."""
    name, shape = op_name(call), shape_of(call)
    if shape is None or shape[:-1] != move.before:
        return False
    if name in OF_ONE or name in _OF_QUANTIZERS:
        return True
    if name == "relax.matmul":
        weight = graph.constant(call.args[1])
        return weight is not None and weight.ndim == 2
    if name == "relax.nn.layer_norm":
        return _is_of_rows(call)
    whole = [shape_of(a) == shape for a in call.args]
    if not _is_binary(call) or (move.order and all(whole)):
        return False
    return all(w or _is_vector(shape_of(a), shape) for w, a in zip(whole, call.args, strict=True))


def _is_of_rows(norm: Any) -> bool:
    axes = [int(a) for a in norm.attrs.axes]
    return axes in ([-1], [len(shape_of(norm) or ()) - 1])


def _rebuilt(call: Any, operands: list[relax.Expr]) -> relax.Expr:
    """Return a call on operands that have other dimensions before the last one."""
    if op_name(call) != "relax.nn.layer_norm":
        return relax.Call(call.op, operands, call.attrs, ty_args=call.ty_args)
    how = call.attrs
    return relax.op.nn.layer_norm(
        *operands, axes=[-1], epsilon=how.epsilon, center=how.center, scale=how.scale
    )


def _is_binary(call: Any) -> bool:
    return op_name(call) in OF_TWO


def _is_vector(own: tuple[int, ...] | None, shape: tuple[int, ...]) -> bool:
    """Whether an operand is the same for all rows."""
    return (
        own is not None and math.prod(own) in (1, own[-1] if own else 1) and len(own) <= len(shape)
    )


@mutator
class _Sinker(PyExprMutator):  # type: ignore[misc]
    graph: Graph  # of the module as it was
    transposes: bool

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        visited = self.visit_expr_post_order(call)
        name, shape = op_name(call), shape_of(call)
        if shape is None or name not in _SINKS:
            return visited
        data, *others = visited.args
        before = self.lookup_binding(data) if isinstance(data, relax.Var) else None
        if not isinstance(before, relax.Call) or (
            name == "relax.nn.layer_norm" and not _is_of_rows(call)
        ):
            return visited
        most = _SINKS[name]
        ranks = [len(found) if (found := shape_of(o)) is not None else most + 1 for o in others]
        moved = _move_of(self.graph, before, "relax.reshape")
        source = (
            self.lookup_binding(before.args[0]) if isinstance(before.args[0], relax.Var) else None
        )
        if (
            moved is None
            and self.transposes
            and op_name(source)
            not in ("relax.reshape", "relax.permute_dims")  # another takes it up
            and self.graph.is_used_once(call.args[0])
        ):
            moved = _move_of(self.graph, before, "relax.permute_dims")
        if max(ranks) > most or moved is None:
            return visited
        made = self.builder_.emit(_rebuilt(call, [before.args[0], *others]))
        return moved.applied(made, self.builder_.emit)


@mutator
class _Hoister(PyExprMutator):  # type: ignore[misc]
    graph: Graph  # of the module as it was
    moves: str  # the operator that moves up
    wanted: dict[int, _Move]

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        move = self.wanted.get(call.__chandle__())
        if move is None:
            own = _move_of(self.graph, call, self.moves)
            if own is not None and self._is_moved(call.args[0]):
                return self.visit_expr(call.args[0])
            return super().visit_call_(call)
        rows = call.args if _is_binary(call) else call.args[:1]
        shape = shape_of(call)
        moved = [self._moved(a, shape_of(a) == shape or not _is_binary(call), move) for a in rows]
        others = [self.visit_expr(a) for a in call.args[len(rows) :]]
        return _rebuilt(call, [*moved, *others])

    def _is_moved(self, expr: Any) -> bool:
        return isinstance(expr, relax.Var) and self._key(expr) in self.wanted

    def _key(self, var: Any) -> int:
        return int(self.graph.value(var).__chandle__())

    def _moved(self, expr: Any, is_row: bool, move: _Move) -> relax.Expr:
        if is_row and self._is_moved(expr):
            return self.visit_expr(expr)
        visited = self.visit_expr(expr)
        shape = shape_of(expr) or ()
        if is_row:
            return self.builder_.emit(move.applied(visited, self.builder_.emit))
        if len(shape) <= 1:
            return visited
        return self.builder_.emit(relax.op.reshape(visited, shape[-1:]))
