"""Who fits: the memory of all seats, planned before the first is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tunerd.artifacts.segments import Cut
from tunerd.colocation.artifacts import weights_bytes_of
from tunerd.colocation.places.base import Place
from tunerd.colocation.plan import Member
from tunerd.colocation.work import Group, Lane
from tunerd.errors import HostError, InputError

_HEADROOM = 0.9  # of the memory: allocators round up, and others have some


def planned_bytes(
    place: Place,
    members: Sequence[Member],
    lanes: Sequence[Lane],
    groups: Sequence[Group] = (),
    *,
    cut_of: Callable[[str], Cut | None],
) -> dict[str, int]:
    """Return what each member needs, in the order of loading; those of a group an equal part.

    cut_of: how a member that is in no group is cut into segments, as `Place.load` takes it.

    Raises HostError, with the member's name and the numbers, for the first that does not fit.
    """
    room = int(place.capacity_bytes() * _HEADROOM)
    needed: dict[str, int] = {}
    group_of = {name: group for group in groups for name in group.members}
    for member in members:
        group = group_of.get(member.name)
        names = {member.name} if group is None else set(group.members)
        seats = sum(not names.isdisjoint(lane.members) for lane in lanes)
        if group is None:
            size = place.needed_bytes(member, seats, cut=cut_of(member.name))
        else:
            size = place.needed_together_bytes(group, seats) // len(group.members)
        taken = sum(needed.values())
        if taken + size > room:
            where = f" in {seats} lanes" if seats > 1 else ""
            raise HostError(
                f"{member.name} does not fit: it needs {_text(size)}{where}, the members before it "
                f"take {_text(taken)}, and {_text(room)} may be used; leave a member out, or "
                "choose a policy with fewer lanes"
            )
        needed[member.name] = size
    return needed


def require_room(group: Group, seats: int, *, depth: int) -> None:
    """Raise InputError where weights that launches need at a time may have too little memory.

    seats: of the group that have their weights in common, each with `depth` launches at a time.
    """
    if group.weights_bytes is None:
        return
    at_once = held_at_once(len(group.members), seats, depth=depth, together=group.together)
    one = weights_bytes_of(group.kernels)
    if group.weights_bytes < at_once * one:
        raise InputError(little_room_text(group.name, group.weights_bytes, at_once, one))


def held_at_once(members: int, seats: int, *, depth: int, together: int) -> int:
    """Return how many of a group's members have weights that must be there at a time.

    Args:
        seats: that have their weights in common, each with `depth` launches at a time.
        together: how many requests a launch has at most.
    """
    # Launches hold what they read, and the kernels' own tenant has its place for ever.
    return min(members, seats * depth * together + 1)


def little_room_text(group: str, size_bytes: int, at_once: int, one_bytes: int) -> str:
    """Return that a group's weights have too little memory, and what to do.

    Args:
        at_once: how many of its members may run at a time.
        one_bytes: what the weights of one take.
    """
    return (
        f"weights_gib: {group} has {_text(size_bytes)} of it, and up to {at_once} of its members "
        f"may run at once, whose weights take {_text(at_once * one_bytes)}; give more, or have "
        "fewer requests in a launch or fewer slices"
    )


def _text(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.1f} MiB"
