"""Verify and time ways to compute a matrix product, in a process under a cap."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.tensor_cores.product_variants import KINDS, NAME, Kernel, Shape, Variant

LIBRARY = "cuBLAS"
CALLS = 32  # of a graph, each with weights of its own
FLUSH_BYTES = 160 << 20
FIRST_ROUNDS, ROUNDS = 5, 30
FINALISTS = 2  # of each kind
TOLERANCE = 5e-3  # of the greatest value
HANG_SECS = 5.0
UNWRITTEN = 6e4  # not NaN: who takes 0 times what is there would keep it
TURN = "TURN "  # begins a line that names the kernel that is launched next
WORKSPACE = 32 << 20  # fp32 values, for split-K
COUNTERS = 4096
_FLOAT16, _L2_128B = 6, 2  # of a tensor map: cuda.h
_SHARED_BYTES, _REGISTERS, _LOCAL_BYTES = 8, 4, 3  # attributes of a function: cuda.h


class Driver:
    """CUDA's driver, as far as PyTorch does not show it; raises RuntimeError with its code."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def __call__(self, name: str, *args: Any) -> None:
        if code := getattr(self._library, name)(*args):
            raise RuntimeError(f"{name} returned {code}")

    def tensor_map(self, tensor: Any, told: dict[str, Any]) -> tuple[int, Any]:
        """Return the address of a tensor map of a matrix, and what keeps it."""
        kept = ctypes.create_string_buffer(128 + 64)
        at = ctypes.addressof(kept) + -ctypes.addressof(kept) % 64
        rows, columns = tensor.shape
        box = told["block_size"]
        self(
            "cuTensorMapEncodeTiled",
            ctypes.c_void_p(at),
            ctypes.c_int(_FLOAT16),
            ctypes.c_uint32(2),
            ctypes.c_void_p(tensor.data_ptr()),
            (ctypes.c_uint64 * 2)(columns, rows),
            (ctypes.c_uint64 * 1)(2 * columns),
            (ctypes.c_uint32 * 2)(box[1], box[0]),
            (ctypes.c_uint32 * 2)(1, 1),
            ctypes.c_int(0),
            ctypes.c_int(told["swizzle"]),
            ctypes.c_int(_L2_128B),
            ctypes.c_int(0),
        )
        return at, kept


class Loaded:
    """A kernel on the GPU."""

    def __init__(self, driver: Driver, kernel: Kernel, folder: Path, sms: int) -> None:
        self._driver, self._kernel = driver, kernel
        self._told = json.loads((folder / f"{kernel.key}.json").read_text())
        image = (folder / f"{kernel.key}.cubin").read_bytes()
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        driver("cuModuleLoadData", ctypes.byref(self._module), image)
        driver("cuModuleGetFunction", ctypes.byref(self._function), self._module, NAME.encode())
        shared, threads = self._told["shared_bytes"], self._told["threads"]
        driver("cuFuncSetAttribute", self._function, _SHARED_BYTES, shared)
        live = ctypes.c_int()
        driver(
            "cuOccupancyMaxActiveBlocksPerMultiprocessor",
            ctypes.byref(live),
            self._function,
            threads,
            ctypes.c_size_t(shared),
        )
        self.live = live.value  # blocks of an SM
        if not self.live:
            raise RuntimeError("no block of it fits an SM")
        self.registers = self._attribute(_REGISTERS)
        self.local_bytes = self._attribute(_LOCAL_BYTES)
        works, splits = kernel.works, kernel.splits
        if kernel.is_persistent:
            self._grid = min(works, sms * self.live), 1
        else:
            self._grid = works // splits, splits

    def _attribute(self, number: int) -> int:
        value = ctypes.c_int()
        self._driver("cuFuncGetAttribute", ctypes.byref(value), number, self._function)
        return value.value

    def call(self, x: Any, w: Any, out: Any, scratch: Sequence[Any]) -> Callable[[int], None]:
        """Return what launches it on a stream with these tensors."""
        values: list[Any] = []
        places: list[int] = []

        def add(value: Any) -> None:
            values.append(value)
            places.append(ctypes.addressof(value))

        descriptors = iter(self._told["descriptors"])
        tensors = [x, w, out, *(scratch if self._kernel.splits > 1 else ())]
        for tensor, type_ in zip(tensors, self._kernel.types, strict=True):
            if not type_.startswith("tensordesc"):
                add(ctypes.c_void_p(tensor.data_ptr()))
                continue
            # Triton passes a descriptor by value, and its extents and strides after it.
            at, kept = self._driver.tensor_map(tensor, next(descriptors))
            values.append(kept)
            places.append(at)
            for extent in tensor.shape:
                add(ctypes.c_int32(extent))
            for stride in tensor.stride():
                add(ctypes.c_int64(stride))
        for _ in range(2):  # scratch memory of Triton's own, which these do not use
            add(ctypes.c_void_p(0))
        packed = (ctypes.c_void_p * len(places))(*places)
        size = [ctypes.c_uint(n) for n in (*self._grid, 1, self._told["threads"], 1, 1)]
        shared = ctypes.c_uint(self._told["shared_bytes"])

        def launch(stream: int, _: Any = values) -> None:  # which the parameters lie in
            where = ctypes.c_void_p(stream)
            self._driver("cuLaunchKernel", self._function, *size, shared, where, packed, None)

        return launch


