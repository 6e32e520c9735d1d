"""Recipes that cannot be used are refused in one sentence, and nothing is written."""

from __future__ import annotations

import pytest

from tests.lib.bad_input import Bad, Make, Place, check
from tests.unit.test_recipe import BAD
from tunerd.errors import ExitCode


def recipe(text: str, *flags: object) -> Make:
    def make(place: Place) -> list[object]:
        path = place.folder / "r.yaml"
        path.write_text(text)
        return ["run", path, *flags]

    return make


GOOD = "model: a.onnx\ncpu-pct: 100\n"
MORE: dict[str, tuple[Make, str]] = {
    "a folder": (lambda place: ["run", place.folder], "there is no such file; give a recipe"),
    "no file": (lambda place: ["run", place.folder / "x.yaml"], "there is no such file; give a re"),
    "no recipe at all": (lambda _: ["run"], "a recipe is missing; give a YAML file"),
    "an unknown run": (recipe(GOOD, "--only", "b"), "--only b: .*no such run; .*a-cpu100"),
    "a value that is none": (recipe(GOOD, "--set", "x"), "--set: 'x' is not KEY=VALUE"),
    "a value of another kind": (recipe(GOOD, "--set", "seed=[[1]]"), "--set: seed: a value is wan"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_recipe_that_cannot_be_used(
    what: str, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    text, said = BAD[what]
    bad = Bad(what, recipe(text), ExitCode.BAD_INPUT, said.replace("^", ""))
    check(bad, place, capsys)


@pytest.mark.parametrize("what", MORE)
def test_a_command_line_that_cannot_be_used(
    what: str, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    make, said = MORE[what]
    check(Bad(what, make, ExitCode.BAD_INPUT, said), place, capsys)
