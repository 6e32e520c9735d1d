"""The workers of a run: who works where, who is started again, who comes and goes with its node."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tunerd.cluster.actor_bodies import WorkerReply
from tunerd.cluster.nodes import Node, TunerSpec, cut_beside, tuners_beside
from tunerd.errors import DeviceError, DiskError, HostError, InfrastructureError, TunerdError
from tunerd.vocabulary import CapProof, Failure, Measurement, SliceSpec, Stage

if TYPE_CHECKING:
    from tunerd.cluster.layout import Layout
    from tunerd.cluster.ray_cluster import Cluster
    from tunerd.records import Store
    from tunerd.settings import TuneSettings
    from tunerd.telemetry.events import Telemetry

log = logging.getLogger(__name__)

MAX_RESTARTS = 3  # of a worker that ends without having done anything: its cause stays
MAX_FAULTS = 16  # of a device, beyond one for each MEASURED_A_FAULT trials that it measured
MEASURED_A_FAULT = 2
LOOK_SECS = 2.0  # between two looks at the nodes of a cluster
WAIT_SECS = 600.0  # for a node to join, where none is left to work on; autoscalers take minutes
_OF_A_SLICE = (Stage.LOAD, Stage.RUN)


class Membership:
    """Tuners and slices in a cluster, as planned at first and as nodes join and leave.

    Args:
        layout: the plan for the nodes that are there at the start.
        elastic: whether nodes may join and leave: in a cluster that others started.
    """

    def __init__(
        self,
        cluster: Cluster,
        layout: Layout,
        *,
        settings: TuneSettings,
        store: Store,
        telemetry: Telemetry,
        elastic: bool,
    ) -> None:
        self._cluster, self._layout, self._settings, self._store = cluster, layout, settings, store
        self._telemetry, self._elastic = telemetry, elastic
        self._nodes = list(layout.nodes)
        self._numbers = {n.node_id: i for i, n in enumerate(layout.nodes)}
        self._slices: dict[str, tuple[SliceSpec, str | None]] = {}  # each with its node
        self._tuners: dict[str, TunerSpec] = {}
        self._roles: dict[str, str] = {}  # of everybody that was ever here
        self._losses: Counter[str] = Counter()  # of each worker, since it last did something
        self._faults: defaultdict[str, float] = defaultdict(float)  # in excess, by device
        self._looked_at = self._staffed_at = time.monotonic()
        self.proofs: tuple[CapProof, ...] = ()

    # --- who there is --------------------------------------------------------------------------

    @property
    def slice_ids(self) -> tuple[str, ...]:
        """The slices that are part of the run, in the order in which they joined."""
        return tuple(self._slices)

    @property
    def tuner_ids(self) -> tuple[str, ...]:
        return tuple(self._tuners)

    def role(self, worker_id: str) -> str:
        return self._roles[worker_id]

    def lane(self, worker_id: str) -> str | None:
        """Return what a worker shares with others: only one of a lane works at a time."""
        if self._layout.is_lockstep:
            return "lockstep"
        if worker_id in self._tuners:
            return self._tuners[worker_id].lane
        return self._slices[worker_id][0].lane

    def device(self, slice_id: str) -> str:
        """Name the device of a slice for people: a GPU by its UUID."""
        return self._slices[slice_id][0].gpu_uuid or slice_id

    def hardware(self, slice_id: str) -> str:
        """Name what a slice is a share of: a GPU, or the cores of a machine."""
        spec, node_id = self._slices[slice_id]
        return f"{node_id} {spec.gpu_uuid or spec.device_index}"

    def fault_domain(self, slice_id: str) -> str:
        """Name what slices share a fault on: a GPU. Slices of cores share nothing."""
        spec, node_id = self._slices[slice_id]
        return f"{node_id} {spec.gpu_uuid or slice_id}"

    def beside(self, slice_id: str) -> tuple[str, ...]:
        """Return the other slices of a slice's device that live, in the order they joined."""
        device, living = self.hardware(slice_id), self._cluster.slice_ids
        others = (s for s in self._slices if s != slice_id and s in living)
        return tuple(s for s in others if self.hardware(s) == device)

    def cores_here(self, slice_id: str) -> tuple[int, ...]:
        """Return the cores of a slice where they are this machine's."""
        spec, node_id = self._slices[slice_id]
        is_here = any(n.is_here for n in self._nodes if n.node_id == node_id)
        return spec.cores if is_here else ()

    # --- at the start --------------------------------------------------------------------------

    def start(self) -> tuple[CapProof, ...]:
        """Start everybody that is planned, and return the slices' proofs once they are ready.

        Tuners answer when they have tasks. Raises HostError and InfrastructureError.
        """
        layout = self._layout
        self._note(layout.tuners, layout.slices)
        settings = self._settings
        self._cluster.start_tuners(
            layout.tuners, layout.target, settings.seed, settings.precision or ""
        )
        self.proofs = tuple(self._cluster.start_slices(layout.slices))
        if len({(p.device, p.sm_count) for p in self.proofs}) > 1:
            raise HostError(
                "the slices obtained different shares: "
                + ", ".join(f"{p.slice_id}: {p.sm_count} of {p.device}" for p in self.proofs)
                + "; their measurements could not be compared"
            )
        return self.proofs

    # --- those that end ------------------------------------------------------------------------

    def has_answered(self, worker_id: str) -> None:
        """Forget how often a worker was lost before: it has done something since."""
        self._losses.pop(worker_id, None)

    def lose(self, worker_id: str, message: str, problem: TunerdError | None = None) -> None:
        """Start a worker again that is lost, unless its node left or it keeps ending.

        Raises InfrastructureError where nobody of its role is left, and no node may bring one, and
        the problem itself where it is of the disk of the only host.
        """
        role = self.role(worker_id)
        self._telemetry.lost(role, worker_id, message)
        self._cluster.drop(worker_id)
        if isinstance(problem, DiskError) and not self._elastic:
            raise problem
        if self._elastic and self._node_of(worker_id) not in self._cluster.living_nodes():
            self._tuners.pop(worker_id, None)
            self._slices.pop(worker_id, None)
            return
        self._losses[worker_id] += 1
        if self._losses[worker_id] <= MAX_RESTARTS:
            self._cluster.restart(worker_id)
            self._telemetry.restarted(role, worker_id)
            return
        if not self._has(role):
            raise InfrastructureError(
                f"the last {role} ended {MAX_RESTARTS + 1} times, at last with: {message}; what "
                "was measured is stored, and the same command goes on"
            )

    def revive(self, slice_ids: Sequence[str], message: str) -> None:
        """Start slices again that do not answer, and wait until they have proved their shares.

        Raises InfrastructureError or HostError where one cannot be had again.
        """
        lost = self._cluster.silent(slice_ids)
        for slice_id in lost:
            self._telemetry.lost("slice", slice_id, message)
            self._cluster.drop(slice_id)
            self._telemetry.restarted("slice", slice_id)
        for proof in self._cluster.start_slices([self._slices[s] for s in lost]):
            if not self._has_share(proof):
                raise InfrastructureError(
                    f"{proof.slice_id} did not get its share again; what was measured is stored, "
                    "and the same command goes on"
                )

    def has_faulted(
        self, slice_id: str, results: Iterable[Measurement | Failure]
    ) -> tuple[str, ...]:
        """Count a device's faults; return its slices where it is to be left alone."""
        device = self.fault_domain(slice_id)
        for result in results:
            if isinstance(result, Measurement):
                self._faults[device] = max(0.0, self._faults[device] - 1 / MEASURED_A_FAULT)
            elif result.stage in _OF_A_SLICE and result.kind.is_fault:
                self._faults[device] += 1
        if self._faults[device] < MAX_FAULTS:
            return ()
        return tuple(s for s in self._slices if self.fault_domain(s) == device)

    def leave_alone(self, slice_ids: Sequence[str]) -> None:
        """End slices for good. Raises DeviceError where no other one is left."""
        message = (
            f"{MAX_FAULTS} trials more have faulted there than one for every {MEASURED_A_FAULT} "
            "that were measured"
        )
        for slice_id in slice_ids:
            self._telemetry.lost("slice", slice_id, f"{message}; its device is left alone")
            self._cluster.drop(slice_id)
        if not self._has("slice"):
            raise DeviceError(
                f"{', '.join(slice_ids)}: {message}, and no other slice is left; see what they "
                "said in the run's folder `logs`, and whether the device is sound (nvidia-smi -q, "
                "dmesg). What was measured is stored, and the same command goes on"
            )

    def is_fit(self, answer: WorkerReply) -> bool:
        """Keep the proof of a slice that has started; one of another share must not measure."""
        return answer.method != "start" or self._has_share(answer.value)

    def _has_share(self, proof: CapProof) -> bool:
        first = self.proofs[0]
        if (proof.device, proof.sm_count) != (first.device, first.sm_count):
            unit = self._settings.share.unit_name
            message = (
                f"{proof.slice_id} obtained {proof.sm_count} {unit} of {proof.device}, and "
                f"others measured with {first.sm_count} of {first.device}"
            )
            log.error("%s; it measures nothing", message)
            self._cluster.drop(proof.slice_id)
            if not self._has("slice"):
                raise HostError(f"{message}; no slice is left that has it")
            return False
        self._store.save_proof(proof)
        self._telemetry.proved(proof)
        return True

    # --- nodes that come and go ----------------------------------------------------------------

    def look(self) -> tuple[str, ...]:
        """Ask nodes that joined, and give what nodes had that left to others of their hosts.

        Looks every now and then only. Returns who is lost with its node: who was idle there would
        say so only when it is given work. Raises InfrastructureError where too long nobody was
        there to search or to measure.
        """
        now = time.monotonic()
        if not self._elastic or now - self._looked_at < LOOK_SECS:
            return ()
        self._looked_at = now
        living = self._cluster.living_nodes()
        left = [n for n in self._nodes if n.node_id not in living]
        for node in left:
            log.error("node %s left", node.survey.hostname)
            self._nodes.remove(node)
        lost = tuple(w for w in (*self._tuners, *self._slices) if self._node_of(w) not in living)
        for worker_id in lost:
            self.lose(worker_id, "its node left")
        for node in list(self._nodes) if left else ():
            self._extend(node)
        for node_id in living.keys() - self._numbers.keys():
            self._numbers[node_id] = len(self._numbers)
            self._cluster.survey(node_id, self._settings.slice_request)
        if all(self._has(role) for role in ("tuner", "slice")):
            self._staffed_at = now
        elif now - self._staffed_at > WAIT_SECS:
            raise InfrastructureError(
                f"no node of the cluster has had a slice and a tuner for {WAIT_SECS:.0f} s; what "
                "was measured is stored, and the same command goes on when nodes are there"
            )
        return lost

    def join(self, answer: WorkerReply) -> None:
        """Start the workers of a node that was asked; they answer when they are ready."""
        if answer.error:
            log.warning("a node that joined is left out: %s", answer.error)
            return
        node = replace(self._cluster.surveyed(answer), kept=())
        name, layout = node.survey.hostname, self._layout
        device = (node.survey.device, node.survey.plan.target.json)
        if node.survey.plan.slices and device != (layout.device, layout.target.json):
            log.warning("node %s is left out: it has %s (%s)", name, *device)
            return
        log.info("node %s joined", name)
        self._nodes.append(node)
        self._extend(node)

    def _extend(self, node: Node) -> None:
        """Start what a node can have and has not."""
        number = self._numbers[node.node_id]
        others = [n for n in self._nodes if n is not node]
        cut = cut_beside(node, others, number=number)
        try:
            tuners = tuners_beside(cut, number, others, self._tuners.values())
        except HostError as error:
            log.warning("node %s is left out: %s", node.survey.hostname, error)
            return
        if self._settings.tuners is not None:
            tuners = tuners[: max(0, self._settings.tuners - len(self._tuners))]
        self._nodes[self._nodes.index(node)] = cut
        slices = [(s, cut.node_id) for s in cut.slices if s not in node.slices]
        self._note(tuners, slices)
        for tuner in tuners:
            self._cluster.add_tuner(tuner)
        for spec, node_id in slices:
            self._cluster.start_slice(spec, node_id)

    def _note(
        self, tuners: Sequence[TunerSpec], slices: Sequence[tuple[SliceSpec, str | None]]
    ) -> None:
        self._tuners |= {t.tuner_id: t for t in tuners}
        self._slices |= {s.slice_id: (s, node_id) for s, node_id in slices}
        self._roles |= dict.fromkeys((t.tuner_id for t in tuners), "tuner")
        self._roles |= dict.fromkeys((s.slice_id for s, _ in slices), "slice")
        self._store.save_slices([s for s, _ in slices])

    def _node_of(self, worker_id: str) -> str | None:
        if worker_id in self._tuners:
            return self._tuners[worker_id].node_id
        return self._slices[worker_id][1]

    def _has(self, role: str) -> bool:
        return bool(self._cluster.tuner_ids if role == "tuner" else self._cluster.slice_ids)
