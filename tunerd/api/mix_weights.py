"""Which members of a mix are a group whose weights have less memory than all of them take."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from tunerd.api.mix_artifacts import Steps
from tunerd.api.mix_costs import like
from tunerd.artifacts.manifest import MANIFEST, read_all_variants, sha256_of
from tunerd.colocation.artifacts import weights_bytes_of
from tunerd.colocation.groups import groups_of, with_weights_of
from tunerd.colocation.memory import held_at_once, require_room
from tunerd.colocation.places.base import STREAM_DEPTH
from tunerd.colocation.plan import Member
from tunerd.colocation.planning import bringing
from tunerd.colocation.planning.lacking import Lacking
from tunerd.colocation.planning.mix import Mix
from tunerd.colocation.planning.placement import Subject
from tunerd.colocation.planning.residency import Residency
from tunerd.colocation.work import Group

_GIB = 1 << 30
_MEASURED_SECS = 5.0  # about, with the start of an engine


class MixWeights:
    """What the groups of a mix have of `weights_gib`.

    lacking: gets a line where a dry run would measure.
    """

    def __init__(
        self, mix: Mix, folder: Path, device: str, steps: Steps, lacking: Lacking, *, is_dry: bool
    ) -> None:
        self._mix, self._folder, self._device = mix, folder, device
        self._steps, self._lacking, self._is_dry = steps, lacking, is_dry

    def limited(self, subjects: Sequence[Subject]) -> list[Subject]:
        """Return members that know what their group's weights have, where that is not all of them.

        The groups are those of the engine that serves a plan of these members. Who is not tuned yet
        is in none. What it takes to bring weights was measured before, or is now.

        Raises InputError where no placement has enough for what may run at once.
        """
        mix = self._mix
        if mix.weights_gib is None or mix.place != "in-process":  # other places take no groups
            return list(subjects)
        tuned = [subject for subject in subjects if subject.architecture]
        members = [Member(name=each.name, artifact=each.artifact) for each in tuned]
        found: dict[str, Residency] = {}
        for group in with_weights_of(groups_of(members, 1), int(mix.weights_gib * _GIB)):
            if group.weights_bytes is not None:
                of = self._residency(group, [m for m in members if m.name in group.members])
                found |= dict.fromkeys(group.members, of)
        return [dataclasses.replace(each, residency=found.get(each.name)) for each in subjects]

    def _residency(self, group: Group, members: Sequence[Member]) -> Residency:
        """Return what a group's weights have; raises as `limited`."""
        is_on_gpu = self._mix.device == "cuda"
        depth = STREAM_DEPTH if is_on_gpu else 1
        require_room(group, 1, depth=depth)
        assert group.weights_bytes is not None
        return Residency(
            name=group.name,
            members=group.members,
            own=frozenset(each.name for each in members if each.artifact == group.kernels),
            together=max(int(v["tenants"]) for v in read_all_variants(group.kernels)),
            size_bytes=group.weights_bytes,
            one_bytes=weights_bytes_of(group.kernels),
            is_shared=is_on_gpu,
            depth=depth,
            measured_secs=self._measured_secs(group, members, depth),
        )

    def _measured_secs(self, group: Group, members: Sequence[Member], depth: int) -> float | None:
        """Return what bringing weights takes; None where it is not measured."""
        path, kernels = self._folder / bringing.BRINGS, group.kernels
        digest = sha256_of(kernels / MANIFEST)
        known = bringing.read_brings(path, digest, self._device)
        if known is not None:
            return known
        what = f"what bringing weights of {group.name} takes"
        if self._is_dry:
            self._lacking.add(f"measure {what}", _MEASURED_SECS)
            return None
        others = [each.artifact for each in members if each.artifact != kernels]
        count = held_at_once(len(members), 1, depth=depth, together=1)
        if len(others) < count:  # the rest are the kernels' own, and never cold
            return None
        self._steps.say_of("measuring", what)
        secs = bringing.measure(kernels, others[:count], like=like(self._mix, kernels))
        if secs is not None:
            bringing.append(path, digest, self._device, secs)
        return secs
