"""Made-up hosts with GPUs."""

from __future__ import annotations

import dataclasses

import pytest

from tunerd.slices.mps import mps_slice
from tunerd.system import gpus, host
from tunerd.system.gpus import GpuFacts
from tunerd.system.host import HostFacts

UUID = "GPU-11111111-2222-3333-4444-555555555555"
H200 = GpuFacts(
    index=0,
    uuid=UUID,
    name="NVIDIA H200",
    mem_bytes=139 << 30,
    mem_free_bytes=138 << 30,
    compute_capability="9.0",
    sm_count=132,
    mig=False,
    compute_mode="default",
    l2_bytes=60 << 20,
)


@pytest.fixture
def runtime_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("r", numbered=True)
    monkeypatch.setenv("TUNERD_RUNTIME_FOLDER", str(folder))


@pytest.fixture
def gpu_host(monkeypatch: pytest.MonkeyPatch, runtime_folder: None) -> HostFacts:
    """A host of 16 cores with one H200."""
    monkeypatch.setattr(mps_slice, "driver_library_problem", lambda: "")
    monkeypatch.setattr(gpus, "visible_gpus", lambda: ((H200,), ""))
    monkeypatch.setattr(gpus, "driver_versions", lambda: ("580.159.04", "13.0"))
    return dataclasses.replace(
        host.facts(), cores=tuple(range(16)), core_quota=None, mps_control="/usr/bin/control"
    )


def with_gpu(facts: HostFacts, **changes: object) -> HostFacts:
    return dataclasses.replace(facts, gpus=(dataclasses.replace(H200, **changes),))  # type: ignore[arg-type]
