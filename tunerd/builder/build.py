"""Candidate -> Build | Failure: lower a schedule, generate code, link it into a shared library.

Builds run in threads of one long-lived process: TVM and NVRTC work without the GIL, and a fresh
process would pay seconds for its imports. What comes out needs no compiler where it is loaded: the
host code is linked here, and CUDA kernels are embedded as cubins of the target's architecture.

TVM makes cubins only beside a GPU driver: what calls its compile callback is the CUDA module of
libtvm_runtime_cuda.so. Elsewhere it silently embeds CUDA source, to be compiled when the library is
loaded. That module gives its process a context on the first GPU, 518 MiB on an H200, by the
cudaSetDevice of its destructor: every tuner would be a tenant of the GPU, outside of MPS. So TVM
embeds source everywhere, which is compiled here, each kernel by itself, and put into the packed
bytes (`packed_imports`).
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import hashlib
import importlib
import json
import logging
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunerd.builder import nvrtc
from tunerd.builder.packed_imports import with_cubins
from tunerd.errors import DiskError, HostError
from tunerd.system import files
from tunerd.vocabulary import Build, Candidate, Failure, Kind, Stage, TargetSpec, Task, TensorSpec

if TYPE_CHECKING:
    from tvm.ir import GlobalVar, IRModule
    from tvm.runtime import Executable, Module
    from tvm.target import Target
    from tvm.tirx import PrimFunc

log = logging.getLogger(__name__)

ENTRY = "main"  # the function that every library exports
_CUDA_MODULE = "ffi.Module.create.cuda"  # without it, TVM takes its stand-in, which holds source
MAX_MESSAGE_CHARS = 2000
_CACHED_TASKS = 256
_LAYOUT_FREE = "layout_free_buffers"  # a function's attribute: weights that a schedule may rewrite
_REWRITES_LAYOUT = "meta_schedule.layout_rewrite_preproc"  # a block's annotation
_PRELOADED = ("tvm.s_tir.meta_schedule", "xgboost")
_DEFAULTS_OF_CUDA = "tvm.s_tir.dlight"
_NO_LINKER = (
    "Builds need a linker: neither `ld` nor a C compiler is on the PATH. "
    "Install one, for example with: apt-get install binutils"
)

_modules: OrderedDict[str, IRModule] = OrderedDict()
_defaults: dict[tuple[int, str], PrimFunc] = {}  # by structural hash and target
_lock = threading.Lock()


def build_problem(target: TargetSpec) -> str | None:
    """Say why this machine cannot build for `target` and what to do, or None where it can."""
    if _linker() is None:
        return _NO_LINKER
    return nvrtc.cuda_build_problem() if target.is_cuda else None


def build_candidate(
    task: Task, candidate: Candidate, *, timeout_secs: float = 60
) -> Build | Failure:
    """Build one candidate from its trace. Raises HostError where this machine cannot build."""
    return _build(task, candidate, lambda: scheduled(task, candidate), timeout_secs)


def build_module(
    task: Task, candidate: Candidate, mod: IRModule, *, timeout_secs: float = 60
) -> Build | Failure:
    """Build a candidate whose schedule was applied already: `mod` is what its trace makes."""
    return _build(task, candidate, lambda: mod, timeout_secs)


def preload(target: TargetSpec) -> None:
    """Import what builds and searches for a target import sooner or later."""
    _tvm()
    for name in (*_PRELOADED, *((_DEFAULTS_OF_CUDA,) if target.is_cuda else ())):
        importlib.import_module(name)


def scheduled(task: Task, candidate: Candidate) -> IRModule:
    """Return the task's module with the candidate's schedule applied.

    The default is DLight's schedule on CUDA. On llvm it is the module as it is, which TVM's
    lowering turns into plain loops: DLight has too few rules for CPUs.
    """
    tvm = _tvm()
    mod = _unscheduled(task)
    if candidate.is_default:
        return default_schedule(mod, tvm.target.Target(task.target.json))
    if '"Tensorize"' in candidate.recipe:
        # Registers the intrinsics. Seconds long, and fp32 schedules without them need none.
        importlib.import_module("tvm.s_tir.tensor_intrin")
    from tvm.s_tir import Schedule
    from tvm.s_tir.schedule import Trace

    schedule = Schedule(mod, error_render_level="fast")
    Trace.apply_json_to_schedule(json.loads(candidate.recipe), schedule)
    return schedule.mod


def default_schedule(mod: IRModule, target: Target) -> IRModule:
    """Schedule every function of `mod` that has no schedule as the default of its target.

    On CUDA by DLight's rules. Where these raise, or make what TVM cannot lower, as of grouped 1x1
    convolutions, a function gets DLight's simplest rule. Raises ValueError where that fails, too.
    """
    if target.kind.name != "cuda":
        return mod
    tvm = _tvm()
    open_ = [
        (var, func)
        for var, func in mod.functions_items()
        if isinstance(func, tvm.tirx.PrimFunc) and not (func.attrs or {}).get("tirx.is_scheduled")
    ]

    def work(each: tuple[GlobalVar, PrimFunc]) -> tuple[GlobalVar, PrimFunc]:
        var, func = each
        return var, _default_of(func, str(var.name_hint), target)

    if len(open_) == 1:  # without a pool, whose threads a process waits for when it ends
        scheduled = dict(map(work, open_))
    else:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            scheduled = dict(pool.map(work, open_))
    mod = mod.clone()
    mod.update(tvm.IRModule(scheduled))
    return mod


def export_library(
    module: Module | Executable, path: Path, *, arch: str | None, threads: int = 1
) -> str:
    """Write compiled code as a shared library that loads without a compiler.

    For one task, or a whole model, whose CUDA kernels are compiled in so many `threads`. `arch` is
    the GPU architecture ("sm_90"), None on CPUs. Returns the compiler's name as `Build.compiler`
    has it.
    """
    compilers = {"llvm" if arch is None else "nvrtc"}

    def pack(root: Module, _system: bool, prefix: str, workspace: str) -> str:
        from tvm.runtime import _ffi_api

        blob = _ffi_api.ModulePackImportsToTensor(root).numpy().tobytes()
        for device in root._collect_from_import_tree(lambda m: m.kind == "cuda"):
            source = device.inspect_source("cuda")
            cubins = nvrtc.compile_kernels(source, arch or _current_arch(), threads=threads)
            compilers.update(cubin.compiler for cubin in cubins.values())
            blob = with_cubins(blob, source.encode(), {n: c.code for n, c in cubins.items()})
        tvm = _tvm()
        hosts = root._collect_from_import_tree(lambda m: m.kind == "llvm")
        # A model that hands its inputs through has no kernel, and no code of the host's.
        own = hosts[0].get_function("_get_target_string")() if hosts else None
        code = tvm.get_global_func("codegen.codegen_blob")(
            blob, False, own or str(tvm.target.Target("llvm")), prefix
        )
        target_path = f"{workspace}/{prefix}devc.o"
        code.write_to_file(target_path)
        return target_path

    module.export_library(str(path), fcompile=_link, fpack_imports=pack)
    return max(compilers, key=("llvm", "nvrtc", "nvrtc-fallback").index)


def _build(
    task: Task, candidate: Candidate, schedule: Callable[[], IRModule], timeout_secs: float
) -> Build | Failure:
    if problem := build_problem(task.target):
        raise HostError(problem)
    outcome: Future[Build | Failure] = Future()

    def work() -> None:
        try:
            outcome.set_result(_lower_and_link(task, candidate, schedule()))
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


def _lower_and_link(task: Task, candidate: Candidate, mod: IRModule) -> Build:
    started = time.perf_counter()
    tvm = _tvm()
    from tvm.s_tir.meta_schedule.arg_info import ArgInfo
    from tvm.s_tir.transform import RemoveWeightLayoutRewriteBlock

    target = tvm.target.Target(task.target.json)
    rewritten = _rewritten(mod) if _LAYOUT_FREE in (mod[ENTRY].attrs or {}) else ()
    # As MetaSchedule's builder does: the weights come in the layout that the schedule wants.
    mod = RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(mod)
    infos = ArgInfo.from_prim_func(mod[ENTRY])
    args = tuple(
        TensorSpec(spec.name, tuple(int(extent) for extent in info.shape), str(info.dtype))
        for spec, info in zip(task.args, infos, strict=True)
    )
    # Its caller takes the arguments from the build, so what TVM would check of them is right. With
    # the checks a small kernel takes 1.5 times as long to build (scripts/benchmark_compile).
    with tvm.transform.PassContext(config={"tirx.disable_assert": True}), target:
        module = tvm.tirx.build(mod, target=target)
    if task.target.is_cuda and not module.imports:
        # This TVM's VerifyMemory lets it pass, and the host code would touch the GPU's memory.
        raise ValueError("no loop of the schedule is bound to GPU threads, so there is no kernel")
    arch = str(target.attrs["arch"]) if task.target.is_cuda else None
    root = Path(tempfile.gettempdir())
    files.require_room(root)
    with (
        files.disk_errors_said(root),
        tempfile.TemporaryDirectory(prefix="tunerd-build-", dir=root) as folder,
    ):
        path = Path(folder, "kernel.so")
        compiler = export_library(module, path, arch=arch)
        library = path.read_bytes()
    return Build(
        candidate=candidate,
        library=library,
        library_sha256=hashlib.sha256(library).hexdigest(),
        build_secs=time.perf_counter() - started,
        args=args,
        weight_args=task.weight_args,
        compiler=compiler,
        rewritten=rewritten,
    )


def _rewritten(mod: IRModule) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Return `Build.rewritten` of a scheduled module, from the blocks that would rewrite weights.

    Such a block copies each weight to its place in the new layout. Where the place of a weight in
    the task's own is a sum of strides along the new axes, their order follows from the strides; a
    layout of which that does not hold is left out.
    """
    tvm = _tvm()
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
            axes = sorted(range(len(strides)), key=lambda axis: -int(strides[axis]))
            found.append((argument, tuple(axes)))
    return tuple(found)


