"""Whole models through tunerd, as the checks of exported and trained ones take them."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from onnx import helper

from lab.models import model_checks
from tests.contract.test_constants import by_rate
from tests.lib.models import example_models, model

EXAMPLES = ("light_squeezenet", "light_shufflenet", "encoder12")


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_architectures_of_people_are_right(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.onnx"
    onnx.save(example_models().make(name), path)
    found = model_checks.check_one(model_checks.Given(path))
    assert found["outcome"] in ("right", "cannot tell"), found["detail"]
    assert found["tasks"] > 0


def test_checks_say_how_each_model_ended_and_are_not_made_again(tmp_path: Path) -> None:
    onnx.save(by_rate(), tmp_path / "rate.onnx")
    unknown = helper.make_node("Sparkle", ["x"], ["y"], domain="com.example")
    onnx.save(model([unknown], inputs={"x": (1, 2)}, outputs={"y": (1, 2)}), tmp_path / "no.onnx")
    given = {
        "fixed": model_checks.Given(tmp_path / "rate.onnx", constants={"sr": 16000}),
        "open": model_checks.Given(tmp_path / "rate.onnx"),
        "unknown": model_checks.Given(tmp_path / "no.onnx"),
    }
    kept = tmp_path / "out" / "found.json"
    done = model_checks.check(given, kept, only="", limit_secs=300)
    outcomes = {name: each["outcome"] for name, each in done.items()}
    assert outcomes == {"fixed": "right", "open": "refused", "unknown": "refused"}
    assert "--constant NAME=NUMBER" in done["open"]["detail"]
    assert json.loads(kept.read_text()) == done
    for path in tmp_path.glob("*.onnx"):
        path.unlink()
    assert model_checks.check(given, kept, only="", limit_secs=300) == done
    assert "| right | 1 |" in model_checks.table(done, given)
