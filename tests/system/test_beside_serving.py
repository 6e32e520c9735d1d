"""A tuning run on a device that serves: as many slices as the plan's members bear."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest

import tunerd
from tests.lib.artifact_fixtures import tiny_artifact
from tests.lib.models import conv_net
from tunerd.api.serving import beside_serving
from tunerd.colocation import Plan
from tunerd.colocation.planning.features import architecture_of, at_share, features_of
from tunerd.colocation.planning.pairs import PAIRS, Pair, Side, append
from tunerd.errors import HostError
from tunerd.settings import TuneSettings
from tunerd.system import host
from tunerd.vocabulary.verdict import Interval


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact that serves, and one of the model that is tuned."""
    folder = tmp_path_factory.mktemp("artifacts")
    for seed, name in enumerate(("served", "tuned")):
        tiny_artifact(folder / name, seed=seed)
    return folder


@pytest.fixture
def serving(made: Path, tmp_path: Path) -> Path:
    """A plan of one member, which has half of the device."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    plan = Plan.model_validate(
        {"members": [{"name": "shop", "artifact": tmp_path / "served", "share": 50}]}
    )
    plan.write(tmp_path / "plan.yaml")
    return tmp_path / "plan.yaml"


def settings(serving: Path, **said: Any) -> TuneSettings:
    folder = serving.parent
    return TuneSettings(
        model=folder / "net.onnx", cpu_pct=25, out=folder / "run", serving=serving, **said
    )


def measured(serving: Path, slowdowns: dict[int, float]) -> None:
    """Have an artifact of the tuned model, and what it costs the member at some shares."""
    folder = serving.parent
    tuned = folder / "run" / "artifact"
    shutil.copytree(folder / "tuned", tuned)

    def side(name: str, path: Path, share: int) -> Side:
        named = at_share(features_of(path).named(), share)
        return Side(name, architecture_of(path), share, named)

    append(
        folder / PAIRS,
        [
            Pair(
                side("shop", folder / "served", 50), side("net", tuned, share),
                host.facts().cpu_model, Interval(x, x - 0.01, x + 0.01), "measured",
            )
            for share, x in slowdowns.items()
        ],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("loss", "slices"), [("2%", None), ("7%", 1), ("10%", 2), ("25%", 3), ("50%", 4)]
)
def test_there_are_as_many_slices_as_the_members_bear(
    serving: Path, loss: str, slices: int | None
) -> None:
    measured(serving, {25: 1.05, 50: 1.08, 75: 1.2, 100: 1.3})
    asked, said = settings(serving, serving_loss=loss), list[str]()
    if slices is None:
        with pytest.raises(HostError, match="1 slice, 25% of the device: shop is slower beside"):
            beside_serving(asked, said.append)
        return
    assert beside_serving(asked, said.append).slices == slices
    assert f"{25 * slices}% of the device: shop is slower beside it by" in said[0]
    assert "measured" in said[0]


def test_no_more_slices_than_were_asked_for(serving: Path) -> None:
    measured(serving, {25: 1.05, 50: 1.08, 75: 1.2, 100: 1.3})
    assert beside_serving(settings(serving, slices=1), lambda _: None).slices == 1


def test_what_cannot_be_estimated_is_said_and_changes_nothing(serving: Path) -> None:
    said: list[str] = []
    asked = settings(serving)
    assert beside_serving(asked, said.append) == asked
    assert "no run of this model" in said[-1]
    measured(serving, {30: 1.05})
    assert beside_serving(asked, said.append) == asked
    assert "no pair was measured" in said[-1] or "too few" in said[-1]
    assert beside_serving(asked.model_copy(update={"serving": None}), said.append).serving is None


def test_a_plan_of_a_run_says_it(serving: Path) -> None:
    onnx.save(conv_net((1, 3, 8, 8)), serving.parent / "net.onnx")
    said: list[str] = []
    tunerd.plan(
        serving.parent / "net.onnx", cpu_pct=50, serving=serving, out=serving.parent / "other",
        on_warning=said.append,
    )  # fmt: skip
    assert "not estimated" in said[0]
