"""Slices of this machine's cores: disjoint sets that the runners are pinned to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from tunerd.errors import HostError
from tunerd.slices.base import Plan, Usability
from tunerd.slices.child import ChildSlice
from tunerd.system import host, targets
from tunerd.vocabulary import CapProof, SliceRequest, SliceSpec, TargetSpec

# How often TVM's threads look for more work before they sleep: by default for some 150 ms behind
# each call, on cores on which the next candidate is built; so for 0.7 ms.
_SPIN, _SPINS = "TVM_THREAD_POOL_SPIN_COUNT", "2000"


class CpuSlice(ChildSlice):
    """A set of cores. Its lane is shared with the tuner that builds on the same cores."""

    kind = "cpu"

    @classmethod
    def usability(cls) -> Usability:
        cores = host.facts().usable_cores
        return Usability(True, f"{cores} core(s) may be used by this process")

    @classmethod
    def plan(cls, request: SliceRequest) -> Plan:
        """Cut the cores that this process may use into slices that share no physical core.

        A slice has its percentage of the hardware threads, rounded down, the threads of one core
        together. Where that leaves it one thread of a last core, the sibling stays idle: a thread
        more is nearer to what was asked for than a core less.
        """
        pct, per_device = request.pct, request.per_device
        facts = host.facts()
        groups = core_groups(facts)
        total = sum(len(g) for g in groups)
        per_slice = total * pct // 100
        if per_slice < 1:
            least = -(-100 // total)
            problem = f"{pct}% of {total} core(s) is less than one core; give at least {least}%"
            return Plan((), TargetSpec("llvm", "{}"), "", problem=problem)
        fit = 100 // pct
        bound = f"{fit} slice(s) of {pct}% fit into {total} core(s)"
        sets = cut_cores(groups, [per_slice] * fit)
        if len(sets) < fit:
            bound = f"{len(sets)} slice(s) of {per_slice} core(s) fit without sharing a core"
        if per_device is not None and per_device > len(sets):
            problem = f"--slices {per_device} is more than fit: {bound}"
            return Plan((), TargetSpec("llvm", "{}"), bound, problem=problem)
        if per_device is not None and per_device < len(sets):
            bound = f"--slices asks for {per_device} where {len(sets)} fit"
            sets = sets[:per_device]
        slices = tuple(
            SliceSpec(
                slice_id=f"cpu-0-{i}",
                kind="cpu",
                pct=pct,
                cores=cores,
                lane=f"cores-{'-'.join(map(str, cores))}",
                environment=(
                    ("OMP_NUM_THREADS", str(len(cores))),
                    (_SPIN, os.environ.get(_SPIN, _SPINS)),
                ),
            )
            for i, cores in enumerate(sets)
        )
        return Plan(slices, targets.cpu_target_json(per_slice), bound)

    def arguments(self) -> tuple[str, ...]:
        return ("--device", "cpu", "--cores", ",".join(map(str, self.spec.cores)))

    def check(self, facts: dict[str, Any]) -> CapProof:
        if tuple(facts["cores"]) != self.spec.cores:
            raise HostError(
                f"the slice {self.spec.slice_id} asked for the cores {list(self.spec.cores)} and "
                f"its runner may use {facts['cores']}; nothing was measured in it"
            )
        return CapProof(
            slice_id=self.spec.slice_id,
            device=facts["device"],
            sm_count=facts["sm_count"],
            device_sm_count=host.facts().usable_cores,
            mechanism="affinity",
            attached=True,
            runner_pid=facts["pid"],
        )


def core_groups(facts: host.HostFacts) -> list[tuple[int, ...]]:
    """Return the usable logical cores, threads of one physical core together, within the quota."""
    groups: list[tuple[int, ...]] = []
    left = facts.usable_cores
    for group in sorted(facts.core_siblings) or [(c,) for c in facts.cores]:
        if left <= 0:
            break
        groups.append(tuple(group[:left]))
        left -= len(group)
    return groups


def cut_cores(groups: Sequence[tuple[int, ...]], sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return sets of so many logical cores; no two have threads of one core.

    Fewer than there are sizes, where the rest does not fit.
    """
    left = list(groups)
    sets: list[tuple[int, ...]] = []
    for size in sizes:
        if sum(map(len, left)) < size:
            break
        cores: list[int] = []
        while (missing := size - len(cores)) > 0:
            group = _next_group(left, missing)
            left.remove(group)
            cores += group[:missing]
        sets.append(tuple(sorted(cores)))
    return sets


def _next_group(groups: list[tuple[int, ...]], missing: int) -> tuple[int, ...]:
    """Return the largest group that is needed whole, or the smallest one, of which a part is."""
    whole = [group for group in groups if len(group) <= missing]
    return max(whole, key=len) if whole else min(groups, key=len)
