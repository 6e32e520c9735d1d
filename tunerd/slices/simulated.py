"""Slices that measure nothing: a deterministic latency model with faults on cue, for tests.

A candidate's time follows from its id alone, so that runs repeat on any machine. The environment
variable TUNERD_SIMULATED_FAULTS of a slice asks for faults: "crash:7,timeout:11" fails every
candidate whose number is divisible by 7 (crash) or 11 (timeout); a candidate's number is its id's
first eight hex digits. Nothing that such a slice says is a measurement of anything.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

from tunerd.runner.base import UNKNOWN, Company, Runner, TorchModule
from tunerd.runner.load import Load, Repeats
from tunerd.runner.profiles import LOAD
from tunerd.slices.base import Plan, Slice, Usability
from tunerd.system import targets
from tunerd.vocabulary import (
    Arrays,
    Build,
    Candidate,
    CapProof,
    Conditions,
    Failure,
    Kind,
    Measurement,
    Profile,
    SliceRequest,
    SliceSpec,
    Stage,
    source_of,
)

FAULTS_VARIABLE = "TUNERD_SIMULATED_FAULTS"
DEFAULT_SECS = 1e-3
_DEVICE = "simulated device"
_SM_COUNT = 100  # of the simulated device: a percent each


def number_of(candidate_id: str) -> int:
    """Return the number that decides a candidate's time and faults."""
    return int(candidate_id[:8], 16)


def simulated_secs(candidate: Candidate) -> float:
    """Return a candidate's time: the default's, or 0.1 to 2 times that, evenly spread."""
    if candidate.is_default:
        return DEFAULT_SECS
    return DEFAULT_SECS * (0.1 + 1.9 * number_of(candidate.candidate_id) / 0xFFFFFFFF)


class SimulatedSlice(Slice):
    """A share of a device that is not there."""

    kind = "simulated"

    def __init__(self, spec: SliceSpec) -> None:
        super().__init__(spec)
        self._runner = SimulatedRunner(spec)

    @classmethod
    def usability(cls) -> Usability:
        return Usability(True, "simulated slices work everywhere and measure nothing")

    @classmethod
    def plan(cls, request: SliceRequest) -> Plan:
        pct, per_device = request.pct, request.per_device
        fit = 100 // pct
        bound = f"{fit} simulated slice(s) of {pct}% fit into one device"
        target = targets.cpu_target_json(1)
        if per_device is not None and per_device > fit:
            return Plan(
                (), target, bound, problem=f"--slices {per_device} is more than fit: {bound}"
            )
        count = min(fit, per_device or fit)
        slices = tuple(
            SliceSpec(slice_id=f"simulated-0-{i}", kind="simulated", pct=pct) for i in range(count)
        )
        return Plan(slices, target, bound)

    def launch(self) -> SimulatedRunner:
        return self._runner

    def prove(self) -> CapProof:
        return CapProof(
            slice_id=self.spec.slice_id,
            device=_DEVICE,
            sm_count=self.spec.pct,
            device_sm_count=_SM_COUNT,
            mechanism="simulated",
            attached=True,
        )

    def close(self) -> None:
        pass


