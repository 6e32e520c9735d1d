"""The kernels of a model with their schedules: the winners of its tasks, and defaults."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tunerd.artifacts.device_kernels import WithKernels, with_device_kernels
from tunerd.builder.library import load_tvm
from tunerd.candidates import registry
from tunerd.candidates.base import ENTRY, DeviceKernel, LoweredKernel
from tunerd.candidates.default import default_schedule
from tunerd.errors import InputError, ModelError
from tunerd.vocabulary import Arrays, Candidate, LibraryCall, TargetSpec, Task

if TYPE_CHECKING:
    from tvm.ir import GlobalVar, IRModule
    from tvm.target import Target
    from tvm.tirx import PrimFunc


@dataclass(frozen=True)
class Scheduled:
    """A model whose kernels need no schedule any more."""

    mod: IRModule
    hits: dict[str, int]  # how many kernels of the model each task covers
    kernels: tuple[DeviceKernel, ...] = ()  # that TVM did not make
    counters: Arrays = field(default_factory=dict)  # weights that these add to the model's
    casts: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # and weights in other types
    orders: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)  # of axes
    gone: frozenset[str] = frozenset()  # weights that it takes no more
    calls: tuple[LibraryCall, ...] = ()


def schedule(
    mod: IRModule,
    tasks: Sequence[Task],
    winners: Mapping[str, Candidate],
    target: TargetSpec,
    *,
    tenants: int | None = None,
) -> Scheduled:
    """Return `mod` with every kernel scheduled, and for so many tenants where some are given.

    A kernel belongs to the task whose workload equals it structurally, as in MetaSchedule's own
    database. Raises InputError for a winner whose task covers no kernel of `mod`, or whose trace
    does not apply, and ModelError for a kernel that has no default.
    """
    tvm = load_tvm()
    wanted = {task_id: c for task_id, c in winners.items() if is_tuned(c)}
    find_task = _task_finder(tasks)
    hits = dict.fromkeys((*(t.task_id for t in tasks), *wanted), 0)
    covered: list[tuple[GlobalVar, PrimFunc, Task]] = []
    for global_var, func in mod.functions_items():
        task = find_task(func) if isinstance(func, tvm.tirx.PrimFunc) else None
        if task is None:
            continue
        hits[task.task_id] += 1
        if task.task_id in wanted:
            covered.append((global_var, func, task))
    lowered = _lower_each({task.task_id: task for _, _, task in covered}, wanted, tenants)
    scheduled = {}
    foreign: dict[GlobalVar, LoweredKernel] = {}
    for global_var, func, task in covered:
        kernel = lowered[task.task_id]
        if kernel.symbol:
            foreign[global_var] = kernel
        else:
            scheduled[global_var] = _scheduled_kernel(func, kernel)
    missing = sorted(task_id for task_id in wanted if hits[task_id] == 0)
    if missing:
        raise InputError(
            f"tuned tasks {', '.join(missing)} cover no kernel of this model; the records are of "
            "another model or target, so use a run folder of this one"
        )
    mod = mod.clone()
    mod.update(tvm.IRModule(scheduled))
    kernels = tuple(kernel for each in foreign.values() for kernel in each.kernels)
    calls = tuple(call for each in foreign.values() for call in each.calls)
    tvm_target = tvm.target.Target(target.json)
    try:
        if tenants is not None:
            weights = {var: task.weight_args for var, _, task in covered}
            mod, foreign = _for_tenants(mod, foreign, weights, tenants, tvm_target)
        made = with_device_kernels(mod, foreign) if foreign else WithKernels(mod)
        mod = default_schedule(made.mod, tvm_target)
        added = (made.counters, made.casts, made.orders, made.gone)
        return Scheduled(mod, hits, kernels, *added, calls)
    except ValueError as error:
        raise ModelError(f"{error}; export the model without this operator") from error


def _for_tenants(
    mod: IRModule,
    foreign: Mapping[GlobalVar, LoweredKernel],
    weights: Mapping[GlobalVar, Sequence[int]],
    tenants: int,
    target: Target,
) -> tuple[IRModule, dict[GlobalVar, LoweredKernel]]:
    """Return a model for several tenants, and its calls of kernels that TVM did not make."""
    from tunerd.artifacts.tenants import Foreign, model_for_tenants

    own = {var: func for var, func in mod.functions_items() if var not in foreign}
    mod = mod.clone()
    mod.update(default_schedule(type(mod)(own), target))
    given = {
        str(var.name_hint): Foreign(kernel, frozenset(weights[var]))
        for var, kernel in foreign.items()
    }
    made = model_for_tenants(mod, given, tenants, target)
    return made.mod, dict(made.foreign)


def is_tuned(winner: Candidate | None) -> bool:
    return winner is not None and not winner.is_default


def _task_finder(tasks: Sequence[Task]) -> Callable[[PrimFunc], Task | None]:
    import tvm
    import tvm_ffi

    normalize = tvm.get_global_func("tvm.s_tir.meta_schedule.normalize_mod")
    workloads: dict[int, list[tuple[IRModule, Task]]] = {}
    for task in tasks:
        workload = tvm.ir.load_json(task.mod_json)
        workloads.setdefault(tvm_ffi.structural_hash(workload), []).append((workload, task))

    def find(func: PrimFunc) -> Task | None:
        mod = normalize(func)
        same = workloads.get(tvm_ffi.structural_hash(mod), ())
        return next((t for w, t in same if tvm_ffi.structural_equal(mod, w)), None)

    return find


def _lower_each(
    tasks: Mapping[str, Task], winners: Mapping[str, Candidate], lanes: int | None
) -> dict[str, LoweredKernel]:
    """Lower the winner of each task, several at once: some sources compile meanwhile."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        lowered = pool.map(
            lambda task: _lowered(task, winners[task.task_id], lanes), tasks.values()
        )
        return dict(zip(tasks, lowered, strict=True))


def _lowered(task: Task, winner: Candidate, lanes: int | None) -> LoweredKernel:
    try:
        return registry.lower(task, winner, lanes)
    except Exception as error:  # whatever TVM throws belongs to this trace
        reason = next(iter(reversed(str(error).strip().splitlines())), type(error).__name__)
        raise InputError(
            f"the schedule {winner.candidate_id} does not apply to task {task.name} "
            f"({task.task_id}): {reason}; tune the task again"
        ) from error


def _scheduled_kernel(func: PrimFunc, lowered: LoweredKernel) -> PrimFunc:
    best = lowered.mod[ENTRY]
    best = best.without_attr("global_symbol")  # the model's name for it comes with its linking
    for key, value in (func.attrs or {}).items():
        best = best.with_attr(key, value)
    return best.with_attr("tirx.is_scheduled", True)
