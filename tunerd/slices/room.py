"""What others leave of a GPU's memory, and what slices beside them may cost them. No CUDA context.

Nobody here knows what the others run, so that the slowdown is a bound: what a share, or turns,
take of a GPU from who would have all of it. Where a run is told which plan serves there, it goes
by measured and estimated slowdowns as well (`tunerd.api.serving`).
"""

from __future__ import annotations

from collections.abc import Sequence

from tunerd.slices.gpu_tenants import ALLOWED_BYTES, ALLOWED_PCT
from tunerd.system.gpus import GpuFacts, GpuState
from tunerd.system.text import count_text, significant
from tunerd.vocabulary import SliceRequest, SliceSpec

SLICE_MEM_BYTES = 2 << 30  # at least: context, copies of weights over twice the L2, activations


def needed_bytes(request: SliceRequest) -> int:
    """Return what the runner of one slice may come to hold of its GPU."""
    return max(SLICE_MEM_BYTES, request.mem_bytes)


def held_bytes(gpu: GpuFacts) -> int:
    """Return what others hold of a GPU; 0 where it is no more than a driver and a daemon do."""
    held = gpu.mem_bytes - gpu.mem_free_bytes
    return held if held > min(ALLOWED_BYTES, gpu.mem_bytes * ALLOWED_PCT // 100) else 0


def room_bytes(gpu: GpuFacts, request: SliceRequest) -> int:
    """Return the memory that slices may have of a GPU."""
    is_ours = request.if_shared == "ignore" or not held_bytes(gpu)
    return gpu.mem_bytes if is_ours else gpu.mem_free_bytes


def refusal(gpus: Sequence[GpuFacts], request: SliceRequest) -> str:
    """Return why a request is refused that is not to share a GPU, "" where it is not."""
    held = next((gpu for gpu in gpus if held_bytes(gpu)), None)
    if request.if_shared != "refuse" or held is None:
        return ""
    return (
        f"others hold {_gib(held_bytes(held))} of GPU {held.index}, and --if-shared refuse keeps "
        "away from it; choose another GPU with CUDA_VISIBLE_DEVICES, or say --if-shared narrow"
    )


def expectation(
    gpu: GpuFacts, slices: Sequence[SliceSpec], request: SliceRequest, state: GpuState
) -> str:
    """Say what a run on these slices of a GPU takes of it, and may cost who else is there.

    "" where nobody is.
    """
    held = held_bytes(gpu)
    if not held or not slices:
        return ""
    who = f"GPU {gpu.index} serves others, too: "
    who += (
        f"{count_text(len(state.pids), 'process', 'processes')} hold" if state.pids else "they hold"
    )
    busy = "" if state.busy_pct is None else f" and keep it {state.busy_pct}% busy"
    needs = _gib(len(slices) * needed_bytes(request))
    name = "slice takes" if len(slices) == 1 else "slices take"
    return (
        f"{who} {_gib(held)}{busy}. {len(slices)} {name} up to about {needs} of the "
        f"{_gib(gpu.mem_free_bytes)} that are free. {_slowdown(slices)}"
    )


def _slowdown(slices: Sequence[SliceSpec]) -> str:
    pct = min(100, sum(spec.pct for spec in slices))
    if slices[0].kind == "mps" and slices[0].mps == "external" and pct < 100:
        times = significant(100 / (100 - pct), 2)
        why = f"{pct}% of the SMs are in slices beside it"
    else:
        times, why = "2", "the GPU takes turns between it and the slices"
    return (
        f"While kernels are measured, what runs there may take up to about {times} times as long, "
        f"since {why}: a bound, which nobody measured; a few short requests in a hundred may take "
        "some milliseconds more."
    )


def _gib(size: int) -> str:
    return f"{significant(size / (1 << 30))} GiB"
