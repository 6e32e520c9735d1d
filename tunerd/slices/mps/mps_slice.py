"""Slices of GPUs, capped by CUDA MPS: each a runner under the guard of its GPU."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tunerd.errors import HostError, InfrastructureError
from tunerd.runner.host import EXIT_SECS, START_SECS, Blame, is_sticky, outside_signal
from tunerd.slices import gpu_tenants, room
from tunerd.slices.base import Plan, ProcessSlice, Usability
from tunerd.slices.gpu_tenants import Own
from tunerd.slices.mps.control import PIPE_FOLDER, client_environment
from tunerd.slices.mps.gpu import external_pipe_folder
from tunerd.slices.mps.guard_client import Lease, gpu_folder, guarded_early
from tunerd.system import gpus, host, targets
from tunerd.system.gpus import GpuFacts, gpu_state
from tunerd.system.host import HostFacts
from tunerd.vocabulary import CapProof, Conditions, SliceRequest, SliceSpec, TargetSpec, to_json
from tunerd.vocabulary.slices import Mps

log = logging.getLogger(__name__)

# NVIDIA MPS, "Client-Server Connection Limits": 48 client contexts per device since Volta. Newer
# drivers take 60 on newer GPUs; more than 48 slices of one GPU are of no use to tuning.
MPS_CLIENT_LIMIT = 48
NO_MPS_CONTROL = (
    "it comes with the NVIDIA driver (on Debian and Ubuntu in the package"
    " nvidia-compute-utils-VERSION; in a container, ask for the driver capability"
    " 'compute,utility')"
)
MIN_SM_COUNT = 2  # the share is handed out in pairs of SMs (TPCs)
# What ends one client and leaves its neighbours alone; everything else may be a fault of the GPU.
_FAULTS_OF_ONE_RUNNER = ("TIMED OUT", "IN TIME", "MPS_CLIENT_TERMINATED")


def expected_sms(device_sm_count: int, pct: int) -> int:
    """Return the SMs that a share gives: rounded down to pairs, as measured on an H200.

    >>> [expected_sms(132, pct) for pct in (100, 40, 10)]
    [132, 52, 12]
    """
    if pct == 100:
        return device_sm_count
    return device_sm_count * pct // 100 // 2 * 2


def run_name() -> str:
    """Return what tells this run's slices from another run's, for the guard of a GPU.

    TUNERD_RUN, which the driver sets for all its actors; without it, a run is one process.
    """
    return os.environ.get("TUNERD_RUN") or f"pid {os.getpid()}"


class MpsSlice(ProcessSlice):
    """One share of a GPU. Its runner is the one MPS client, and no child of this process."""

    kind = "mps"

    def __init__(self, spec: SliceSpec) -> None:
        super().__init__(spec)
        self._lease: Lease | None = None
        self._epoch = 0

    # --- what this host can do -----------------------------------------------------------------

    @classmethod
    def usability(cls) -> Usability:
        return usability_of(host.facts())

    @classmethod
    def plan(cls, request: SliceRequest) -> Plan:
        facts = host.facts()
        return beside_others(plan_for(facts, request), facts, request)

    # --- the runner ----------------------------------------------------------------------------

    @classmethod
    @contextlib.contextmanager
    def early(cls, specs: Sequence[SliceSpec], run: str) -> Iterator[None]:
        """Start the GPUs' guards with a runner for each slice, which imports TVM meanwhile."""
        with contextlib.ExitStack() as stack:
            by_gpu: dict[str, list[SliceSpec]] = {}
            for spec in specs:
                by_gpu.setdefault(spec.gpu_uuid or "", []).append(spec)
            for gpu_uuid, of in by_gpu.items():
                external = _external_pipe_folder(of[0])
                stack.enter_context(guarded_early(gpu_uuid, run, of, external=external))
            yield

    def connect(self) -> socket.socket:
        spec = self.spec
        lease = self._held_lease()
        answer = lease.request("start_runner", spec=to_json(spec))
        self._epoch = answer["epoch"]
        deadline = time.monotonic() + START_SECS
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(answer["socket"])
                return connection
            except OSError as error:
                connection.close()
                runner = lease.request("runner", slice_id=spec.slice_id)
                if runner["exit_status"] is not None or time.monotonic() > deadline:
                    raise InfrastructureError(
                        f"the runner of {spec.slice_id} (pid {answer['pid']}) does not answer:"
                        f" exit status {runner['exit_status']}, {error}; it printed:"
                        f" {runner['log'] or 'nothing'}"
                    ) from error
            time.sleep(0.05)

    def ended_from_outside(self) -> str:
        deadline = time.monotonic() + EXIT_SECS
        status = None
        with contextlib.suppress(InfrastructureError):  # the guard is gone: the fence starts anew
            while status is None and time.monotonic() < deadline:
                answer = self._held_lease().request("runner", slice_id=self.spec.slice_id)
                status = answer["exit_status"]
                time.sleep(0.02)
        return outside_signal(status)

    def fence(self, reason: str, *, is_alone: bool) -> Blame:
        of_one = any(word in reason.upper() for word in _FAULTS_OF_ONE_RUNNER)
        return self._ask_to_fence(
            reason,
            scope="runner" if of_one else "gpu",
            shared=is_sticky(reason),
            alone=is_alone,
        )

    def revive(self, reason: str) -> None:
        if self.spec.mps == "own":
            self._ask_to_fence(reason, scope="gpu", shared=True)

    def _ask_to_fence(self, reason: str, **how: Any) -> Blame:
        fields = {
            "slice_id": self.spec.slice_id,
            "epoch": self._epoch,
            "reason": reason,
            **how,
        }
        try:
            answer = self._held_lease().request("fence", **fields)
        except InfrastructureError:
            # The guard was killed. A new one first stops what the old one has left.
            log.warning("the guard of %s is gone; starting another", self.spec.gpu_uuid)
            answer = self._held_lease().request("fence", **fields)
        return Blame(answer.get("culprit", ""), answer.get("reason", ""))

    def conditions(self, *, idle: bool = False) -> Conditions:
        return gpu_tenants.conditions(self.spec.gpu_uuid or "", self._own, idle=idle)

    def _own(self) -> Own | None:
        try:
            answer = self._held_lease().request("own", slice_id=self.spec.slice_id)
        except (HostError, InfrastructureError):  # a measurement is worth keeping without
            return None
        return Own(**answer | {"pids": frozenset(answer["pids"])})

    def check(self, facts: dict[str, Any]) -> CapProof:
        listed = self._held_lease().request("attached", pid=facts["pid"])["attached"]
        return proof_of(self.spec, facts, listed=listed)

    def close(self) -> None:
        """Stop the runner, by terminate_client if it does not end by itself; give up the GPU."""
        super().close()
        lease, self._lease = self._lease, None
        if lease is not None:
            with contextlib.suppress(InfrastructureError):
                lease.request("stop_runner", slice_id=self.spec.slice_id)
            lease.close()

    def _held_lease(self) -> Lease:
        if self._lease is None or self._lease.closed:
            spec = self.spec
            if spec.gpu_uuid is None:
                raise HostError(f"the slice {spec.slice_id} names no GPU")
            external = _external_pipe_folder(spec)
            self._lease = Lease.acquire(spec.gpu_uuid, run_name(), external=external)
        return self._lease