def _unscheduled(task: Task) -> IRModule:
    with _lock:
        if mod := _modules.get(task.task_id):
            _modules.move_to_end(task.task_id)
            return mod
    mod = _tvm().ir.load_json(task.mod_json)
    with _lock:
        _modules[task.task_id] = mod
        while len(_modules) > _CACHED_TASKS:
            _modules.popitem(last=False)
    return mod


def _default_of(func: PrimFunc, name: str, target: Target) -> PrimFunc:
    tvm = _tvm()
    import tvm_ffi
    from tvm.s_tir import dlight

    known = (int(tvm_ffi.structural_hash(func)), str(target))
    with _lock:
        if known in _defaults:
            return _defaults[known]
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
        with _lock:
            _defaults[known] = mod[ENTRY]
        return mod[ENTRY]
    raise ValueError(f"DLight has no schedule of {name} that TVM can lower: {problem}")


@dataclasses.dataclass(frozen=True)
class _Linker:
    program: str
    libraries: tuple[str, ...]


@functools.cache
def _linker() -> _Linker | None:
    """Choose the linker itself: a compiler's driver takes 4 to 6 times as long for one object.

    Unlike the driver it is told no libraries. The one that matters is libm, as this process has
    loaded it: code that names no version of `expf` would bind to the oldest in glibc, which checks
    for errors. Measured by scripts/benchmark_compile.
    """
    if linker := shutil.which("ld"):
        with open("/proc/self/maps") as maps:
            loaded = {line.split()[-1] for line in maps if "/" in line}
        libraries = sorted(path for path in loaded if Path(path).name == "libm.so.6")
        return _Linker(linker, ("--as-needed", *libraries))
    driver = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    return _Linker(driver, ("-lm",)) if driver else None


def _link(output: str, objects: list[str], **_options: Any) -> None:
    linker = _linker()
    if linker is None:
        raise HostError(_NO_LINKER)
    command = [linker.program, "-shared", "-o", output, *objects, *linker.libraries]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == -signal.SIGTERM:  # `ray job stop` sends it to a driver's children, too
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        if os.strerror(errno.ENOSPC) in done.stderr:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), output)
        raise RuntimeError(f"{command[0]} failed: {done.stderr}")


def _current_arch() -> str:
    from tvm.support import nvcc
    from tvm.target import Target

    version = nvcc.get_target_compute_version(Target.current(allow_none=True))
    return f"sm_{version.replace('.', '')}"


@functools.cache
def _tvm() -> Any:
    """Import TVM with its CUDA libraries in reach, and take from it what makes a CUDA context."""
    nvrtc.preload()
    import tvm
    import tvm.tirx
    from tvm_ffi.registry import remove_global_func

    if tvm.get_global_func(_CUDA_MODULE, allow_missing=True) is not None:
        remove_global_func(_CUDA_MODULE)
    return tvm
