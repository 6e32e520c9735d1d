#!/usr/bin/env python3
"""Measure what programmatic dependent launches bring to chains of tensor-core kernels.

    scripts/lab/tensor_cores/launch_overlap.py --out FOLDER [--shares 40,100] [--batches 1,8]

A kernel of a model waits until the one before it has ended, and then begins to read its weights,
which no other kernel writes. With a programmatic dependent launch (CUDA programming guide,
"Programmatic Dependent Launch and Synchronization") its blocks start while the one before still
runs, do what needs none of its results, and wait for it then.

The chains are ResNet-50's 53 convolutions with their residuals and the max pooling, and the 48
GEMMs of BERT-base (128 tokens; attention and norms are left out), fp16 with fp32 accumulation, by
one Triton template with fused epilogues and split-K, each operation at the fastest of some
configurations, measured alone with cold weights. Each chain is one CUDA graph, launched in turns:

    serial    ordinary launches
    early     programmatic launches: a kernel lets the next one start at once, and waits for the one
              before it before it reads anything
    late      the same, but lets the next one start only after its own main loop
    prefetch  as early, and before it waits, it fetches its weights into the L2 cache

All must give the same bits. Needs one NVIDIA GPU of compute capability 9.0 or more, with MPS,
PyTorch and Triton. Writes overlap.json with every sample and overlap.txt.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MODES = ("serial", "early", "late", "prefetch")
WORKSPACE = 32 << 20  # fp32 values for split-K


# --- the template ------------------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator]
def conv(  # type: ignore[no-untyped-def]
    x_ptr,
    w_ptr,
    bias_ptr,
    res_ptr,
    out_ptr,
    ws_ptr,
    locks_ptr,
    M,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    N: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    PAD: tl.constexpr,
    HAS_RES: tl.constexpr,
    ACT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLIT_K: tl.constexpr,
    MODE: tl.constexpr,
):
    """Convolve NHWC by HWIO as an implicit GEMM, with bias, residual and activation.

    A GEMM is a convolution of 1x1. A step of K lies within one tap; the channels of a stem, fewer
    than a step, are taken with a row of taps at once. MODE is an index of MODES.
    """
    pid, split = tl.program_id(0), tl.program_id(1)
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    width = 4 * tiles_n
    first = pid // width * 4
    height = min(tiles_m - first, 4)
    tile_m, tile_n = first + pid % width % height, pid % width // height
    offs_m = tile_m * BM + tl.arange(0, BM)
    offs_n = tile_n * BN + tl.arange(0, BN)
    offs_k = tl.arange(0, BK)
    rows = tl.minimum(offs_m, M - 1)
    cols = tl.max_contiguous(tl.multiple_of(offs_n, BN), BN)
    BY_ROW: tl.constexpr = C % BK != 0
    STEPS: tl.constexpr = (KERNEL * C + BK - 1) // BK if BY_ROW else C // BK
    TAPS: tl.constexpr = KERNEL if BY_ROW else KERNEL * KERNEL
    KT: tl.constexpr = STEPS * TAPS
    PER: tl.constexpr = (KT + SPLIT_K - 1) // SPLIT_K
    begin = split * PER
    end = min(begin + PER, KT)
    if MODE > 0:
        if MODE != 2:
            gdc_launch_dependents()
        if MODE == 3 and not BY_ROW:
            LINES: tl.constexpr = (BN + 63) // 64  # 128 bytes each
            lines = tile_n * BN + tl.arange(0, LINES) * 64
            for kt in range(begin, end):
                at = w_ptr + (kt * BK + offs_k)[:, None] * N + lines[None, :]
                tl.inline_asm_elementwise(
                    "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
                    "=r,l",
                    [at.to(tl.int64)],
                    dtype=tl.int32,
                    is_pure=False,
                    pack=1,
                )
        gdc_wait()
    image = rows // (OH * OW)
    ih0 = rows // OW % OH * STRIDE - PAD
    iw0 = rows % OW * STRIDE - PAD
    base = ((image * H + ih0) * W + iw0) * C
    acc = tl.zeros((BM, BN), tl.float32)
    for kt in range(begin, end):
        tap, step = kt // STEPS, kt % STEPS
        if BY_ROW:
            r = step * BK + offs_k
            iw = iw0[:, None] + (r // C)[None, :]
            ih = (ih0 + tap)[:, None]
            inside = (ih >= 0) & (ih < H) & (iw >= 0) & (iw < W) & (r < KERNEL * C)[None, :]
            x = tl.load(x_ptr + base[:, None] + tap * (W * C) + r[None, :], mask=inside, other=0.0)
            k = tap * (KERNEL * C) + r
            there = (r < KERNEL * C)[:, None]
            w = tl.load(w_ptr + k[:, None] * N + cols[None, :], mask=there, other=0.0)
        else:
            kh, kw = tap // KERNEL, tap % KERNEL
            c = step * BK + offs_k
            at = x_ptr + (base + (kh * W + kw) * C)[:, None] + c[None, :]
            if KERNEL == 1 and PAD == 0:
                x = tl.load(at)
            else:
                ih, iw = ih0 + kh, iw0 + kw
                inside = (ih >= 0) & (ih < H) & (iw >= 0) & (iw < W)
                x = tl.load(at, mask=inside[:, None], other=0.0)
            k = kt * BK + offs_k
            w = tl.load(w_ptr + k[:, None] * N + cols[None, :])
        acc = tl.dot(x, w, acc)
    if MODE == 2:
        gdc_launch_dependents()
    last = True
    if SPLIT_K > 1:  # the splits are added in their order, by whoever comes last
        tiles = tiles_m * tiles_n
        at = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
        tl.store(ws_ptr + (split * tiles + pid) * (BM * BN) + at, acc)
        tl.debug_barrier()
        last = tl.atomic_add(locks_ptr + pid, 1, sem="acq_rel") == SPLIT_K - 1
        if last:
            acc = tl.zeros((BM, BN), tl.float32)
            for s in range(SPLIT_K):
                acc += tl.load(ws_ptr + (s * tiles + pid) * (BM * BN) + at, cache_modifier=".cg")
            tl.store(locks_ptr + pid, 0)
    if last:
        mask = (offs_m < M)[:, None]
        out = offs_m[:, None] * N + cols[None, :]
        acc += tl.load(bias_ptr + cols)[None, :].to(tl.float32)
        if HAS_RES:
            acc += tl.load(res_ptr + out, mask=mask, other=0.0).to(tl.float32)
        if ACT == "relu":
            acc = tl.maximum(acc, 0.0)
        elif ACT == "gelu":
            acc = 0.5 * acc * (1.0 + tl.math.erf(acc * 0.7071067811865476))
        tl.store(out_ptr + out, acc.to(tl.float16), mask=mask)


@dataclass(frozen=True)
class Config:
    bm: int
    bn: int
    bk: int
    split_k: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Op:
    """One kernel: a convolution of square images, or a GEMM as one of 1x1 over `height` rows."""

    height: int
    width: int
    channels: int
    filters: int
    kernel: int = 1
    stride: int = 1
    pad: int = 0
    has_res: bool = False
    act: str = ""

    @property
    def out_height(self) -> int:
        return (self.height + 2 * self.pad - self.kernel) // self.stride + 1

    @property
    def out_width(self) -> int:
        return (self.width + 2 * self.pad - self.kernel) // self.stride + 1

    @property
    def rows(self) -> int:
        return self.out_height * self.out_width

    @property
    def depth(self) -> int:
        return self.kernel * self.kernel * self.channels

    def steps(self, bk: int) -> int:
        if self.channels % bk:
            return self.kernel * math.ceil(self.kernel * self.channels / bk)
        return self.depth // bk

    def constants(self, config: Config, mode: str) -> dict[str, Any]:
        return {
            "H": self.height,
            "W": self.width,
            "C": self.channels,
            "N": self.filters,
            "OH": self.out_height,
            "OW": self.out_width,
            "KERNEL": self.kernel,
            "STRIDE": self.stride,
            "PAD": self.pad,
            "HAS_RES": self.has_res,
            "ACT": self.act,
            "BM": config.bm,
            "BN": config.bn,
            "BK": config.bk,
            "SPLIT_K": config.split_k,
            "MODE": MODES.index(mode),
        }

    def space(self) -> Iterator[Config]:
        """Yield the configurations that fit shared memory and registers."""
        is_stem = self.channels < 16
        for bm in (16, 32, 64, 128):
            for bn in (32, 64, 128, 256):
                if self.filters % bn or not 1024 <= bm * bn <= 128 * 128:
                    continue
                for bk in (32,) if is_stem else (32, 64, 128):
                    if not is_stem and self.channels % bk:
                        continue
                    steps = self.steps(bk)
                    for split_k in (1, 2, 3, 4, 6, 8, 12):
                        if split_k > 1 and steps // split_k < 2:
                            continue
                        for warps in (4, 8) if bm >= 64 else (2, 4):
                            if not 8 <= bm * bn / (32 * warps) <= 128:
                                continue
                            for stages in (2, 3, 4, 5, 6):
                                fits = (stages - 1) * (bm + bn) * bk * 2 <= 200 << 10
                                if fits and stages <= steps // split_k + 2:
                                    yield Config(bm, bn, bk, split_k, warps, stages)

    def guess_secs(self, config: Config, sms: int, batch: int) -> float:
        """Estimate a call: waves over the SMs, and in each a step's arithmetic or its bytes."""
        tiles = math.ceil(batch * self.rows / config.bm) * math.ceil(self.filters / config.bn)
        blocks, steps = tiles * config.split_k, self.steps(config.bk) / config.split_k
        buffers = max(1, config.stages - 1)
        shared = buffers * (config.bm + config.bn) * config.bk * 2
        live = max(1, min(220 * 1024 // shared, 2048 // (32 * config.warps)))
        busy = min(live, math.ceil(blocks / sms))
        full = min(1, config.bm / 64) * min(1, config.bn / 64)
        flop = 2 * config.bm * config.bn * config.bk / (4.0e12 * full)
        mem = (config.bm + config.bn) * config.bk * 2 / 70e9
        step = max(busy * flop, busy * mem, 0.7e-6 / buffers)
        secs = math.ceil(blocks / (sms * busy)) * (1.0e-6 + steps * step) + 2e-6
        if config.split_k > 1:
            secs += 1.2e-6 + 2 * config.split_k * tiles * config.bm * config.bn * 4 / 2e12
        return secs

    def candidates(self, sms: int, batch: int, count: int) -> list[Config]:
        """Return the best by the estimate, two of each tile, and some of the rest by chance."""
        ranked = sorted(self.space(), key=lambda c: self.guess_secs(c, sms, batch))
        chosen: list[Config] = []
        for config in ranked:
            alike = [c for c in chosen if (c.bm, c.bn, c.bk) == (config.bm, config.bn, config.bk)]
            if len(alike) < 3 and len(chosen) < count * 3 // 4:
                chosen.append(config)
        rest = [c for c in ranked[: max(60, len(ranked) // 4)] if c not in chosen]
        random.Random(0).shuffle(rest)
        return (chosen + rest)[:count]


Steps = list[tuple[Op, str, str | None, str]]  # operation, its input, its residual, its output


def resnet50() -> Steps:
    """Return the steps of ResNet-50: operation, name of its input, of its residual, of its output.

    The input of the first block is "pooled".
    """
    steps: Steps = [(Op(224, 224, 3, 64, 7, 2, 3, act="relu"), "images", None, "stem")]
    here, size, channels = "pooled", 56, 64
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            name = f"{stage}.{block}"
            res = here
            first = Op(size, size, channels, width, act="relu")
            steps.append((first, here, None, f"{name}.a"))
            middle = Op(size, size, width, width, 3, stride, 1, act="relu")
            steps.append((middle, f"{name}.a", None, f"{name}.b"))
            if not block:
                down = Op(size, size, channels, 4 * width, 1, stride)
                steps.append((down, here, None, f"{name}.down"))
                res = f"{name}.down"
            size //= stride
            expand = Op(size, size, width, 4 * width, has_res=True, act="relu")
            steps.append((expand, f"{name}.b", res, name))
            here, channels = name, 4 * width
    return steps


def bert_base(tokens: int = 128) -> Steps:
    """Return the GEMMs of BERT-base; what follows qkv reads the first of its values."""
    steps: Steps = []
    here = "images"
    for layer in range(12):
        steps += [
            (Op(tokens, 1, 768, 2304), here, None, f"{layer}.qkv"),
            (Op(tokens, 1, 768, 768, has_res=True), f"{layer}.qkv", here, f"{layer}.out"),
            (Op(tokens, 1, 768, 3072, act="gelu"), f"{layer}.out", None, f"{layer}.up"),
            (Op(tokens, 1, 3072, 768, has_res=True), f"{layer}.up", f"{layer}.out", f"{layer}"),
        ]
        here = f"{layer}"
    return steps


CHAINS: dict[str, Callable[[], Steps]] = {
    "ResNet-50": resnet50,
    "BERT-base": bert_base,
}


# --- compiling ---------------------------------------------------------------------------------


def compiled(op: Op, config: Config, mode: str) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointers = dict.fromkeys(("x_ptr", "w_ptr", "bias_ptr", "res_ptr", "out_ptr"), "*fp16")
    types = pointers | {"ws_ptr": "*fp32", "locks_ptr": "*i32", "M": "i32"}
    signature = {name: types.get(name, "constexpr") for name in conv.arg_names}
    attrs = {(i,): [["tt.divisibility", 16]] for i in range(7)}
    source = ASTSource(conv, signature, constexprs=op.constants(config, mode), attrs=attrs)
    options = {
        "num_warps": config.warps,
        "num_stages": config.stages,
        "launch_pdl": mode != "serial",
    }
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def compile_job(job: tuple[Op, Config, str]) -> str:
    """Compile into Triton's cache; return what went wrong."""
    try:
        compiled(*job)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    return ""


def compile_all(jobs: Sequence[tuple[Op, Config, str]]) -> dict[str, Any]:
    started = time.monotonic()
    workers = max(1, len(os.sched_getaffinity(0)) - 1)
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        problems = [p for p in pool.imap_unordered(compile_job, jobs, chunksize=2) if p]
    return {
        "compiled": len(jobs) - len(problems),
        "problems": problems[:5],
        "secs": time.monotonic() - started,
        "workers": workers,
    }


# --- measuring ---------------------------------------------------------------------------------


@dataclass
class Bench:
    """Tensors, launches and graphs on one stream."""

    torch: Any
    batch: int
    stream: Any = None
    samples: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch = self.torch
        self.stream = torch.cuda.Stream()
        self.sms = torch.cuda.get_device_properties(0).multi_processor_count
        self.flush = torch.zeros(40 << 20, device="cuda")  # 160 MB, read over the L2
        self.ws = torch.empty(WORKSPACE, device="cuda")
        self.locks = torch.zeros(1 << 16, dtype=torch.int32, device="cuda")
        self.random = torch.Generator(device="cuda").manual_seed(1)

    def rand(self, *shape: int, scale: float = 1.0) -> Any:
        torch = self.torch
        values = torch.randn(*shape, generator=self.random, device="cuda")
        return (values * scale).half()

    def launcher(self, op: Op, config: Config, mode: str) -> Callable[..., None]:
        """Return what launches a kernel for input, weights, bias, residual and output."""
        kernel = compiled(op, config, mode)
        rows = self.batch * op.rows
        tiles = math.ceil(rows / config.bm) * (op.filters // config.bn)
        if tiles * config.split_k * config.bm * config.bn > WORKSPACE:
            raise RuntimeError("the workspace is too small")
        constants = list(op.constants(config, mode).values())
        run = kernel[(tiles, config.split_k, 1)]

        def launch(x: Any, w: Any, bias: Any, res: Any, out: Any) -> None:
            run(x, w, bias, res, out, self.ws, self.locks, rows, *constants)

        return launch

    def graph(self, work: Callable[[], None]) -> Any:
        torch = self.torch
        with torch.cuda.stream(self.stream):
            work()  # loads the modules
            self.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            work()
        return graph

    def time(self, graph: Any, *, cold: bool = True) -> float:
        """Return a launch of a graph in seconds, with what it reads out of the L2 cache."""
        torch = self.torch
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self.stream):
            if cold:
                self.flush.sum()
            begin.record(self.stream)
            graph.replay()
            end.record(self.stream)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def tune(bench: Bench, op: Op, count: int, limit_secs: float) -> tuple[Config, dict[str, Any]]:
    """Return the fastest configuration of an operation alone, and what was measured."""
    torch, copies, launches = bench.torch, 8, 16
    rows = bench.batch * op.rows
    x = bench.rand(bench.batch * op.height * op.width, op.channels)
    weights = [bench.rand(op.depth, op.filters, scale=op.depth**-0.5) for _ in range(copies)]
    bias, res = bench.rand(op.filters), bench.rand(rows, op.filters)
    out = torch.empty(rows, op.filters, device="cuda", dtype=torch.float16)
    want = reference(torch, bench.batch, op, x, weights[0], bias, res if op.has_res else None)
    found: list[tuple[float, Config]] = []
    wrong: list[str] = []
    started = time.monotonic()
    for config in op.candidates(bench.sms, bench.batch, count):
        if found and time.monotonic() - started > limit_secs:
            break
        try:
            launch = bench.launcher(op, config, "serial")
            with torch.cuda.stream(bench.stream):
                launch(x, weights[0], bias, res, out)
            bench.stream.synchronize()
            error = float((out.float() - want).abs().max() / want.abs().max())
            if not error < 5e-3:
                wrong.append(f"{config}: {error:.2g}")
                bench.locks.zero_()
                continue

            def work(launch: Callable[..., None] = launch) -> None:
                for i in range(launches):
                    launch(x, weights[i % copies], bias, res, out)

            graph = bench.graph(work)
            times = [bench.time(graph) / launches for _ in range(4)]
            found.append((statistics.median(times[1:]), config))
        except (RuntimeError, triton.runtime.errors.OutOfResources) as error:
            wrong.append(f"{config}: {error}"[:200])
    found.sort(key=lambda f: f[0])
    told = {
        "op": asdict(op),
        "best": asdict(found[0][1]),
        "secs": found[0][0],
        "measured": len(found),
        "wrong": wrong[:3],
    }
    return found[0][1], told


def reference(torch: Any, batch: int, op: Op, x: Any, w: Any, bias: Any, res: Any | None) -> Any:
    images = x.float().view(batch, op.height, op.width, op.channels).permute(0, 3, 1, 2)
    filters = w.float().view(op.kernel, op.kernel, op.channels, op.filters).permute(3, 2, 0, 1)
    y = torch.nn.functional.conv2d(images, filters, stride=op.stride, padding=op.pad)
    y = y.permute(0, 2, 3, 1).reshape(-1, op.filters) + bias.float()
    if res is not None:
        y = y + res.float()
    return {"": lambda v: v, "relu": torch.relu, "gelu": torch.nn.functional.gelu}[op.act](y)


def measure_chain(
    bench: Bench, name: str, configs: dict[Op, Config], rounds: int
) -> dict[str, Any]:
    """Time a chain in every mode, in turns."""
    torch, batch = bench.torch, bench.batch
    steps = CHAINS[name]()
    first = steps[0][0]
    buffers = {"images": bench.rand(batch * first.height * first.width, first.channels)}
    for op, _, _, out in steps:
        shape = (batch * op.rows, op.filters)
        buffers[out] = torch.zeros(*shape, device="cuda", dtype=torch.float16)
    if name == "ResNet-50":
        buffers["pooled"] = torch.zeros(batch * 56 * 56, 64, device="cuda", dtype=torch.float16)
    weights = [
        bench.rand(op.depth, op.filters, scale=(1.0 if op.act else 0.3) * op.depth**-0.5)
        for op, *_ in steps
    ]
    biases = [bench.rand(op.filters, scale=0.1) for op, *_ in steps]

    def pool() -> None:
        stem = buffers["stem"].view(batch, 112, 112, 64).permute(0, 3, 1, 2)
        pooled = torch.nn.functional.max_pool2d(stem, 3, 2, 1)
        buffers["pooled"].copy_(pooled.permute(0, 2, 3, 1).reshape(-1, 64))

    graphs, outputs = {}, {}
    for mode in MODES:
        launchers = {op: bench.launcher(op, configs[op], mode) for op, *_ in steps}

        def work(launchers: dict[Op, Callable[..., None]] = launchers) -> None:
            for (op, x, res, out), w, bias in zip(steps, weights, biases, strict=True):
                other = buffers[res] if res else buffers[out]
                launchers[op](buffers[x], w, bias, other, buffers[out])
                if out == "stem":
                    pool()

        graphs[mode] = bench.graph(work)
        for buffer in buffers.values():
            if buffer is not buffers["images"]:
                buffer.zero_()
        for _ in range(3):
            bench.time(graphs[mode])
        outputs[mode] = buffers[steps[-1][3]].clone()
    same = {mode: bool(torch.equal(outputs[mode], outputs["serial"])) for mode in MODES}
    samples: dict[str, list[float]] = {mode: [] for mode in MODES}
    for turn in range(rounds):
        for mode in MODES if turn % 2 else MODES[::-1]:
            samples[mode].append(bench.time(graphs[mode]))
    return {
        "kernels": len(steps),
        "same_bits": same,
        "finite": bool(torch.isfinite(outputs["serial"]).all()),
        "weights_mb": sum(w.numel() for w in weights) * 2 / 1e6,
        "secs": samples,
    }


def inside(options: argparse.Namespace) -> None:
    """Be the process of one share."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    found: dict[str, Any] = {}
    for batch in options.batches:
        bench = Bench(torch, batch)
        for name in CHAINS:
            ops = list(dict.fromkeys(op for op, *_ in CHAINS[name]()))
            told = {op: tune(bench, op, options.configs, options.limit) for op in ops}
            configs = {op: config for op, (config, _) in told.items()}
            compiling = compile_all([(op, configs[op], m) for op in ops for m in MODES[1:]])
            found[f"{name}, batch {batch}"] = {
                "sms": bench.sms,
                "device": torch.cuda.get_device_name(),
                "tuned": [t for _, t in told.values()],
                "compiling": compiling,
                **measure_chain(bench, name, configs, options.rounds),
            }
            Path(options.inside).write_text(json.dumps(found))


# --- shares ------------------------------------------------------------------------------------


@contextlib.contextmanager
def mps() -> Iterator[dict[str, str]]:
    """Yield the environment of an MPS daemon of our own."""
    with tempfile.TemporaryDirectory(prefix="overlap-mps-") as folder:
        for part in ("pipe", "log"):
            Path(folder, part).mkdir()
        env = os.environ | {
            "CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe",
            "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log",
        }
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env=env, check=True)
        try:
            yield env
        finally:
            quit_ = ["nvidia-cuda-mps-control"]
            subprocess.run(quit_, input="quit\n", text=True, env=env, timeout=30)


def table(document: dict[str, Any]) -> str:
    lines = [
        f"| chain | share | SMs | {' | '.join(MODES)} | {' is | '.join(MODES[1:])} is |",
        f"|---|{'--:|' * (2 * len(MODES) + 1)}",
    ]
    for share, chains in document["shares"].items():
        for name, chain in chains.items():
            medians = {m: statistics.median(chain["secs"][m]) * 1e6 for m in MODES}
            cells = [f"{medians[m]:.1f} µs" for m in MODES]
            cells += [_ratio(chain["secs"], mode) for mode in MODES[1:]]
            lines.append(f"| {name} | {share}% | {chain['sms']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _ratio(secs: dict[str, list[float]], mode: str) -> str:
    """Return how many times faster a mode is than serial, and the middle 90% of the rounds."""
    ratios = sorted(a / b for a, b in zip(secs["serial"], secs[mode], strict=True))
    low, high = ratios[len(ratios) // 20], ratios[-1 - len(ratios) // 20]
    return f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})"


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shares", type=_numbers, default=[40, 100])
    parser.add_argument("--batches", type=_numbers, default=[1, 8])
    parser.add_argument("--configs", type=int, default=24, help="of each operation")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--limit", type=float, default=3.0, help="seconds to tune an operation")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        inside(options)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {"command": shlex.join(sys.argv), "triton": triton.__version__}
    sms = {40: 52, 100: 132, 10: 12}
    jobs = {
        (op, config, "serial"): None
        for build in CHAINS.values()
        for op in dict.fromkeys(op for op, *_ in build())
        for share in options.shares
        for batch in options.batches
        for config in op.candidates(sms.get(share, 132 * share // 100), batch, options.configs)
    }
    document["compiling"] = compile_all(list(jobs))
    print(document["compiling"], file=sys.stderr, flush=True)
    document["shares"] = {}
    with mps() as env:
        for share in options.shares:
            part = options.out / f".{share}.json"
            command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:]]
            subprocess.run(
                [*command, "--inside", str(part)],
                env=env | {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(share)},
            )
            if part.exists():
                document["shares"][str(share)] = json.loads(part.read_text())
                part.unlink()
            (options.out / "overlap.json").write_text(json.dumps(document) + "\n")
            (options.out / "overlap.txt").write_text(table(document))
    print(table(document))


if __name__ == "__main__":
    main()
