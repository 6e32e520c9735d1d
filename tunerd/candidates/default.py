"""The default schedule of a task: what every other candidate is compared with.

DLight's schedule on CUDA, which has too few rules for CPUs. On llvm sums of products are cut for
the vector registers by the template's estimate. All else is plain loops, without those of values
that are read once, as of a transpose before a reshape. Its recipe is empty.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from tunerd.candidates.base import (
    CACHED_TASKS,
    ENTRY,
    CandidateSource,
    LoweredKernel,
    Search,
    SearchSettings,
    module_of,
)
from tunerd.candidates.registers.first import FirstCut, first_cut
from tunerd.candidates.tensor_intrinsics import load_tensor_intrinsics
from tunerd.vocabulary import (
    DEFAULT_SOURCE,
    Proposal,
    Result,
    TargetSpec,
    Task,
    TrainingRow,
    TransferredResults,
    default_candidate,
)

if TYPE_CHECKING:
    from tvm.ir import GlobalVar, IRModule
    from tvm.target import Target
    from tvm.tirx import PrimFunc

log = logging.getLogger(__name__)

_defaults: dict[tuple[int, str], PrimFunc | None] = {}  # by structural hash and target
_lock = threading.Lock()


class DefaultSource(CandidateSource):
    """Has one candidate of every task."""

    name = DEFAULT_SOURCE

    def imports(self, target: TargetSpec) -> tuple[str, ...]:
        return ("tvm.s_tir.dlight",) if target.is_cuda else ()

    def lower(self, task: Task, recipe: str, lanes: int | None = None) -> LoweredKernel:
        import tvm

        if recipe:
            raise ValueError("a default schedule has no recipe")
        packed = packed_default(task) if lanes is None else None
        if packed is not None:
            return packed
        return LoweredKernel(default_schedule(module_of(task), tvm.target.Target(task.target.json)))

    def search(self, settings: SearchSettings) -> Search:
        return _OnlyDefault()


class _OnlyDefault(Search):
    """Proposes the default once."""

    def learn(self, transferred: Sequence[TransferredResults], tasks: Mapping[str, Task]) -> None:
        """Learn nothing: there is nothing to choose."""

    def propose(
        self,
        task: Task,
        count: int,
        *,
        results: Sequence[Result] = (),
        exclude: Collection[str] = (),
        rows: Sequence[TrainingRow] = (),
    ) -> Proposal:
        started = time.perf_counter()
        only = default_candidate(task)
        is_known = only.candidate_id in {*exclude, *(r.candidate.candidate_id for r in results)}
        found = () if is_known or not count else (only,)
        message = "" if found else "a task has one default schedule"
        return Proposal(found, not found, message, time.perf_counter() - started)


def default_schedule(mod: IRModule, target: Target) -> IRModule:
    """Schedule every function of `mod` that has no schedule as the default of its target.

    On llvm by the template of registers, where it takes the function, else as plain loops without
    those of what is read once. On CUDA by DLight's rules.
    Where these raise, or make what TVM cannot lower, as of grouped 1x1 convolutions, a function
    gets DLight's simplest rule. Raises ValueError where that fails, too.
    """
    import tvm
    import tvm_ffi

    rules = _by_dlight if target.kind.name == "cuda" else _for_cpus
    open_ = [
        (var, func)
        for var, func in mod.functions_items()
        if isinstance(func, tvm.tirx.PrimFunc) and not (func.attrs or {}).get("tirx.is_scheduled")
    ]

    def work(each: tuple[GlobalVar, PrimFunc]) -> tuple[GlobalVar, PrimFunc | None]:
        var, func = each
        known = (int(tvm_ffi.structural_hash(func)), str(target))
        with _lock:
            if known in _defaults:
                return var, _defaults[known]
        made = rules(func, str(var.name_hint), target)
        with _lock:
            _defaults[known] = made
        return var, made

    if len(open_) == 1:  # without a pool, whose threads a process waits for when it ends
        made = dict(map(work, open_))
    else:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            made = dict(pool.map(work, open_))
    scheduled = {var: func for var, func in made.items() if func is not None}
    if not scheduled:
        return mod
    mod = mod.clone()
    mod.update(tvm.IRModule(scheduled))
    return mod


def _for_cpus(func: PrimFunc, name: str, target: Target) -> PrimFunc | None:
    """Return a function as scheduled for a CPU; None where nothing is to be changed."""
    import tvm

    mod = tvm.IRModule({ENTRY: func})
    cut = _first_cut(mod, name, target)
    made = _without_steps_between(mod, name) if cut is None else cut.mod
    return None if made is None else scheduled_as(func, made[ENTRY])


def _first_cut(
    mod: IRModule, name: str, target: Target, weight_args: Collection[int] = ()
) -> FirstCut | None:
    try:
        return first_cut(mod, target, weight_args)
    except Exception as error:  # of a primitive of TVM's, which may take no such loops
        log.info("%s: it is not cut for the registers: %s", name, error)
        return None


@functools.lru_cache(CACHED_TASKS)
def packed_default(task: Task) -> LoweredKernel | None:
    """Return a task's default where it takes a weight of its one model in a layout of its own."""
    import tvm

    if task.target.is_cuda or task.tenants > 1:
        return None
    mod, target = module_of(task), tvm.target.Target(task.target.json)
    cut = _first_cut(mod, task.name, target, task.weight_args)
    if cut is None or not cut.layouts:
        return None
    made = scheduled_as(mod[ENTRY], cut.mod[ENTRY])
    return LoweredKernel(tvm.IRModule({ENTRY: made}), layouts=cut.layouts)


