"""Who else is on a GPU, by what NVML lists and by what it does not."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.lib.fake_nvml import MIB, FakeNvml
from tunerd.slices import gpu_tenants
from tunerd.slices.gpu_tenants import Own, judged
from tunerd.slices.whole import WholeSlice
from tunerd.system import gpus
from tunerd.system.gpus import GpuState
from tunerd.vocabulary import Conditions, SliceSpec

UUID = "GPU-11111111-2222-3333-4444-555555555555"
GIB = 1 << 30
OWN = Own(frozenset({100, 101, 102}), runners=2, neighbours=1)
QUIET = GpuState(
    pids=(100, 101),
    graphics_pids=(),
    mem_used_bytes=2 * GIB,
    mem_bytes=139 * GIB,
    busy_pct=None,
    clock_reasons=0,
    is_persistent=True,
)


def by(own: Own | None = OWN, **changes: object) -> tuple[int | None, str]:
    return judged(replace(QUIET, **changes), own)  # type: ignore[arg-type]


# --- the list of processes ---------------------------------------------------------------------


def test_a_list_that_names_a_process_of_ours_is_believed() -> None:
    assert by() == (0, "")
    assert by(pids=(100, 4242)) == (1, "1 process of others: pid 4242")
    assert by(pids=(7, 8, 100)) == (2, "2 processes of others: pid 7, 8")


def test_a_list_that_is_believed_counts_and_not_memory_or_load() -> None:
    assert by(busy_pct=80, mem_used_bytes=130 * GIB) == (0, "")


@pytest.mark.parametrize("pids", [None, (), (90_001, 90_002)], ids=["untold", "empty", "foreign"])
def test_memory_judges_where_the_list_cannot_be_believed(pids: Sequence[int] | None) -> None:
    allowed = 3 * 2 * GIB  # of two runners and of MPS itself
    assert by(pids=pids, mem_used_bytes=allowed) == (None, "")
    held = by(pids=pids, mem_used_bytes=allowed + 12_288 * MIB)
    assert held == (None, "at least 12,288 MiB held by others")


def test_a_small_gpu_allows_a_tenth_of_its_memory() -> None:
    small = {"pids": (), "mem_bytes": 10 * GIB}
    assert by(**small, mem_used_bytes=3 * GIB) == (None, "")
    assert by(**small, mem_used_bytes=4 * GIB) == (None, "at least 1,024 MiB held by others")


def test_what_keeps_the_gpu_busy_is_said_where_the_list_is_empty() -> None:
    assert by(busy_pct=5, pids=()) == (None, "")
    assert by(busy_pct=80, pids=()) == (None, "others keep it 80% busy")
    assert by(busy_pct=None, pids=()) == (None, "")


def test_without_word_of_what_is_ours_nobody_is_accused() -> None:
    assert by(None, pids=(4242,), mem_used_bytes=130 * GIB) == (None, "")


# --- clocks ------------------------------------------------------------------------------------


def test_clocks_that_heat_holds_down_disturb_and_the_power_limit_does_not() -> None:
    assert by(clock_reasons=0x04) == (0, "")
    assert by(clock_reasons=0x40) == (0, "hot: hardware thermal slowdown")
    assert by(None, clock_reasons=0x80) == (None, "power brake")


def test_several_causes_are_one_short_text() -> None:
    _, both = by(pids=(100, 4242), clock_reasons=0x40)
    assert both == "1 process of others: pid 4242; hot: hardware thermal slowdown"
    _, many = by(pids=(100, *range(1_000_000, 1_000_009)), clock_reasons=0xE8)
    assert many.startswith("9 processes of others: pid 1000000, 1000001, 1000002 and 6 more; ")
    assert len(many) == 100


# --- through NVML ------------------------------------------------------------------------------


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setattr(gpus, "nvml_library", lambda: (fake, ""))
    return fake


def test_conditions_hold_clocks_neighbours_and_strangers(nvml: FakeNvml) -> None:
    nvml.compute, nvml.through_mps = [100], [101, 4242]
    cause = "1 process of others: pid 4242"
    assert gpu_tenants.conditions(UUID, lambda: OWN) == Conditions(1980, 41, 350.5, 1, 1, cause)


def test_utilisation_is_others_only_while_nothing_of_ours_runs(nvml: FakeNvml) -> None:
    nvml.busy = [80]
    assert not gpu_tenants.conditions(UUID, lambda: OWN).is_disturbed
    idle = gpu_tenants.conditions(UUID, lambda: OWN, idle=True)
    assert (idle.strangers, idle.disturbed_by) == (None, "others keep it 80% busy")


def test_a_display_is_no_tenant(nvml: FakeNvml) -> None:
    nvml.compute, nvml.graphics = [100], [4242]
    assert not gpu_tenants.conditions(UUID, lambda: OWN).is_disturbed


def test_a_runner_that_starts_while_nvml_is_asked_is_no_stranger(nvml: FakeNvml) -> None:
    nvml.through_mps = [100]

    def own() -> Own:
        nvml.through_mps = [100, 103]
        return replace(OWN, pids=OWN.pids | {103})

    assert gpu_tenants.conditions(UUID, own).strangers == 0


def test_an_nvml_that_tells_nothing_leaves_everything_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpus, "nvml_library", lambda: (None, "no driver"))
    assert gpu_tenants.conditions(UUID, lambda: OWN) == Conditions(neighbours=1)


def test_the_memory_of_a_client_of_mps_counts_once(nvml: FakeNvml) -> None:
    nvml.compute, nvml.through_mps = [7, 8, 9], [8, 9]
    nvml.bytes_of = {7: GIB, 8: 2 * GIB}
    assert gpus.process_bytes(UUID) == {7: GIB, 8: 2 * GIB}
    nvml.compute = None  # as in some containers
    assert gpus.process_bytes(UUID) == {8: 2 * GIB}


def test_the_runner_of_a_whole_gpu_is_no_stranger_to_it(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = WholeSlice(SliceSpec("whole-0-0", "whole", 100, gpu_uuid=UUID))
    pid = os.getpid()
    monkeypatch.setattr(whole, "_process", SimpleNamespace(pid=pid))
    nvml.compute = [pid]
    assert whole.conditions().strangers == 0
    nvml.compute = [pid, 4242]
    assert whole.conditions().disturbed_by == "1 process of others: pid 4242"
