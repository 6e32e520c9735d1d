#!/usr/bin/env python3
"""Many products of one shape on one GPU: in turns, in parallel, or as one kernel.

    PYTHONPATH=.:scripts python3 -m lab.colocation.gemms --out FOLDER

Table 1 of Jain et al. (arXiv 1901.00041): R products wait, each with matrices of its own. Here each
way is a CUDA graph of one process:

    time          cuBLAS, one after another on one stream
    space         cuBLAS on parallel streams
    bmm           cuBLAS, one batched call over stacked matrices: the paper's space-time
    super-kernel  one launch of a Triton kernel that takes its operands from a table of addresses

For R = 2 to 480, in fp32 (and as asked), all ways of one R in turns, the queue never empty. Checks
what each computes against fp64. Writes gemms.json with all samples after each R, and gemms.txt. An
R that is in the folder is not measured again. Runs where PyTorch, Triton and an NVIDIA GPU are.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.colocation import torch_models
from lab.colocation.gemms_table import SHAPES, key_of, tables
from lab.colocation.queues import Sampler, Slot

COUNTS = (2, 5, 10, 20, 40, 80, 120, 240, 480)
TURNS = 10
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


def problems(shape: tuple[int, int, int], count: int, precision: str) -> Problems:
    import torch

    rows, columns, depth = shape
    dtype = torch.float16 if precision == "fp16" else torch.float32
    generator = torch.Generator("cuda").manual_seed(count)

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

    return _slot(call, given)


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

    return _slot(call, given)


def batched(given: Problems) -> Slot:
    import torch

    return _slot(lambda: torch.bmm(given.lefts, given.rights, out=given.outs), given)


def as_one_kernel(
    given: Problems, shape: tuple[int, int, int], precision: str, sampler: Sampler
) -> tuple[Slot, dict[str, Any]]:
    """Return the fastest way to cut it here, and which that is."""
    import torch

    from lab.colocation.gemm_kernels import launches

    tables = [
        torch.tensor([each.data_ptr() for each in stack], dtype=torch.int64, device="cuda")
        for stack in (given.lefts, given.rights, given.outs)
    ]
    best, said, rate = None, {}, 0.0
    for launch in launches(shape, given.count, precision):
        try:
            call = functools.partial(launch.queue, tables, given.lefts)
            slot = _slot(call, (given, tables))
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


def _slot(call: Callable[[], Any], kept: Any) -> Slot:
    """Capture a call; one launch makes one round of all problems."""
    graph = torch_models.captured(call, ())
    slot = graph.on()
    return Slot(_keeping(slot.launch, kept), slot.stream)


def _keeping(launch: Callable[[], None], kept: Any) -> Callable[[], None]:
    def again(_kept: Any = kept) -> None:
        launch()

    return again


# --- measuring ---------------------------------------------------------------------------------


def measured(
    shape: tuple[int, int, int], count: int, precision: str, secs: float, sampler: Sampler
) -> dict[str, Any]:
    """Return problems per second of each way in turns, and the error of each."""
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
    rates: dict[str, list[float]] = {way: [] for way in slots}
    for turn in range(TURNS):
        for way in list(slots)[:: 1 if turn % 2 else -1]:
            label = _label(shape, count, precision, way)
            rates[way].append(count * sampler.saturated(label, [slots[way]], secs))
    return found | {"per_sec": rates}


def _label(shape: tuple[int, int, int], count: int, precision: str, way: str) -> str:
    return f"{shape} {count} {precision} {way}"


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precisions", default="fp32,fp16", help="of fp32, tf32, fp16")
    parser.add_argument("--counts", default=",".join(map(str, COUNTS)))
    parser.add_argument("--sample-secs", type=float, default=0.02)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    import torch

    from tunerd.system import gpus, host
    from tunerd.vocabulary import to_json

    options.out.mkdir(parents=True, exist_ok=True)
    place, facts = options.out / "gemms.json", host.facts()
    document: dict[str, Any] = {
        "command": host.shown(sys.argv),
        "host": to_json(facts),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "found": json.loads(place.read_text())["found"] if place.exists() else {},
    }
    torch.zeros(1, device="cuda")
    sampler = Sampler()
    for precision in options.precisions.split(","):
        torch_models.set_precision(precision)
        for shape in SHAPES:
            for count in map(int, options.counts.split(",")):
                key = key_of(precision, shape, count)
                if key in document["found"]:
                    continue
                found = measured(shape, count, precision, options.sample_secs, sampler)
                found["clock"] = to_json(gpus.conditions(facts.gpus[0].uuid))
                document["found"][key] = found
                place.write_text(json.dumps(document) + "\n")
                rates = {w: math.floor(max(r)) for w, r in found["per_sec"].items()}
                print(f"{key}: {rates} {found['problems'] or ''}", file=sys.stderr, flush=True)
    text = tables(document)
    (options.out / "gemms.txt").write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
