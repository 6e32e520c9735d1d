"""The slices of every kind that is usable here, for the contracts that they keep."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from tunerd.slices import member, plan
from tunerd.slices.base import Slice
from tunerd.system import host
from tunerd.testing.kernels import kernels
from tunerd.vocabulary import (
    Build,
    Candidate,
    SliceRequest,
    SliceSpec,
    TargetSpec,
)

KINDS = [
    "cpu",
    "simulated",
    pytest.param("mps", marks=pytest.mark.gpu),
    pytest.param("whole", marks=pytest.mark.gpu),
]


def pct_of(kind: str) -> int:
    """The least share that is a slice of its own here, 100% of a whole GPU."""
    if kind == "cpu":
        return -(-100 // host.facts().usable_cores)
    return {"simulated": 50, "mps": 40, "whole": 100}[kind]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    usable = member(request.param).usability()
    if not usable.ok:
        pytest.skip(usable.why)
    return str(request.param)


@pytest.fixture
def spec(kind: str) -> SliceSpec:
    return plan(SliceRequest(kind, pct_of(kind))).slices[0]


@pytest.fixture
def measured(spec: SliceSpec) -> Iterator[Slice]:
    with member(spec.kind)(spec) as made:
        yield made


@pytest.fixture
def with_runner(spec: SliceSpec) -> Iterator[Slice]:
    """A slice whose runner is a process that a kernel may end."""
    if spec.kind == "simulated":
        pytest.skip("a simulated slice has no runner; its faults come on cue")
    if spec.kind == "mps":
        pytest.skip("a client of MPS never ends by a signal; the tests of MPS fence it")
    if spec.kind == "whole":
        pytest.skip("a kernel of a GPU cannot signal its process")
    with member(spec.kind)(spec) as made:
        yield made


def target_of(spec: SliceSpec) -> TargetSpec:
    return plan(SliceRequest(spec.kind, spec.pct)).target


def builds_for(spec: SliceSpec, count: int = 3) -> list[Build]:
    """Build small kernels of different lengths."""
    return kernels(target_of(spec), count)


def named(of: Candidate, number: int) -> Candidate:
    return dataclasses.replace(of, candidate_id=f"{number:016x}")


def broken(build: Build) -> Build:
    return dataclasses.replace(build, library=b"no library")
