from __future__ import annotations

import dataclasses
import gzip
import io
import json
import os
import signal
import stat
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lib import ROOT
from tests.lib.record_samples import FACTS, TASK, candidate, measurement
from tests.lib.store_places import proposed
from tunerd.errors import FolderError
from tunerd.records import Store, sqlite
from tunerd.records.facts import RunFacts
from tunerd.records.paths import Paths
from tunerd.records.schema import STORE_NAME
from tunerd.runs.archive import pack, unpack
from tunerd.runs.folder import RunFolder, locked, require_free
from tunerd.runs.merge import merge_runs
from tunerd.settings import TuneSettings
from tunerd.vocabulary import Model, TargetSpec, TrialState


def fill(folder: Path, *numbers: int) -> None:
    with RunFolder.open(folder, facts=FACTS) as run:
        run.store.register_tasks([TASK])
        ids = proposed(run.store, [candidate(n) for n in numbers])
        run.store.start(ids, "cpu-0-0")
        run.store.finish_all({c: measurement(1.0 + n) for n, c in enumerate(ids, 1)})


def test_a_run_folder_is_private_and_says_what_it_is_of(tmp_path: Path) -> None:
    root = tmp_path / "runs" / "one"
    facts = dataclasses.replace(FACTS, settings={"trials": 5}, host={"cpu_model": "CPU X"})
    with RunFolder.open(root, facts=facts) as run:
        assert stat.S_IMODE(root.stat().st_mode) == 0o700
        assert run.write_log(7, "it said \udcff") == root / "logs" / "trial-7.log"
        assert run.paths.log(7).read_text() == "it said ?"
    assert json.loads(run.paths.settings.read_text())["settings"] == {"trials": 5}
    assert json.loads(run.paths.host.read_text()) == {"cpu_model": "CPU X"}
    run.close()


def test_a_run_is_private_however_it_came_to_be(tmp_path: Path) -> None:
    fill(tmp_path / "run", 1)
    for folder in ("unpacked", "merged", "opened"):
        (tmp_path / folder).mkdir(mode=0o755)
    unpack(pack(tmp_path / "run", tmp_path / "file"), tmp_path / "unpacked")
    merge_runs([tmp_path / "run"], tmp_path / "merged")
    RunFolder.open(tmp_path / "opened", facts=FACTS).close()
    for folder in ("unpacked", "merged", "opened"):
        assert stat.S_IMODE((tmp_path / folder).stat().st_mode) == 0o700, folder


def test_a_folder_that_is_locked_is_private_however_it_came_to_be(tmp_path: Path) -> None:
    (tmp_path / "profile").mkdir(mode=0o755)
    with locked(tmp_path / "profile"):
        assert stat.S_IMODE((tmp_path / "profile").stat().st_mode) == 0o700


