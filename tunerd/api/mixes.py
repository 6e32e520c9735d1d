"""Plan a mix of models on one device: tune, measure, search, prove."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tunerd.api.colocation import without_mismatches
from tunerd.api.mix_artifacts import MixArtifacts, Steps
from tunerd.api.mix_costs import MixCosts, like
from tunerd.api.mix_sources import (
    device_of,
    kind_of_machine,
    memory_of,
    points_in,
    points_of,
    profiled,
    shares_of,
)
from tunerd.api.mix_weights import MixWeights
from tunerd.api.run import Artifact, OnStep, StrPath, nothing
from tunerd.artifacts.manifest import MANIFEST, sha256_of
from tunerd.colocation.places.base import seat_bytes
from tunerd.colocation.plan import Plan
from tunerd.colocation.planning import features, launched, pairs
from tunerd.colocation.planning.answer import Answer, answer, plan_of, unknown
from tunerd.colocation.planning.curves import Curves, Origin, Point, read_points
from tunerd.colocation.planning.engine_cost import EngineCost
from tunerd.colocation.planning.estimates import model_of
from tunerd.colocation.planning.kept import keep, keep_pairs, kept, kept_pairs
from tunerd.colocation.planning.lacking import Lacking
from tunerd.colocation.planning.mix import Entry, Mix, names_of
from tunerd.colocation.planning.neighbours import neighbours
from tunerd.colocation.planning.pairs import PAIRS, Pairs
from tunerd.colocation.planning.placement import Subject
from tunerd.colocation.planning.planned import ANSWER, PLAN, PlannedMix
from tunerd.colocation.planning.proof import prove
from tunerd.colocation.planning.team import Team
from tunerd.colocation.planning.world import World
from tunerd.errors import InputError, Interrupted
from tunerd.studies.profile.folder import FACTS
from tunerd.system import host
from tunerd.system.store_address import StoreAddress

PROFILE = "tunerd profile"  # how points of one tenant are measured
_MOST_PASSES = 6  # in which pairs of a new plan are measured, and it is rehearsed


def colocate_plan(
    mix: Mix | StrPath,
    *,
    out: StrPath | None = None,
    dry_run: bool = False,
    prove_it: bool = True,
    store: str | StoreAddress | None = None,
    on_step: OnStep | None = None,
) -> PlannedMix:
    """Say which share and lane each model of a mix gets; measure what that takes, and prove it.

    The same call in the same folder goes on where it stopped: each tuning, each visit of a share
    and each pair that was measured is kept.

    Args:
        mix: a file, or what was read of one.
        out: the folder; mixes/NAME if not given.
        dry_run: measure and write nothing; answer by what was measured before.
        prove_it: run the plan with the rates of the mix, and compare.
        store: a team's store, whose points are taken and which gets those that are measured; that
            of the mix if not given. One that cannot be reached is a note.

    Raises TunerdError, and Interrupted after SIGINT or SIGTERM, with what was measured kept.
    """
    from tunerd.system.signals import Stop

    given = mix if isinstance(mix, Mix) else Mix.read(os.fspath(mix))
    if store is not None:
        given = given.model_copy(update={"store": _address(store)})
    name = "mix" if isinstance(mix, Mix) else Path(os.fspath(mix)).stem
    folder = Path(out) if out is not None else Path("mixes") / name
    if dry_run:
        dry = _Work(given, folder, nothing, is_dry=True)
        return dataclasses.replace(dry.planned(), lacking_secs=dry.secs_in_all(prove_it=prove_it))
    say = on_step or nothing
    with _opened(folder), without_mismatches(), Stop() as stop:

        def go_on(message: str) -> None:
            if stop.requested:
                raise Interrupted(
                    "stopped on request; what was measured is kept, and the same command goes on"
                )
            say(message)

        work = _Work(given, folder, go_on, is_dry=False)
        found = work.planned()
        if found.plan is not None:
            found.plan.write(folder / PLAN)
            if prove_it and found.answer.chosen is not None:
                proof = prove(Plan.read(folder / PLAN), found.answer.chosen, go_on)
                found = dataclasses.replace(found, proof=proof)
        else:
            (folder / PLAN).unlink(missing_ok=True)  # of an earlier mix, which did fit
        _written(found)
        return found


class _Work:
    """What a mix takes: artifacts, curves and pairs, each from where it is or made now."""

    def __init__(self, mix: Mix, folder: Path, say: OnStep, *, is_dry: bool) -> None:
        self._mix, self._folder, self._say, self._is_dry = mix, folder, say, is_dry
        self._steps = Steps(say)
        self._lacking = Lacking()
        self._device = device_of(mix)
        self._shares, left_out = shares_of(mix)
        self._left_out = tuple(f"{pct}% is left out: {why}" for pct, why in left_out)
        self.curves = Curves()
        for message in self._left_out:
            self._say(message)
        here = host.facts()
        self._on = kind_of_machine(mix.device, here)
        self._team = Team(
            mix.store,
            self._on,
            place=mix.place,
            host=here.hostname,
            folder=folder,
            say=say,
        )

    def planned(self) -> PlannedMix:
        self._team.ask(is_dry=self._is_dry)
        found = self._found()
        if not self._is_dry:
            self._team.publish()
        notes = tuple(self._team.notes)
        return dataclasses.replace(found, notes=notes, left_out=self._left_out)

    def secs_in_all(self, *, prove_it: bool) -> float:
        """Return about how long a plan takes that is no dry run; 0 where nothing lacks."""
        return self._lacking.secs_in_all(self._mix, prove_it=prove_it)

    def _found(self) -> PlannedMix:
        mix = self._mix
        makes = MixArtifacts(
            mix, self._folder, self._shares, self._steps, self._lacking, is_dry=self._is_dry
        )
        makes.require_models()
        artifacts = {entry.name: makes.of(entry) for entry in mix.members}
        for path in mix.curves:
            self.curves.add(self._given_points(path, artifacts))
        for entry in mix.members:
            counts = makes.counts(entry)
            self.curves.add(self._points(entry, artifacts[entry.name], counts))
        subjects = [
            subject
            for entry in mix.members
            for subject in self._subjects(entry, artifacts[entry.name])
        ]
        subjects = MixWeights(
            mix, self._folder, self._device, self._steps, self._lacking, is_dry=self._is_dry
        ).limited(subjects)
        known = self._known_pairs(subjects)
        table, no_estimate = self._pairs(known, self._device)
        if any(not self.curves.shares(entry.name) for entry in mix.members):
            if self._is_dry:
                self._lacking.add_engine(mix)
            said = unknown(self._lacking.lines)
            return PlannedMix(mix, self._folder, said, None, None, self.curves, table, no_estimate)
        engine = MixCosts(
            mix,
            self._folder,
            self._device,
            self.curves,
            self._team,
            self._steps,
            self._lacking,
            is_dry=self._is_dry,
        )
        costs = engine.alone(subjects)
        found, plan = self._answered(subjects, table, costs)
        for _ in range(_MOST_PASSES):
            if plan is None:
                break
            if self._measured_pairs(found, subjects, table, plan):
                table, no_estimate = self._pairs(table.measured, self._device)
            elif rehearsed := engine.rehearsed(found, subjects, costs, plan):
                costs = rehearsed
            else:
                break
            found, plan = self._answered(subjects, table, costs)
        return PlannedMix(mix, self._folder, found, plan, None, self.curves, table, no_estimate)

    def _answered(
        self, subjects: Sequence[Subject], table: Pairs, costs: Mapping[str, EngineCost]
    ) -> tuple[Answer, Plan | None]:
        mix = self._mix
        self._say("searching placements")
        found = answer(
            self._world(subjects, table, costs),
            shares=self._shares,
            together=mix.search.together,
            to_measure=self._lacking.lines,
        )
        return found, plan_of(found, mix, subjects) if found.is_fit else None

    def _world(
        self, subjects: Sequence[Subject], table: Pairs, costs: Mapping[str, EngineCost]
    ) -> World:
        mix = self._mix
        return World(
            subjects,
            self.curves,
            table,
            busy=mix.search.busy,
            memory_bytes=memory_of(mix),
            costs=costs,
        )

    # --- curves --------------------------------------------------------------------------------

    def _points(
        self, entry: Entry, artifacts: Sequence[Path], counts: Sequence[int]
    ) -> list[Point]:
        """Return what an entry's first artifact takes at the shares that have no point yet.

        counts: of models in a launch, for which a dry run would tune.
        """
        lacking = set(self._shares) - set(self.curves.shares(entry.name))
        lanes = launched.lanes_of(artifacts)
        if lanes is not None:
            return self._launched(entry, artifacts, lanes)
        if not artifacts:  # a dry run would tune them
            self._foresee(entry, lacking, counts)
            return []
        before = [p for p in kept(artifacts[0], self._device, entry.name) if p.share in lacking]
        lacking -= {point.share for point in before}
        digest = sha256_of(artifacts[0] / MANIFEST)
        before += self._team.points(
            entry.name, digest, [(share, 1) for share in sorted(lacking)], how=PROFILE
        )
        lacking -= {point.share for point in before}
        return before + (self._profiled(entry, artifacts, lacking) if lacking else [])

    def _profiled(self, entry: Entry, artifacts: Sequence[Path], lacking: set[int]) -> list[Point]:
        from tunerd.studies.profile.subject import subject_of_artifact

        subject = subject_of_artifact(artifacts[0])
        root = self._folder / "curves" / f"{entry.name}-{subject.digest[:12]}"
        if self._is_dry:
            found = points_in(root, entry.name) if (root / FACTS).is_file() else []
            found = [point for point in found if point.share in lacking]
            lacking -= {point.share for point in found}
            if lacking:
                self._lacking.add_shares(self._mix, entry, lacking)
            return found
        from tunerd.api.studies import profile

        result = profile(
            Artifact(artifacts[0]),
            shares=sorted(lacking),
            rounds=self._mix.search.rounds,
            duration_secs=self._mix.search.visit,
            out=root,
            on_step=functools.partial(self._steps.say_of, f"measuring {entry.name}"),
        )
        found = points_of(result.profile, entry.name, str(root))
        found = [point for point in found if point.share in lacking]
        self._team.keep_points(sha256_of(artifacts[0] / MANIFEST), found, how=PROFILE)
        return found

    def _launched(
        self, entry: Entry, artifacts: Sequence[Path], lanes: launched.Launchable
    ) -> list[Point]:
        """Return what launches of several take at each share, measured before or now."""
        path, kernels = self._folder / launched.LAUNCHES, lanes.kernels
        digest = sha256_of(kernels / MANIFEST)
        found = launched.read_launches(path, digest)
        known = {(p.share, p.together) for p in self.curves if p.of == entry.name}
        known |= {(p.share, p.together) for p in found}
        before = kept(kernels, self._device, entry.name)
        found += [p for p in before if (p.share, p.together) not in known]
        known |= {(p.share, p.together) for p in found}
        most = max(lanes.counts) if lanes.is_batch else len(artifacts)
        together = {1, *self._mix.search.together} & set(lanes.counts)
        wanted = [(s, c) for s in self._shares for c in sorted(together) if c <= most]
        lacking = [each for each in wanted if each not in known]
        how = f"{launched.SOURCE}, {self._mix.place}"
        found += self._team.points(entry.name, digest, lacking, how=how)
        known |= {(p.share, p.together) for p in found}
        others = [artifact for artifact in artifacts if artifact != kernels]
        for share, count in lacking:
            if (share, count) in known:
                continue
            if self._is_dry:
                self._lacking.add_launches(self._mix, entry, share, count)
                continue
            what = f"{entry.name} at {share}%, {count} in a launch"
            point = launched.measure(
                entry.name,
                [kernels, *others][:count],
                share,
                count=count,
                like=like(self._mix, kernels),
                rounds=self._mix.search.rounds,
                round_secs=max(1.0, self._mix.search.visit),
                say=functools.partial(self._steps.say_of, f"measuring {what}"),
            )
            launched.append(path, digest, point)
            keep(kernels, self._device, [point])
            self._team.keep_points(digest, [point], how=how)
            found.append(point)
        return found

    def _foresee(self, entry: Entry, lacking: set[int], counts: Sequence[int]) -> None:
        """Add what is measured of an entry once it is tuned."""
        if counts:
            for share, count in itertools.product(sorted(lacking), counts):
                self._lacking.add_launches(self._mix, entry, share, count)
        elif lacking:
            self._lacking.add_shares(self._mix, entry, lacking)

    def _given_points(self, path: Path, artifacts: dict[str, tuple[Path, ...]]) -> list[Point]:
        """Return the points of a file, or of a profile's folder, which is of one artifact."""
        if not path.is_dir():
            found = read_points(path)
            if strange := {point.of for point in found} - artifacts.keys():
                raise InputError(f"{path}: there is no entry '{min(strange)}' in the mix")
            return found
        from tunerd.studies.profile.subject import subject_of_artifact

        digest = profiled(path)
        for name, folders in artifacts.items():
            if folders and subject_of_artifact(folders[0]).digest == digest:
                found = points_in(path, name)
                return [dataclasses.replace(point, origin=Origin(str(path))) for point in found]
        raise InputError(f"{path} is a profile of none of the mix's artifacts; leave it out")

    # --- members and pairs ---------------------------------------------------------------------

    def _subjects(self, entry: Entry, artifacts: Sequence[Path]) -> list[Subject]:
        from tunerd.colocation.artifacts import needed_memory

        found = []
        lanes = launched.lanes_of(artifacts)
        for nth, name in enumerate(names_of(entry)):
            subject = Subject(
                name=name,
                of=entry.name,
                rate=entry.rate,
                slo_secs=entry.slo_ms / 1e3 if entry.slo_ms else None,
                part=entry.percentile / 100,
            )
            if artifacts:
                path = artifacts[min(nth, len(artifacts) - 1)]
                kernels = lanes[0] if lanes is not None else path
                needed = needed_memory(kernels)
                subject = dataclasses.replace(
                    subject,
                    artifact=path,
                    kernels=kernels,
                    has_batches=lanes is not None and lanes.is_batch,
                    architecture=features.architecture_of(kernels),
                    features=features.features_of(kernels).named(),
                    shared_bytes=needed.shared_bytes,
                    each_bytes=seat_bytes(needed, self._mix.place, self._mix.device),
                )
            found.append(subject)
        return found

    def _known_pairs(self, subjects: Sequence[Subject]) -> list[pairs.Pair]:
        """Return what was measured of pairs, what this plan measured last."""
        own = pairs.read_pairs(self._folder / PAIRS)
        known = [
            dataclasses.replace(pair, origin=Origin(str(path)))
            for path in self._mix.pairs
            for pair in pairs.read_pairs(path)
        ]
        folders = [subject.kernels for subject in subjects if subject.architecture]
        before = kept_pairs(folders, self._on)
        known += [pair for pair in before if dataclasses.replace(pair, origin=None) not in own]
        known += self._team.pairs({subject.architecture for subject in subjects}, self._device)
        return known + own

    def _pairs(self, known: Sequence[pairs.Pair], device: str) -> tuple[Pairs, str]:
        if self._mix.search.pairs == "none":
            return Pairs((), device), "the mix says `pairs: none`"
        here = [pair for pair in known if pair.device == device]
        model, why = model_of(here)
        return Pairs(known, device, model=model), why

    def _measured_pairs(
        self, found: Answer, subjects: Sequence[Subject], table: Pairs, plan: Plan
    ) -> bool:
        """Measure the pairs of a plan's lanes that nobody has; say whether there were any."""
        assert found.chosen is not None
        if self._is_dry or self._mix.search.pairs != "measure":
            return False
        is_new = False
        world = self._world(subjects, table, {})
        for one, two in neighbours(found.chosen.placement, world):
            a, b = one.side, two.side
            if table.slowdown(a, b).how == table.slowdown(b, a).how == "measured":
                continue
            measured = pairs.measure(
                (a, one.artifacts),
                (b, two.artifacts),
                like=plan,
                device=table.device,
                say=self._say,
            )
            pairs.append(self._folder / PAIRS, measured)
            keep_pairs([one.artifacts[0], two.artifacts[0]], measured, self._on)
            self._team.keep_pairs(measured)
            table.add(measured)
            is_new = True
        return is_new


def _address(store: str | StoreAddress) -> StoreAddress:
    try:
        return StoreAddress.parse(store) if isinstance(store, str) else store
    except ValueError as error:
        raise InputError(f"--store cannot be used: {error}") from None


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[None]:
    from tunerd.runs.folder import locked
    from tunerd.system.files import disk_errors_said

    with disk_errors_said(folder), locked(folder):
        yield


def _written(found: PlannedMix) -> None:
    from tunerd.report.html import write_page
    from tunerd.report.mix import mix_json, mix_page
    from tunerd.system.files import write_whole

    write_whole(found.folder / ANSWER, json.dumps(mix_json(found), indent=1) + "\n")
    write_page(found.report, mix_page(found))