@dataclass
class Contender:
    """A way to compute a product that is right, as a graph of CALLS calls."""

    kind: str
    cut: str
    graph: Any
    told: dict[str, Any]
    kept: Any = None
    samples: list[float] = field(default_factory=list)


class Bench:
    """One product's tensors, and what is timed on them."""

    def __init__(self, torch: Any, driver: Driver, shape: Shape) -> None:
        self._torch, self._driver, self.shape = torch, driver, shape
        self.sms = torch.cuda.get_device_properties(0).multi_processor_count
        self._stream = torch.cuda.Stream()
        random = torch.Generator(device="cuda").manual_seed(1)

        def rand(*size: int, scale: float = 1.0) -> Any:
            return (torch.randn(*size, generator=random, device="cuda") * scale).half()

        m, n, k = shape.rows, shape.columns, shape.depth
        self.x = rand(2, m, k)
        self.w = rand(CALLS, k, n, scale=k**-0.5)
        self.w_by_column = self.w.transpose(1, 2).contiguous()
        self.out = torch.empty(m, n, device="cuda", dtype=torch.float16)
        self.scratch = [
            torch.zeros(COUNTERS, device="cuda", dtype=torch.int32),
            torch.empty(WORKSPACE, device="cuda"),
        ]
        self._flush = torch.zeros(FLUSH_BYTES // 4, device="cuda")
        self._wants = [self.x[i % 2].float() @ self.w[i].float() for i in (0, CALLS - 1)]
        torch.cuda.synchronize()

    def add(
        self, kind: str, cut: str, told: dict[str, Any], calls: Sequence[Callable[[int], None]]
    ) -> Contender:
        """Verify a way's calls, the first alone and the last among others; raises ValueError."""
        torch, stream = self._torch, self._stream
        self.out.fill_(UNWRITTEN)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            calls[0](stream.cuda_stream)
        self._wait()
        told["error"] = self._error(0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call(stream.cuda_stream)
        contender = Contender(kind, cut, graph, told, kept=calls)
        self.secs(contender)
        told["error_in_turns"] = self._error(1)
        return contender

    def secs(self, contender: Contender) -> float:
        """Return the seconds of one call of many in a row, whose weights come from memory."""
        torch = self._torch
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._stream):
            self._flush.sum()
            self.x.sum()
            begin.record(self._stream)
            contender.graph.replay()
            end.record(self._stream)
        self._wait()
        return float(begin.elapsed_time(end)) / 1e3 / CALLS

    def _wait(self) -> None:
        """Wait for the stream; end the process if a kernel does not end."""
        done = self._torch.cuda.Event()
        done.record(self._stream)
        started = time.monotonic()
        while not done.query():
            if time.monotonic() - started > HANG_SECS:
                print("the kernel does not end", file=sys.stderr, flush=True)
                os._exit(3)

    def check(self) -> None:
        """End the process where a kernel left the GPU's context unusable."""
        try:
            self._torch.cuda.synchronize()
        except RuntimeError as error:
            print(error, file=sys.stderr, flush=True)
            os._exit(4)

    def _error(self, number: int) -> float:
        want = self._wants[number]
        error = float((self.out.float() - want).abs().max() / want.abs().max())
        if not error < TOLERANCE:
            self.scratch[0].zero_()
            raise ValueError(f"a wrong result: {error:.2g} of the greatest value")
        return error

    # --- the ways ------------------------------------------------------------------------------

    def kernel(self, variant: Variant, kernel: Kernel, folder: Path) -> Contender:
        loaded = Loaded(self._driver, kernel, folder, self.sms)
        if kernel.workspace > WORKSPACE:
            raise ValueError("the workspace is too small for it")
        if kernel.is_persistent and kernel.works <= self.sms * loaded.live:
            raise ValueError("all of its tiles fit the SMs at once")
        told = {
            "key": kernel.key,
            "registers": loaded.registers,
            "local_bytes": loaded.local_bytes,
            "blocks_of_an_sm": loaded.live,
        }
        calls = [
            loaded.call(self.x[i % 2], self.w[i], self.out, self.scratch) for i in range(CALLS)
        ]
        return self.add(variant.kind, variant.cut, told, calls)

    def library(self, library: str, layout: str) -> Contender:
        """Return torch.matmul by one of PyTorch's libraries, with weights of one layout."""
        torch = self._torch
        torch.backends.cuda.preferred_blas_library(library)
        ws = self.w if layout == "KxN" else self.w_by_column.transpose(1, 2)

        def one(i: int) -> Callable[[int], None]:
            return lambda _: torch.matmul(self.x[i % 2], ws[i], out=self.out)

        return self.add(LIBRARY, f"{library} {layout}", {}, [one(i) for i in range(CALLS)])


def in_turns(bench: Bench, contenders: Sequence[Contender], rounds: int) -> None:
    """Time all in turns; the order is turned round each time."""
    for contender in contenders:
        contender.samples = []
    for turn in range(rounds):
        for contender in contenders[:: 1 if turn % 2 else -1]:
            print(f"{TURN}{contender.kind}", flush=True)
            contender.samples.append(bench.secs(contender))


def measured(
    bench: Bench, variants: Sequence[Variant], folder: Path, without: frozenset[str]
) -> dict[str, Any]:
    """Return what was found of one product."""
    contenders: list[Contender] = []
    failed: list[dict[str, str]] = []

    def take(kind: str, cut: str, make: Callable[[], Contender]) -> None:
        try:
            contenders.append(make())
        except (RuntimeError, ValueError) as error:
            bench.check()
            failed.append({"kind": kind, "cut": cut, "problem": str(error)[:200]})

    for library in ("cublas", "cublaslt"):
        for layout in ("KxN", "NxK"):
            cut = f"{library} {layout}"
            take(LIBRARY, cut, functools.partial(bench.library, library, layout))
    product = bench.shape.product()
    for variant in sorted(variants, key=lambda v: KINDS.index(v.kind)):
        kernel = Kernel.of(product, variant)
        problem = _problem(kernel, folder)
        if variant.kind in without:
            problem = "one of its kind ended the process"
        if problem:
            failed.append({"kind": variant.kind, "cut": variant.cut, "problem": problem})
            continue
        print(f"{TURN}{variant.kind}", flush=True)
        take(variant.kind, variant.cut, functools.partial(bench.kernel, variant, kernel, folder))
    in_turns(bench, contenders, FIRST_ROUNDS)
    all_ = [
        {"kind": c.kind, "cut": c.cut, "secs": statistics.median(c.samples), **c.told}
        for c in contenders
    ]
    finalists: list[Contender] = []
    for kind in (*KINDS, LIBRARY):
        of = (c for c in contenders if c.kind == kind)
        finalists += sorted(of, key=lambda c: statistics.median(c.samples))[:FINALISTS]
    in_turns(bench, finalists, ROUNDS)
    kept = [{"kind": c.kind, "cut": c.cut, "secs": c.samples} for c in finalists]
    return {"tried": all_, "failed": failed, "finalists": kept}


def _problem(kernel: Kernel, folder: Path) -> str:
    place = folder / f"{kernel.key}.json"
    if not place.exists():
        return "it was not compiled"
    return str(json.loads(place.read_text()).get("problem", ""))
