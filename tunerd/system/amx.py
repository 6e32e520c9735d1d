"""Leave to use AMX, which Linux gives to a process that asks for it.

The registers are 8 KiB of each thread's state, so that a process without leave has none, and ends
by an illegal instruction where it uses them. What is asked for once holds for all threads.
"""

from __future__ import annotations

import ctypes
import functools
import platform

FEATURES = ("amx-int8", "amx-tile")  # that kernels of whole numbers need, as LLVM spells them

_ARCH_PRCTL = 158  # the number of the system call on x86-64
_ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 0x1023, 18  # asm/prctl.h, asm/fpu/types.h


@functools.cache
def permitted() -> bool:
    """Ask for AMX, and say whether this process has it.

    It has not where the CPU or Linux (before 5.16) lacks it, or where a sandbox forbids to ask.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    syscall = ctypes.CDLL(None).syscall
    syscall.restype = ctypes.c_long
    asked = map(ctypes.c_long, (_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA))
    return bool(syscall(*asked) == 0)
