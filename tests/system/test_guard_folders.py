"""What the guard refuses: folders that it cannot use, and runners of another name or share."""
# ruff: noqa: F811  fixtures are arguments

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lib.guard_bench import UUID, Bench, bench, spec_for  # noqa: F401  fixtures
from tunerd.errors import HostError, InfrastructureError
from tunerd.slices.mps import guard_client as lease_module
from tunerd.slices.mps.gpu import Gpu
from tunerd.vocabulary import SliceSpec


def test_a_private_folder_that_others_can_enter_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    monkeypatch.setenv("TUNERD_RUNTIME_FOLDER", str(shared))
    with pytest.raises(HostError, match="only you can enter"):
        lease_module.private_folder()


@pytest.mark.parametrize("place", ["missing/r", "file", "file/r", "dangling"])
def test_a_private_folder_that_cannot_be_made_is_refused_with_the_name_of_its_variable(
    place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    monkeypatch.setenv("TUNERD_RUNTIME_FOLDER", str(tmp_path / place))
    with pytest.raises(HostError, match=f"{place}.*TUNERD_RUNTIME_FOLDER"):
        lease_module.private_folder()


def test_a_file_in_the_place_of_a_gpus_folder_is_named(bench: Bench) -> None:
    folder = lease_module.gpu_folder(UUID)
    folder.rmdir()
    folder.touch()
    with pytest.raises(HostError, match=f"{folder.name}.*TUNERD_RUNTIME_FOLDER"):
        lease_module.gpu_folder(UUID)
    folder.unlink()


def test_a_folder_too_deep_for_a_socket_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deep = tmp_path / ("d" * 100)
    monkeypatch.setenv("TUNERD_RUNTIME_FOLDER", str(deep))
    with pytest.raises(HostError, match="too long"):
        lease_module.gpu_folder(UUID)


def test_no_runner_is_started_for_a_name_that_is_a_path(tmp_path: Path) -> None:
    gpu = Gpu(UUID, tmp_path, run="run")
    with pytest.raises(ValueError, match="none that a guard can start"):
        gpu.start_runner(SliceSpec("../x", "mps", 40))


def test_no_runner_is_started_with_another_share_than_its_slices(bench: Bench) -> None:
    lease = bench.lease()
    fields = spec_for(lease, "mps-0-0", pct=50) | {"pct": 40}
    with pytest.raises(InfrastructureError, match="THREAD_PERCENTAGE=50, and its runner needs 40"):
        lease.request("start_runner", spec=fields)
