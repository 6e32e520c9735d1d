"""Requests of one model in batches, by the engine on a real GPU: each answer is that of batch 1."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tunerd
from tests.lib.models import floats
from tests.lib.sized_models import by_hand, packed, products
from tunerd.artifacts import staging
from tunerd.artifacts.batches import BatchedModel
from tunerd.colocation import Engine
from tunerd.colocation.plan import Plan
from tunerd.slices.base import Plan as SlicePlan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::tunerd.MismatchWarning"),
]

SIZES = ({"batch": 1}, {"batch": 4}, {"batch": 8})
WAIT_SECS = 120


@pytest.fixture(scope="module")
def artifact(whole_gpu: SlicePlan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("batches")
    return packed(products(), SIZES, folder, target=whole_gpu.target)


def test_a_burst_is_served_in_batches_and_each_answer_is_that_of_batch_1(artifact: Path) -> None:
    sized = tunerd.load(artifact)
    assert isinstance(sized, tunerd.SizedModel)
    alone = sized.at(batch=1)
    said = {
        "device": "cuda",
        "policy": {"kind": "space-time"},
        "members": [{"name": "net", "artifact": artifact}],
    }
    given = [floats(1, 6, seed=seed) for seed in range(200)]
    with Engine(Plan.model_validate(said)) as engine:
        futures = [engine.submit("net", {"x": x}) for x in given]
        answers = [future.result(WAIT_SECS)["y"] for future in futures]
        launches = engine.stats().groups["net+"]
    for x, y in zip(given, answers, strict=True):
        assert y.shape == (1, 5)
        np.testing.assert_allclose(y, alone(x)["y"], rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(y, by_hand(x), rtol=1e-3, atol=1e-4)
    assert launches.requests == len(given)
    assert max(launches.of_size) > 1


@pytest.mark.parametrize("large_bytes", [1, 1 << 30], ids=["beside", "on one stream"])
def test_launches_one_behind_the_other_mix_no_rows(
    artifact: Path, large_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cuda.bindings import driver

    from tunerd.system.cuda_driver import checked

    monkeypatch.setattr(staging, "_LARGE_BYTES", large_bytes)
    sized = tunerd.load(artifact)
    assert isinstance(sized, tunerd.SizedModel)
    batches = BatchedModel(sized)
    stream, bring, fetch = (int(checked(driver.cuStreamCreate(1))) for _ in range(3))
    staged = batches.staged_lanes(stream, 2)
    for turn in range(3):
        under_way = []
        for size, number, count in ((8, 0, 5), (4, 0, 3), (8, 1, 8), (1, 0, 1)):
            given = [floats(1, 6, seed=100 * turn + 10 * number + i) for i in range(count)]
            launch = staged[size][number]
            requests = [(batches.own, {"x": x}) for x in given]
            launch.launch(requests, stream, bring=bring, fetch=fetch)
            under_way.append((given, launch))
        for given, launch in under_way:
            launch.wait()
            assert launch.secs() > 0
            for x, outputs in zip(given, launch.read(), strict=True):
                np.testing.assert_allclose(outputs["y"], by_hand(x), rtol=1e-3, atol=1e-4)
