#!/usr/bin/env python3
"""Many products of one shape on one GPU: in turns, in parallel, or as one kernel.

    PYTHONPATH=.:scripts python3 -m lab.colocation.gemms --out FOLDER

Table 1 of Jain et al. (arXiv 1901.00041): R products wait, each with matrices of its own. Here each
way is a CUDA graph, of one process but for one of them:

    time          cuBLAS, one after another on one stream
    space         cuBLAS on parallel streams
    processes     cuBLAS in ten clients of MPS, each with a tenth of them one after another
    bmm           cuBLAS, one batched call over stacked matrices
    addresses     cuBLAS, one batched call by arrays of addresses, as the paper's
    super-kernel  one launch of a Triton kernel that takes its operands from a table of addresses

For R = 2 to 480, in fp32 (and as asked), all ways of one R in turns, the queue never empty. Checks
what each computes against fp64. Writes gemms.json with all samples, and gemms.txt, after each R. An
R that is in the folder is not measured again. Runs where PyTorch, Triton and an NVIDIA GPU are.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.colocation import torch_models, workers
from lab.colocation.gemms_table import SHAPES, key_of, tables
from lab.colocation.queues import Sampler, Slot
from lab.colocation.windowed import Windowed
from lab.colocation.workers import Group, Worker, WorkerError
from lab.lab import made_by, write
from tunerd.errors import TunerdError
from tunerd.runner.pytorch import as_graph, set_precision

COUNTS = (2, 5, 10, 20, 40, 80, 120, 240, 480)
TURNS = 10
PROCESSES = 10
_TOGETHER_SECS = 0.1  # of a sample of processes, which begin and end a little apart
_PREPARE_SECS = 200.0
_MOST_STREAMS = 32  # as many as PyTorch has
_TRY_SECS = 0.004  # of each way to cut the super-kernel


@dataclass(frozen=True)
class Problems:
    """So many products of (rows, depth) by (depth, columns), stacked."""

    lefts: Any
    rights: Any
    outs: Any

    @property
    def count(self) -> int:
        return len(self.lefts)

    def worst_error(self) -> float:
        """Return the largest error of what is in `outs`, over the largest value."""
        worst = 0.0
        for left, right, out in zip(self.lefts, self.rights, self.outs, strict=True):
            want = left.double() @ right.double()
            worst = max(worst, float((want - out.double()).abs().max() / want.abs().max()))
        return worst

    def clear(self) -> None:
        import torch

        self.outs.zero_()
        torch.cuda.synchronize()  # other streams do not wait for the one that this is on


def problems(shape: tuple[int, int, int], count: int, precision: str, *, seed: int = 0) -> Problems:
    import torch

    rows, columns, depth = shape
    dtype = torch.float16 if precision == "fp16" else torch.float32
    generator = torch.Generator("cuda").manual_seed(seed)

    def made(*size: int) -> Any:
        return torch.randn(size, generator=generator, device="cuda", dtype=dtype)

    outs = torch.zeros((count, rows, columns), device="cuda", dtype=dtype)
    return Problems(made(count, rows, depth), made(count, depth, columns), outs)


# --- the ways ----------------------------------------------------------------------------------


def _one(given: Problems, i: int) -> None:
    import torch

    torch.mm(given.lefts[i], given.rights[i], out=given.outs[i])


def in_time(given: Problems) -> Slot:
    def call() -> None:
        for i in range(given.count):
            _one(given, i)

    return _slot(call, given, given.count)


def in_space(given: Problems) -> Slot:
    import torch

    sides = [torch.cuda.Stream() for _ in range(min(given.count, _MOST_STREAMS))]

    def call() -> None:
        main = torch.cuda.current_stream()
        begin = torch.cuda.Event()
        begin.record(main)
        for number, side in enumerate(sides):
            side.wait_event(begin)
            with torch.cuda.stream(side):
                for i in range(number, given.count, len(sides)):
                    _one(given, i)
        for side in sides:
            main.wait_stream(side)

    return _slot(call, given, given.count)


def batched(given: Problems) -> Slot:
    import torch

    return _slot(lambda: torch.bmm(given.lefts, given.rights, out=given.outs), given, given.count)


# Of cublas_api.h and library_types.h.
_COMPUTE = {"fp32": 68, "tf32": 77, "fp16": 68}  # CUBLAS_COMPUTE_32F, and its FAST_TF32
_TYPES = {"fp32": 0, "tf32": 0, "fp16": 2}  # CUDA_R_32F, CUDA_R_16F
_AS_IT_IS, _DEFAULT = 0, -1  # CUBLAS_OP_N, CUBLAS_GEMM_DEFAULT


def by_addresses(given: Problems, shape: tuple[int, int, int], precision: str) -> Slot:
    import torch

    rows, columns, depth = shape
    tables = _addresses(given)
    lefts, rights, outs = (ctypes.c_void_p(table.data_ptr()) for table in tables)
    cublas, dtype = _cublas(), _TYPES[precision]
    one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)

    def call() -> None:
        # By columns, as cuBLAS has matrices, each product is that of the transposed, the other way.
        status = cublas.cublasGemmBatchedEx(
            ctypes.c_void_p(torch.cuda.current_blas_handle()), _AS_IT_IS, _AS_IT_IS,
            columns, rows, depth, ctypes.byref(one), rights, dtype, columns,
            lefts, dtype, depth, ctypes.byref(zero), outs, dtype, columns,
            given.count, _COMPUTE[precision], _DEFAULT,
        )  # fmt: skip
        if status:
            raise RuntimeError(f"cublasGemmBatchedEx: status {status}")

    return _slot(call, (given, tables), given.count)


def _addresses(given: Problems) -> list[Any]:
    """Return where each matrix is, on the GPU: of the left ones, the right ones and the results."""
    import torch

    return [
        torch.tensor([each.data_ptr() for each in stack], dtype=torch.int64, device="cuda")
        for stack in (given.lefts, given.rights, given.outs)
    ]


@functools.cache
def _cublas() -> ctypes.CDLL:
    """Return the cuBLAS that PyTorch has loaded. Raises RuntimeError where there is none."""
    import torch

    torch.cuda.current_blas_handle()
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/libcublas.so" in line:
            return ctypes.CDLL(line.split()[-1])
    raise RuntimeError("PyTorch has loaded no cuBLAS")


def as_one_kernel(
    given: Problems, shape: tuple[int, int, int], precision: str, sampler: Sampler
) -> tuple[Slot, dict[str, Any]]:
    """Return the fastest way to cut it here, and which that is."""
    from lab.colocation.gemm_kernels import launches

    tables = _addresses(given)
    best, said, rate = None, {}, 0.0
    for launch in launches(shape, given.count, precision):
        try:
            call = functools.partial(launch.queue, tables, given.lefts)
            slot = _slot(call, (given, tables), given.count)
            label = f"{shape} {given.count} {precision} {launch.constants}"
            sampler.saturated(label, [slot], _TRY_SECS)
            found = sampler.saturated(label, [slot], _TRY_SECS)
        except Exception as error:  # a tile that this GPU cannot hold
            print(f"{launch.constants}: {error}"[:200], file=sys.stderr)
            continue
        if found > rate:
            best, said, rate = slot, launch.constants | {"warps": launch.warps}, found
    if best is None:
        raise RuntimeError("no way to cut the kernel ran")
    return best, said


def _slot(call: Callable[[], Any], kept: Any, count: int) -> Slot:
    """Capture a call that solves so many problems."""
    made = torch_models.slot(as_graph(call, ()))
    return Slot(_keeping(made.launch, kept), made.stream, count)


def _keeping(launch: Callable[[], None], kept: Any) -> Callable[[], None]:
    def again(_kept: Any = kept) -> None:
        launch()

    return again


class Tenth(Windowed):
    """One of ten processes: its part of the products of each R that has ten parts."""

    def __init__(self, precisions: Sequence[str], counts: Sequence[int], seed: int) -> None:
        super().__init__()
        self._precisions, self._counts, self._seed = precisions, counts, seed

    def prepare(self, _: dict[str, Any]) -> dict[str, Any]:
        for precision in self._precisions:
            set_precision(precision)
            for shape in SHAPES:
                for count in self._counts:
                    if count % PROCESSES == 0:
                        mine = problems(shape, count // PROCESSES, precision, seed=self._seed)
                        self._slots[key_of(precision, shape, count)] = in_time(mine)
        return {"labels": list(self._slots)}


# --- measuring ---------------------------------------------------------------------------------


def measured(
    shape: tuple[int, int, int], count: int, precision: str, secs: float, sampler: Sampler,
    group: Group | None,
) -> dict[str, Any]:  # fmt: skip
    """Return problems per second of each way in turns, and the error of each.

    group: processes that have their part of these, None without.
    """
    given = problems(shape, count, precision)
    found: dict[str, Any] = {"per_sec": {}, "error": {}, "problems": {}}
    slots: dict[str, Slot] = {}

    def one_kernel() -> Slot:
        slot, found["tile"] = as_one_kernel(given, shape, precision, sampler)
        return slot

    ways: dict[str, Callable[[], Slot]] = {
        "time": lambda: in_time(given),
        "space": lambda: in_space(given),
        "bmm": lambda: batched(given),
        "addresses": lambda: by_addresses(given, shape, precision),
        "super-kernel": one_kernel,
    }
    for way, make in ways.items():
        try:
            slots[way] = make()
            given.clear()
            sampler.saturated(_label(shape, count, precision, way), [slots[way]], secs)
            found["error"][way] = given.worst_error()
        except Exception as error:
            found["problems"][way] = f"{type(error).__name__}: {error}"[:400]
            slots.pop(way, None)
    sample: dict[str, Callable[[], float]] = {
        way: functools.partial(_alone, sampler, _label(shape, count, precision, way), slot, secs)
        for way, slot in slots.items()
    }
    if group is not None and count % PROCESSES == 0:
        sample["processes"] = functools.partial(_in_step, group, key_of(precision, shape, count))
    rates: dict[str, list[float]] = {way: [] for way in sample}
    for turn in range(TURNS):
        for way in list(rates)[:: 1 if turn % 2 else -1]:
            try:
                rates[way].append(sample[way]())
            except WorkerError as error:
                found["problems"][way] = str(error)[:400]
                del rates[way]
    return found | {"per_sec": rates}


def _alone(sampler: Sampler, label: str, slot: Slot, secs: float) -> float:
    return sampler.saturated(label, [slot], secs)


def _in_step(group: Group, label: str) -> float:
    return float(sum(a["per_sec"] for a in group.sample(label, "saturated", _TOGETHER_SECS)))


def _label(shape: tuple[int, int, int], count: int, precision: str, way: str) -> str:
    return f"{shape} {count} {precision} {way}"


@contextlib.contextmanager
def processes(options: argparse.Namespace) -> Iterator[Group | None]:
    """Start ten clients of an MPS daemon of ours; yield None where that cannot be."""
    if not options.processes:
        yield None
        return
    given = ["--precisions", ",".join(options.precisions), "--counts"]
    given += [",".join(map(str, options.counts)), "--out", str(options.out)]
    with contextlib.ExitStack() as stack:
        group: Group | None = None
        try:
            environment = stack.enter_context(workers.mps_daemon())(None)
            group = Group(
                [
                    Worker(
                        workers.here("gemms", *given, "--worker", seed), environment,
                        options.out / f"process-{seed}.txt",
                    )
                    for seed in range(PROCESSES)
                ]
            )  # fmt: skip
            stack.callback(workers.close_all, [group])
            group.prepare(_PREPARE_SECS)
        except (TunerdError, WorkerError) as error:
            print(f"without processes: {error}", file=sys.stderr, flush=True)
            group = None
        yield group


def measure_all(options: argparse.Namespace, group: Group | None) -> dict[str, Any]:
    """Measure each R that the folder does not have, and write after each."""
    import torch

    from tunerd.system import gpus, host
    from tunerd.vocabulary import to_json

    place, facts = options.out / "gemms.json", host.facts()
    document: dict[str, Any] = {
        **made_by(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "found": json.loads(place.read_text())["found"] if place.exists() else {},
    }
    torch.zeros(1, device="cuda")
    sampler = Sampler()
    for precision in options.precisions:
        set_precision(precision)
        for shape, count in itertools.product(SHAPES, options.counts):
            key = key_of(precision, shape, count)
            if key in document["found"]:
                continue
            found = measured(shape, count, precision, options.sample_secs, sampler, group)
            found["clock"] = to_json(gpus.conditions(facts.gpus[0].uuid))
            document["found"][key] = found
            write(place, document, indent=None)
            place.with_suffix(".txt").write_text(tables(document))
            rates = {w: math.floor(max(r)) for w, r in found["per_sec"].items()}
            print(f"{key}: {rates} {found['problems'] or ''}", file=sys.stderr, flush=True)
    return document


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precisions", default="fp32,fp16", help="of fp32, tf32, fp16")
    parser.add_argument("--counts", default=",".join(map(str, COUNTS)))
    parser.add_argument("--processes", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--sample-secs", type=float, default=0.02)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.precisions = options.precisions.split(",")
    options.counts = [int(count) for count in options.counts.split(",")]
    if options.worker is not None:
        body = Tenth(options.precisions, options.counts, options.worker)
        workers.serve({"prepare": body.prepare, "sample": body.sample})
        return
    options.out.mkdir(parents=True, exist_ok=True)
    with processes(options) as group:
        document = measure_all(options, group)
    print(tables(document), end="")


if __name__ == "__main__":
    main()