def test_the_same_run_goes_on_with_other_budgets(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    other = dataclasses.replace(FACTS, settings={"trials": 99}, tunerd_version="9.9")
    with RunFolder.open(tmp_path, facts=other) as run:
        assert run.store.counts()[TrialState.MEASURED] == 1
        assert [facts.settings for _, facts in run.store.sessions()] == [{}, {"trials": 99}]


def test_a_folder_of_another_model_is_refused_and_both_are_named(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    before = Paths(tmp_path).settings.read_text()
    other = dataclasses.replace(FACTS, model_name="mine", model_digest="e" * 64)
    with pytest.raises(FolderError, match=r"'net' \(sha256 dddddddddddd\).*'mine' \(sha256 eee"):
        RunFolder.open(tmp_path, facts=other)
    assert Paths(tmp_path).settings.read_text() == before
    RunFolder.open(tmp_path, facts=FACTS).close()  # the refusal left no lock behind


def test_a_folder_of_a_model_in_other_sizes_is_refused_by_the_flags_of_both(tmp_path: Path) -> None:
    RunFolder.open(tmp_path, facts=FACTS).close()
    sizes = {"batch": 4, "shapes": {"x": [4, 3]}, "dims": {"n": 2}}
    other = dataclasses.replace(FACTS, model_digest="e" * 64, settings=sizes)
    with pytest.raises(FolderError, match=r"with --batch 4 --shape x:4,3 --dim n=2; .* --out"):
        RunFolder.open(tmp_path, facts=other)


def test_a_name_that_no_folder_can_have_is_refused_before_one_is_made(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match=r"File name too long; .* --out"):
        require_free(tmp_path / ("x" * 300), FACTS)


def test_a_run_that_was_killed_before_it_began_leaves_its_folder_free(tmp_path: Path) -> None:
    sqlite.open_writer(tmp_path / STORE_NAME).close()
    require_free(tmp_path, FACTS)


def test_a_folder_of_a_model_whose_file_has_changed_is_refused_in_words(tmp_path: Path) -> None:
    RunFolder.open(tmp_path, facts=FACTS).close()
    other = dataclasses.replace(FACTS, model_digest="e" * 64)
    with pytest.raises(FolderError, match=r"whose file is another or has changed; .* --out"):
        RunFolder.open(tmp_path, facts=other)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"pct": 40}, "share 50%.*share 40%"),
        ({"device": "CPU Y"}, "device CPU X.*device CPU Y"),
        ({"slice_kind": "whole"}, "slice kind cpu.*slice kind whole"),
        ({"target": TargetSpec("llvm", '{"kind":"llvm","mcpu":"skylake"}')}, "znver3.*skylake"),
        ({"tvm_version": "0.28"}, r"TVM 0.27.0.*TVM 0\.28"),
    ],
)
def test_what_changes_the_meaning_of_numbers_is_refused(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    fill(tmp_path, 1)
    with pytest.raises(FolderError, match=said):
        RunFolder.open(tmp_path, facts=dataclasses.replace(FACTS, **change))


def test_a_gpu_target_may_differ_in_its_host_but_not_in_its_architecture(tmp_path: Path) -> None:
    def facts(arch: str, host: str) -> RunFacts:
        text = json.dumps({"kind": "cuda", "arch": arch, "host": {"mcpu": host}})
        return dataclasses.replace(FACTS, target=TargetSpec("cuda", text))

    RunFolder.open(tmp_path, facts=facts("sm_90", "znver3")).close()
    RunFolder.open(tmp_path, facts=facts("sm_90", "skylake")).close()
    with pytest.raises(FolderError, match="sm_80"):
        RunFolder.open(tmp_path, facts=facts("sm_80", "znver3"))


def test_facts_are_gathered_from_settings_and_model(tmp_path: Path) -> None:
    settings = TuneSettings(
        model=Path("net.onnx"), out=tmp_path, gpu_pct=40, slice_kind="mps", dims={"batch": 1}
    )
    model = Model("net", "d" * 64, (), (), graph=None)
    facts = RunFacts.of(
        settings, model, target=FACTS.target, device="NVIDIA H200", host={"cores": (0, 1)}
    )
    assert (facts.pct, facts.slice_kind, facts.settings["dims"]) == (40, "mps", {"batch": 1})
    assert facts.host == {"cores": [0, 1]}
    assert RunFacts.from_json(json.loads(json.dumps(facts.to_json()))) == facts


_HOLDER = """
import sys, os
from pathlib import Path
from tests.lib.record_samples import FACTS
from tunerd.runs.folder import RunFolder
run = RunFolder.open(Path(sys.argv[1]), facts=FACTS)
if os.fork() == 0:
    print(os.getpid(), flush=True)  # from here, where the child let the lock go
sys.stdin.readline()
os._exit(0)
"""


def test_a_second_tunerd_is_refused_until_the_first_dies(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(tmp_path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        with pytest.raises(FolderError, match=f"in use by the tunerd with pid {holder.pid};"):
            RunFolder.open(tmp_path, facts=FACTS)
        with Store.read(tmp_path) as readable:
            assert readable.facts() == FACTS
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        os.kill(child, 0)  # a forked child lives on, and must not hold the lock
        RunFolder.open(tmp_path, facts=FACTS).close()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "run", tmp_path / "file"):
        with pytest.raises(FolderError, match=r"/file is a file, and no folder; choose"):
            RunFolder.open(path, facts=FACTS)


def test_a_folder_of_somebody_elses_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    tmp_path.chmod(0o755)
    with pytest.raises(FolderError, match=r"holds 'thesis.tex' and no run"):
        RunFolder.open(tmp_path, facts=FACTS)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_session_killed_before_its_store_was_made_can_be_repeated(tmp_path: Path) -> None:
    (tmp_path / "tunerd.lock").write_text("1\n")
    (tmp_path / "logs").mkdir()
    RunFolder.open(tmp_path, facts=FACTS).close()


# --- packing -----------------------------------------------------------------------------------


def test_a_live_run_packs_into_one_file_and_goes_on_elsewhere(tmp_path: Path) -> None:
    root = tmp_path / "run"
    fill(root, 1, 2)
    with RunFolder.open(root, facts=FACTS) as run:
        run.paths.artifact.mkdir()
        (run.paths.artifact / "manifest.json").write_text("{}")
        (run.paths.artifact / "away").symlink_to("/etc/passwd")
        run.paths.report.write_text("<html>")
        (root / "runner.pid").write_text("not part of a run")
        run.write_log(3, "log")
        run.store.start(proposed(run.store, [candidate(3)]), "cpu-0-0")
        assert pack(root, tmp_path / "run.tar.gz") == tmp_path / "run.tar.gz"
    there = unpack(tmp_path / "run.tar.gz", tmp_path / "there")
    found = {p.relative_to(there).as_posix() for p in there.rglob("*")}
    assert found == {
        "artifact",
        "artifact/manifest.json",
        "host.json",
        "logs",
        "logs/trial-3.log",
        "report.html",
        "settings.json",
        "store.sqlite",
    }
    assert stat.S_IMODE(there.stat().st_mode) == 0o700
    with RunFolder.open(there, facts=FACTS) as run:
        assert [r.candidate for r in run.store.requeue_unfinished()] == [candidate(3)]
        assert run.store.counts()[TrialState.MEASURED] == 2


def test_a_packed_run_is_refused_on_another_device(tmp_path: Path) -> None:
    fill(tmp_path / "run", 1)
    pack(tmp_path / "run", tmp_path / "file")
    there = unpack(tmp_path / "file", tmp_path / "there")
    with pytest.raises(FolderError, match=r"device CPU X.*device NVIDIA L4"):
        RunFolder.open(there, facts=dataclasses.replace(FACTS, device="NVIDIA L4"))


def test_packing_overwrites_nothing_and_needs_a_run(tmp_path: Path) -> None:
    fill(tmp_path / "run", 1)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FolderError, match="file exists"):
        pack(tmp_path / "run", tmp_path / "file")
    with pytest.raises(FolderError, match="not a run folder"):
        pack(tmp_path / "nothing", tmp_path / "new")
    with pytest.raises(FolderError, match="run exists"):
        unpack(tmp_path / "file", tmp_path / "run")
    with pytest.raises(FolderError, match="cannot be unpacked"):
        unpack(tmp_path / "file", tmp_path / "there")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "run"]


