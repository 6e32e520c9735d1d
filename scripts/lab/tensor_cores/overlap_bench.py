"""Compile the kernels of chains, tune each alone, and time the chains as CUDA graphs."""

from __future__ import annotations

import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import triton

from lab.tensor_cores.overlap_chains import CHAINS
from lab.tensor_cores.overlap_kernel import MODES, WORKSPACE, Config, Op, conv

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
