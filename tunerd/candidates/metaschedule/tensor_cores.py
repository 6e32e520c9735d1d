"""Sketches on tensor cores: products of 16 bits, summed in fp32.

MetaSchedule's rules for them look for a product of two matrices of 16 bits. A convolution that pads
its input pads what was widened, so the padded input is narrowed first, by a step of the trace: what
it holds was of 16 bits before. Sketches that sum in 16 bits are left out, and so are vectors of 16
elements, of which TVM makes no CUDA that compiles.

TVM's intrinsics are for float16; the same ones for bfloat16 are made of its generators.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from tunerd.candidates.tensor_intrinsics import load_tensor_intrinsics
from tunerd.vocabulary import BF16, FP16, Task, architecture

MARK = '"Tensorize"'  # of a recipe that needs the intrinsics
_TENSORIZED = "meta_schedule.auto_tensorize"  # an annotation
_DTYPES = {FP16: "float16", BF16: "bfloat16"}
_LEAST_ARCH = {FP16: 70, BF16: 80}  # CUDA C++ Programming Guide, warp matrix functions
_SIDE = 16  # of the matrices that an instruction multiplies
# A product that is mostly padding is faster on CUDA cores. A stem of 3 channels and 7 x 7 taps is
# padded by a tenth.
_MOST_PADDING = 2.0
_VECTOR_LENGTHS = [1, 2, 4, 8]

_lock = threading.Lock()
_Trace = tuple[list[Any], list[Any]]


def is_tensorized(instructions: Sequence[Any]) -> bool:
    """Say whether a sketch computes on tensor cores."""
    return any(kind == "Annotate" and of == [_TENSORIZED] for kind, _, of, _ in instructions)


def register_intrinsics() -> None:
    """Register the intrinsics of TVM, and those of bfloat16; once per process, in seconds."""
    load_tensor_intrinsics()
    with _lock:
        _register_bfloat16()


def tensor_core_traces(
    task: Task, mod: Any, generate: Callable[[Any, Sequence[Any]], list[_Trace]]
) -> list[_Trace]:
    """Return the sketches of a task on tensor cores; none where there is no product for them.

    generate: returns the sketches that rules make of a module.
    """
    from tvm.s_tir import Schedule
    from tvm.s_tir.schedule import Trace

    dtype = _DTYPES.get(task.precision)
    arch = architecture(task.target.json).removeprefix("sm_").rstrip("af")
    if dtype is None or not arch.isdecimal() or int(arch) < _LEAST_ARCH[task.precision]:
        return []
    if sum(arg.dtype == dtype for arg in task.args[:-1]) < 2:
        return []
    register_intrinsics()
    narrowed = Schedule(mod, error_render_level="fast")
    for name in _padded_inputs(narrowed, dtype):
        narrowed.unsafe_set_dtype(narrowed.get_sblock(name), 0, dtype)
    # Its names must not be those of the trace that comes after it.
    before = [
        [kind, [f"own_{n}" for n in inputs], of, [f"own_{n}" for n in outputs]]
        for kind, inputs, of, outputs in _plain(narrowed.trace.as_json())[0]
    ]
    found = []
    for instructions, decisions in generate(narrowed.mod, _rules(task.precision)):
        if not is_tensorized(instructions) or _padding(task, decisions) > _MOST_PADDING:
            continue
        shifted = [[i + len(before), decided] for i, decided in decisions]
        schedule = Schedule(mod, error_render_level="fast")
        Trace.apply_json_to_schedule([[*before, *instructions], shifted], schedule)
        found.append(_plain(schedule.trace.as_json()))
    return found


def _plain(trace: Any) -> Any:
    from tunerd.candidates.metaschedule.space import plain

    return plain(trace)


def _padded_inputs(schedule: Any, dtype: str) -> list[str]:
    """Return blocks that widen values of 16 bits and move them, as padding does."""
    from tvm import tirx

    root = schedule.get_sblock("root")
    inside = list(schedule.get(root).alloc_buffers)
    found = []
    for block in map(schedule.get, schedule.get_child_blocks(root)):
        store = block.body
        if not isinstance(store, tirx.BufferStore):
            continue
        is_inside = any(store.buffer.same_as(each) for each in inside)
        if is_inside and _is_moved(store.value, dtype):
            found.append(str(block.name_hint))
    return found


def _is_moved(value: Any, dtype: str) -> bool:
    """Say whether a value is one of 16 bits that was widened, or in some places zero."""
    match type(value).__name__:
        case "FloatImm":
            return bool(value.value == 0.0)
        case "Cast":
            load = value.value
            return type(load).__name__ == "TensorLoad" and str(load.source.ty.dtype) == dtype
        case "Call":
            is_choice = str(value.op.name).rpartition(".")[2] == "if_then_else"
            return is_choice and all(_is_moved(each, dtype) for each in list(value.args)[1:])
    return False


def _padding(task: Task, decisions: Sequence[Any]) -> float:
    """Return what a sketch multiplies, over what the task does."""
    if not task.flops:
        return 1.0
    products = 2.0 * _SIDE**3
    for _, decided in decisions:
        for factor in decided if isinstance(decided, list) else ():
            products *= factor
    return products / task.flops


@functools.cache
def _rules(precision: str) -> tuple[Any, ...]:
    """Return MetaSchedule's rules for tensor cores, with sums in fp32 alone."""
    from tvm.s_tir import meta_schedule as ms

    stock = ms.ScheduleRule.create("cuda-tensorcore")
    others = [r for r in stock if not isinstance(r, ms.schedule_rule.MultiLevelTilingTensorCore)]
    tiling = ms.schedule_rule.MultiLevelTilingTensorCore(
        intrin_groups=[_group(precision, transposed) for transposed in (False, True)],
        structure="SSSRRSRS",
        tile_binds=["blockIdx.y", "blockIdx.x", "threadIdx.y"],
        max_innermost_factor=4,
        vector_load_lens=_VECTOR_LENGTHS,
        reuse_read=ms.schedule_rule.ReuseType(req="must", levels=[4], scope="shared.dyn"),
        reuse_write=ms.schedule_rule.ReuseType(req="must", levels=[2], scope="shared.dyn"),
        use_software_pipeline=False,
    )
    return (others[0], tiling, *others[1:])


