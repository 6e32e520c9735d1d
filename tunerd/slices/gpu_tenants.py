"""Who else is on the GPU of a slice, and what holds its clocks down, while a trial runs there.

NVML lists the processes of a GPU. In a container the list may be empty, or hold pids of another
namespace. It is believed where it names a process of our own; elsewhere the memory in use decides,
and the utilisation while nothing of ours runs there. A display's processes are no tenants.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tunerd.system import gpus
from tunerd.system.gpus import GpuState, gpu_state
from tunerd.vocabulary import Conditions

# What each runner, and all the rest of MPS together, may hold where the list cannot be believed.
# Planning counts the same 2 GiB for a slice: context, copies of weights, activations.
ALLOWED_BYTES, ALLOWED_PCT = 2 << 30, 10
ALLOWED_BUSY_PCT = 5
_MAX_CHARS = 100
_SHOWN_PIDS = 3


@dataclass(frozen=True)
class Own:
    """What is a run's own on a GPU."""

    pids: frozenset[int]  # of everything that it ever started there
    runners: int  # that live
    neighbours: int | None = None  # of one slice: other runners that live


def conditions(gpu_uuid: str, own: Callable[[], Own | None], *, idle: bool = False) -> Conditions:
    """Read the state of a GPU, and judge who else uses it. Cheap; never raises.

    `idle` says that nothing of ours runs there, so that its utilisation tells something.
    `own` is asked after NVML: what a neighbour has started since is in no list. It returns None
    where nobody can tell.
    """
    state = gpu_state(gpu_uuid, samples=int(idle))
    known = own()
    strangers, disturbed_by = judged(state, known)
    return replace(
        gpus.conditions(gpu_uuid),
        neighbours=known.neighbours if known else None,
        strangers=strangers,
        disturbed_by=disturbed_by,
    )


def judged(state: GpuState, own: Own | None) -> tuple[int | None, str]:
    """Return the number of others' processes, None where it is unknown, and what disturbs."""
    strangers, said = None, []
    if own is not None and own.pids & set(state.pids or ()):
        others = sorted(set(state.pids or ()) - own.pids)
        strangers = len(others)
        if others:
            said.append(_processes_text(others))
    elif own is not None:
        said += _by_memory_and_load(state, own)
    said += state.slowdowns
    text = "; ".join(said)
    return strangers, text if len(text) <= _MAX_CHARS else f"{text[: _MAX_CHARS - 3]}..."


def _by_memory_and_load(state: GpuState, own: Own) -> list[str]:
    said = []
    if state.mem_used_bytes is not None and state.mem_bytes:
        each = min(ALLOWED_BYTES, state.mem_bytes * ALLOWED_PCT // 100)
        excess = state.mem_used_bytes - (own.runners + 1) * each
        if excess > 0:
            said.append(f"at least {math.ceil(excess / (1 << 20)):,} MiB held by others")
    if state.busy_pct is not None and state.busy_pct > ALLOWED_BUSY_PCT:
        said.append(f"others keep it {state.busy_pct}% busy")
    return said


def _processes_text(pids: Sequence[int]) -> str:
    count = f"{len(pids)} process{'es' * (len(pids) > 1)} of others"
    shown = ", ".join(map(str, pids[:_SHOWN_PIDS]))
    more = len(pids) - _SHOWN_PIDS
    return f"{count}: pid {shown}" + (f" and {more} more" if more > 0 else "")
