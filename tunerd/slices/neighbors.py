"""Which slices share a device with the one that decides, and what they do meanwhile.

none      nothing: finalists are measured alone on their device
busy      they repeat the task's default kernel
as-tuned  they measure finalists of other tasks, as they did in the search
"""

from __future__ import annotations

from collections.abc import Sequence

from tunerd.errors import HostError
from tunerd.vocabulary import SliceSpec

NONE, BUSY, AS_TUNED = "none", "busy", "as-tuned"

Placed = Sequence[tuple[SliceSpec, str | None]]  # slices, each with its node


def others_on_device(slices: Placed, slice_id: str) -> list[str]:
    """Return the other slices of a slice's device, in order."""
    (of,) = {_device(s, node) for s, node in slices if s.slice_id == slice_id}
    return [s.slice_id for s, node in slices if _device(s, node) == of and s.slice_id != slice_id]


def require_neighbours(slices: Placed, neighbours: str) -> None:
    """Raise HostError where finals are to have neighbours and a device has one slice alone."""
    if neighbours != NONE and not others_on_device(slices, slices[0][0].slice_id):
        raise HostError(
            f"--neighbours {neighbours} takes a second slice of the device, and there is one; "
            "give a smaller share, more --slices, or --neighbours none"
        )


def _device(spec: SliceSpec, node: str | None) -> tuple[str | None, str | None, int]:
    return node, spec.gpu_uuid, spec.device_index
