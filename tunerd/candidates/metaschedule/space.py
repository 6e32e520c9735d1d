"""Task -> DesignSpace: what MetaSchedule's rules make of a task, before anything is decided."""

from __future__ import annotations

import functools
import json
import logging
from dataclasses import dataclass, replace
from typing import Any

from tunerd.candidates.metaschedule.access import accesses_of
from tunerd.candidates.metaschedule.design import Design, Limits, Sketch
from tunerd.candidates.metaschedule.knobs import Choices
from tunerd.candidates.metaschedule.tensor_cores import tensor_core_traces
from tunerd.candidates.metaschedule.traces import SOFTWARE_PIPELINE
from tunerd.vocabulary import Task


@dataclass(frozen=True)
class DesignSpace:
    """A task's sketches, and what a choice of them is checked by."""

    task: Task
    mod: Any  # the task's unscheduled IRModule
    traces: tuple[Any, ...]  # of its sketches
    sms: int | None
    limits: Limits
    postprocs: tuple[Any, ...]

    @functools.cached_property
    def design(self) -> Design:
        sms = self.sms and self.sms / self.task.tenants
        return Design(self.traces, accesses_of(self.mod), sms=sms)

    def at(self, sms: int | None) -> DesignSpace:
        """Return the same sketches at another share of a GPU."""
        return self if sms == self.sms else replace(self, sms=sms)

    def allows(self, sketch: Sketch, row: Choices) -> bool:
        """Say whether a choice keeps the limits, as far as that can be told from its numbers."""
        return bool(sketch.fits(row[None], self.limits)[0])


def design_space(task: Task, *, sms: int | None = None, rand_state: int = 1) -> DesignSpace:
    """Generate the sketches of a task; raises what TVM raises where it has none.

    sms: of the share of a GPU that is tuned for. Of several models each has its part of them.
    """
    import tvm
    from tvm.s_tir import meta_schedule as ms

    mod = tvm.ir.load_json(task.mod_json)
    target = tvm.target.Target(task.target.json)
    postprocs: tuple[Any, ...] = ()

    def generated(of: Any, rules: list[Any], kind: str) -> list[Any]:
        nonlocal postprocs
        space = ms.space_generator.PostOrderApply(
            sch_rules=rules, postprocs=kind, mutator_probs=kind
        )
        context = _tune_context(of, target, space=space, name=task.name, rand_state=rand_state)
        try:
            traces = [plain(s.trace.as_json()) for s in context.generate_design_space()]
        except IndexError:  # it looks for loops of a product's consumer that tiling has changed
            left = [r for r in rules if not isinstance(r, ms.schedule_rule.CrossThreadReduction)]
            if len(left) == len(rules):
                raise
            return generated(of, left, kind)
        postprocs = tuple(
            postproc
            for postproc in context.space_generator.postprocs
            # Weights of several models lie as each model has them, for whatever number of lanes.
            if task.tenants == 1 or not isinstance(postproc, ms.postproc.RewriteLayout)
        )
        return traces

    traces = []
    if task.target.is_cuda:
        traces = tensor_core_traces(
            task, mod, lambda of, rules: generated(of, list(rules), "cuda-tensorcore")
        )
    if not traces:
        kind = "cuda" if task.target.is_cuda else "llvm"
        traces = generated(mod, list(ms.ScheduleRule.create(kind)), kind)
        if task.target.is_cuda:
            traces = [_unrolled_late(trace) for trace in traces]
    return DesignSpace(
        task=task,
        mod=mod,
        traces=tuple(traces),
        sms=sms,
        limits=_limits(task.target.json),
        postprocs=postprocs,
    )


def _unrolled_late(trace: Any) -> Any:
    """Let NVRTC unroll instead of TVM, which makes nearly the same machine code of less source.

    scripts/lab/search/unrolling.py compares them. Not a software pipeline: its waits are numbered.
    """
    text = json.dumps(trace)
    if SOFTWARE_PIPELINE in text:
        return trace
    return json.loads(
        text.replace("meta_schedule.unroll_explicit", "meta_schedule.unroll_implicit")
    )


def _limits(target_json: str) -> Limits:
    target = json.loads(target_json)
    known = {
        "max_threads": target.get("max_threads_per_block"),
        "shared_bytes": target.get("max_shared_memory_per_block"),
    }
    return Limits(**{name: int(value) for name, value in known.items() if value})


def _tune_context(mod: Any, target: Any, *, space: Any, name: str, rand_state: int) -> Any:
    """Make a TuneContext as its own constructor does, without importing every tensor intrinsic.

    That import takes 10 to 20 s in each process, and fp32 schedules use none of them.
    """
    from tvm.s_tir.meta_schedule import TuneContext, _ffi_api
    from tvm.s_tir.meta_schedule.logging import get_logging_func

    context = TuneContext.__new__(TuneContext)
    context.__init_handle_by_constructor__(
        _ffi_api.TuneContext,
        mod,
        target,
        space,
        None,  # no search strategy
        name,
        1,
        rand_state,
        get_logging_func(_search_log),
    )
    _ffi_api.TuneContextInitialize(context)
    return context


_search_log = logging.getLogger("tunerd.candidates.metaschedule.search.tvm")
_search_log.setLevel(logging.ERROR)  # TVM tells every rule that it does not have


def plain(value: Any) -> Any:
    """Return TVM's containers as Python's, so that json can write them."""
    if isinstance(value, bool | int | float | str) or value is None:
        if isinstance(value, bool):
            return bool(value)
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value)
        return str(value) if value is not None else None
    if isinstance(value, dict) or hasattr(value, "items"):
        return {str(k): plain(v) for k, v in value.items()}
    if hasattr(value, "value") and isinstance(value.value, int | float):
        return value.value
    return [plain(v) for v in value]
