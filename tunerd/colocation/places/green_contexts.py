"""Parts of a GPU within one process: green contexts, whose SMs are disjoint, and proved.

A green context is made of sets of SMs that the driver never gives to two. A graph runs where the
stream is on which it was captured, so a seat is captured on a stream of its lane's context. That
it does is shown and not believed: a kernel that is captured in the same way marks each SM on which
one of its blocks runs (`%smid`), with more blocks than the whole GPU takes at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tunerd.errors import HostError, InfrastructureError
from tunerd.system.cuda_driver import checked

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_DEFAULT_STREAM = 1  # CU_GREEN_CTX_DEFAULT_STREAM
_PAIR = 2  # SMs that share what lies between them and the GPU: less is never given alone
# CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING: sets of 8 make 8 SMs of a share of 15, and some
# cards have 15 of them and not 16. Only clusters of blocks need them, and those are not compiled.
_IN_PAIRS = 1
_MAX_SMS = 1024
_THREADS = 1024  # of a block: at most two of them are on an SM
# As old a version as knows the instructions: a driver compiles no PTX that is newer than itself.
_MARK = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry mark(.param .u64 seen)
{
    .reg .pred %p;
    .reg .u32 %sm, %one;
    .reg .u64 %base, %at, %since, %now;
    ld.param.u64 %base, [seen];
    cvta.to.global.u64 %base, %base;
    mov.u32 %sm, %smid;
    mul.wide.u32 %at, %sm, 4;
    add.u64 %at, %base, %at;
    mov.u32 %one, 1;
    st.global.u32 [%at], %one;
    mov.u64 %since, %globaltimer;
WAIT:
    mov.u64 %now, %globaltimer;
    sub.u64 %now, %now, %since;
    setp.lt.u64 %p, %now, 20000;
    @%p bra WAIT;
    ret;
}
\0"""