class SimulatedRunner(Runner):
    """Answers at once, from the model above."""

    def __init__(self, spec: SliceSpec) -> None:
        self.spec = spec
        self._repeat_secs = DEFAULT_SECS
        self._from_to: tuple[float, float | None] = (0.0, None)

    def measure(
        self,
        builds: Sequence[Build],
        profile: Profile,
        *,
        best_secs: Sequence[float | None] = (),
        company: Company = UNKNOWN,
    ) -> list[Measurement | Failure]:
        return [self._answer(b.candidate, profile, profile.min_samples, company) for b in builds]

    def compare(
        self, builds: Sequence[Build], profile: Profile, *, company: Company = UNKNOWN
    ) -> list[Measurement | Failure]:
        return self.measure(builds, profile, company=company)

    def agree(
        self, reference: Build, build: Build, *, company: Company = UNKNOWN
    ) -> Failure | None:
        """Compare what both compute on this machine's CPU, as the model is run: results are real.

        A build without a library, as tests make them up, agrees with all others.
        """
        if not (reference.library and build.library):
            return None
        from tunerd.runner.agreement import disagreement
        from tunerd.runner.sampling import CpuDevice

        return disagreement(CpuDevice(sorted(os.sched_getaffinity(0))), reference, build)

    def run_model(
        self, artifact: str, inputs: Arrays, *, alone: str = "", company: Company = UNKNOWN
    ) -> Arrays:
        """Run the compiled model on this machine's CPU: outputs are real even here."""
        from tunerd.artifacts.lane_check import outputs_of
        from tunerd.artifacts.loading import load

        return outputs_of(load(artifact), load(alone), inputs) if alone else load(artifact)(inputs)

    def compare_models(
        self, artifacts: Sequence[str], profile: Profile, *, company: Company = UNKNOWN
    ) -> list[Measurement | Failure]:
        """Return the sums of the models' simulated kernels, from their manifests."""
        return [self._sum(artifact, profile, company) for artifact in artifacts]

    def prepare_pytorch(
        self, way: str, module: TorchModule, *, anew: bool, limit_secs: float
    ) -> str | Failure:
        return Failure(Stage.LOAD, Kind.REFUSED, "a simulated slice runs nothing, and no PyTorch")

    def compare_with_pytorch(
        self, artifact: str, ways: Sequence[str], profile: Profile
    ) -> list[Measurement | Failure]:
        lacking = Failure(Stage.LOAD, Kind.REFUSED, "a simulated slice runs no PyTorch")
        return [self._sum(artifact, profile), *(lacking for _ in ways)]

    def load(self, load: Load) -> float | Failure:
        if load.build is not None:
            answer = self._answer(load.build.candidate, LOAD, 1)
        else:
            answer = self._sum(load.artifact, LOAD)
        if isinstance(answer, Failure):
            return answer
        self._repeat_secs = answer.median_secs
        return self._repeat_secs

    def repeat(self, start_at: float, stop_at: float | None = None) -> None:
        self._from_to = (start_at, stop_at)

    def stop(self) -> Repeats | Failure:
        """Return repeats without a gap between the two moments, at once; without `stop_at` none."""
        start_at, stop_at = self._from_to
        count = 0 if stop_at is None else math.ceil((stop_at - start_at) / self._repeat_secs)
        times = [start_at + i * self._repeat_secs for i in range(count + 1)]
        if count > 1 and stop_at is not None and times[-2] >= stop_at:  # rounded up
            times.pop()
        return Repeats(self.spec.slice_id, tuple(times[:-1]), tuple(times[1:]))

    def _sum(self, artifact: str, profile: Profile, company: Company = UNKNOWN) -> Measurement:
        from pathlib import Path

        from tunerd.artifacts.manifest import nearest, read_variants

        total = 0.0
        for task in nearest(read_variants(Path(artifact)), self.spec.pct)["tasks"]:
            source = task.get("source") or source_of(task["origin"])
            candidate = Candidate(task["task_id"], task["candidate_id"] or "0" * 16, source)
            total += task["weight"] * simulated_secs(candidate)
        return self._samples(total, profile, profile.min_samples, company)

    def _answer(
        self, candidate: Candidate, profile: Profile, samples: int, company: Company = UNKNOWN
    ) -> Measurement | Failure:
        for kind, divisor in self._faults().items():
            if not candidate.is_default and not number_of(candidate.candidate_id) % divisor:
                return Failure(Stage.RUN, kind, f"simulated: {kind}")
        return self._samples(simulated_secs(candidate), profile, samples, company)

    def _samples(
        self, secs: float, profile: Profile, samples: int, company: Company
    ) -> Measurement:
        return Measurement(
            run_secs=tuple(secs * (1 + 1e-4 * i) for i in range(samples)),
            calls_per_sample=1,
            profile=profile.name,
            slice_id=self.spec.slice_id,
            sm_count=self.spec.pct,
            conditions=company.seen_in(Conditions()),
        )

    def _faults(self) -> dict[Kind, int]:
        text = dict(self.spec.environment).get(FAULTS_VARIABLE, "")
        pairs = (item.split(":") for item in text.split(",") if item)
        return {Kind(kind): int(divisor) for kind, divisor in pairs}
