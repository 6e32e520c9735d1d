"""What the members of a plan get under a policy, all of them busy: measured by the engine.

Work is what all get in terms of what each takes alone: a request of a member is worth the seconds
that it takes when nothing else runs. A GPU does not say which part of it is idle; what a policy
leaves idle is what another one with more work does not.
"""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tunerd.artifacts import loading
from tunerd.artifacts.loading import LoadedModel
from tunerd.artifacts.manifest import MANIFEST, sha256_of
from tunerd.colocation.bench import sample_inputs
from tunerd.colocation.engine import Engine
from tunerd.colocation.load.generator import DONE, run_load
from tunerd.colocation.places import place_of
from tunerd.colocation.places.base import Place
from tunerd.colocation.plan import LoadChoice, Plan, PolicyChoice
from tunerd.colocation.regulation.search import Kernels
from tunerd.colocation.work import Lane
from tunerd.errors import InputError
from tunerd.system.jsonl import Journal

CLIENTS = 2  # of each tenant: while one waits, the other is served
_PLACES = 12  # at which a member may stop, or a few more
_LEAST_SECS = 1e-6


@dataclass(frozen=True)
class Busy:
    """What each member got while all were busy. tail_secs: what 99 of 100 answers took at most."""

    per_sec: Mapping[str, float]
    tail_secs: Mapping[str, float]


def in_turns(rounds: Sequence[Busy]) -> Busy:
    """Return the mean of several rounds, and the median of their tails."""
    return Busy(
        {n: float(np.mean([each.per_sec[n] for each in rounds])) for n in rounds[0].per_sec},
        {n: float(np.median([each.tail_secs[n] for each in rounds])) for n in rounds[0].tail_secs},
    )


class EngineMeasurer:
    """Runs a plan's members under one policy after the other.

    Args:
        probe_secs: how long each time.
        journal: where what was measured is kept, and taken from the next time.
        open_model: loads an artifact for a GPU; several measurers may have one that keeps them.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        probe_secs: float,
        journal: Path | None = None,
        open_model: Callable[[Path], LoadedModel] = loading.load,
    ) -> None:
        members = tuple(m.model_copy(update={"slo_ms": None, "shares": ()}) for m in plan.members)
        load = LoadChoice(kind="closed", duration=probe_secs, clients=CLIENTS)
        self._plan = plan.model_copy(update={"members": members, "load": load})
        self._inputs = sample_inputs(self._plan)
        self._open_model = functools.cache(open_model)
        self._journal = Journal(journal) if journal is not None else None
        self._known = self._read() if journal is not None else defaultdict(list)
        self.wall_secs = 0.0  # that the last one took which was measured

    def kernels(self) -> tuple[Kernels, ...]:
        """Return where each member may stop, by trying it; raises as Engine.start does."""
        names = tuple(m.name for m in self._plan.members)
        found = []
        with self._place() as place:
            whole, fine = place.cut([Lane("whole", 100, names), Lane("fine", 100, names)])
            for member in self._plan.members:
                secs = sum(place.load(member, whole, cut=()).segment_secs)
                cut = place.load(member, fine, cut=max(secs / _PLACES, _LEAST_SECS))
                found.append(Kernels(member.name, cut.ends, cut.segment_secs))
        return tuple(found)

    def under(self, policy: PolicyChoice, *, anew: bool = False) -> Busy:
        """Return what all get under a policy; anew: whatever is known of it.

        Raises as Engine.start does.
        """
        key = json.dumps(policy.model_dump(mode="json"), sort_keys=True)
        if not anew and self._known[key]:
            return self._known[key].pop(0)
        since = time.monotonic()
        found = self._measured(policy)
        self.wall_secs = time.monotonic() - since
        if self._journal is not None and not anew:
            line = {"digest": self._digest, "policy": key} | vars(found)
            self._journal.append(json.dumps(line))
        return found

    def is_known(self, policy: PolicyChoice) -> bool:
        """Say whether `under` has it without measuring."""
        key = json.dumps(policy.model_dump(mode="json"), sort_keys=True)
        return bool(self._known[key])

    def _measured(self, policy: PolicyChoice) -> Busy:
        plan = self._plan.model_copy(update={"policy": policy})
        with Engine(plan, place=self._place()) as engine:
            observed = run_load(engine, plan.load, self._inputs)
        window_secs = observed.window[1] - observed.window[0]
        latencies: dict[str, list[float]] = {m.name: [] for m in plan.members}
        for sample in observed.counted:
            if sample.end == DONE:
                latencies[sample.member].append(sample.latency_secs)
        return Busy(
            {name: len(each) / window_secs for name, each in latencies.items()},
            {
                name: float(np.percentile(each, 99)) if each else plan.load.duration
                for name, each in latencies.items()
            },
        )

    def _place(self) -> Place:
        """Return a new place; on a GPU models are loaded once, and captured anew."""
        if (self._plan.place, self._plan.device) == ("in-process", "cuda"):
            from tunerd.colocation.places.cuda_streams import CudaStreamsPlace

            return CudaStreamsPlace(open_model=self._open_model)
        return place_of(self._plan.place, self._plan.device)

    @functools.cached_property
    def _digest(self) -> str:
        said = {
            "members": {m.name: sha256_of(m.artifact / MANIFEST) for m in self._plan.members},
            "said": [(m.clients, m.share, m.lane, m.cores) for m in self._plan.members],
            "place": self._plan.place,
            "device": self._plan.device,
            "secs": self._plan.load.duration,
        }
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]

    def _read(self) -> defaultdict[str, list[Busy]]:
        assert self._journal is not None
        known: defaultdict[str, list[Busy]] = defaultdict(list)
        try:
            for line in map(json.loads, self._journal.read().splitlines()):
                if line["digest"] == self._digest:
                    known[line["policy"]].append(Busy(line["per_sec"], line["tail_secs"]))
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(
                f"{self._journal.path} holds a line that is no measurement: {error}; remove it"
            ) from None
        return known
