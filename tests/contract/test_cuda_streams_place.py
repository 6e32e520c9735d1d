"""The place of streams and green contexts, without a GPU."""

from __future__ import annotations

import queue
import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from onnx import helper

from tests.lib.artifact_fixtures import model_of
from tests.lib.colocation_plans import Script, artifact, inputs
from tests.lib.fake_driver import OK, Answer, Driver
from tests.lib.fake_gpu import FakeContexts, FakeCudaModel, FakeGpu, FakeStaged, fake_cuda_place
from tests.lib.place_subjects import (
    cuda_streams,
    in_process,
    opened,
)
from tests.lib.super_models import artifact_of, super_artifact
from tunerd.artifacts.staging import bytes_of
from tunerd.colocation import MpsClientWarning
from tunerd.colocation.artifacts import needed_memory, outputs_of
from tunerd.colocation.places.base import Done, Fault, seat_bytes
from tunerd.colocation.places.cuda_streams import CudaStreamsPlace
from tunerd.colocation.places.gpu_context import GpuContext
from tunerd.colocation.places.green_contexts import units_of
from tunerd.colocation.plan import Member
from tunerd.colocation.work import Lane, Seat
from tunerd.errors import HostError, InfrastructureError
from tunerd.vocabulary import Model


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("members")


def test_a_dead_context_takes_every_seat_and_a_new_process_is_asked_for(root: Path) -> None:
    with opened(cuda_streams, root) as subject:
        (lane,) = subject.place.cut([Lane("stream-0", 100, ("m0", "m1"))])
        seats = [subject.load(seed, lane) for seed in (0, 1)]
        subject.fault(seats[0])
        vars(subject.place)["_gpu"].dead = True
        fault = subject.run(seats[0], inputs())
        assert isinstance(fault, Fault)
        assert fault.is_own
        assert set(fault.lost) == set(seats)
        with pytest.raises(InfrastructureError, match="start the process again"):
            subject.place.reload(seats[1])


class OneGpu(Driver):
    """One GPU, whose contexts an MPS daemon makes or not, which is known once there is one."""

    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT="sms", CU_DEVICE_ATTRIBUTE_MPS_ENABLED="mps"
    )

    def __init__(self, *, is_mps: bool) -> None:
        super().__init__()
        self.attributes, self.is_retained = {"sms": 132, "mps": int(is_mps)}, False

    def cuInit(self, flags: int) -> Answer:
        return (OK,)

    def cuDeviceGet(self, number: int) -> Answer:
        return OK, number

    def cuDevicePrimaryCtxRetain(self, device: int) -> Answer:
        self.is_retained = True
        return OK, "primary"

    def cuCtxSetCurrent(self, context: str) -> Answer:
        return (OK,)

    def cuDeviceGetName(self, size: int, device: int) -> Answer:
        return OK, b"a GPU\0"

    def cuDeviceGetUuid(self, device: int) -> Answer:
        return OK, SimpleNamespace(bytes=bytes(16))

    def cuDeviceGetAttribute(self, attribute: str, device: int) -> Answer:
        assert self.is_retained
        return OK, self.attributes[attribute]


