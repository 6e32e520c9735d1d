"""The README's commands, run as they stand but for what a machine without a GPU lacks.

Shares of a GPU are those of simulated slices, an artifact is measured on half of the cores, a
search has a few trials, and files lie in a temporary folder.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest

from tests.lib import ROOT
from tests.lib.models import two_products
from tests.lib.readme_commands import in_blocks
from tunerd.cli.app import app
from tunerd.cli.errors import run
from tunerd.errors import ExitCode
from tunerd.studies.profile import auto
from tunerd.studies.profile.measuring import Effort
from tunerd.system import host

ELSEWHERE = {
    "--address auto": "tests/system/test_ray_jobs.py and test_cluster.py have clusters",
    "/shared/": "tests/system/test_ray_jobs.py submits jobs",
    "postgresql": "tests/system/test_team_store.py starts a server",
    "--libraries": "tests/lib/fake_cublaslt.py stands for a library",
}
# In a command as the README has it, and what stands there here.
INSTEAD = (
    (r"recipes/colocation/cpu.yaml", "plan.yaml"),
    (r"recipes/colocation/mixes/cpu.yaml", "mix.yaml"),
    (r"recipes/colocation/jobs.yaml", "jobs.yaml"),
    (r"^(colocate bench .*)$", r"\1 --duration 300ms"),
    (r"models/light_\w+\.onnx", "model.onnx"),
    (r"model.onnx (.*--dim batch)", r"sized.onnx \1"),
    (r"--gpu-pct auto", "--cpu-pct auto"),
    (r"^profile (.*)$", r"profile \1 --cpu --rounds 2 --duration 300ms"),
    (r"--batches 1,8 --shares 10,25,50,100", "--batches 64,128 --shares 50,100"),
    (r"^matrix (.*)--shares 10,25,40,50,75,100 (.*)$",
     r"matrix \1--shares 50,100 \2 --slice simulated --trials 8 --rounds 1"),
    (r"^tune (.*)--gpu-pct", r"tune \1--slice simulated --gpu-pct"),
    (r"^tune (.*)--cpu-pct 50", r"tune \1--slice simulated --cpu-pct 50"),
    (r"^tune (.*)$", r"tune \1 --trials 4 --tuners 1 --slices 1"),
    (r"--trials 2000 (.*--trials 4)", r"\1"),
    (r"(--store .*)$", r"\1 --out runs/of-a-team"),  # the other runs here are copies of one
    (r"--budget 10m", "--budget 30s"),
    (r"/srv/tunerd/", "{folder}/"),
    (r"^bench (.*?)(?: --gpu-pct 50)?(?: --duration 30s)?$",
     r"bench \1 --cpu-pct 50 --duration 1s"),
    (r"--tenants 1,2,4,8", "--tenants 1,2"),
    (r"--dim batch=1,4,8", "--dim batch=1,4"),
    # Two slices of half of the cores are all that there are.
    (r"--replicas 2 --beside", "--replicas 1 --beside"),
    (r"^run recipes/cpu.yaml(?! --dry-run)(.*)$",
     r"run {recipes}/cpu.yaml --set out={folder}/runs/cores/{name} --set model={folder}/model.onnx"
     r" --set trials=4 --set cpu-pct=50 \1"),
    (r"--set trials=100 --set out=runs/short/{name}", ""),
    (r"^run recipes/", r"run {recipes}/"),
    (r"^(run .*nightly.*)$", r"\1 --dry-run"),
    (r"--wait 30m", "--wait 1s"),
)  # fmt: skip
PLAN = """
members:
  - {name: one, artifact: runs/model-gpu40/artifact, share: 50, rate: 20, slo_ms: 200}
  - {name: two, artifact: runs/model-gpu25/artifact, share: 50, rate: 20, slo_ms: 200}
"""
MIX = """
members:
  - {name: one, artifact: runs/model-gpu40/artifact, rate: 20, slo_ms: 200}
  - {name: two, artifact: runs/model-gpu25/artifact, rate: 20, slo_ms: 200}
search: {shares: [50], rounds: 1, visit: 100ms}
load: {duration: 300ms}
"""
JOBS = """
devices: {simulated: 1}
jobs:
  - {name: one, command: ["true"], memory_gib: 1}
"""
COPIES = {
    "model-gpu40": ("night1", "night2", "monday", "tuesday", "first", "second", "other-gpu40"),
    "model-gpu25": ("other-gpu25",),
}
GOOD = {ExitCode.BETTER, ExitCode.NO_GAIN, ExitCode.CANNOT_TELL}
# What else a command may say on a machine that is as it is.
ALSO_GOOD = {
    "doctor": {ExitCode.HOST_NOT_CAPABLE},
    "preflight": {ExitCode.NOT_QUIET},
    "colocate": {ExitCode.REGRESSION},
    "compare": {ExitCode.REGRESSION, ExitCode.NOT_COMPARABLE},
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, kept_cluster: None) -> Iterator[Path]:
    """A folder with the model and the runs that the README's commands name."""
    folder = tmp_path_factory.mktemp("readme")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(auto, "EFFORT", Effort(rounds=2, duration_secs=0.3))
        onnx.save(two_products(), folder / "model.onnx")
        onnx.save(with_open_batch(two_products()), folder / "sized.onnx")
        for pct in (25, 40, 50, 100):
            argv = ["tune", "model.onnx", "--gpu-pct", str(pct), "--slice", "simulated"]
            argv += ["--trials", "4", "--tuners", "1", "--slices", "1"]
            assert run(app, [*argv, "--json"]) in GOOD
        for name, copies in COPIES.items():
            for copy in copies:
                shutil.copytree(folder / "runs" / name, folder / "runs" / copy)
        (folder / "artifacts").mkdir()
        (folder / "plan.yaml").write_text(PLAN)
        (folder / "mix.yaml").write_text(MIX)
        (folder / "jobs.yaml").write_text(JOBS)
        yield folder


def with_open_batch(model: onnx.ModelProto) -> onnx.ModelProto:
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    return model


def replaced(argv: list[str]) -> str:
    line = " ".join(argv)
    for pattern, instead in INSTEAD:
        line = re.sub(pattern, instead, line)
    return " ".join(line.split())


def different() -> list[list[str]]:
    """Return the commands that are not the same when they are run here."""
    return list({replaced(argv): argv for argv in in_blocks()}.values())


def as_run(argv: list[str], folder: Path) -> list[str]:
    line = replaced(argv)
    places = {"{folder}": str(folder), "{recipes}": str(ROOT / "recipes")}
    for word, place in places.items():
        line = line.replace(word, place)
    return line.split()


@pytest.mark.slow
@pytest.mark.skipif(host.facts().usable_cores < 2, reason="two slices take a core each")
@pytest.mark.parametrize("argv", different(), ids=" ".join)
def test_a_command_of_the_readme_does_what_it_says(
    argv: list[str], world: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for word, where in ELSEWHERE.items():
        if word in " ".join(argv):
            pytest.skip(where)
    if argv[0] == "records" and argv[1] == "unpack":
        shutil.rmtree(world / argv[-1])  # it is unpacked where no run is
    elif argv[0] in ("pack", "records") and "--to" in argv:
        shutil.rmtree(world / argv[-1], ignore_errors=True)
    code = run(app, as_run(argv, world))
    said = capfd.readouterr()
    assert code in GOOD | ALSO_GOOD.get(argv[0], set()), said.err
    assert said.out + said.err
