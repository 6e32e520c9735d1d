"""Recipes: what they say, which runs that makes, and what is refused, at which line."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
import yaml

from tests.lib import ROOT
from tunerd.cli.app import app
from tunerd.cli.errors import run
from tunerd.errors import ExitCode, InputError
from tunerd.settings import TuneSettings
from tunerd.settings.option import keys_of
from tunerd.studies.recipes import Recipe, json_schema, read_recipe
from tunerd.studies.recipes.document import MAX_BYTES, MAX_VALUES
from tunerd.studies.recipes.execute import Result
from tunerd.studies.recipes.recipe import MAX_RUNS
from tunerd.system import gpus

Captured = pytest.CaptureFixture[str]
Read = Callable[..., Recipe]
# scripts/reproduce has recipes of other commands, too.
OF_OTHER_COMMANDS = {"claims.yaml", "claims-fp16.yaml", "shares.yaml"}
RECIPES = sorted(p for p in (ROOT / "recipes").glob("*.yaml") if p.name not in OF_OTHER_COMMANDS)


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    """Return what reads a recipe's text, in a file `r.yaml` in this process's folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TUNERD_STORE", raising=False)

    def reading(text: str, *overrides: str) -> Recipe:
        Path("r.yaml").write_text(text)
        return read_recipe(Path("r.yaml"), overrides)

    return reading


def lines(recipe: Recipe) -> list[str]:
    return [shlex.join(run.command.argv) for run in recipe.runs]


# --- runs --------------------------------------------------------------------------------------


def test_a_recipe_without_entries_is_a_run(read: Read) -> None:
    recipe = read("model: nets/a.onnx\ncpu-pct: 50\nbudget: 90\n")
    assert [run.name for run in recipe.runs] == ["a-cpu50"]
    assert lines(recipe) == ["tune nets/a.onnx --cpu-pct 50 --out runs/a-cpu50 --budget 90"]
    assert recipe.preflight is None


def test_several_models_and_shares_are_several_runs_in_order(read: Read) -> None:
    recipe = read("model: [a.onnx, b.onnx]\ngpu-pct: [40, 100]\ntrials: 5\n")
    assert lines(recipe) == [
        f"tune {m}.onnx --gpu-pct {pct} --out runs/{m}-gpu{pct} --trials 5"
        for m in "ab"
        for pct in (40, 100)
    ]


def test_another_batch_size_has_a_name_and_a_folder_of_its_own(read: Read) -> None:
    recipe = read("model: a.onnx\ncpu-pct: 50\nbatch: 4\n")
    assert [run.name for run in recipe.runs] == ["a-cpu50-batch4"]
    assert lines(recipe) == ["tune a.onnx --cpu-pct 50 --out runs/a-cpu50-batch4 --batch 4"]


def test_a_list_for_any_flag_of_one_value_is_a_run_of_each(read: Read) -> None:
    recipe = read("runs: {x: {model: a.onnx, cpu-pct: 50, seed: [1, 2]}}")
    assert [run.name for run in recipe.runs] == ["x-seed1", "x-seed2"]


def test_a_list_for_a_flag_that_may_be_repeated_is_one_run(read: Read) -> None:
    recipe = read("model: a.onnx\ncpu-pct: 50\nwarm-start: [r, s]\nshape: 'x:1,3'\n")
    (line,) = lines(recipe)
    assert "--shape x:1,3 " in line
    assert line.endswith("--warm-start r --warm-start s")


def test_an_entry_says_again_what_the_top_says_and_null_takes_it_back(read: Read) -> None:
    recipe = read(
        "model: a.onnx\ncpu-pct: 50\ntrials: 5\nbudget: 1m\n"
        "runs:\n  one:\n  two: {trials: 9, budget: null}\n"
    )
    assert lines(recipe) == [
        "tune a.onnx --cpu-pct 50 --out runs/one --trials 5 --budget 1m",
        "tune a.onnx --cpu-pct 50 --out runs/two --trials 9",
    ]


def test_a_flag_without_a_value_is_true_or_false(read: Read) -> None:
    text = "model: a.onnx\ncpu-pct: 50\nstore: sqlite:////s/x\nrequire-hit: "
    assert "--require-hit" in lines(read(text + "true"))[0]
    assert "--require-hit" not in lines(read(text + "false"))[0]


