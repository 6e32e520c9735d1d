"""The first GPU that this process sees, through the driver: its context, memory and facts."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from tunerd.errors import HostError


class GpuContext:
    """Makes the primary context. Raises HostError where there is no GPU, or no cuda-bindings."""

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver
        except ImportError:
            raise HostError(
                "the package cuda-bindings is not installed; run pip install 'tunerd[cuda]'"
            ) from None
        self._driver = driver
        try:
            self._checked(driver.cuInit(0))
            self._device = self._checked(driver.cuDeviceGet(0))
            self._context = self._checked(driver.cuDevicePrimaryCtxRetain(self._device))
            self._checked(driver.cuCtxSetCurrent(self._context))
            name = self._checked(driver.cuDeviceGetName(128, self._device))
            uuid = self._checked(driver.cuDeviceGetUuid(self._device))
            attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
            self.sm_count = int(self._checked(driver.cuDeviceGetAttribute(attribute, self._device)))
        except RuntimeError as error:
            raise HostError(
                f"there is no GPU to share here ({error}); run `tunerd doctor` to see what is "
                "missing, or give a plan with `device: cpu`"
            ) from None
        self.name = name.split(b"\0")[0].decode()
        self.uuid = f"GPU-{UUID(bytes=bytes(uuid.bytes))}"  # as NVML writes it

    def make_current(self) -> None:
        """Have the calling thread's work go to this GPU."""
        self._checked(self._driver.cuCtxSetCurrent(self._context))

    def free_bytes(self) -> int:
        """Return the memory that is free now; under MPS, of what the limit leaves."""
        self.make_current()
        error, free, _ = self._driver.cuMemGetInfo()
        self._checked((error,))
        return int(free)

    def is_dead(self) -> bool:
        """Say whether an error has left the context so that it answers nothing any more."""
        self._driver.cuCtxSetCurrent(self._context)
        (error,) = self._driver.cuStreamQuery(0)  # which does not wait
        known = self._driver.CUresult
        return error not in (known.CUDA_SUCCESS, known.CUDA_ERROR_NOT_READY)

    def _checked(self, answer: Any) -> Any:
        error, *values = answer
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(error.name)
        return values[0] if values else None
