"""Members that are loaded as one: what their artifacts say of their architecture.

An artifact for several tenants has kernels that serve models of its architecture, each with weights
of its own, one or several in a launch. Members of a plan with such an artifact, and those that are
of its architecture, are a group: an artifact for one model, from which the weights are taken, or
the folder that `tunerd tenant` writes, which has nothing else. A member in no group is as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tunerd.artifacts.loading import load
from tunerd.artifacts.manifest import read_all_variants, read_tenant
from tunerd.artifacts.super_model import SuperModel
from tunerd.colocation.plan import Member
from tunerd.colocation.work import Group
from tunerd.errors import InputError
from tunerd.vocabulary import Arrays


class ForTenants(Protocol):
    """What the kernels of a group are loaded as: a SuperModel."""

    own: str
    counts: tuple[int, ...]

    def add(self, name: str, source: Path) -> None: ...
    def bring(self, names: Sequence[str]) -> None: ...
    def run(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> Sequence[Arrays]: ...


def load_for_tenants(artifact: Path) -> SuperModel:
    """Load an artifact for several tenants."""
    model = load(artifact)
    assert isinstance(model, SuperModel)  # by its manifest, which was read before
    return model


def groups_of(members: Sequence[Member], most: int) -> tuple[Group, ...]:
    """Return the groups among members, whose launches take `most` requests where they can.

    Raises LoadError for a folder that is no artifact, and InputError for weights alone whose
    kernels no member has.
    """
    of_architecture: dict[str, list[Member]] = {}
    for member in members:
        if architecture := read_tenant(member.artifact).get("architecture"):
            of_architecture.setdefault(architecture, []).append(member)
    groups = []
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


def kernels_of(members: Sequence[Member], groups: Sequence[Group]) -> dict[str, Path]:
    """Return the artifact by which each member runs, which says what its tensors are."""
    own = {member.name: member.artifact for member in members}
    return own | {name: group.kernels for group in groups for name in group.members}


def add_tenants(model: ForTenants, group: Group, members: Sequence[Member]) -> dict[str, str]:
    """Have members' weights on the device, too; return the name of each member's there.

    Raises LoadError for weights that are not of the architecture.
    """
    named: dict[str, str] = {}
    for member in members:
        if member.artifact == group.kernels:
            named[member.name] = model.own
        else:
            named[member.name] = f"member {member.name}"
            model.add(named[member.name], member.artifact)
    model.bring(tuple(named.values()))
    return named


def _counts(artifact: Path) -> tuple[int, ...]:
    """Return for how many tenants an artifact has kernels; 0: for one model; nothing: none."""
    if "target" not in read_tenant(artifact):  # weights alone
        return ()
    return tuple(int(variant.get("tenants", 0)) for variant in read_all_variants(artifact))
