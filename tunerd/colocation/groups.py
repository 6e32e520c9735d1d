"""Members whose requests may be in one launch: what their artifacts say of that.

An artifact for several tenants has kernels that serve models of its architecture, each with weights
of its own, one or several in a launch. Members of a plan with such an artifact, and those that are
of its architecture, are a group: an artifact for one model, from which the weights are taken, or
the folder that `tunerd tenant` writes, which has nothing else. A member whose artifact has several
batches (`tunerd.artifacts.batches`) is a group of its own: a launch takes several of its requests.
A member in no group is as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from tunerd.artifacts.batches import BatchedModel, batch_sizes
from tunerd.artifacts.loading import load
from tunerd.artifacts.manifest import Manifest, read_all_variants, read_tenant
from tunerd.artifacts.sized import SizedModel
from tunerd.artifacts.super_model import SuperModel
from tunerd.colocation.artifacts import weights_bytes_of
from tunerd.colocation.plan import Member
from tunerd.colocation.work import Group
from tunerd.errors import InputError
from tunerd.vocabulary import Arrays


class ForSeveral(Protocol):
    """What the kernels of a group are loaded as: a SuperModel, or a BatchedModel."""

    own: str
    counts: tuple[int, ...]

    @property
    def brought(self) -> int: ...
    def limit_weights(self, size_bytes: int) -> None: ...
    def add(self, name: str, source: Path) -> None: ...
    def bring(self, names: Sequence[str]) -> None: ...
    def run(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> Sequence[Arrays]: ...


def load_for_several(artifact: Path) -> SuperModel | BatchedModel:
    """Load an artifact for several tenants, or of several batches."""
    model = load(artifact)
    if isinstance(model, SizedModel):
        return BatchedModel(model)
    assert isinstance(model, SuperModel)  # by its manifest, which was read before
    return model


def groups_of(members: Sequence[Member], most: int) -> tuple[Group, ...]:
    """Return the groups among members, whose launches take `most` requests where they can.

    Raises LoadError for a folder that is no artifact, and InputError for weights alone whose
    kernels no member has.
    """
    groups: list[Group] = []
    of_architecture: dict[str, list[Member]] = {}
    for member in members:
        if batches := _batches(member.artifact):
            together = min(most, batches[-1])
            groups.append(Group(f"{member.name}+", (member.name,), together, member.artifact))
        elif architecture := read_tenant(member.artifact).get("architecture"):
            of_architecture.setdefault(architecture, []).append(member)
    for alike in of_architecture.values():
        counts = {member.name: _counts(member.artifact) for member in alike}
        first = next((m for m in alike if any(counts[m.name])), None)
        if first is not None:
            names = tuple(member.name for member in alike)
            name = f"{names[0]}+{len(names) - 1}" if len(names) > 1 else f"{names[0]}+"
            together = min(most, max(counts[first.name]))
            groups.append(Group(name, names, together, first.artifact))
        elif alone := [m.name for m in alike if not counts[m.name]]:
            raise InputError(
                f"{alone[0]} has weights and no kernels, and no member has an artifact for several "
                "tenants of its architecture; add the one that it was made like"
            )
    return tuple(groups)


def with_weights_of(groups: Sequence[Group], size_bytes: int) -> tuple[Group, ...]:
    """Return groups whose tenants' weights have so much memory in all, each a part of its own.

    The parts are as all of their weights are. Batches have one model's, as any member.
    """
    needed = {
        group.name: len(group.members) * weights_bytes_of(group.kernels)
        for group in groups
        if not _batches(group.kernels)
    }
    in_all = sum(needed.values())
    if in_all <= size_bytes:
        return tuple(groups)
    return tuple(
        replace(group, weights_bytes=size_bytes * needed[group.name] // in_all)
        if group.name in needed
        else group
        for group in groups
    )


def kernels_of(members: Sequence[Member], groups: Sequence[Group]) -> dict[str, Path]:
    """Return the artifact by which each member runs, which says what its tensors are."""
    own = {member.name: member.artifact for member in members}
    return own | {name: group.kernels for group in groups for name in group.members}


def add_tenants(model: ForSeveral, group: Group, members: Sequence[Member]) -> dict[str, str]:
    """Have members' weights on the device, too, if all fit; return the name of each member's there.

    Raises LoadError for weights that are not of the architecture.
    """
    named: dict[str, str] = {}
    for member in members:
        if member.artifact == group.kernels:
            named[member.name] = model.own
        else:
            named[member.name] = f"member {member.name}"
            model.add(named[member.name], member.artifact)
    if group.weights_bytes is None:
        model.bring(tuple(named.values()))
    else:
        model.limit_weights(group.weights_bytes)
    return named


def tried_tenants(group: Group, tenants: Mapping[str, str]) -> list[str]:
    """Return whose requests a seat is tried with: of as many as it has room for at a time.

    tenants: by member, as the model calls them.
    """
    names = [*tenants.values()]
    return names if group.weights_bytes is None else names[: group.together]


def _counts(artifact: Path) -> tuple[int, ...]:
    """Return for how many tenants an artifact has kernels; 0: for one model; nothing: none."""
    return tuple(int(variant.get("tenants", 0)) for variant in _variants(artifact))


def _batches(artifact: Path) -> tuple[int, ...]:
    """Return the batches that an artifact has; nothing where it has one size, or no kernels."""
    variants = _variants(artifact)
    return batch_sizes(variants) if variants else ()


def _variants(artifact: Path) -> tuple[Manifest, ...]:
    """Return the variants of an artifact; nothing of weights alone."""
    return read_all_variants(artifact) if "target" in read_tenant(artifact) else ()
