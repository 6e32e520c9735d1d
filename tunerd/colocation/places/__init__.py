"""Places by the names that a plan gives them."""

from __future__ import annotations

from tunerd.colocation.places.base import Place
from tunerd.errors import HostError


def place_of(kind: str, device: str) -> Place:
    """Return a new place of a kind on a device; HostError where it is not to be had."""
    from tunerd.colocation.places.cuda_streams import CudaStreamsPlace
    from tunerd.colocation.places.in_process import InProcessPlace
    from tunerd.colocation.places.mps import MpsPlace
    from tunerd.colocation.places.processes import ProcessesPlace

    places: dict[tuple[str, str], type[Place]] = {
        ("in-process", "cpu"): InProcessPlace,
        ("in-process", "cuda"): CudaStreamsPlace,
        ("processes", "cpu"): ProcessesPlace,
        ("mps", "cuda"): MpsPlace,
    }
    if (kind, device) not in places:
        raise HostError(f"there is no place {kind} on {device} yet; choose `place: in-process`")
    return places[kind, device]()