def _external_pipe_folder(spec: SliceSpec) -> Path | None:
    """Return where somebody else's daemon listens for this slice; None for one of our own."""
    return None if spec.mps == "own" else Path(dict(spec.environment)[PIPE_FOLDER])


def usability_of(facts: HostFacts) -> Usability:
    """Say whether MPS slices work on a host; the first thing that is missing, and how to get it."""
    missing = missing_for_gpu(facts)
    if missing:
        return Usability(False, missing)
    if facts.mps_control is None:
        return Usability(False, f"{host.MPS_CONTROL} is not on PATH: {NO_MPS_CONTROL}")
    if not any(problem_of(gpu) == "" for gpu in facts.gpus):
        return Usability(False, "; ".join(problem_of(gpu) for gpu in facts.gpus))
    return Usability(True, f"{len(facts.gpus)} GPU(s), MPS of driver {facts.driver}")


def missing_for_gpu(facts: HostFacts) -> str:
    """Return why no GPU can be used here, or ""."""
    if facts.no_gpu:
        return f"no GPU: {facts.no_gpu}"
    return driver_library_problem()


def driver_library_problem() -> str:
    """Return why the CUDA driver's library does not load, or "". Creates no context."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"the CUDA driver's library does not load ({error}); install the NVIDIA driver"
    return ""


def problem_of(gpu: GpuFacts) -> str:
    """Return why a GPU cannot be cut by MPS, or ""."""
    name = f"GPU {gpu.index} ({gpu.name})"
    if gpu.mig:
        return f"{name} is in MIG mode, which is not used here; choose another GPU"
    if gpu.compute_mode in ("prohibited", "exclusive-thread"):
        return (
            f"{name} is in compute mode {gpu.compute_mode}, MPS needs default or"
            " exclusive-process; its administrator can change that with nvidia-smi -c"
        )
    if int(gpu.compute_capability.split(".")[0]) < 7:
        return f"{name} is older than Volta, whose MPS was the first to cap a client's share"
    return ""


def plan_for(facts: HostFacts, request: SliceRequest) -> Plan:
    """Cut every usable GPU of a host into slices, from its facts alone."""
    pct, per_device = request.pct, request.per_device
    usable = usability_of(facts)
    gpus = [gpu for gpu in facts.gpus if problem_of(gpu) == ""]
    if not usable.ok or not gpus:
        return Plan((), TargetSpec("cuda", "{}"), "", problem=usable.why)
    target = targets.cuda_target(gpus[0].compute_capability, l2_bytes=gpus[0].l2_bytes)
    count, bound = _count_per_gpu(facts, gpus, request)
    problem = room.refusal(gpus, request) or _share_problem(gpus, pct)
    problem = problem or ("" if count else f"no slice fits: {bound}")
    if per_device is not None and per_device > count:
        problem = problem or f"{per_device} slices per GPU do not fit: {bound}"
    if len({gpu.name for gpu in gpus}) > 1:
        models = ", ".join(sorted({gpu.name for gpu in gpus}))
        problem = problem or f"the GPUs differ ({models}); choose with CUDA_VISIBLE_DEVICES"
    if problem:
        return Plan((), target, bound, problem=problem)
    if per_device is not None and per_device < count:
        count, bound = per_device, f"--slices asks for {per_device} per GPU where {count} fit"
    slices = tuple(
        share_of(
            gpu,
            pct,
            slice_id=f"mps-{gpu.index}-{position}",
            mps=request.mps,
            most_bytes=room.room_bytes(gpu, request) // count,
        )
        for gpu in gpus
        for position in range(count)
    )
    return Plan(slices, target, bound)


def beside_others(found: Plan, facts: HostFacts, request: SliceRequest) -> Plan:
    """Return a plan with what people should know where its GPUs serve others, too."""
    notes = (
        room.expectation(
            gpu,
            [spec for spec in found.slices if spec.gpu_uuid == gpu.uuid],
            request,
            gpu_state(gpu.uuid, samples=2),
        )
        for gpu in facts.gpus
        if request.if_shared != "ignore" and room.held_bytes(gpu)
    )
    return replace(found, note=" ".join(filter(None, notes)))


def _count_per_gpu(
    facts: HostFacts, gpus: list[GpuFacts], request: SliceRequest
) -> tuple[int, str]:
    """Return how many slices fit into each GPU, and the bound that held in words."""
    pct = request.pct
    share = 100 // pct
    least, needed = min(room.room_bytes(gpu, request) for gpu in gpus), room.needed_bytes(request)
    by_memory = least // needed
    left = "" if least == min(gpu.mem_bytes for gpu in gpus) else ", which others leave,"
    by_cores = max(1, facts.usable_cores // len(gpus))
    bounds = [
        (share, f"{share} slices of {pct}% fit into each GPU"),
        (MPS_CLIENT_LIMIT, f"MPS takes {MPS_CLIENT_LIMIT} clients per GPU"),
        (
            by_memory,
            f"{least >> 30} GiB of GPU memory{left} hold {by_memory} slices of "
            f"{needed / (1 << 30):.3g} GiB",
        ),
        (
            by_cores,
            f"{facts.usable_cores} host cores drive {by_cores} slices of each of {len(gpus)}"
            " GPU(s), one core a slice",
        ),
    ]
    return min(bounds, key=lambda bound: bound[0])


def _share_problem(gpus: list[GpuFacts], pct: int) -> str:
    for gpu in gpus:
        if gpu.sm_count is not None and expected_sms(gpu.sm_count, pct) < MIN_SM_COUNT:
            least = next(p for p in range(1, 101) if expected_sms(gpu.sm_count, p) >= MIN_SM_COUNT)
            return (
                f"{pct}% of the {gpu.sm_count} SMs of {gpu.name} are under {MIN_SM_COUNT};"
                f" give at least {least}%"
            )
    return ""


def share_of(
    gpu: GpuFacts, pct: int, *, slice_id: str, mps: Mps = "own", most_bytes: int | None = None
) -> SliceSpec:
    """Return a slice of one GPU. most_bytes: of its memory; its share if not given."""
    return SliceSpec(
        slice_id=slice_id,
        kind="mps",
        pct=pct,
        device_index=gpu.index,
        gpu_uuid=gpu.uuid,
        environment=_environment(gpu, pct, mps, most_bytes),
        mps=mps,
    )


def _environment(
    gpu: GpuFacts, pct: int, mps: str, most_bytes: int | None
) -> tuple[tuple[str, str], ...]:
    """Return what the runner of a slice gets; its guard checks that, and adds nothing."""
    if mps == "external":  # in whose daemon the GPU's number is not known
        return _sorted(client_environment(external_pipe_folder(), gpu.uuid, pct))
    own = gpu.mem_bytes * pct // 100
    mem_bytes = max(room.SLICE_MEM_BYTES, own if most_bytes is None else min(own, most_bytes))
    return _sorted(
        client_environment(gpu_folder(gpu.uuid) / "pipe", gpu.uuid, pct)
        | {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={mem_bytes >> 20}M"}
    )


def _sorted(environment: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(environment.items()))


def proof_of(spec: SliceSpec, facts: dict[str, Any], *, listed: bool | None) -> CapProof:
    """Check what a runner obtained; raises HostError where it is not the share that was asked.

    Args:
        facts: what the runner reads in its client.
        listed: whether the MPS server lists it as its client; None where that is unknown.
    """
    sm_count = int(facts["sm_count"])
    device_sm_count = device_sms(spec, facts)
    expected = expected_sms(device_sm_count, spec.pct)
    problem = ""
    if not device_sm_count:
        problem = f"its client sees {sm_count} SMs and nothing tells how many its GPU has"
    elif not facts["mps_enabled"]:
        problem = "its client runs without MPS"
    elif listed is False:
        problem = "the MPS server does not list it as a client"
    elif sm_count < expected - 2:
        problem = (
            f"its client sees {sm_count} SMs (a daemon can give all clients less: ask it with"
            " get_default_active_thread_percentage)"
        )
    elif sm_count > expected + 2 or (spec.pct < 100 and sm_count >= device_sm_count):
        problem = f"its client sees {sm_count} SMs"
    elif sm_count < MIN_SM_COUNT:
        problem = f"its client sees {sm_count} SMs, under {MIN_SM_COUNT}"
    if problem:
        raise HostError(
            f"the slice {spec.slice_id} did not obtain its {spec.pct}%: {problem}, where"
            f" {expected} of {device_sm_count} SMs were expected; nothing was measured in it."
            " Run `tunerd doctor`"
        )
    return obtained(facts, spec, mechanism="mps", device_sm_count=device_sm_count)


def device_sms(spec: SliceSpec, facts: dict[str, Any]) -> int:
    """Return the SMs of a slice's whole GPU, by NVML and by the runner; 0 where neither knows."""
    by_nvml = next(
        (gpu.sm_count for gpu in gpus.visible_gpus()[0] if gpu.uuid == spec.gpu_uuid), None
    )
    return max(by_nvml or 0, int(facts.get("device_sm_count", 0)))


def obtained(
    facts: dict[str, Any], spec: SliceSpec, *, mechanism: str, device_sm_count: int
) -> CapProof:
    """Return the proof that a runner's facts make, once they have been checked."""
    return CapProof(
        slice_id=spec.slice_id,
        device=facts["device"],
        sm_count=int(facts["sm_count"]),
        device_sm_count=device_sm_count,
        mechanism=mechanism,
        attached=True,
        driver=facts.get("driver") or gpus.driver_versions()[0],
        compute_capability=facts["compute_capability"],
        runner_pid=int(facts["pid"]),
    )
