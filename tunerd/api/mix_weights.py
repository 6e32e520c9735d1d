"""Which members of a mix are a group whose weights have less memory than all of them take."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tunerd.artifacts.manifest import read_all_variants
from tunerd.colocation.artifacts import weights_bytes_of
from tunerd.colocation.groups import groups_of, with_weights_of
from tunerd.colocation.memory import require_room
from tunerd.colocation.places.base import STREAM_DEPTH
from tunerd.colocation.plan import Member
from tunerd.colocation.planning.mix import Mix
from tunerd.colocation.planning.placement import Subject
from tunerd.colocation.planning.residency import Residency
from tunerd.colocation.work import Group

_GIB = 1 << 30


def with_residency(subjects: Sequence[Subject], mix: Mix) -> list[Subject]:
    """Return members that know what their group's weights have, where that is not all they take.

    The groups are those of the engine that serves a plan of these members. Who is not tuned yet is
    in none.

    Raises InputError where no placement has enough for what may run at once.
    """
    if mix.weights_gib is None or mix.place != "in-process":  # other places take no groups
        return list(subjects)
    tuned = [subject for subject in subjects if subject.architecture]
    members = [Member(name=each.name, artifact=each.artifact) for each in tuned]
    found: dict[str, Residency] = {}
    for group in with_weights_of(groups_of(members, 1), int(mix.weights_gib * _GIB)):
        if group.weights_bytes is not None:
            residency = _residency(group, members, mix)
            require_room(group, 1, depth=residency.depth)
            found |= dict.fromkeys(group.members, residency)
    return [dataclasses.replace(each, residency=found.get(each.name)) for each in subjects]


def _residency(group: Group, members: Sequence[Member], mix: Mix) -> Residency:
    assert group.weights_bytes is not None
    in_group = [member for member in members if member.name in group.members]
    is_on_gpu = mix.device == "cuda"
    return Residency(
        name=group.name,
        members=group.members,
        own=frozenset(each.name for each in in_group if each.artifact == group.kernels),
        together=max(int(v["tenants"]) for v in read_all_variants(group.kernels)),
        size_bytes=group.weights_bytes,
        one_bytes=weights_bytes_of(group.kernels),
        is_shared=is_on_gpu,
        depth=STREAM_DEPTH if is_on_gpu else 1,
    )
