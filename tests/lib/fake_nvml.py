"""NVML of one made-up GPU, for tests of what is made of its answers."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

MIB = 1 << 20


class FakeNvml:
    """One GPU's NVML; what is set to None is not supported."""

    class NVMLError(Exception):
        pass

    nvmlMemory_v2 = 0x02000028

    def __init__(self) -> None:
        self.compute: Sequence[int] | None = ()
        self.through_mps: Sequence[int] | None = ()
        self.graphics: Sequence[int] | None = ()
        self.bytes_of: dict[int, int] = {}  # of a process's memory; of others it is not told
        self.used_bytes = 500 * MIB
        self.total_bytes = 139 << 30
        self.busy: list[int] | None = [0]
        self.reasons: int | None = 1  # idle
        self.persistent: int | None = 1
        self.has_event_reasons = True
        self.has_memory_v2 = True

    def _told(self, value: Any) -> Any:
        if value is None:
            raise self.NVMLError("Not Supported")
        return value

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def _processes(self, pids: Sequence[int] | None) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(pid=pid, usedGpuMemory=self.bytes_of.get(pid))
            for pid in self._told(pids)
        ]

    def nvmlDeviceGetComputeRunningProcesses(self, _: str) -> list[SimpleNamespace]:
        return self._processes(self.compute)

    def nvmlDeviceGetMPSComputeRunningProcesses(self, _: str) -> list[SimpleNamespace]:
        return self._processes(self.through_mps)

    def nvmlDeviceGetGraphicsRunningProcesses(self, _: str) -> list[SimpleNamespace]:
        return self._processes(self.graphics)

    def nvmlDeviceGetMemoryInfo(self, _: str, version: int | None = None) -> SimpleNamespace:
        if version and not self.has_memory_v2:
            raise self.NVMLError("Function Not Found")
        return SimpleNamespace(used=self.used_bytes, total=self.total_bytes)

    def nvmlDeviceGetUtilizationRates(self, _: str) -> SimpleNamespace:
        busy = self._told(self.busy)
        return SimpleNamespace(gpu=busy.pop(0) if len(busy) > 1 else busy[0])

    def nvmlDeviceGetCurrentClocksEventReasons(self, _: str) -> int:
        return int(self._told(self.reasons if self.has_event_reasons else None))

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, _: str) -> int:
        return int(self._told(self.reasons))

    def nvmlDeviceGetPersistenceMode(self, _: str) -> int:
        return int(self._told(self.persistent))

    def nvmlDeviceGetClockInfo(self, _: str, clock: int) -> int:
        return 1980

    def nvmlDeviceGetTemperature(self, _: str, sensor: int) -> int:
        return 41

    def nvmlDeviceGetPowerUsage(self, _: str) -> int:
        return 350_500
