"""Lowered -> Tasks: one task per distinct kernel of the model."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tunerd.frontend.relax.lowering import Lowered, make_target
from tunerd.vocabulary import FP16, FP32, TargetSpec, Task, TensorSpec

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.tirx import PrimFunc

_LONGEST_NAME = 60


def extract_tasks(
    lowered: Lowered, target: TargetSpec, *, precision: str = "", tenants: int | None = None
) -> tuple[Task, ...]:
    """Return the kernels of `lowered`, each once, in the order in which the model first calls them.

    Where no precision is given, a task has that of its tensors. `tenants` is how many models of the
    architecture its kernels serve at once, in lanes.

    A kernel that only copies, as a reshape of an output does, is no task: nothing can be gained.
    Nor is a concatenation or a split that is left out, as it is without lanes.
    """
    import tvm
    from tvm import relax
    from tvm.s_tir import meta_schedule as ms

    from tunerd.frontend.relax.joins import joins_of

    calls = _calls(lowered, joins_of(lowered.mod).left_out if tenants is None else frozenset())
    tasks = {}
    labels: Counter[str] = Counter()
    for each in ms.relax_integration.extract_tasks(lowered.mod, make_target(target)):
        mod = each.dispatched[0]
        func = mod["main"]
        called = calls.get(_workload(mod))
        if called is None or relax.analysis.has_reshape_pattern(func):
            continue
        args = _args(func)
        task = Task(
            task_id=_task_id(mod, args),
            name=_label(str(each.task_name), labels),
            weight=called.count,
            flops=_flops(mod),
            args=args,
            weight_args=tuple(sorted(called.weight_args)),
            target=target,
            mod_json=tvm.ir.save_json(mod),
            precision=precision or _exported_precision(args),
        )
        tasks[called.position] = task.for_tenants(tenants or 1)
    return tuple(task for _, task in sorted(tasks.items()))


def like(task: Task, func: PrimFunc) -> Task:
    """Return the task of a kernel that computes what another's does, from or into other tensors."""
    import tvm

    mod = tvm.get_global_func("tvm.s_tir.meta_schedule.normalize_mod")(func)
    args = _args(mod["main"])
    return replace(task, task_id=_task_id(mod, args), args=args, mod_json=tvm.ir.save_json(mod))


def _label(name: str, known: Counter[str]) -> str:
    """Return a kernel's name, which lists its operators, short enough for a table."""
    if len(name) <= _LONGEST_NAME:
        return name
    first = name[:_LONGEST_NAME].rpartition("_")[0]
    known[first] += 1
    return f"{first}_etc{known[first] if known[first] > 1 else ''}"


def architecture_of(lowered: Lowered) -> str:
    """Return a digest of what a lowered model computes, whatever its weights are.

    Models of one architecture have the same one in any process: names of variables do not matter.
    """
    weights = [(spec.shape, str(spec.dtype)) for spec in lowered.weights.values()]
    said = f"{_workload(lowered.mod):016x} {weights}"
    return hashlib.sha256(said.encode()).hexdigest()


@dataclass
class _Calls:
    position: int  # of the first call in the model
    weight_args: set[int]  # arguments that are hoisted weights in every call
    count: int = 0


def _calls(lowered: Lowered, left_out: Collection[Any]) -> dict[int, _Calls]:
    """Return how `main` calls each workload, by the hash of its normalized function.

    left_out: variables that are bound to calls that an artifact does not make.
    """
    import tvm
    from tvm import relax

    normalize = tvm.get_global_func("tvm.s_tir.meta_schedule.normalize_mod")
    main = lowered.mod["main"]
    weights = {p.name for p in main.params[lowered.num_inputs :]}
    workloads: dict[str, int] = {}  # by name of the function
    calls: dict[int, _Calls] = {}
    for block in main.body.blocks:
        for binding in block.bindings:
            call = binding.value
            is_call = isinstance(call, relax.Call) and call.op.name == "relax.call_tir"
            if not is_call or binding.var in left_out:
                continue
            name = call.args[0].name_hint
            if name not in workloads:
                workloads[name] = _workload(normalize(lowered.mod[name]))
            constant = {
                i
                for i, arg in enumerate(call.args[1])
                if isinstance(arg, relax.Var) and arg.name in weights
            }
            known = calls.setdefault(workloads[name], _Calls(len(calls), constant))
            known.weight_args &= constant
            known.count += 1
    return calls


def _workload(mod: IRModule) -> int:
    """Return TVM's hash of a normalized module: names of variables do not matter to it."""
    import tvm_ffi

    return int(tvm_ffi.structural_hash(mod))


def _exported_precision(args: tuple[TensorSpec, ...]) -> str:
    return FP16 if any(arg.dtype == "float16" for arg in args) else FP32


def _task_id(mod: IRModule, args: tuple[TensorSpec, ...]) -> str:
    """Return 12 hex digits that are the same in every process and every model.

    The JSON of a workload has the names of the model's variables in it, so it will not do.
    """
    shapes = [(arg.shape, arg.dtype) for arg in args]
    return hashlib.sha256(f"{_workload(mod):016x} {shapes}".encode()).hexdigest()[:12]


def _args(func: PrimFunc) -> tuple[TensorSpec, ...]:
    from tvm.s_tir.meta_schedule.arg_info import ArgInfo

    infos = ArgInfo.from_prim_func(func)
    return tuple(
        TensorSpec(str(param.name), tuple(int(d) for d in info.shape), str(info.dtype))
        for param, info in zip(func.params, infos, strict=True)
    )


def _flops(mod: IRModule) -> float:
    from tvm.s_tir.analysis import estimate_tir_flops

    try:
        return float(estimate_tir_flops(mod))
    except Exception:  # an operation or a loop that TVM's estimate does not know
        return 0.0
