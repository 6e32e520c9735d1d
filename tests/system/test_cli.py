"""What people type: good command lines, and machines that cannot do what is asked."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import typer
from onnx import helper

from tests.lib import ROOT
from tests.lib.models import model
from tests.lib.node_fixtures import settings
from tunerd.cli.app import app
from tunerd.cli.errors import run
from tunerd.cluster.layout import local_layout
from tunerd.errors import ExitCode
from tunerd.records import RunFacts, Store
from tunerd.records.schema import STORE_NAME
from tunerd.runs import plan as preparation
from tunerd.runs.folder import RunFolder
from tunerd.settings.texts import sized_name
from tunerd.system import gpus
from tunerd.vocabulary import SliceSpec

Captured = pytest.CaptureFixture[str]
Refused = Callable[..., str]

HEAVY = ("numpy", "onnx", "onnxruntime", "pandas", "ray", "scipy", "sqlalchemy", "tvm")
FOR_A_COMMAND = ("markdown_it", "pydantic", "rich", "tunerd.cli.tune", "tunerd.settings")


def matmul(batch: int | str = 4) -> onnx.ModelProto:
    """Return a matrix product and a relu; a batch that is a name is an open dimension."""
    weights = np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)
    return model(
        [
            helper.make_node("MatMul", ["x", "w"], ["product"]),
            helper.make_node("Relu", ["product"], ["y"]),
        ],
        inputs={"x": (batch, 16)},
        outputs={"y": (batch, 8)},
        weights={"w": weights},
    )


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder, beside `tmp_path / models`."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def net(tmp_path: Path) -> str:
    return saved(matmul(), tmp_path / "models" / "net.onnx")


@pytest.fixture
def open_net(tmp_path: Path) -> str:
    return saved(matmul("batch"), tmp_path / "models" / "open.onnx")


def saved(proto: onnx.ModelProto, path: Path) -> str:
    path.parent.mkdir(exist_ok=True)
    onnx.save(proto, path)
    return str(path)


@pytest.fixture
def refused(here: Path, capsys: Captured) -> Refused:
    """Run a command line that must end with a code, one sentence, and nothing created."""

    def check(code: ExitCode, *argv: str) -> str:
        before = sorted(here.rglob("*"))
        assert run(app, list(argv)) == code
        out, err = capsys.readouterr()
        (line,) = err.splitlines()
        assert line.startswith("tunerd: ")
        assert "Traceback" not in err
        assert out == ""
        assert sorted(here.rglob("*")) == before
        return line

    return check


def document(capsys: Captured, *argv: str, code: int = 0) -> Any:
    """Run a command line with --json and return the one document that stdout got."""
    assert run(app, [*argv, "--json"]) == code
    return json.loads(capsys.readouterr().out)


# --- help --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv", [["--help"], ["tune", "--help"], ["compare", "--help"], ["records", "--help"]]
)
def test_help_is_answered_without_heavy_imports(argv: list[str]) -> None:
    heavy = HEAVY if argv[0] != "--help" else HEAVY + FOR_A_COMMAND
    program = (
        "import sys; from tunerd.cli.app import app; from tunerd.cli.errors import run;"
        f"code = run(app, {argv!r}); print(sorted(set({heavy!r}) & set(sys.modules)),"
        " file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (0, "[]")
    assert "Usage" in done.stdout


def help_of(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    """Return what `--help` shows at 80 columns, as one line without frames."""
    assert run(app, [*command, "--help"]) == 0
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


@pytest.mark.parametrize("command", [(), ("tune",), ("status",), ("records",), ("records", "show")])
def test_help_shows_no_type_for_a_flag_that_takes_no_value(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    said = help_of(capsys, *command)
    assert "--help Show this message" in said
    assert "bool" not in said


def test_help_shows_the_defaults_that_its_sentences_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "goes on in its own. [default: runs/MODEL-gpu40]" in help_of(capsys, "tune")


@pytest.mark.parametrize("command", ["tune", "profile", "matrix"])
def test_help_names_simulated_slices_behind_the_kinds_that_measure(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = help_of(capsys, command)
    assert "--slice <mps|whole|cpu> Kind of slice" in said
    assert "Research: --slice simulated measures nothing" in said.partition("--help Show")[2]


@pytest.mark.parametrize("columns", [72, 150])
def test_help_breaks_lines_where_the_terminal_ends(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", columns)
    assert run(app, ["tune", "--help"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    (first,) = (n for n, line in enumerate(lines) if line.startswith("Exit codes:"))
    word = lines[first + 1].split()[0]
    assert len(f" {lines[first]} {word} ") > columns


def test_the_program_runs_as_a_module_and_says_its_version() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tunerd", "--version"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.split()[0]) == (0, "tunerd")


def test_without_what_commands_need_one_sentence_says_how_to_install_it() -> None:
    program = "from tunerd.cli import main; main()"
    bare = [sys.executable, "-S", "-c", program, "doctor"]  # without installed packages
    done = subprocess.run(bare, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == ExitCode.HOST_NOT_CAPABLE
    (line,) = done.stderr.splitlines()
    assert line.startswith("tunerd: the module typer is missing")
    assert "--no-deps" in line


# --- shapes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [["--dim", "batch=2"], ["--shape", "x:2,16"], ["--batch", "2"]])
def test_an_open_dimension_may_be_given_in_several_ways(
    flags: list[str], open_net: str, capsys: Captured
) -> None:
    plan = document(capsys, "tune", open_net, "--cpu-pct", "100", "--dry-run", *flags)
    assert plan["model"]["inputs"] == [{"name": "x", "shape": [2, 16], "dtype": "float32"}]


@pytest.mark.parametrize(
    ("flags", "folder"),
    [
        (["--batch", "2"], "runs/open-b2-cpu100"),
        (["--dim", "batch=2"], "runs/open-batch2-cpu100"),
        (["--shape", "x:2,16"], "runs/open-x2x16-cpu100"),
    ],
)
def test_another_size_goes_to_a_folder_of_its_own(
    flags: list[str], folder: str, open_net: str, capsys: Captured
) -> None:
    plan = document(capsys, "tune", open_net, "--cpu-pct", "100", "--dry-run", *flags)
    assert plan["out"] == folder


def test_a_size_with_a_path_in_its_name_stays_below_the_folder_of_runs() -> None:
    name = sized_name("net", batch=None, shapes={"a/../b": (1, 2)}, dims={"/n": 3})
    assert name == "net-a_.._b1x2-_n3"


def test_a_dry_run_is_refused_where_the_run_would_be(
    open_net: str, here: Path, refused: Refused, capsys: Captured
) -> None:
    asked = ("tune", open_net, "--cpu-pct", "100", "--out", "run", "--dry-run")
    begun = settings(model=Path(open_net), cpu_pct=100, batch=2)
    layout = local_layout(begun)
    fixed = preparation.read(begun)
    facts = RunFacts.of(begun, fixed, target=layout.target, device=layout.device, host={})
    RunFolder.open(here / "run", facts=facts).close()
    assert document(capsys, *asked, "--batch", "2")["out"] == "run"
    line = refused(ExitCode.BAD_FOLDER, *asked, "--batch", "3")
    assert "run holds a run of model 'open' (sha256" in line
    assert "with --batch 2, not of 'open' (sha256" in line
    assert "with --batch 3; choose another folder with --out" in line


def test_a_dry_run_is_refused_in_a_folder_of_something_else(
    net: str, here: Path, refused: Refused
) -> None:
    (here / "own.txt").write_text("mine")
    argv = ("tune", net, "--cpu-pct", "100", "--out", ".", "--dry-run")
    assert "holds 'own.txt' and no run" in refused(ExitCode.BAD_FOLDER, *argv)
    assert os.listdir(here) == ["own.txt"]


# --- flags -------------------------------------------------------------------------------------


def test_more_slices_than_fit_are_refused_with_the_bound(net: str, refused: Refused) -> None:
    line = refused(ExitCode.HOST_NOT_CAPABLE, "tune", net, "--cpu-pct", "100", "--slices", "2")
    assert "--slices 2 is more than fit: 1 slice" in line


def test_more_tuners_than_cores_are_refused(net: str, refused: Refused) -> None:
    refused(ExitCode.HOST_NOT_CAPABLE, "tune", net, "--cpu-pct", "100", "--tuners", "9999")


def test_an_error_with_json_is_one_document(net: str, capsys: Captured) -> None:
    error = document(capsys, "tune", net, "--cpu-pct", "0", code=ExitCode.BAD_INPUT)["error"]
    assert error["kind"] == "bad-input"
    assert error["exit_code"] == ExitCode.BAD_INPUT
    assert "--cpu-pct" in error["message"]


def test_a_model_error_with_json_is_one_document(capsys: Captured) -> None:
    argv = ("tune", "nowhere.onnx", "--cpu-pct", "100")
    error = document(capsys, *argv, code=ExitCode.BAD_MODEL)["error"]
    assert error["kind"] == "bad-model"


# --- machines ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mps", "whole"])
def test_without_a_gpu_what_is_missing_is_said_before_the_model_is_read(
    kind: str, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "visible_gpus", lambda: ((), "no NVIDIA driver answers here"))
    argv = ("tune", "nowhere.onnx", "--gpu-pct", "40", "--slice", kind)
    assert "no NVIDIA driver answers here" in refused(ExitCode.HOST_NOT_CAPABLE, *argv)


def test_an_address_where_nothing_listens_is_an_error_at_once(net: str, refused: Refused) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and nobody listens
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        argv = ("tune", net, "--cpu-pct", "100", "--address", address)
        assert address in refused(ExitCode.INFRASTRUCTURE, *argv)


@pytest.mark.parametrize("address", ["nonsense", "ray://127.0.0.1:10001", ":1", "host:port"])
def test_an_address_is_a_host_and_a_port(address: str, net: str, refused: Refused) -> None:
    argv = ("tune", net, "--cpu-pct", "100", "--address", address)
    assert "--address" in refused(ExitCode.BAD_INPUT, *argv)


def test_doctor_answers_in_json(capsys: Captured) -> None:
    run(app, ["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["cpu_tuning"] in (True, False)
    assert {"name", "status", "fact", "fix"} <= found["findings"][0].keys()


# --- dry runs ----------------------------------------------------------------------------------


def test_a_dry_run_is_one_document_and_creates_nothing(
    net: str, here: Path, capsys: Captured
) -> None:
    plan = document(capsys, "tune", net, "--cpu-pct", "100", "--dry-run", "--trials", "100")
    assert list(here.iterdir()) == []
    assert plan["share_pct"] == 100
    assert len(plan["slices"]) == 1
    assert [task["weight"] for task in plan["tasks"]] == [1]
    assert plan["trials"] == 100
    assert plan["estimate_secs"] > 0


def test_a_dry_run_for_people_names_what_the_document_holds(net: str, capsys: Captured) -> None:
    argv = ["tune", net, "--cpu-pct", "100", "--dry-run", "--budget", "90s"]
    plan = document(capsys, *argv)
    assert run(app, argv) == 0
    shown = capsys.readouterr().out
    (task,), (planned,) = plan["tasks"], plan["slices"]
    for text in ("x float32[4,16]", "100% of", plan["bound"][0], planned["slice_id"], task["name"]):
        assert text in shown
    assert "1 task, tuned until 1 min 30 s of search" in shown


@pytest.mark.slow
def test_a_run_does_what_its_dry_run_printed(net: str, here: Path) -> None:
    command = [sys.executable, "-m", "tunerd", "tune", net, "--cpu-pct", "100", "--trials", "4"]
    command += ["--out", "run", "--json"]
    dry = subprocess.run([*command, "--dry-run"], capture_output=True, text=True, check=True)
    assert list(here.iterdir()) == []
    plan = json.loads(dry.stdout)
    real = subprocess.run(command, capture_output=True, text=True)
    outcome = json.loads(real.stdout)
    assert real.returncode == outcome["exit_code"] < 10
    with Store.read(here / "run") as store:
        facts = store.facts()
        tasks = [(t.task_id, t.weight) for t in store.tasks()]
    rows = sqlite3.connect(here / "run" / STORE_NAME).execute("select spec from slices")
    specs = [SliceSpec(**json.loads(text)) for (text,) in rows]
    slices = [
        {
            "slice_id": s.slice_id,
            "kind": s.kind,
            "pct": s.pct,
            "gpu_uuid": s.gpu_uuid,
            "cores": list(s.cores),
            "environment": dict(s.environment),
            "node_id": None,  # of no cluster
        }
        for s in specs
    ]
    assert slices == plan["slices"]
    assert facts.target.json == plan["target"]
    assert facts.model_digest == plan["model"]["digest"]
    assert tasks == [(t["task_id"], t["weight"]) for t in plan["tasks"]]


def test_the_list_of_commands_says_of_each_what_it_says_of_itself() -> None:
    program: Any = typer.main.get_command(app)
    for name, command in program.commands.items():
        first = " ".join(str(command.help).partition("\n\n")[0].split())
        assert first == program.table[name]


def test_arguments_are_in_capitals_in_every_usage_line() -> None:
    usages = {" ".join(path): pieces for path, pieces in usage_lines(program(), ())}
    assert usages["tune"] == ["[OPTIONS]", "MODEL"]
    assert usages["report"] == ["[OPTIONS]", "RUN..."]
    assert usages["run"] == ["[OPTIONS]", "[RECIPE]"]
    for pieces in usages.values():
        for piece in pieces:
            name = piece.removesuffix(".onnx")
            assert name == name.upper()
            assert not set(name) & set("{}")


def program() -> Any:
    return typer.main.get_command(app)


def usage_lines(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from usage_lines(inner, (*path, name))
        return
    with command.make_context(path[-1], [], resilient_parsing=True) as context:
        yield path, command.collect_usage_pieces(context)
