"""Places by the name that a plan gives them."""

from __future__ import annotations

from tunerd.colocation.places.base import Place


def place_of(kind: str) -> Place:
    """Return a new place of a kind; KeyError for an unknown one."""
    from tunerd.colocation.places.in_process import InProcessPlace
    from tunerd.colocation.places.processes import ProcessesPlace

    places: dict[str, type[Place]] = {
        place.kind: place for place in (InProcessPlace, ProcessesPlace)
    }
    return places[kind]()