def _group(precision: str, transposed: bool) -> dict[str, str]:
    """Name the intrinsics of a product; the names are TVM's, of float16."""
    short = "f16" if precision == FP16 else "bf16"
    trans = "_trans" if transposed else ""
    size = f"{_SIDE}x{_SIDE}x{_SIDE}"
    return {
        "init": f"wmma_fill_{size}_f32",
        "load_a": f"wmma_load_{size}_{short}_a_shared_dyn",
        "load_b": f"wmma_load_{size}_{short}_b{trans}_shared_dyn",
        "compute": f"wmma_sync_{size}_{short}{short}f32{trans}",
        "store": f"wmma_store_{size}_f32_shared_dyn",
    }


@functools.cache
def _register_bfloat16() -> None:
    from tvm.s_tir import TensorIntrin
    from tvm.s_tir.tensor_intrin import cuda

    sides = (_SIDE, _SIDE, _SIDE)
    for transposed in (False, True):
        names = _group(BF16, transposed)
        load_b = cuda.get_wmma_load_intrin(*sides, "bfloat16", "shared.dyn", True, transposed)
        TensorIntrin.register(names["load_b"], *load_b)
        sync = cuda.get_wmma_sync_intrin(*sides, "bfloat16", "float32", transposed)
        TensorIntrin.register(names["compute"], *sync)
    load_a = cuda.get_wmma_load_intrin(*sides, "bfloat16", "shared.dyn", False, False)
    TensorIntrin.register(_group(BF16, False)["load_a"], *load_a)
