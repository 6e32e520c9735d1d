"""Say whether all streams of an engine's lanes are carried out at once: their kernels meet.

    python -m tests.lib.at_once PLAN.yaml

Prints how many lanes there are, and how many of their kernels met all others. A kernel that waits
for the others in vain ends after a while, before what is queued behind it begins.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import Any

from tunerd.colocation import Engine, Plan
from tunerd.system.cuda_driver import checked

_WORD = 4  # bytes
_MEET = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry meet(.param .u64 counts, .param .u32 all)
{
    .reg .pred %p;
    .reg .u32 %all, %here, %old;
    .reg .u64 %base, %since, %now;
    ld.param.u64 %base, [counts];
    cvta.to.global.u64 %base, %base;
    ld.param.u32 %all, [all];
    atom.global.add.u32 %old, [%base], 1;
    mov.u64 %since, %globaltimer;
WAIT:
    ld.volatile.global.u32 %here, [%base];
    setp.ge.u32 %p, %here, %all;
    @%p bra MET;
    mov.u64 %now, %globaltimer;
    sub.u64 %now, %now, %since;
    setp.lt.u64 %p, %now, 500000000;
    @%p bra WAIT;
    ret;
MET:
    atom.global.add.u32 %old, [%base+4], 1;
    ret;
}
\0"""


def met(driver: Any, streams: Sequence[int]) -> int:
    """Return how many of a kernel on each stream saw all others begin."""
    module = checked(driver.cuModuleLoadData(_MEET))
    counts = checked(driver.cuMemAlloc(2 * _WORD))
    checked(driver.cuMemsetD32(counts, 0, 2))
    function = checked(driver.cuModuleGetFunction(module, b"meet"))
    given = ((int(counts), len(streams)), (ctypes.c_void_p, ctypes.c_uint32))
    for stream in streams:
        checked(driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, given, 0))
    for stream in streams:  # a green context is none of those that another one waits for
        checked(driver.cuStreamSynchronize(stream))
    found = (ctypes.c_uint32 * 2)()
    checked(driver.cuMemcpyDtoH(ctypes.addressof(found), counts, ctypes.sizeof(found)))
    return found[1]


def main() -> None:
    from cuda.bindings import driver

    with Engine(Plan.read(sys.argv[1])) as engine:
        place: Any = engine._place
        streams = [track.stream for track in place._tracks.values()]
        place._gpu.make_current()
        print(len(streams), met(driver, streams))


if __name__ == "__main__":
    main()
