"""Builds that compute the same, and builds that do not, in a slice of this machine's cores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.lib.build_fixtures import (
    built,
    candidate_of,
    default_of,
    matmul_task,
    task_of,
    tiled_matmul,
)
from tunerd.builder import library
from tunerd.builder.build import build_candidate
from tunerd.candidates.metaschedule.search import Searcher
from tunerd.runner.agreement import SEEDS
from tunerd.runner.base import Runner
from tunerd.slices.simulated import SimulatedSlice
from tunerd.system.arrays import KERNEL_TOLERANCES, comparison_values
from tunerd.vocabulary import Build, Failure, Kind, Layout, SliceSpec, Stage, Task, TensorSpec

ROWS, DEPTH, COLUMNS = 32, 64, 48


def default_build(task: Task) -> Build:
    return built(build_candidate(task, default_of(task)))


def planted(library_of: Task, instead_of: Task) -> Build:
    """A build of one task with the library of another that takes the same arguments."""
    return replace(
        default_build(library_of), candidate=candidate_of(instead_of, tiled_matmul(instead_of))
    )


def test_two_schedules_of_one_task_agree(cores: Runner) -> None:
    task = matmul_task()
    other = built(build_candidate(task, candidate_of(task, tiled_matmul(task))))
    assert cores.agree(default_build(task), other) is None


def test_a_library_that_computes_something_else_is_a_wrong_answer(cores: Runner) -> None:
    task = matmul_task()
    failure = cores.agree(default_build(task), planted(matmul_task(after="negative"), task))
    assert failure is not None
    assert (failure.stage, failure.kind) == (Stage.VERIFY, Kind.WRONG_ANSWER)
    assert "1536 of 1536 elements" in failure.message


def test_a_simulated_slice_compares_real_results() -> None:
    task = matmul_task()
    runner = SimulatedSlice(SliceSpec("simulated-0-0", "simulated", 50)).launch()
    default = default_build(task)
    wrong = planted(matmul_task(after="negative"), task)
    assert runner.agree(default, default) is None
    assert isinstance(failure := runner.agree(default, wrong), Failure)
    assert failure.kind is Kind.WRONG_ANSWER
    assert runner.agree(replace(default, library=b""), wrong) is None  # made up


def test_a_library_that_does_not_load_is_a_failure_after_which_the_slice_works_on(
    cores: Runner,
) -> None:
    whole = default_build(matmul_task())
    failure = cores.agree(whole, replace(whole, library=whole.library[:100]))
    assert failure is not None
    assert failure.stage is Stage.VERIFY
    assert cores.agree(whole, whole) is None


def test_where_the_default_does_not_load_the_message_says_so(cores: Runner) -> None:
    whole = default_build(matmul_task())
    failure = cores.agree(replace(whole, library=whole.library[:100]), whole)
    assert failure is not None
    assert "the default schedule cannot be compared with" in failure.message


# --- kernels that compute something else -------------------------------------------------------


def te() -> Any:
    library.load_tvm()
    from tvm import te

    return te


def topi() -> Any:
    library.load_tvm()
    from tvm import topi

    return topi


def dense(
    finish: Callable[[Any], Any] = lambda product: product,
    *,
    row: Callable[[Any], Any] = lambda k: k,
    depth: int = DEPTH,
    dtype: str = "float32",
) -> Task:
    """A matrix product with something after it; a term takes the `row` of the weights."""
    left = te().placeholder((ROWS, DEPTH), dtype, name="left")
    right = te().placeholder((DEPTH, COLUMNS), dtype, name="right")
    k = te().reduce_axis((0, depth), "k")
    product = te().compute(
        (ROWS, COLUMNS), lambda i, j: te().sum(left[i, k] * right[row(k), j], axis=k)
    )
    return task_of([left, right, finish(product)])


def pointwise(of: Callable[[Any, Any], Any], dtype: str = "float32") -> Task:
    """What a function makes of each element of `x` and of `y`."""
    x = te().placeholder((40, 50), dtype, name="x")
    y = te().placeholder((40, 50), dtype, name="y")
    return task_of([x, y, te().compute(x.shape, lambda i, j: of(x[i, j], y[i, j]), name="out")])


def lookup(row: Callable[[Any], Any] = lambda index: index, *, rows: int = 2) -> Task:
    """Rows of a table by their numbers."""
    table = te().placeholder((rows, 16), name="table")
    ids = te().placeholder((60,), "int64", name="ids")
    return task_of([table, ids, te().compute((60, 16), lambda i, j: table[row(ids[i]), j])])


def difference(cores: Runner, right: Task, wrong: Task) -> Failure | None:
    return cores.agree(default_build(right), default_build(wrong))


def with_one_wrong(product: Any) -> Any:
    def wrong(i: Any, j: Any) -> Any:
        is_it = library.load_tvm().tirx.all(i == 17, j == 5)
        return te().if_then_else(is_it, -product[i, j], product[i, j])

    return te().compute(product.shape, wrong)


def relu(product: Any) -> Any:
    return topi().nn.relu(product)


WRONG: dict[str, Callable[[], tuple[Task, Task]]] = {
    "one element": lambda: (dense(), dense(with_one_wrong)),
    "without its ReLU": lambda: (dense(relu), dense()),
    "with a ReLU": lambda: (dense(), dense(relu)),
    "absolute values": lambda: (dense(), dense(lambda product: topi().abs(product))),
    "absolute inputs": lambda: (
        pointwise(lambda x, y: x * y),
        pointwise(lambda x, y: te().abs(x) * y),
    ),
    "another row of the weights": lambda: (dense(), dense(row=lambda k: (k + 1) % DEPTH)),
    "two rows swapped": lambda: (dense(), dense(row=lambda k: te().if_then_else(k < 2, 1 - k, k))),
    "a term less": lambda: (dense(), dense(depth=DEPTH - 1)),
    "half precision": lambda: (dense(relu, dtype="float16"), dense(dtype="float16")),
    "half precision, one element": lambda: (
        dense(dtype="float16"),
        dense(with_one_wrong, dtype="float16"),
    ),
    "half precision, the result in single": lambda: (
        pointwise(lambda x, y: (x + y).astype("float32"), "float16"),
        pointwise(lambda x, y: (x - y).astype("float32"), "float16"),
    ),
    "bfloat16": lambda: (
        pointwise(lambda x, y: x + y, "bfloat16"),
        pointwise(lambda x, y: x - y, "bfloat16"),
    ),
    "double precision": lambda: (
        pointwise(lambda x, y: x + y, "float64"),
        pointwise(lambda x, y: x + y.astype("float32").astype("float64"), "float64"),
    ),
    "integers": lambda: (
        pointwise(lambda x, y: x + y, "int32"),
        pointwise(lambda x, y: x | y, "int32"),
    ),
    "one row for all numbers": lambda: (lookup(), lookup(lambda index: index * 0)),
    "the other row": lambda: (lookup(), lookup(lambda index: 1 - index)),
    "without a root": lambda: (
        pointwise(lambda x, y: x * te().sqrt(y)),
        pointwise(lambda x, y: x * y),
    ),
}


@pytest.mark.parametrize("tasks", WRONG.values(), ids=WRONG)
def test_what_computes_something_else_is_found(
    cores: Runner, tasks: Callable[[], tuple[Task, Task]]
) -> None:
    right, wrong = tasks()
    failure = difference(cores, right, wrong)
    assert failure is not None
    assert (failure.stage, failure.kind) == (Stage.VERIFY, Kind.WRONG_ANSWER)


def test_a_single_wrong_element_is_counted(cores: Runner) -> None:
    failure = difference(cores, dense(), dense(with_one_wrong))
    assert failure is not None
    assert "1 of 1536 elements" in failure.message


SAME: dict[str, Callable[[], tuple[Task, Task]]] = {
    "a sum in another order": lambda: (dense(), dense(row=lambda k: k)),
    "half precision": lambda: (dense(relu, dtype="float16"), dense(relu, dtype="float16")),
    "half precision, the result in single": lambda: (
        pointwise(lambda x, y: (x + y + x).astype("float32"), "float16"),
        pointwise(lambda x, y: (x + x + y).astype("float32"), "float16"),
    ),
    "bfloat16": lambda: (
        pointwise(lambda x, y: x * y, "bfloat16"),
        pointwise(lambda x, y: y * x, "bfloat16"),
    ),
    "integers": lambda: (
        pointwise(lambda x, y: x + y, "int32"),
        pointwise(lambda x, y: y + x, "int32"),
    ),
    "a lookup": lambda: (lookup(), lookup(lambda index: 1 - (1 - index))),
    "a root": lambda: (
        pointwise(lambda x, y: x * te().sqrt(y)),
        pointwise(lambda x, y: te().sqrt(y) * x),
    ),
    "not a number": lambda: (
        pointwise(lambda x, y: x + te().sqrt(-1 - y)),
        pointwise(lambda x, y: te().sqrt(-1 - y) + x),
    ),
}


@pytest.mark.parametrize("tasks", SAME.values(), ids=SAME)
def test_what_computes_the_same_agrees(
    cores: Runner, tasks: Callable[[], tuple[Task, Task]]
) -> None:
    assert difference(cores, *tasks()) is None


@pytest.mark.parametrize("dtype", KERNEL_TOLERANCES)
def test_the_tolerance_is_where_the_table_has_it(cores: Runner, dtype: str) -> None:
    # At the largest element the absolute and the relative tolerance add up.
    tolerance = sum(KERNEL_TOLERANCES[dtype])

    def off_by(tolerances: float) -> Task:
        def scaled(x: Any, y: Any) -> Any:
            const = library.load_tvm().tirx.const
            return (x.astype("float64") * const(1 + tolerances * tolerance, "float64")).astype(
                dtype
            )

        return pointwise(scaled, dtype)

    assert difference(cores, off_by(0.0), off_by(0.9)) is None
    failure = difference(cores, off_by(0.0), off_by(1.1))
    assert failure is not None
    assert failure.kind is Kind.WRONG_ANSWER


# --- inputs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", KERNEL_TOLERANCES)
def test_floats_are_drawn_with_both_signs(dtype: str) -> None:
    values = comparison_values(TensorSpec("x", (1000,), dtype), 0, 0)
    assert values.dtype == dtype
    assert values.min() < -0.9
    assert values.max() > 0.9
    assert np.abs(values).max() <= 1


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int32", "int64"])
def test_integers_are_drawn_so_that_they_may_be_indices(dtype: str) -> None:
    values = comparison_values(TensorSpec("x", (1000,), dtype), 0, 0)
    assert values.dtype == dtype
    assert set(values.tolist()) == {0, 1}


def test_a_table_of_one_row_is_asked_for_no_other(cores: Runner) -> None:
    # What lies behind the table is not its own: equal kernels may find different things there.
    task = lookup(rows=1)
    always_first = lookup(lambda index: index * 0, rows=1)
    assert difference(cores, task, always_first) is None


def test_no_two_arguments_and_no_two_seeds_are_alike() -> None:
    spec = TensorSpec("x", (1000,), "float32")
    draws = [comparison_values(spec, seed, nth).tobytes() for seed in SEEDS for nth in range(3)]
    assert len(set(draws)) == len(draws) == 3 * len(SEEDS) >= 6
    assert comparison_values(spec, 0, 0).tobytes() == draws[0]


# --- weights in a layout of the schedule's own -------------------------------------------------


def rewritten(task: Task) -> Build:
    """A build that takes its weights in a layout of its own."""
    proposed = Searcher(seed=0, threads=1).propose(task, 8).candidates
    builds = (built(build_candidate(task, c)) for c in proposed)
    return next(b for b in builds if b.args[1].shape != task.args[1].shape)


def test_a_schedule_with_its_own_layout_of_the_weights_agrees(cores: Runner) -> None:
    task = matmul_task(weights=(1,))
    assert cores.agree(default_build(task), rewritten(task)) is None


def test_a_wrong_schedule_is_found_with_its_own_layout_of_the_weights_too(cores: Runner) -> None:
    task, wrong = matmul_task(weights=(1,)), matmul_task(weights=(1,), after="negative")
    failure = cores.agree(default_build(task), rewritten(wrong))
    assert failure is not None
    assert failure.kind is Kind.WRONG_ANSWER


def test_a_wrong_layout_of_the_weights_is_found(cores: Runner) -> None:
    task = matmul_task(weights=(1,))
    right = rewritten(task)
    ((argument, layout),) = right.layouts
    first, second, *rest = layout.split
    swapped = {0: 1, 1: 0}
    other = Layout((second, first, *rest), tuple(swapped.get(axis, axis) for axis in layout.axes))
    assert other.shape == layout.shape
    wrong = replace(right, layouts=((argument, other),))
    failure = cores.agree(default_build(task), wrong)
    assert failure is not None
    assert failure.kind is Kind.WRONG_ANSWER
    assert "T_matmul_NN differs" in failure.message


def test_a_default_with_a_layout_of_its_own_is_compared_with_weights_as_the_task_has_them(
    cores: Runner,
) -> None:
    task, wrong = matmul_task(weights=(1,)), matmul_task(weights=(1,), after="negative")
    default = rewritten(task)
    plain = built(build_candidate(task, candidate_of(task, tiled_matmul(task))))
    assert default.args[1].shape != plain.args[1].shape
    assert cores.agree(default, plain) is None
    assert cores.agree(default, default) is None
    failure = cores.agree(default, replace(plain, library=default_build(wrong).library))
    assert failure is not None
    assert "T_matmul_NN differs" in failure.message


def test_a_layout_of_the_weights_that_is_not_known_is_refused(cores: Runner) -> None:
    task = matmul_task(weights=(1,))
    failure = cores.agree(default_build(task), replace(rewritten(task), layouts=()))
    assert failure is not None
    assert "right is taken in a layout that is not known" in failure.message
