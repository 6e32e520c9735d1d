"""The energy of a GPU between two moments, by NVML's counter."""

from __future__ import annotations

from tunerd.system import gpus


class EnergyMeter:
    """Reads the counter at `start` and `stop`. The counter is of the whole board, in millijoules,
    and moves in steps of some milliseconds: over seconds that is nothing.

    Args:
        gpu_uuid: None for what is no GPU, and has no counter.
    """

    def __init__(self, gpu_uuid: str | None) -> None:
        self._uuid = gpu_uuid
        self._first: int | None = None
        self._last: int | None = None

    def start(self) -> None:
        self._first = self._read()

    def stop(self) -> None:
        self._last = self._read()

    @property
    def joules(self) -> float | None:
        """Return what went by between the two; None where NVML does not tell."""
        if self._first is None or self._last is None:
            return None
        return (self._last - self._first) / 1e3

    def _read(self) -> int | None:
        if self._uuid is None:
            return None
        found = gpus.ask_gpu(self._uuid, "nvmlDeviceGetTotalEnergyConsumption")
        return None if found is None else int(found)