Member = tuple[tarfile.TarInfo, bytes]


def plain(name: str, content: bytes = b"x") -> Member:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    return member, content


def special(name: str, kind: bytes, target: str = "") -> Member:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member, b""


@pytest.mark.parametrize(
    "hostile",
    [
        pytest.param([plain("../evil")], id="parent"),
        pytest.param([plain("logs/../../evil")], id="parent-inside"),
        pytest.param([plain("/tmp/evil")], id="absolute"),
        pytest.param([plain("logs")], id="file-for-folder"),
        pytest.param([plain("evil.sh")], id="not-of-a-run"),
        pytest.param([plain("tunerd.lock")], id="lock"),
        pytest.param([plain("store.sqlite-wal")], id="write-ahead-log"),
        pytest.param([special("logs/l", tarfile.SYMTYPE, "/etc")], id="symbolic-link"),
        pytest.param([special("artifact", tarfile.SYMTYPE, "..")], id="link-for-folder"),
        pytest.param([special("logs/h", tarfile.LNKTYPE, "../x")], id="hard-link"),
        pytest.param([special("logs/d", tarfile.CHRTYPE)], id="device"),
        pytest.param([special("logs/p", tarfile.FIFOTYPE)], id="pipe"),
        pytest.param([special("store.sqlite", tarfile.DIRTYPE)], id="folder-for-store"),
        pytest.param([plain("logs/a", b"1"), plain("logs/a", b"2")], id="twice"),
        pytest.param([plain("logs/" + "a" * 2000)], id="long-name"),
        pytest.param([plain("logs/a"), plain("logs/a/b")], id="file-as-folder"),
    ],
)
def test_a_hostile_archive_leaves_nothing_behind(tmp_path: Path, hostile: list[Member]) -> None:
    place = tmp_path / "a" / "b"
    with pytest.raises(FolderError):
        unpack(_archive(tmp_path / "file", _and_a_run(tmp_path, hostile)), place / "there")
    assert list(place.iterdir()) == []
    assert not (tmp_path / "a" / "evil").exists()


def test_an_archive_over_the_limits_is_refused(tmp_path: Path) -> None:
    fill(tmp_path / "run", 1)
    pack(tmp_path / "run", tmp_path / "file")
    for limits in ({"max_bytes": 1000}, {"max_members": 2}):
        with pytest.raises(FolderError, match="the limits"):
            unpack(tmp_path / "file", tmp_path / "there", **limits)


def test_a_large_header_is_not_read_into_memory(tmp_path: Path) -> None:
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, 1 << 40
    with gzip.open(tmp_path / "file", "wb") as stream:
        stream.write(header.tobuf(tarfile.GNU_FORMAT))
        stream.write(bytes(1 << 16))
    with pytest.raises(FolderError, match="a header of"):
        unpack(tmp_path / "file", tmp_path / "there")


def _damaged(content: bytes) -> bytes:
    return content[:4096] + os.urandom(len(content) - 4096)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_damaged, "cannot be opened as a store"),
        (lambda _: b"text" * 999, "file is not a database"),
    ],
)
def test_a_packed_store_that_is_damaged_is_refused(
    tmp_path: Path, change: Callable[[bytes], bytes], said: str
) -> None:
    (member, content), *rest = _and_a_run(tmp_path, [])
    changed = change(content)
    member.size = len(changed)
    with pytest.raises(FolderError, match=said):
        unpack(_archive(tmp_path / "file", [(member, changed), *rest]), tmp_path / "there")
    assert not (tmp_path / "there").exists()


def _and_a_run(folder: Path, members: list[Member]) -> list[Member]:
    fill(folder / "run", 1)
    store = pack(folder / "run", folder / "good")
    with tarfile.open(store) as archive:
        good = archive.extractfile("store.sqlite")
        assert good is not None
        return [plain("store.sqlite", good.read()), *members]


def _archive(file: Path, members: list[Member]) -> Path:
    with tarfile.open(file, "w:gz") as archive:
        for member, content in members:
            archive.addfile(member, io.BytesIO(content))
    return file
