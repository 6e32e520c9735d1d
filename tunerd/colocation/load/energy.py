"""The energy of a GPU between two moments, by NVML's counter."""

from __future__ import annotations

from tunerd.system import gpus


class EnergyMeter:
    """Adds up what goes by between each `start` and `stop`.

    The counter is of the whole board, in millijoules, and moves in steps of some milliseconds: over
    seconds that is nothing.

    Args:
        gpu_uuid: None for what is no GPU, and has no counter.
    """

    def __init__(self, gpu_uuid: str | None) -> None:
        self._uuid = gpu_uuid
        self._first: int | None = None
        self.joules: float | None = None  # so far; None where NVML does not tell

    def start(self) -> None:
        self._first = self._read()

    def stop(self) -> None:
        last = self._read()
        if self._first is not None and last is not None:
            self.joules = (self.joules or 0.0) + (last - self._first) / 1e3

    def _read(self) -> int | None:
        if self._uuid is None:
            return None
        found = gpus.ask_gpu(self._uuid, "nvmlDeviceGetTotalEnergyConsumption")
        return None if found is None else int(found)
