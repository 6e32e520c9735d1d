"""A memory-bandwidth hog: a kernel that streams through more memory than the cache holds.

The triad of STREAM (McCalpin, 1995), out = left + 3 * right, over arrays that are used once each
time. On CPUs all cores of the slice share it; on GPUs it is DLight's schedule.
"""

from __future__ import annotations

import hashlib

from tunerd.builder.build import build_candidate
from tunerd.errors import HostError
from tunerd.runner.load import Load
from tunerd.system import cores, gpus
from tunerd.vocabulary import Failure, TargetSpec, Task, TensorSpec, default_candidate

_USUAL_CACHE_BYTES = 64 << 20  # where nobody tells
_LEAST_ARRAY_BYTES = 32 << 20
_ARRAYS = 3
_FACTOR = 3.0


def memory_hog(target: TargetSpec, *, cores: int, hogs: int = 1) -> tuple[Load, int]:
    """Build a hog; return it and how many bytes one repeat reads and writes.

    Args:
        cores: of the slice it will run in; GPUs need none.
        hogs: how many will run at once: together they use over twice the last-level cache.
    """
    length = _array_bytes(target, hogs) // 4
    task = _triad(target, length, cores)
    build = build_candidate(task, default_candidate(task))
    if isinstance(build, Failure):
        raise HostError(f"the memory hog cannot be built here: {build.message[-300:]}")
    return Load(build=build), _ARRAYS * 4 * length


def _array_bytes(target: TargetSpec, hogs: int) -> int:
    if target.is_cuda:
        cache = max((gpu.l2_bytes or 0 for gpu in gpus.visible_gpus()[0]), default=0)
    else:
        cache = cores.last_level_cache_bytes()
    wanted = 2 * (cache or _USUAL_CACHE_BYTES) // (_ARRAYS * hogs)
    room = cores.memory_bytes() // (8 * _ARRAYS * hogs)
    # Whole chunks for any number of cores up to 64, and vectors of 16.
    return max(_LEAST_ARRAY_BYTES, min(wanted, room)) // 4096 * 4096


def _triad(target: TargetSpec, length: int, cores: int) -> Task:
    import tvm
    from tvm import te

    left = te.placeholder((length,), name="left")
    right = te.placeholder((length,), name="right")
    out = te.compute((length,), lambda i: left[i] + right[i] * _FACTOR, name="out")
    mod = tvm.IRModule({"main": te.create_prim_func([left, right, out])})
    if not target.is_cuda:
        schedule = tvm.s_tir.Schedule(mod)
        (loop,) = schedule.get_loops(schedule.get_sblock("out", "main"))
        part, chunk, lane = schedule.split(loop, [max(1, cores), None, 16])
        schedule.parallel(part)
        schedule.vectorize(lane)
        del chunk
        mod = schedule.mod
    mod_json = tvm.ir.save_json(mod)
    args = tuple(TensorSpec(name, (length,), "float32") for name in ("left", "right", "out"))
    return Task(
        task_id=hashlib.sha256(mod_json.encode()).hexdigest()[:12],
        name="memory-hog",
        weight=1,
        flops=2.0 * length,
        args=args,
        weight_args=(),
        target=target,
        mod_json=mod_json,
    )