def _without_steps_between(mod: IRModule, name: str) -> IRModule | None:
    """Compute what is read once, and by no reduction, where it is read; None: there is no such."""
    from tvm.s_tir import Schedule

    from tunerd.candidates.nests.blocks import blocks_of

    blocks = [block for block, _ in blocks_of(mod[ENTRY])]
    params = list(mod[ENTRY].params)
    inlined: list[str] = []
    for block in blocks:
        made = block.writes[0].source
        readers = [b for b in blocks if any(r.source.same_as(made) for r in b.reads)]
        regions = [r for b in readers for r in b.reads if r.source.same_as(made)]
        if (
            block.init is None
            and not any(made.same_as(param) for param in params)
            and len(readers) == 1
            and readers[0].init is None
            and all(getattr(at.extent, "value", 0) == 1 for r in regions for at in r.region)
        ):
            inlined.append(str(block.name_hint))
    if not inlined:
        return None
    try:
        schedule = Schedule(mod, error_render_level="fast")
        for block_name in inlined:
            schedule.compute_inline(schedule.get_sblock(block_name))
    except Exception as error:  # of loops around blocks, as of several tenants, or of a primitive
        log.info("%s: its steps stay: %s", name, error)
        return None
    return schedule.mod


def scheduled_as(func: PrimFunc, made: PrimFunc) -> PrimFunc:
    """Return what was made of a function in its place: with its attributes, and as scheduled."""
    made = made.without_attr("global_symbol")  # the model's name for it comes with its linking
    for key, value in (func.attrs or {}).items():
        made = made.with_attr(key, value)
    return made.with_attr("tirx.is_scheduled", True)


def _by_dlight(func: PrimFunc, name: str, target: Target) -> PrimFunc:
    import tvm
    from tvm.s_tir import dlight

    if {"float16", "int8"} & {str(param.dtype) for param in func.params}:
        load_tensor_intrinsics()  # which DLight's products in these types import
    simplest = dlight.gpu.Fallback()
    usual = (
        dlight.gpu.Matmul(),
        dlight.gpu.GEMV(),
        dlight.gpu.Reduction(),
        dlight.gpu.GeneralReduction(),
        simplest,
    )
    problem = ""
    for rules in (usual, (simplest,)):
        try:
            with target:  # a module of its own: it is changed
                mod = dlight.ApplyDefaultSchedule(*rules)(tvm.IRModule({ENTRY: func}))
            entry = mod[ENTRY].with_attr("global_symbol", ENTRY)
            with target:
                tvm.tirx.build(tvm.IRModule({ENTRY: entry}), target=target)
        except Exception as error:  # of a rule, or of any pass
            problem = next(iter(str(error).strip().splitlines()), type(error).__name__)
            log.info("%s: no default by %d rules: %s", name, len(rules), problem)
            continue
        return mod[ENTRY]
    raise ValueError(f"DLight has no schedule of {name} that TVM can lower: {problem}")
