"""Candidate -> Build | Failure: lower it, generate code, link it into a shared library.

Builds run in threads of one long-lived process: TVM and NVRTC work without the GIL, and a fresh
process would pay seconds for its imports.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import logging
import tempfile
import threading
import time
import traceback
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from tunerd.builder import library, nvrtc
from tunerd.builder.library import export_library, load_tvm
from tunerd.builder.lowering import tir_pipeline
from tunerd.candidates import registry
from tunerd.candidates.base import ENTRY, LoweredKernel, taken
from tunerd.candidates.tensor_intrinsics import load_tensor_intrinsics
from tunerd.errors import DiskError, HostError
from tunerd.system import files
from tunerd.vocabulary import (
    BF16,
    FP16,
    TF32,
    Build,
    Candidate,
    Failure,
    Kind,
    Layout,
    Stage,
    TargetSpec,
    Task,
    TensorSpec,
    architecture,
    in_lanes,
)

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.runtime import Module

log = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 2000
_LAYOUT_FREE = "layout_free_buffers"  # a function's attribute: weights that a schedule may rewrite
_REWRITES_LAYOUT = "meta_schedule.layout_rewrite_preproc"  # a block's annotation


def build_problem(target: TargetSpec) -> str | None:
    """Say why this machine cannot build for `target` and what to do, or None where it can."""
    if library.linker() is None:
        return library.NO_LINKER
    return nvrtc.cuda_build_problem() if target.is_cuda else None


def build_candidate(
    task: Task,
    candidate: Candidate,
    *,
    lowered: LoweredKernel | None = None,
    timeout_secs: float = 60,
) -> Build | Failure:
    """Build one candidate from its recipe, or from `lowered`, which its recipe means.

    Raises HostError where this machine cannot build.
    """
    if problem := build_problem(task.target):
        raise HostError(problem)
    outcome: Future[Build | Failure] = Future()

    def work() -> None:
        try:
            outcome.set_result(_link_of(task, candidate, lowered))
        except DiskError as error:
            outcome.set_exception(error)
        except Exception as error:  # whatever TVM throws belongs to this candidate
            message = "".join(traceback.format_exception_only(error)).strip()
            outcome.set_result(Failure(Stage.BUILD, Kind.COMPILE, message[-MAX_MESSAGE_CHARS:]))

    # A thread cannot be killed: a build over its time is left to end by itself.
    thread = threading.Thread(target=work, name=f"build-{candidate.candidate_id}", daemon=True)
    thread.start()
    try:
        return outcome.result(timeout=timeout_secs)
    except TimeoutError:
        log.warning("%s of %s: build abandoned", candidate.candidate_id, task.name)
        message = f"the build took over {timeout_secs:g} s and was abandoned"
        return Failure(Stage.BUILD, Kind.TIMEOUT, message)


def preload(target: TargetSpec, precision: str = "") -> None:
    """Import what builds and searches for a target import sooner or later.

    precision: that kernels compute in, where it is known. TVM's tensor intrinsics take a second.
    """
    load_tvm()
    for source in registry.SOURCES.values():
        for name in source.imports(target):
            importlib.import_module(name)
    if target.is_cuda and precision in (TF32, FP16, BF16):
        load_tensor_intrinsics()


def _link_of(task: Task, candidate: Candidate, lowered: LoweredKernel | None) -> Build:
    started = time.perf_counter()
    tvm = load_tvm()
    if lowered is None:
        lowered = registry.lower(task, candidate)
    # A build's caller takes the arguments from the build, so what TVM would check of them is right.
    # With the checks a small kernel builds in 1.5 times the time (scripts/lab/compile/kernels.py).
    unchecked = tvm.transform.PassContext(config={"tirx.disable_assert": True})
    if lowered.symbol:
        if (lowered.lanes or 1) != task.tenants:
            raise ValueError(f"the kernel is for {lowered.lanes or 1} models, not {task.tenants}")
        with unchecked:
            module = tvm.tirx.build(lowered.mod, target=tvm.target.Target(task.target.json))
        return _linked(
            task,
            candidate,
            module,
            args=taken(task.args, lowered.casts, lowered.layouts),
            lowered=lowered,
            started=started,
            layouts=lowered.layouts,
        )
    mod = lowered.mod
    from tvm.s_tir.meta_schedule.arg_info import ArgInfo
    from tvm.s_tir.transform import RemoveWeightLayoutRewriteBlock

    from tunerd.builder.tenants import for_tenants

    target = tvm.target.Target(task.target.json)
    layouts = lowered.layouts
    if _LAYOUT_FREE in (mod[ENTRY].attrs or {}):
        layouts += _layouts(mod)
    # As MetaSchedule's builder does: the weights come in the layout that the schedule wants.
    mod = RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(mod)
    infos = ArgInfo.from_prim_func(mod[ENTRY])
    args = tuple(
        TensorSpec(spec.name, tuple(int(extent) for extent in info.shape), str(info.dtype))
        for spec, info in zip(task.args, infos, strict=True)
    )
    if task.tenants > 1:
        if layouts:
            raise ValueError(
                "a schedule with its weights in a layout of its own is for one model: the weights "
                "of several lie as each model has them, for all numbers of lanes alike"
            )
        func = for_tenants(mod[ENTRY], task.weight_args, task.tenants, is_cuda=task.target.is_cuda)
        mod = tvm.IRModule({ENTRY: func.with_attr("global_symbol", ENTRY)})
    with unchecked, target:
        pipeline = tir_pipeline() if task.target.is_cuda else None
        module = tvm.tirx.build(mod, target=target, pipeline=pipeline)
    if task.target.is_cuda and not module.imports:
        # This TVM's VerifyMemory lets it pass, and the host code would touch the GPU's memory.
        raise ValueError("no loop of the schedule is bound to GPU threads, so there is no kernel")
    return _linked(
        task, candidate, module, args=args, lowered=lowered, started=started, layouts=layouts
    )


def _linked(
    task: Task,
    candidate: Candidate,
    module: Module,
    *,
    args: tuple[TensorSpec, ...],
    lowered: LoweredKernel,
    started: float,
    layouts: tuple[tuple[int, Layout], ...] = (),
) -> Build:
    arch = architecture(task.target.json) if task.target.is_cuda else None
    root = Path(tempfile.gettempdir())
    files.require_room(root)
    with (
        files.disk_errors_said(root),
        tempfile.TemporaryDirectory(prefix="tunerd-build-", dir=root) as folder,
    ):
        path = Path(folder, "kernel.so")
        compiler = export_library(module, path, arch=arch, kernels=lowered.kernels)
        code = path.read_bytes()
    if lowered.calls:
        compiler = lowered.symbol
    weights = task.weight_args
    if task.tenants > 1:
        args = in_lanes(args, weights, task.tenants)
        weights = tuple(i + 1 for i in weights)
    return Build(
        candidate=candidate,
        library=code,
        library_sha256=hashlib.sha256(code).hexdigest(),
        build_secs=time.perf_counter() - started,
        args=args,
        weight_args=weights,
        compiler=compiler,
        layouts=layouts,
        scratch=lowered.scratch,
        precision=task.precision,
        tenants=task.tenants,
        calls=lowered.calls,
    )


def _layouts(mod: IRModule) -> tuple[tuple[int, Layout], ...]:
    """Return `Build.layouts` of a scheduled module, from the blocks that would rewrite weights.

    Such a block copies each weight to its place in the new layout. Where the place of a weight in
    the task's own is a sum of strides along the new axes, their order follows from the strides; a
    layout of which that does not hold is left out.
    """
    tvm = load_tvm()
    from tvm.s_tir import Schedule
    from tvm.sym import detect_linear_equation

    found = []
    schedule = Schedule(mod, error_render_level="fast")
    for block_rv in schedule.get_child_blocks(schedule.get_sblock("root")):
        block = schedule.get(block_rv)
        if _REWRITES_LAYOUT not in block.annotations:
            continue
        store, load = block.body, block.body.value
        own = [int(extent) for extent in load.source.shape]
        places = tvm.tirx.IndexMap(list(load.indices), list(store.indices), None).inverse(own)
        flat = functools.reduce(
            lambda sum_, part: sum_ * part[1] + part[0],
            zip(places.final_indices, own, strict=True),
            0,
        )
        strides = detect_linear_equation(flat, list(places.initial_indices))[:-1]
        if strides:
            (argument,) = (i for i, p in enumerate(mod[ENTRY].params) if p.same_as(load.source))
            order = sorted(range(len(strides)), key=lambda axis: -int(strides[axis]))
            split = tuple(int(store.buffer.shape[axis]) for axis in order)
            found.append((argument, Layout(split, tuple(map(order.index, range(len(order)))))))
    return tuple(found)