def test_paths_are_relative_to_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("recipes", "elsewhere"):
        (tmp_path / name).mkdir()
    path = tmp_path / "recipes" / "r.yaml"
    path.write_text("model: ../a.onnx\ncpu-pct: 50\nout: '../runs/{name}'\n")
    monkeypatch.chdir(tmp_path)
    assert lines(read_recipe(path)) == ["tune a.onnx --cpu-pct 50 --out runs/a-cpu50"]
    monkeypatch.chdir(tmp_path / "elsewhere")
    (line,) = lines(read_recipe(path))
    assert f"tune {tmp_path}/a.onnx " in line


def test_the_command_line_says_it_last_and_its_paths_are_its_own(
    read: Read, tmp_path: Path
) -> None:
    (tmp_path / "sub").mkdir()
    path = tmp_path / "sub" / "r.yaml"
    path.write_text("model: a.onnx\ncpu-pct: 50\nruns: {x: {trials: 4}}\n")
    recipe = read_recipe(path, ["trials=7", "model=b.onnx", "cpu-pct=[10, 20]"])
    assert lines(recipe) == [
        f"tune b.onnx --cpu-pct {pct} --out sub/runs/x-cpu{pct} --trials 7" for pct in (10, 20)
    ]


def test_a_gate_and_a_check_before_are_the_flags_of_their_commands(read: Read) -> None:
    recipe = read(
        "model: a.onnx\ncpu-pct: 50\npreflight: {cpu-only: true}\n"
        "gate: {base: 'best/{name}', fail-above: 3%}\n"
        "runs: {x: , y: {gate: {fail-above: 9%}}, z: {gate: null}}\n"
    )
    assert recipe.preflight is not None
    assert recipe.preflight.argv == ("preflight", "--cpu-only")
    gates = [run.gate and shlex.join(run.gate.command.argv) for run in recipe.runs]
    assert gates == [
        "compare best/x runs/x --fail-above 3%",
        "compare best/y runs/y --fail-above 9%",
        None,
    ]


def test_runs_are_chosen_by_their_name_or_by_that_of_their_entry(read: Read) -> None:
    recipe = read("model: a.onnx\nruns: {x: {cpu-pct: [1, 2]}, y: {cpu-pct: 3}}\n")
    assert [r.name for r in recipe.only(["x"])] == ["x-cpu1", "x-cpu2"]
    assert [r.name for r in recipe.only(["y", "x-cpu2"])] == ["x-cpu2", "y"]
    with pytest.raises(InputError, match="no such run; did you mean x-cpu1"):
        recipe.only(["x-cpu11"])


def test_aliases_unfold(read: Read) -> None:
    recipe = read("model: a.onnx\nruns:\n  x: &x {cpu-pct: 5}\n  y: *x\n")
    assert [run.name for run in recipe.runs] == ["x", "y"]


# --- what is refused ---------------------------------------------------------------------------

