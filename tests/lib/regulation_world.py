"""A device whose kernels share it by a known law, under the real scheduler and policy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tests.lib.colocation_world import member
from tunerd.colocation.estimates import Estimates
from tunerd.colocation.policies.regulated import Regulated
from tunerd.colocation.regulation.search import Kernels
from tunerd.colocation.regulation.values import Outcome, Part, Regulation
from tunerd.colocation.scheduler import Scheduler
from tunerd.colocation.work import Complete, Instruction, Pause, Request, Seat, Start

_CLIENTS = 2  # of each member: while one request runs, the next waits
_GAP_SECS = 2e-5  # that a segment takes before its first kernel


@dataclass
class _Run:
    start_id: int
    seat: Seat
    segments: list[list[tuple[float, float]]]
    began_at: float
    first: int
    done: int = 0
    is_pausing: bool = False


class SharedDevice:
    """Measures regulations of models whose kernels take `secs` alone and want a part of the device.

    Together they have what they want where that is not more than the device; else all run slower,
    as the device is divided and by `quarrel` for what they want beyond it, as of one cache. So it
    pays to have large kernels beside small ones, and not beside each other.
    """

    def __init__(
        self,
        models: Mapping[str, Sequence[tuple[float, float]]],
        *,
        quarrel: float = 0.6,
        until: float = 0.05,
        bounds: Mapping[str, float] | None = None,
    ) -> None:
        self.models, self._quarrel, self._until = models, quarrel, until
        self._bounds = dict(bounds or {})
        self.measured = 0
        self.met_apart = 0  # how often parts ran at once that are apart
        self.answered: dict[str, int] = {}  # in the last run, by member

    @property
    def kernels(self) -> list[Kernels]:
        return [
            Kernels(name, tuple(range(1, len(of) + 1)), tuple(secs for secs, _ in of))
            for name, of in self.models.items()
        ]

    def every(self, most_stops: int) -> Iterator[Regulation]:
        """Yield all regulations with so many stops of each at most."""
        ways = [
            [
                (name, stops)
                for count in range(most_stops + 1)
                for stops in itertools.combinations(range(1, len(of)), count)
            ]
            for name, of in self.models.items()
        ]
        for stops in itertools.product(*ways):
            pairs = Regulation(stops).pairs
            for chosen in itertools.product((False, True), repeat=len(pairs)):
                yield Regulation(stops, frozenset(itertools.compress(pairs, chosen)))

    def __call__(self, regulation: Regulation) -> Outcome:
        self.measured += 1
        ran = _Simulation(self.models, regulation, self._quarrel)
        found = ran.run(self._until, self._bounds)
        self.met_apart += ran.met_apart
        self.answered = {name: len(each) for name, each in ran.latencies.items()}
        return found


class _Simulation:
    def __init__(
        self,
        models: Mapping[str, Sequence[tuple[float, float]]],
        regulation: Regulation,
        quarrel: float,
    ) -> None:
        members = [member(name) for name in models]
        policy = Regulated.model_validate(regulation.parameters())
        lanes = policy.lay_out(members)
        self._quarrel, self._regulation, self.met_apart = quarrel, regulation, 0
        self._parts = {
            name: [
                [(_GAP_SECS, 0.0), *models[name][first:end]]
                for first, end in itertools.pairwise((0, *stops, len(models[name])))
            ]
            for name, stops in regulation.stops
        }
        segments = {Seat(name, name): len(parts) for name, parts in self._parts.items()}
        estimates = Estimates()
        for seat in segments:
            for nth, part in enumerate(self._parts[seat.member]):
                estimates.observe(seat, nth, sum(secs for secs, _ in part), now=0.0)
        self._scheduler = Scheduler(members, lanes, policy, segments, estimates)
        self._runs: dict[int, _Run] = {}
        self._ids = itertools.count()
        self._asked: dict[int, Request] = {}
        self.latencies: dict[str, list[float]] = {name: [] for name in models}
        self.now = 0.0

    def run(self, until: float, bounds: Mapping[str, float]) -> Outcome:
        work = 0.0
        for name in self._parts:
            for _ in range(_CLIENTS):
                self._ask(name)
        while self.now < until:
            assert self._runs, "nothing runs although requests wait"
            rates = self._rates()
            step = min(run.segments[0][0][0] / rates[i] for i, run in self._runs.items())
            self.now += step
            ended = []
            for i, run in self._runs.items():
                secs, wants = run.segments[0][0]
                work += step * rates[i] if wants else 0.0
                left = secs - step * rates[i]
                run.segments[0][0] = (left, wants)
                if left <= 1e-12:
                    ended.append(run)
            for run in ended:
                self._kernel_ended(run)
        tails = {name: max(each, default=until) for name, each in self.latencies.items()}
        excess = max((tails[name] / bound - 1 for name, bound in bounds.items()), default=0.0)
        return Outcome(work / self.now, max(0.0, excess))

    def _rates(self) -> dict[int, float]:
        wants = sum(run.segments[0][0][1] for run in self._runs.values())
        rate = 1.0 if wants <= 1 else 1 / (wants * (1 + self._quarrel * (wants - 1)))
        return {i: rate if run.segments[0][0][1] else 1.0 for i, run in self._runs.items()}

    def _ask(self, name: str) -> None:
        request = Request(next(self._ids), name, "default", self.now)
        self._asked[request.request_id] = request
        self._carry_out(self._scheduler.arrive(request, self.now))

    def _kernel_ended(self, run: _Run) -> None:
        run.segments[0].pop(0)
        if run.segments[0]:
            return
        run.segments.pop(0)
        run.done += 1
        if run.segments and not run.is_pausing:
            return
        del self._runs[run.start_id]
        secs = self.now - run.began_at
        self._carry_out(
            self._scheduler.ended(run.start_id, run.seat, secs, self.now, segments=run.done)
        )

    def _note(self, starts: Part) -> None:
        runs = [Part(r.seat.member, r.first + r.done) for r in self._runs.values()]
        self.met_apart += self._regulation.is_apart(starts, runs)

    def _carry_out(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Start(start_id, _, seat, segment):
                    self._note(Part(seat.member, segment))
                    parts = [list(part) for part in self._parts[seat.member][segment:]]
                    self._runs[start_id] = _Run(start_id, seat, parts, self.now, segment)
                case Pause(seat):
                    for run in self._runs.values():
                        run.is_pausing = run.is_pausing or run.seat == seat
                case Complete(request_id):
                    request = self._asked.pop(request_id)
                    self.latencies[request.member].append(self.now - request.arrived_at)
                    self._ask(request.member)