@pytest.mark.parametrize("is_mps", [True, False])
def test_a_context_tells_whether_an_mps_daemon_has_made_it(
    is_mps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bindings = ModuleType("cuda.bindings")
    bindings.driver = OneGpu(is_mps=is_mps)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    gpu = GpuContext()
    assert (gpu.is_mps_client, gpu.sm_count) == (is_mps, 132)


def test_a_client_of_mps_warns_of_what_becomes_of_the_others_when_it_is_killed() -> None:
    with pytest.warns(MpsClientWarning, match="all clients of that daemon fail; use `place: mps`"):
        CudaStreamsPlace(FakeGpu(is_mps_client=True)).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CudaStreamsPlace(FakeGpu()).close()


def test_what_waits_on_the_stream_of_what_hangs_is_lost_with_it(root: Path) -> None:
    with opened(cuda_streams, root) as subject:
        lanes = subject.place.cut([Lane("a", 100, ("m0", "m1", "m2")), Lane("b", 100, ("m3",))])
        seats = [subject.load(seed, lanes[0]) for seed in (0, 1, 2)] + [subject.load(3, lanes[1])]
        told: queue.SimpleQueue[Done | Fault] = queue.SimpleQueue()
        subject.hang(seats[0])
        for seat in seats[:2]:
            subject.place.start(seat, 0, inputs(), told.put)
        assert set(subject.place.evict(seats[0])) == set(seats[:2])
        early = subject.run(seats[1], inputs())  # as was decided before the eviction was known
        assert isinstance(early, Fault)
        assert early.lost == (seats[1],)
        assert not early.is_own
        for seat in seats[2:]:
            assert isinstance(subject.run(seat, inputs()), Done)
        subject.heal()
        for seat in seats[:2]:
            subject.place.reload(seat)
            assert isinstance(subject.run(seat, inputs()), Done)
        assert told.empty()


def test_a_part_of_a_gpu_is_a_green_context_and_its_seats_are_captured_there(root: Path) -> None:
    contexts, captured_on = FakeContexts(), []

    class Noting(FakeCudaModel):
        def staged(self, stream: Any, count: int = 1) -> tuple[FakeStaged, ...]:
            captured_on.append(stream)
            return super().staged(stream, count)

    script = Script()
    made = in_process(root, script)
    made.place = CudaStreamsPlace(
        FakeGpu(), lambda path: Noting(script.open_model(path)), lambda: contexts
    )
    with made.place:
        subject = made
        half, rest, whole = subject.place.cut(
            [Lane("half", 50, ("m0",)), Lane("rest", 40, ("m1",)), Lane("whole", 100, ("m2",))]
        )
        loaded = [
            subject.place.load(subject.member(seed), lane, cut=None).proof
            for seed, lane in enumerate((half, rest, whole))
        ]
        assert [(p.units, p.mechanism) for p in loaded] == [
            (66, "green context"),
            (52, "green context"),
            (132, "stream"),
        ]
        subject.place.reload(Seat("m1", "rest"))
    names = [contexts.of_stream[s].context if s else None for s in captured_on]
    assert names == ["half", "rest", None, "rest"]
    assert contexts.is_closed


def test_graphs_are_captured_where_nothing_is_launched_meanwhile(root: Path) -> None:
    contexts, made = FakeContexts(), []

    class Noting(FakeCudaModel):
        def staged(self, stream: Any, count: int = 1) -> tuple[FakeStaged, ...]:
            made.extend(found := super().staged(stream, count))
            return found

    script = Script()
    subject = in_process(root, script)
    subject.place = CudaStreamsPlace(
        FakeGpu(), lambda path: Noting(script.open_model(path)), lambda: contexts
    )
    with subject.place:
        (lane,) = subject.place.cut([Lane("half", 50, ("m0", "m1"))])
        seats = [subject.load(seed, lane) for seed in (0, 1)]
        subject.place.reload(seats[1])
        for seat in seats:
            assert isinstance(subject.run(seat, inputs()), Done)
    launched_on = set[Any]().union(*(each.launched_on for each in made))
    assert launched_on
    assert launched_on.isdisjoint(each.captured_on for each in made)


def test_a_part_of_less_than_the_sms_that_come_together_is_refused(root: Path) -> None:
    with pytest.raises(HostError, match=r"1% of 60 SMs for little is less than the 2 .* least 4%"):
        units_of([("little", 1)], sms=60, unit=2)


def test_shares_of_a_gpu_fit_when_they_are_at_most_the_whole() -> None:
    for pcts in ((50, 50), (40, 40, 20), (25,) * 4, (10,) * 10, (7,) * 14, (90, 10)):
        assert sum(units_of([("a", pct) for pct in pcts], sms=132, unit=2)) <= 66


def test_equal_shares_are_equal_sets_and_the_nearest_where_all_fit() -> None:
    for count, sets in ((8, 8), (4, 16), (3, 22), (2, 33)):
        equal = [("a", 100 // count)] * count
        assert units_of(equal, sms=132, unit=2) == (sets,) * count


def test_weights_of_a_member_are_planned_once_for_all_its_streams(root: Path) -> None:
    with opened(cuda_streams, root) as subject:
        once, twice = (subject.place.needed_bytes(subject.member(0), n, cut=None) for n in (1, 2))
    weights = (artifact(root, 0) / "weights.bin").stat().st_size
    assert weights < once < twice < 2 * once - weights


def adding(floats: int) -> Model:
    """Return a model whose input has so many values."""
    nodes = [helper.make_node("Add", ["x", "w"], ["y"])]
    shapes = {"x": (1, floats)}, {"y": (1, floats)}
    return model_of(nodes, {"w": np.ones((1, floats))}, inputs=shapes[0], outputs=shapes[1])


_LARGE = 32 << 10  # floats


@pytest.mark.parametrize(("floats", "copies"), [(_LARGE - 1, 0), (_LARGE, 2)])
def test_inputs_are_planned_again_where_they_are_copied_ahead_and_outputs_for_each_launch(
    floats: int, copies: int, tmp_path: Path
) -> None:
    member = Member(name="m", artifact=artifact_of(adding(floats), tmp_path / "a"))
    with fake_cuda_place(Script()) as place:
        whole, in_segments = (place.needed_bytes(member, 3, cut=cut) for cut in (None, 1e-3))
    (output,) = outputs_of(member.artifact)
    assert whole - in_segments == 3 * (copies * floats * 4 + bytes_of(output))
    needed = needed_memory(member.artifact)
    assert whole == needed.shared_bytes + 3 * seat_bytes(needed, "in-process", "cuda")
    assert seat_bytes(needed, "in-process", "cpu") == needed.each_bytes


def test_inputs_of_lanes_are_planned_again_where_their_launch_has_large_ones(
    tmp_path: Path,
) -> None:
    floats = _LARGE // 2
    folder = super_artifact(adding(floats), tmp_path / "a", (1, 2))
    slots = 2 * 4
    assert needed_memory(folder).ahead_bytes == 2 * floats * 4 + slots