NET = "model: a.onnx\ncpu-pct: 50\n"
BOMB = "a: &a0 [x]\n" + "".join(
    f"b{i}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]\n" for i in range(12)
)
BAD = {
    "an unknown key": (NET + "trails: 5", r"3:1: there is no key trails; did you mean trials\?"),
    "an underscore": ("gpu_pct: 4", r"1:1: there is no key gpu_pct; did you mean gpu-pct\?"),
    "a flag of its own": (NET + "json: true", "3:1: there is no key json; allowed are"),
    "a share over all": (NET + "runs:\n  x:\n    cpu-pct: [5, 101]", r"5:18: cpu-pct: .*100"),
    "a budget of words": (NET + "budget: soon", "3:9: budget: 'soon' is not a duration"),
    "a shape of words": (NET + "shape: ['x:1', x]", "3:16: shape: .*'x' is not NAME:SIZES"),
    "a kind of no slice": (NET + "slice: cloud", "3:8: slice: .*'cloud' is not one of"),
    "two shares": (NET + "gpu-pct: 40", "3:10: gpu-pct: give one share"),
    "no share": ("model: a.onnx", "1:1: give one share"),
    "no model": ("runs:\n  x: {cpu-pct: 4}", "2:3: model is missing; give an ONNX file"),
    "no value": (NET + "trials:", "3:8: trials has no value; write null to take back"),
    "no list of values": (NET + "trials: []", "3:9: trials: the list is empty"),
    "a mapping": (NET + "trials: {a: 1}", "3:9: trials: a value is wanted here"),
    "neither yes nor no": (NET + "require-hit: yes", "3:14: .*'yes' is neither true nor false"),
    "a key twice": (NET + "cpu-pct: 40", "3:1: cpu-pct is said twice, first in line 2"),
    "an entry twice": (NET + "runs:\n  x:\n  x:", "5:3: x is said twice, first in line 4"),
    "an alias twice": ("&a model: x\n*a : y", "1:1: model is said twice"),
    "a list": ("- model: a.onnx", "1:1: a recipe is made of lines `key: value`"),
    "a word": ("model", "1:1: a recipe is made of lines"),
    "nothing": ("# nothing\n", "r.yaml: the recipe is empty"),
    "two documents": (NET + "---\n" + NET, "3:1: a second document begins"),
    "no YAML": ("model: [a", r"r.yaml:1:\d+: this is no YAML: .*expected"),
    "a tab": ("runs:\n\tx: 1", "2:1: this is no YAML"),
    "a control character": ("model: \x07", "this is no YAML: .*special characters"),
    "an escaped one": ('model: "a\\0b"', r"1:8: the character U\+0000 is allowed in no value"),
    "half of a character": ('model: "\\ud800"', r"1:8: the character U\+D800"),
    "more than a character": ('model: "\\UFFFFFFFF"', "this is no YAML"),
    "a tag": (NET + "seed: !!int 3", "3:7: tags such as .*int are not read"),
    "an object": ("!!python/object/apply:os.system [id]", "1:1: tags such as .*os.system"),
    "a merge key": (NET + "x: &x {}\n<<: *x", "4:1: merge keys are not read"),
    "a bomb": (BOMB, f"more than {MAX_VALUES:,} values, aliases unfolded"),
    "an alias of itself": ("model: &a [*a]", r"1:12: the alias \*a has no anchor before it"),
    "a deep list": ("model: " + "[" * 5000, "more than 16 deep"),
    "too many runs": (
        f"model: a.onnx\ncpu-pct: 5\nseed: [{', '.join(map(str, range(MAX_RUNS + 1)))}]",
        "more than 1,000 runs",
    ),
    "one folder for two": (
        "model: a\ncpu-pct: [1, 2]\nout: x",
        r"share the folder .*x; write \{na",
    ),
    "one name for two": ("model: [x/a.onnx, y/a.onnx]\ncpu-pct: 1", "two runs are named a-cpu1"),
    "a name that is a path": (NET + "runs:\n  ../x:", "4:3: runs: '../x' cannot be a name"),
    "no entries": (NET + "runs: {}", "3:7: runs: there is no entry"),
    "runs in runs": (NET + "runs: {x: {runs: }}", "3:12: .*it belongs at the top of the recipe"),
    "a check in an entry": (NET + "runs: {x: {preflight: }}", "3:12: .*belongs at the top"),
    "a gate without a base": (NET + "gate: {fail-above: 5%}", "3:1: gate: base is missing"),
    "a gate's unknown key": (NET + "gate:\n  fail-abov: 5%", "4:3: .*did you mean fail-above"),
    "a gate's bad value": (NET + "gate: {base: x, fail-above: y}", "3:29: fail-above: .*'y' is no"),
    "a gate of lists": (NET + "gate: {base: [x, y]}", "3:14: base: one value is wanted"),
    "a check's bad value": (NET + "preflight: {wait: y}", "3:19: wait: 'y' is not a duration"),
    "a password": (
        NET + "store: postgresql+psycopg://me:hush@h/d",
        "3:8: store: it holds a password, which a recipe must not",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_what_a_recipe_cannot_say_is_refused_with_its_place(what: str, read: Read) -> None:
    text, said = BAD[what]
    with pytest.raises(InputError, match=said) as caught:
        read(text)
    assert str(caught.value).startswith("r.yaml:")
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("trials", "--set: 'trials' is not KEY=VALUE; write for example"),
        ("trails=1", r"--set: there is no key trails; did you mean trials\?"),
        ("trials=0", "--set: trials: .*"),
        ("trials=[", "--set: this is no YAML"),
        ("trials=", "--set: trials has no value"),
        ("runs.x.trials=3", "--set: there is no key runs"),
        ("gate.x=3", "--set: gate has no key x"),
        ("=", "--set: there is no key"),
    ],
)
def test_what_cannot_be_said_on_the_command_line(text: str, said: str, read: Read) -> None:
    with pytest.raises(InputError, match=said):
        read(NET, text)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff\xfe", "r.yaml:1:1: this is not UTF-8"),
        (b"#" * (MAX_BYTES + 1), "r.yaml: a recipe has at most 256 KiB"),
        (None, "r.yaml: there is no such file"),
    ],
)
def test_a_file_that_is_no_recipe(
    content: bytes | None,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("r.yaml").write_bytes(content)
    with pytest.raises(InputError, match=said):
        read_recipe(Path("r.yaml"))


# --- keys and the schema -----------------------------------------------------------------------


def test_every_flag_of_tune_is_a_key_but_those_of_run_itself() -> None:
    program: Any = typer.main.get_command(app)
    flags = {p.opts[0].removeprefix("--") for p in program.commands["tune"].params}
    own = {p.opts[0].removeprefix("--") for p in program.commands["run"].params}
    assert {key.name for key in keys_of(TuneSettings)} == flags - own
    assert {"model", "gpu-pct", "warm-start", "store"} <= flags - own


def test_the_published_schema_is_up_to_date() -> None:
    """`tunerd run --schema > recipes/schema.json` makes it so."""
    published = json.loads((ROOT / "recipes" / "schema.json").read_text())
    assert published == json.loads(json.dumps(json_schema()))
    jsonschema.Draft7Validator.check_schema(published)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_a_recipe_of_the_repository_is_read_and_fits_the_schema(path: Path) -> None:
    assert read_recipe(path).runs
    text = path.read_text()
    jsonschema.validate(yaml.safe_load(text), json_schema())
    assert text.startswith("# yaml-language-server: $schema=schema.json\n")


@pytest.mark.parametrize(
    "what",
    [
        "an unknown key",
        "a share over all",
        "a kind of no slice",
        "a mapping",
        "a list",
        "a word",
        "no list of values",
        "no entries",
        "runs in runs",
        "a check in an entry",
        "a gate's unknown key",
        "a name that is a path",
    ],
)
def test_the_schema_refuses_what_an_editor_can_see(what: str) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(yaml.safe_load(BAD[what][0]), json_schema())


# --- the command -------------------------------------------------------------------------------


def test_a_dry_run_prints_the_commands_and_does_nothing(read: Read, capsys: Captured) -> None:
    read(NET + "preflight: {}\ngate: {base: b}\n")
    before = sorted(Path().rglob("*"))
    assert run(app, ["run", "r.yaml", "--dry-run"]) == 0
    out = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    assert out == [
        "tunerd preflight",
        "tunerd tune a.onnx --cpu-pct 50 --out runs/a-cpu50",
        "tunerd compare b runs/a-cpu50",
    ]
    assert run(app, ["run", "r.yaml", "--dry-run", "--json"]) == 0
    (planned,) = json.loads(capsys.readouterr().out)["runs"]
    assert planned["command"] == out[1]
    assert sorted(Path().rglob("*")) == before


def test_quiet_is_waited_for_where_a_run_is_possible_and_what_is_not_is_said_before(
    read: Read, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Recipe] = []

    def carried(recipe: Recipe, *_: object, **__: object) -> Result:
        asked.append(recipe)
        return Result(None, ())

    monkeypatch.setattr("tunerd.studies.recipes.execute.carry_out", carried)
    monkeypatch.setattr(gpus, "visible_gpus", lambda: ((), "no NVIDIA driver answers here"))
    read("model: a.onnx\npreflight: {wait: 30m}\nruns: {x: {gpu-pct: 40}, y: {cpu-pct: 50}}\n")
    assert run(app, ["run", "r.yaml"]) == run(app, ["run", "r.yaml", "--only", "x"]) == 0
    checks = [recipe.preflight for recipe in asked]
    assert [check and check.argv for check in checks] == [("preflight", "--wait", "30m"), None]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tunerd run: x is impossible here: ")
    assert "no NVIDIA driver answers here" in line


def test_a_recipe_that_cannot_be_read_is_one_sentence_and_an_exit_code(
    read: Read, capsys: Captured
) -> None:
    Path("r.yaml").write_text("trails: 5")
    assert run(app, ["run", "r.yaml"]) == ExitCode.BAD_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "tunerd: r.yaml:1:1: there is no key trails; did you mean trials?"
    assert run(app, ["run"]) == ExitCode.BAD_INPUT
    assert "a recipe is missing" in capsys.readouterr().err


def test_the_schema_is_printed(capsys: Captured) -> None:
    assert run(app, ["run", "--schema"]) == 0
    assert capsys.readouterr().out == (ROOT / "recipes" / "schema.json").read_text()