def units_of(names_and_pcts: Sequence[tuple[str, int]], *, sms: int, unit: int) -> tuple[int, ...]:
    """Return how many sets of `unit` SMs each lane gets of a GPU with `sms`.

    That is the nearest number where the GPU has as many for all, so that eight at 12% have 16 SMs
    and not 14; else it is rounded down, and then shares of at most 100% together fit. Raises
    HostError where they do not, or one gets none.

    >>> units_of([("a", 40), ("b", 25)], sms=132, unit=2)
    (26, 17)
    >>> units_of([("a", 25), ("b", 25), ("c", 25), ("d", 25)], sms=132, unit=2)
    (16, 16, 16, 16)
    """
    nearest = tuple((2 * sms * pct + 100 * unit) // (200 * unit) for _, pct in names_and_pcts)
    down = tuple(sms * pct // (100 * unit) for _, pct in names_and_pcts)
    counts = nearest if sum(nearest) <= sms // unit else down
    for (name, pct), count in zip(names_and_pcts, counts, strict=True):
        if count < 1:
            raise HostError(
                f"{pct}% of {sms} SMs for {name} is less than the {unit} that come together; give "
                f"it at least {-(-100 * unit // sms)}%, or choose the policy time or streams"
            )
    if sum(counts) > sms // unit:
        raise HostError(
            f"the shares are {sum(counts) * unit} SMs together, and the GPU can give {sms // unit} "
            f"times {unit}; make them smaller"
        )
    return counts


@dataclass(frozen=True)
class Part:
    """A green context. `sms`: the numbers of the SMs on which its work was seen to run."""

    context: Any
    sm_count: int
    sms: frozenset[int]


class GreenContexts:
    """Cuts the GPU of the current context; what it made lives until close()."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._device = checked(driver.cuCtxGetDevice())
        self._parts: list[Part] = []

    def cut(self, names_and_pcts: Sequence[tuple[str, int]]) -> tuple[Part, ...]:
        """Return a part for each lane, in their order.

        Raises HostError where the driver has no green contexts or the shares do not fit, and
        InfrastructureError where two parts were seen on one SM, or one on more than it has.
        """
        driver = self._driver
        try:
            kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
            whole = checked(driver.cuDeviceGetDevResource(self._device, kind))
        except (RuntimeError, AttributeError) as error:
            raise HostError(
                f"this driver gives no parts of a GPU within a process ({error}); choose the "
                "policy time, streams or regulated"
            ) from None
        sms = int(whole.sm.smCount)
        counts = units_of(names_and_pcts, sms=sms, unit=_PAIR)
        status, groups, found, _ = driver.cuDevSmResourceSplitByCount(
            sms // _PAIR, whole, _IN_PAIRS, _PAIR
        )
        checked((status,))
        left = list(groups[:found])
        if sum(counts) > found:
            raise HostError(
                f"the driver splits {sms} SMs into {found} sets of {_PAIR}, and {sum(counts)} are "
                "asked for; make the shares smaller"
            )
        for (name, _), count in zip(names_and_pcts, counts, strict=True):
            mine, left = left[:count], left[count:]
            self._parts.append(self._made(name, mine))
        self._require_disjoint([name for name, _ in names_and_pcts])
        return tuple(self._parts)

    def stream(self, part: Part) -> int:
        """Return a new stream of a part, as CUDA's handle."""
        made = self._driver.cuGreenCtxStreamCreate(part.context, _NON_BLOCKING, 0)
        return int(checked(made))

    def close(self) -> None:
        """Destroy the contexts. No work may be under way in them."""
        parts, self._parts = self._parts, []
        for part in parts:
            self._driver.cuGreenCtxDestroy(part.context)

    def _made(self, name: str, groups: Sequence[Any]) -> Part:
        driver = self._driver
        description = checked(driver.cuDevResourceGenerateDesc(groups, len(groups)))
        context = checked(driver.cuGreenCtxCreate(description, self._device, _DEFAULT_STREAM))
        count = sum(int(group.sm.smCount) for group in groups)
        part = Part(context, count, frozenset())
        seen = self._seen_from(self.stream(part))
        if not seen or len(seen) > count:
            raise InfrastructureError(
                f"{name} was to have {count} SMs, and its work was seen on {len(seen)}; choose "
                "the policy time or streams, and report the driver"
            )
        return Part(context, count, seen)

    def _require_disjoint(self, names: Sequence[str]) -> None:
        owners: dict[int, str] = {}
        for name, part in zip(names, self._parts, strict=True):
            for sm in part.sms:
                if sm in owners:
                    raise InfrastructureError(
                        f"{owners[sm]} and {name} were both seen on SM {sm}; choose the policy "
                        "time or streams, and report the driver"
                    )
                owners[sm] = name

    def _seen_from(self, stream: int) -> frozenset[int]:
        """Return the SMs on which a graph ran that was captured on a stream."""
        driver = self._driver
        module = checked(driver.cuModuleLoadData(_MARK))
        seen = checked(driver.cuMemAlloc(4 * _MAX_SMS))
        try:
            checked(driver.cuMemsetD32(seen, 0, _MAX_SMS))
            checked(driver.cuCtxSynchronize())
            function = checked(driver.cuModuleGetFunction(module, b"mark"))
            mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
            checked(driver.cuStreamBeginCapture(stream, mode))
            parameters = ((int(seen),), (ctypes.c_void_p,))
            launched = driver.cuLaunchKernel(
                function, 4 * _MAX_SMS, 1, 1, _THREADS, 1, 1, 0, stream, parameters, 0
            )
            graph = checked(driver.cuStreamEndCapture(stream))
            checked(launched)
            executable = checked(driver.cuGraphInstantiate(graph, 0))
            checked(driver.cuGraphLaunch(executable, stream))
            checked(driver.cuStreamSynchronize(stream))
            checked(driver.cuGraphExecDestroy(executable))
            checked(driver.cuGraphDestroy(graph))
            marks = (ctypes.c_uint32 * _MAX_SMS)()
            copied = driver.cuMemcpyDtoH(ctypes.addressof(marks), seen, ctypes.sizeof(marks))
            checked(copied)
        finally:
            checked(driver.cuMemFree(seen))
            checked(driver.cuModuleUnload(module))
        return frozenset(number for number, mark in enumerate(marks) if mark)
