"""What every kind of slice promises."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tunerd.slices.base import Plan, Slice
from tunerd.testing.kernels import kernels
from tunerd.vocabulary import Measurement, Profile, SliceRequest

QUICK = Profile("quick-v1", max_samples=4, max_total_secs=0.05)


class SliceContract:
    """Derive from it, with fixtures `member` and, where 50% is not a slice, `pct`.

    Tests are skipped where the kind is not usable on this host.
    """

    @pytest.fixture
    def member(self) -> type[Slice]:
        """Return the class of the slices."""
        raise NotImplementedError

    @pytest.fixture
    def pct(self) -> int:
        """Return a share that is a slice here."""
        return 50

    @pytest.fixture
    def planned(self, member: type[Slice], pct: int) -> Plan:
        usable = member.usability()
        if not usable.ok:
            pytest.skip(usable.why)
        return member.plan(SliceRequest(member.kind, pct))

    @pytest.fixture
    def made(self, member: type[Slice], planned: Plan) -> Iterator[Slice]:
        with member(planned.slices[0]) as held:
            yield held

    def test_a_kind_says_whether_it_is_usable_here_and_why(self, member: type[Slice]) -> None:
        assert member.usability().why

    def test_shares_of_a_device_sum_to_100_at_most(self, planned: Plan) -> None:
        assert planned.problem == ""
        assert planned.bound
        for index in {s.device_index for s in planned.slices}:
            assert sum(s.pct for s in planned.slices if s.device_index == index) <= 100

    def test_slices_are_disjoint(self, planned: Plan) -> None:
        slices = planned.slices
        assert len({s.slice_id for s in slices}) == len(slices)
        cores = [core for s in slices for core in s.cores]
        assert len(set(cores)) == len(cores)

    def test_more_slices_than_fit_is_a_problem_that_says_how_many_do(
        self, member: type[Slice], pct: int, planned: Plan
    ) -> None:
        refused = member.plan(SliceRequest(member.kind, pct, per_device=1000))
        assert refused.slices == ()
        assert "1000" in refused.problem
        assert refused.bound in refused.problem

    def test_start_proves_what_was_obtained(self, made: Slice) -> None:
        proof = made.prove()
        assert proof.slice_id == made.spec.slice_id
        assert 0 < proof.sm_count <= proof.device_sm_count
        assert proof.attached
        assert proof.mechanism
        assert proof.device

    def test_a_slice_starts_itself_when_it_is_asked_to_measure(
        self, made: Slice, planned: Plan
    ) -> None:
        (result,) = made.launch().measure(kernels(planned.target, 1), QUICK)
        assert isinstance(result, Measurement)

    def test_a_closed_slice_can_be_closed_again(self, member: type[Slice], planned: Plan) -> None:
        held = member(planned.slices[0])
        held.prove()
        held.close()
        held.close()

    def test_a_slice_that_was_never_started_can_be_closed(
        self, member: type[Slice], planned: Plan
    ) -> None:
        member(planned.slices[0]).close()

    def test_a_closed_slice_leaves_no_process_and_no_file(
        self,
        member: type[Slice],
        planned: Plan,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        builds = kernels(planned.target, 1)
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        held = member(planned.slices[0])
        pid = held.prove().runner_pid
        held.launch().measure(builds, QUICK)
        held.close()
        assert list(tmp_path.iterdir()) == []
        if pid:
            assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"
