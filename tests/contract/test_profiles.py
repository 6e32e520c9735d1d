"""Where a kernel finds its weights, by the profile that it is measured with."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lib.build_fixtures import built, default_of, matmul_task
from tunerd.builder.build import build_candidate
from tunerd.runner.profiles import (
    L2,
    final_profile,
    range_of,
    within,
)
from tunerd.runner.sampling import CpuDevice
from tunerd.runs.finals.quiet_slice import Finals
from tunerd.settings import TuneSettings
from tunerd.system import cores, host
from tunerd.vocabulary import SEARCH

MIB = 1 << 20


def range_in(l2: str, model_bytes: int, cache_bytes: int) -> int:
    return range_of(within(final_profile(l2), model_bytes), cache_bytes)


def test_weights_of_a_small_model_stay_in_the_cache_and_those_of_a_large_one_do_not() -> None:
    assert range_in("model", 5 * MIB, 60 * MIB) == 8 * MIB
    assert range_in("model", 36 * MIB, 60 * MIB) == 64 * MIB
    assert range_in("model", 500 * MIB, 60 * MIB) == 120 * MIB
    for model_bytes in (0, 5 * MIB, 500 * MIB):
        assert range_in("cold", model_bytes, 60 * MIB) == 120 * MIB
        assert range_in("warm", model_bytes, 60 * MIB) == 0
    assert range_in("model", 0, 60 * MIB) == 120 * MIB  # of a model that nobody knows


@given(model_bytes=st.integers(1, 1 << 34), cache_bytes=st.integers(1 << 20, 1 << 27))
def test_a_model_s_range_is_all_of_its_weights_or_twice_the_cache(
    model_bytes: int, cache_bytes: int
) -> None:
    found = range_in("model", model_bytes, cache_bytes)
    assert min(model_bytes, 2 * cache_bytes) <= found <= max(2 * model_bytes, MIB)


def test_times_of_models_of_about_the_same_size_have_the_same_name() -> None:
    names = {mib: within(final_profile("model"), mib * MIB).name for mib in (36, 60, 64, 65, 4000)}
    assert names[36] == names[60] == names[64] == "final-v6-model-64MiB"
    assert names[65] == "final-v6-model-128MiB"
    assert names[4000] == "final-v6-model-256MiB"
    for l2 in ("cold", "warm"):
        assert within(final_profile(l2), 36 * MIB) == final_profile(l2)
    assert Finals("model", model_bytes=36 * MIB).conditions.startswith("final-v6-model-64MiB,")


def test_a_search_and_its_finals_find_their_weights_in_the_same_place() -> None:
    for cache_bytes in (MIB, 60 * MIB):
        search = range_of(within(SEARCH, 36 * MIB), cache_bytes)
        assert search == range_in(TuneSettings.model_fields["l2"].default, 36 * MIB, cache_bytes)


def test_another_name_of_a_cache_is_refused() -> None:
    with pytest.raises(ValueError, match=f"one of {', '.join(L2)}"):
        final_profile("hot")


def test_a_device_keeps_the_copies_that_a_profile_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "last_level_cache_bytes", lambda: 64 << 10)
    task = matmul_task(weights=(1,))
    build = built(build_candidate(task, default_of(task)))
    device = CpuDevice(sorted(host.facts().cores)[:1])
    path = tmp_path / "kernel.so"
    path.write_bytes(build.library)
    device.prepare(build, path, final_profile("warm"))
    device.prepare(build, path, final_profile("cold"))
    warm, cold = device._arguments._sets.values()
    weight_bytes = 64 * 48 * 4
    assert len(warm) == 1
    assert len(cold) * weight_bytes >= 2 * (64 << 10)
