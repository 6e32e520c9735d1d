#!/usr/bin/env python3
"""Time the two compilations of a build, of CUDA kernels and of the host code around them.

Samples schedules with MetaSchedule, and compiles the CUDA source of each that passes with the
stand-in headers and with those of libcu++, as TVM does. Says how often the stand-ins did, and
whether both made the same machine code. Then links one library in every way that is at hand, and
builds for this CPU with and without TVM's checks of arguments.
Needs no GPU. Writes every number to --json.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lab.compile.cubins import machine_code
from lab.lab import write
from tunerd.builder import nvrtc

ARCH = "sm_90"
TARGET = {
    "kind": "cuda",
    "arch": ARCH,
    "max_threads_per_block": 1024,
    "max_shared_memory_per_block": 49152,
    "thread_warp_size": 32,
    "max_num_threads": 1024,
}


def workloads() -> dict[str, Any]:
    """Return modules that use what CNNs and transformers use, fp32 and fp16."""
    import tvm
    from tvm import te, topi

    def conv(size: int, cin: int, cout: int, kernel: int, stride: int = 1) -> Any:
        data = te.placeholder((1, size, size, cin), name="data")
        weight = te.placeholder((kernel, kernel, cin, cout), name="weight")
        bias = te.placeholder((cout,), name="bias")
        out = topi.nn.relu(
            topi.add(topi.nn.conv2d_nhwc(data, weight, stride, kernel // 2, 1), bias)
        )
        return data, weight, bias, out

    def depthwise() -> Any:
        data = te.placeholder((1, 96, 28, 28), name="data")
        weight = te.placeholder((96, 1, 3, 3), name="weight")
        out = topi.nn.depthwise_conv2d_nchw(data, weight, 1, 1, 1)
        return data, weight, topi.clip(out, 0.0, 6.0)

    def matmul(m: int, n: int, k: int, after: Callable[[Any], Any], dtype: str = "float32") -> Any:
        left = te.placeholder((m, k), name="left", dtype=dtype)
        right = te.placeholder((k, n), name="right", dtype=dtype)
        return left, right, after(topi.matmul(left, right))

    def gelu(x: Any) -> Any:
        half = tvm.tirx.const(0.5, x.dtype)
        root = tvm.tirx.const(0.70710678, x.dtype)
        return te.compute(x.shape, lambda *i: x(*i) * (half + half * tvm.tirx.erf(x(*i) * root)))

    def batch_matmul() -> Any:
        left = te.placeholder((12, 128, 64), name="left")
        right = te.placeholder((12, 128, 64), name="right")
        return left, right, topi.nn.batch_matmul(left, right)

    def softmax() -> Any:
        data = te.placeholder((128, 1000), name="data")
        return data, topi.nn.softmax(data)

    def max_pool() -> Any:
        data = te.placeholder((1, 64, 56, 56), name="data")
        out = topi.nn.pool2d(data, (3, 3), (2, 2), (1, 1), (1, 1, 1, 1), "max", layout="NCHW")
        return data, out

    made = {
        "conv2d_56x64x64_3x3": conv(56, 64, 64, 3),
        "conv2d_28x128x256_1x1": conv(28, 128, 256, 1),
        "conv2d_14x256x512_3x3_s2": conv(14, 256, 512, 3, 2),
        "depthwise_28x96_relu6": depthwise(),
        "matmul_128": matmul(128, 128, 128, lambda x: x),
        "matmul_512_gelu": matmul(512, 512, 512, gelu),
        "matmul_256_sigmoid": matmul(256, 1024, 256, topi.sigmoid),
        "matmul_256_tanh": matmul(256, 512, 256, topi.tanh),
        "batch_matmul_12x128x64": batch_matmul(),
        "softmax_128x1000": softmax(),
        "max_pool_56x64": max_pool(),
        "matmul_256_fp16": matmul(256, 256, 256, topi.nn.relu, "float16"),
    }
    return {
        name: tvm.IRModule({"main": te.create_prim_func(list(tensors))})
        for name, tensors in made.items()
    }


def sampled_sources(mod: Any, *, kernels: int, samples: int, seed: int) -> Iterator[str]:
    """Yield the CUDA source of up to `kernels` schedules that pass, of `samples` drawn."""
    import tvm
    from tvm.s_tir import Schedule
    from tvm.s_tir import meta_schedule as ms
    from tvm.s_tir.schedule import ScheduleError, Trace

    target = tvm.target.Target(TARGET)
    with target:
        context = ms.TuneContext(mod=mod, target=target, space_generator="post-order-apply")
        spaces = [space.trace for space in context.generate_design_space()]
        for draw in range(samples):
            space = spaces[draw % len(spaces)]
            schedule = Schedule(mod, seed=seed + draw + 1, error_render_level="fast")
            try:
                Trace(space.insts, {}).apply_to_schedule(schedule, remove_postproc=True)
            except ScheduleError:
                continue
            if all(rule.apply(schedule) for rule in context.space_generator.postprocs):
                try:
                    module = tvm.tirx.build(schedule.mod, target=target)
                except tvm.error.InternalError:
                    continue  # TVM's lowering; no compiler sees it
                yield module.imports[0].inspect_source("cuda")
                kernels -= 1
            if not kernels:
                return


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    value = work()
    return time.perf_counter() - started, value


def compile_both(source: str) -> dict[str, Any]:
    """Compile one source in both ways, and say how long each took."""

    def stand_ins() -> bytes | str:
        try:
            return nvrtc.run_nvrtc(source, ARCH, headers=nvrtc.STAND_INS)
        except nvrtc.CudaCompileError as error:
            return str(error)

    lean_secs, lean = timed(stand_ins)
    full_secs, full = timed(lambda: nvrtc.run_nvrtc(source, ARCH))
    return {
        "source_chars": len(source),
        "stand_in_secs": lean_secs,
        "libcuxx_secs": full_secs,
        "error": lean if isinstance(lean, str) else None,
        "same_machine_code": isinstance(lean, bytes) and machine_code(lean) == machine_code(full),
    }


def link_times(mod: Any, repeats: int) -> dict[str, float]:
    """Return the median seconds of linking the host object of `mod` with each linker found."""
    import tvm

    from tunerd.builder import library

    times: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        module = tvm.tirx.build(mod, target=tvm.target.Target({"kind": "llvm"}))
        writes = [timed(lambda: module.write_to_file(f"{folder}/k.o"))[0] for _ in range(repeats)]
        times["(write the object)"] = statistics.median(writes)
        commands = {
            "g++ -shared": ["g++", "-shared", "-fPIC"],
            "cc -shared": ["cc", "-shared", "-fPIC"],
            "cc -fuse-ld=gold": ["cc", "-shared", "-fuse-ld=gold"],
            "ld.gold -shared": ["ld.gold", "-shared"],
            "ld.lld -shared": ["ld.lld", "-shared"],
            "ld -shared": ["ld", "-shared"],
        }
        ways: dict[str, Callable[[], Any]] = {
            name: lambda c=command: subprocess.run(  # type: ignore[misc]
                [*c, "-o", f"{folder}/k.so", f"{folder}/k.o"], check=True, capture_output=True
            )
            for name, command in commands.items()
            if shutil.which(command[0])
        }
        ways["tunerd"] = lambda: library._link(f"{folder}/k.so", [f"{folder}/k.o"])
        for name, way in ways.items():
            try:
                times[name] = statistics.median(timed(way)[0] for _ in range(repeats))
            except subprocess.CalledProcessError:
                continue  # the driver is here, its -fuse-ld is not
    return times


def check_times(modules: dict[str, Any], repeats: int) -> list[dict[str, Any]]:
    """Return the core seconds of builds for this CPU, with TVM's checks of arguments and without.

    In turns. The schedules are TVM's default: loops as they are.
    """
    import tvm

    from tunerd.system import targets

    target = tvm.target.Target(json.loads(targets.cpu_target_json(1).json))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, mod in modules.items():
            secs: dict[bool, list[float]] = {True: [], False: []}
            for _ in range(repeats):
                for is_checked, found in secs.items():
                    started = time.process_time()
                    config = {"tirx.disable_assert": not is_checked}
                    with tvm.transform.PassContext(config=config):
                        module = tvm.tirx.build(mod, target=target)
                    module.write_to_file(f"{folder}/k.o")
                    found.append(time.process_time() - started)
            rows.append({"workload": name, "checked_secs": secs[True], "core_secs": secs[False]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", type=int, default=8, help="of each workload, at most")
    parser.add_argument("--samples", type=int, default=300, help="schedules drawn for them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=20, help="of each link")
    parser.add_argument("--json", type=Path, help="where to write every number")
    options = parser.parse_args()
    if problem := nvrtc.cuda_build_problem():
        parser.exit(13, problem + "\n")
    nvrtc.preload()
    rows = []
    modules = workloads()
    for name, mod in modules.items():
        sources = sampled_sources(
            mod, kernels=options.kernels, samples=options.samples, seed=options.seed
        )
        mine = [{"workload": name, **compile_both(source)} for source in sources]
        rows += mine
        fine = sum(row["error"] is None for row in mine)
        print(f"{name}: {len(mine)} kernels, {fine} compiled with the stand-ins", flush=True)
    links = link_times(modules["conv2d_28x128x256_1x1"], options.repeats)

    def median(key: str) -> float:
        return float(statistics.median(row[key] for row in rows))

    print(f"kernels: {len(rows)}, without libcu++: {sum(r['error'] is None for r in rows)}")
    print(f"with the same machine code: {sum(r['same_machine_code'] for r in rows)}")
    print(f"median seconds: {median('stand_in_secs'):.3f}, libcu++ {median('libcuxx_secs'):.3f}")
    for name, seconds in links.items():
        print(f"{name}: {1e3 * seconds:.1f} ms")
    checks = check_times(modules, options.repeats)
    ratios = [
        statistics.median(row["checked_secs"]) / statistics.median(row["core_secs"])
        for row in checks
    ]
    print(f"checks of arguments: {statistics.median(ratios):.2f} times the core time of a build")
    if options.json:
        report = {
            "machine": platform.machine(),
            "kernels": rows,
            "link_secs": links,
            "checks": checks,
        }
        write(options.json, report)


if __name__ == "__main__":
    main()
