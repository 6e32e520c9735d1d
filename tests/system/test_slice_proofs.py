"""What proves that a slice has its share of a GPU."""
# ruff: noqa: F811  fixtures are arguments

from __future__ import annotations

import dataclasses

import pytest

from tests.lib.gpu_hosts import UUID, gpu_host, runtime_folder  # noqa: F401  fixtures
from tunerd.errors import HostError
from tunerd.slices import whole
from tunerd.slices.mps import mps_slice
from tunerd.system.host import HostFacts
from tunerd.vocabulary import SliceSpec

CLIENT = {
    "device": "NVIDIA H200",
    "sm_count": 52,
    "mps_enabled": True,
    "compute_capability": "9.0",
    "pid": 4242,
}


# --- proofs ------------------------------------------------------------------------------------


SPEC = SliceSpec("mps-0-0", "mps", 40, gpu_uuid=UUID)


def test_a_client_of_the_daemon_with_its_share_of_sms_is_a_proof(gpu_host: HostFacts) -> None:
    proof = mps_slice.proof_of(SPEC, CLIENT, listed=True)
    assert (proof.sm_count, proof.device_sm_count, proof.attached) == (52, 132, True)
    assert (proof.mechanism, proof.runner_pid, proof.driver) == ("mps", 4242, "580.159.04")


def test_where_the_client_list_cannot_tell_the_client_decides(gpu_host: HostFacts) -> None:
    assert mps_slice.proof_of(SPEC, CLIENT, listed=None).attached


@pytest.mark.parametrize(
    ("changes", "listed", "words"),
    [
        ({"mps_enabled": False}, None, "without MPS"),
        ({}, False, "does not list"),
        ({"sm_count": 132}, True, "132 SMs"),
        ({"sm_count": 56}, True, "56 SMs"),
    ],
)
def test_a_share_that_was_not_obtained_is_refused(
    gpu_host: HostFacts, changes: dict[str, object], listed: bool | None, words: str
) -> None:
    with pytest.raises(HostError, match=words):
        mps_slice.proof_of(SPEC, CLIENT | changes, listed=listed)


def test_a_whole_gpu_is_refused_where_something_caps_it(gpu_host: HostFacts) -> None:
    spec = dataclasses.replace(SPEC, pct=100)
    facts = CLIENT | {"mps_enabled": False, "sm_count": 132}
    assert whole.proof_of(spec, facts).sm_count == 132
    with pytest.raises(HostError, match="52 of 132"):
        whole.proof_of(spec, facts | {"sm_count": 52})
    with pytest.raises(HostError, match="through MPS"):
        whole.proof_of(spec, facts | {"mps_enabled": True})
