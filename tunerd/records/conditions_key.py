"""What a measurement was obtained on: those of equal ones may be compared, and used again."""

from __future__ import annotations

from dataclasses import dataclass

from tunerd.records.facts import RunFacts, code_for
from tunerd.vocabulary import FP32, CapProof


@dataclass(frozen=True)
class Obtained:
    """With a task's id the key of its outcome; what was asked for is no part of it."""

    device: str  # GPU or CPU model
    sm_count: int  # SMs or cores of the slice
    mechanism: str  # that limited it
    driver: str
    code_for: str  # kind and architecture of the target
    tvm_version: str
    profile: str  # how it was measured, and beside which neighbours
    precision: str = FP32  # that the kernels compute in
    tenants: int = 1  # models that share a kernel

    @classmethod
    def of(cls, proof: CapProof, facts: RunFacts, profile: str) -> Obtained:
        """Return what is measured on, and how, in a slice that proved its cap."""
        return cls(
            device=proof.device,
            sm_count=proof.sm_count,
            mechanism=proof.mechanism,
            driver=proof.driver,
            code_for=f"{facts.target.kind} {code_for(facts.target)}",
            tvm_version=facts.tvm_version,
            profile=profile,
            precision=facts.precision or FP32,
            tenants=facts.tenants or 1,
        )
