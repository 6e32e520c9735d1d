"""The kernels of a model with their schedules: the winners of its tasks, and defaults."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tunerd.artifacts.device_kernels import WithKernels, with_device_kernels
from tunerd.artifacts.in_place import InPlace, NotInPlace, in_place
from tunerd.builder.library import load_tvm
from tunerd.candidates import registry
from tunerd.candidates.base import ENTRY, DeviceKernel, LoweredKernel
from tunerd.candidates.default import default_schedule, packed_default, scheduled_as
from tunerd.errors import InputError, ModelError
from tunerd.frontend.relax.joins import Joins, joins_of
from tunerd.frontend.tasks import like
from tunerd.vocabulary import (
    Arrays,
    Candidate,
    Layout,
    LibraryCall,
    TargetSpec,
    Task,
    default_candidate,
)

if TYPE_CHECKING:
    from tvm.ir import GlobalVar, IRModule
    from tvm.target import Target
    from tvm.tirx import PrimFunc

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scheduled:
    """A model whose kernels need no schedule any more."""

    mod: IRModule
    hits: dict[str, int]  # how many kernels of the model each task covers
    kernels: tuple[DeviceKernel, ...] = ()  # that TVM did not make
    counters: Arrays = field(default_factory=dict)  # weights that these add to the model's
    casts: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # and weights in other types
    layouts: Mapping[str, tuple[str, Layout]] = field(default_factory=dict)
    gone: frozenset[str] = frozenset()  # weights that it takes no more
    calls: tuple[LibraryCall, ...] = ()


@dataclass(frozen=True)
class _Covered:
    """A kernel of the model with a winner, or whose default has layouts."""

    var: GlobalVar
    task: Task  # as the kernel is called: where it reaches into roots, no task of the run
    winner: Candidate
    roots: frozenset[Any]


def schedule(
    mod: IRModule,
    tasks: Sequence[Task],
    winners: Mapping[str, Candidate],
    target: TargetSpec,
    *,
    tenants: int | None = None,
) -> Scheduled:
    """Return `mod` with every kernel scheduled, and for so many tenants where some are given.

    Concatenations and splits are left out where `frontend.relax.joins` finds nothing in the way,
    and where each kernel around them has a schedule for where it reads and writes then.

    A kernel belongs to the task whose workload equals it structurally, as in MetaSchedule's own
    database. Raises InputError for a winner whose task covers no kernel of `mod`, or whose trace
    does not apply, and ModelError for a kernel that has no default.
    """
    wanted = {task_id: c for task_id, c in winners.items() if is_tuned(c)}
    if tenants is None:
        wanted |= _with_layouts(tasks, wanted)
    refused: frozenset[Any] = frozenset()  # roots of joins, in which a kernel has no schedule
    lowered: dict[str, LoweredKernel] = {}
    while True:
        joins = joins_of(mod, refused) if tenants is None else Joins({}, frozenset())
        try:
            placed = in_place(mod, joins)
            return _scheduled(placed, mod, tasks, wanted, target, tenants, lowered)
        except NotInPlace as error:
            log.info("not joined in place: %s", error)
            refused |= error.roots or {part.root for part in joins.parts.values()}


def _scheduled(
    placed: InPlace,
    original: IRModule,
    tasks: Sequence[Task],
    wanted: Mapping[str, Candidate],
    target: TargetSpec,
    tenants: int | None,
    lowered: dict[str, LoweredKernel],
) -> Scheduled:
    tvm = load_tvm()
    mod = placed.mod
    find_task = _task_finder(tasks)
    hits = dict.fromkeys((*(t.task_id for t in tasks), *wanted), 0)
    covered: list[_Covered] = []
    for global_var, func in mod.functions_items():
        if not isinstance(func, tvm.tirx.PrimFunc):
            continue
        name, roots = placed.made_of.get(str(global_var.name_hint), ("", frozenset()))
        task = find_task(original[name] if roots else func)
        if task is None:
            continue
        hits[task.task_id] += 1
        if task.task_id in wanted:
            own = like(task, func) if roots else task
            covered.append(_Covered(global_var, own, wanted[task.task_id], roots))
    _lower_each(covered, tenants, lowered)
    scheduled = {}
    foreign: dict[GlobalVar, LoweredKernel] = {}
    for each in covered:
        kernel = lowered[each.task.task_id]
        if kernel.symbol or kernel.layouts:
            foreign[each.var] = kernel
        else:
            scheduled[each.var] = scheduled_as(mod[each.var], kernel.mod[ENTRY])
    missing = sorted(i for i, winner in wanted.items() if is_tuned(winner) and hits[i] == 0)
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
            weights = {each.var: each.task.weight_args for each in covered}
            mod, foreign = _for_tenants(mod, foreign, weights, tenants, tvm_target)
        made = with_device_kernels(mod, foreign) if foreign else WithKernels(mod)
        mod = default_schedule(made.mod, tvm_target)
        added = (made.counters, made.casts, made.layouts, made.gone)
        return Scheduled(mod, hits, kernels, *added, calls)
    except ValueError as error:
        if placed.made_of:
            raise NotInPlace(str(error)) from error
        raise ModelError(f"{error}; export the model without this operator") from error


def _with_layouts(tasks: Sequence[Task], winners: Collection[str]) -> dict[str, Candidate]:
    """Return the defaults, of tasks without a winner, that take weights in a layout of their own.

    All others are scheduled where they stand in the model.
    """
    left = [t for t in tasks if t.task_id not in winners]
    return {t.task_id: default_candidate(t) for t in left if packed_default(t) is not None}


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
    covered: Sequence[_Covered], lanes: int | None, lowered: dict[str, LoweredKernel]
) -> None:
    """Lower the winner of each task, several at once: some sources compile meanwhile.

    lowered: by task_id, where they come; what is there already stays.
    """
    wanted = {each.task.task_id: each for each in covered if each.task.task_id not in lowered}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        made = list(pool.map(lambda each: _lowered(each, lanes), wanted.values()))
    failed = [each for each in made if isinstance(each, NotInPlace)]
    lowered |= {
        task_id: each
        for task_id, each in zip(wanted, made, strict=True)
        if not isinstance(each, NotInPlace)
    }
    if failed:
        roots = frozenset[Any]().union(*(each.roots for each in failed))
        raise NotInPlace("; ".join(map(str, failed)), roots)


def _lowered(each: _Covered, lanes: int | None) -> LoweredKernel | NotInPlace:
    task, winner = each.task, each.winner
    try:
        return registry.lower(task, winner, lanes)
    except Exception as error:  # whatever TVM throws belongs to this trace
        reason = next(iter(reversed(str(error).strip().splitlines())), type(error).__name__)
        if each.roots:
            return NotInPlace(f"{task.name}: {reason}", each.roots)
        raise InputError(
            f"the schedule {winner.candidate_id} does not apply to task {task.name} "
            f"({task.task_id}): {reason}; tune the task again"
        ) from error
