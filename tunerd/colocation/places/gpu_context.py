"""The first GPU that this process sees, through the driver: its context, memory and facts."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from uuid import UUID

from tunerd.artifacts.staging import PinnedArrays
from tunerd.errors import HostError
from tunerd.system.cuda_driver import ask_for_connections, beside_captures, checked, current
from tunerd.vocabulary import TensorSpec

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


class MpsClientWarning(UserWarning):
    """This process is a client of an MPS daemon itself: killed, it takes the others along."""


class GpuContext:
    """Makes the primary context. Raises HostError where there is no GPU, or no cuda-bindings.

    is_mps_client: whether this process went to an MPS daemon for it, as the driver says.
    """

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver
        except ImportError:
            raise HostError(
                "the package cuda-bindings is not installed; run pip install 'tunerd[cuda]'"
            ) from None
        self._driver = driver
        ask_for_connections()
        try:
            checked(driver.cuInit(0))
            self._device = checked(driver.cuDeviceGet(0))
            self._context = checked(driver.cuDevicePrimaryCtxRetain(self._device))
            checked(driver.cuCtxSetCurrent(self._context))
            name = checked(driver.cuDeviceGetName(128, self._device))
            uuid = checked(driver.cuDeviceGetUuid(self._device))
            self.sm_count = self._attribute("MULTIPROCESSOR_COUNT")
            self.is_mps_client = bool(self._attribute("MPS_ENABLED"))
        except RuntimeError as error:
            raise HostError(
                f"there is no GPU to share here ({error}); run `tunerd doctor` to see what is "
                "missing, or give a plan with `device: cpu`"
            ) from None
        self.name = name.split(b"\0")[0].decode()
        self.uuid = f"GPU-{UUID(bytes=bytes(uuid.bytes))}"  # as NVML writes it

    def make_current(self) -> None:
        """Have the calling thread's work go to this GPU."""
        checked(self._driver.cuCtxSetCurrent(self._context))

    def current(self) -> contextlib.AbstractContextManager[None]:
        """Have the calling thread's work in this block go to this GPU."""
        return current(self._driver, self._context)

    def stream(self) -> int:
        """Return a new stream of the whole GPU, which does not wait for the default one."""
        self.make_current()
        return int(checked(self._driver.cuStreamCreate(_NON_BLOCKING)))

    def destroy_stream(self, stream: int) -> None:
        """Destroy a stream of this GPU, of the whole or of a part. Nothing runs there any more."""
        self.make_current()
        self._driver.cuStreamDestroy(stream)  # of a context that is dead, all is gone

    def free_bytes(self) -> int:
        """Return the memory that is free now; under MPS, of what the limit leaves."""
        self.make_current()
        error, free, _ = self._driver.cuMemGetInfo()
        checked((error,))
        return int(free)

    def pinned(self, specs: Sequence[TensorSpec], *, is_lent: bool = False) -> PinnedArrays:
        """Return arrays from which this GPU copies while nobody waits."""
        self.make_current()
        with beside_captures(self._driver):
            return PinnedArrays(self._driver, specs, is_lent=is_lent)

    def is_dead(self) -> bool:
        """Say whether an error has left the context so that it answers nothing any more."""
        self._driver.cuCtxSetCurrent(self._context)
        (error,) = self._driver.cuStreamQuery(0)  # which does not wait
        known = self._driver.CUresult
        return error not in (known.CUDA_SUCCESS, known.CUDA_ERROR_NOT_READY)

    def _attribute(self, name: str) -> int:
        attribute = getattr(self._driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(checked(self._driver.cuDeviceGetAttribute(attribute, self._device)))
