"""The comparison with TVM's own tuner: what its scripts make of runs that were written down."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
import pytest

from lab.stock import benchmark as stock_benchmark
from lab.stock import compare_searches, stock_tuner
from lab.stock import summary as stock_summary
from lab.stock.curves import curves_svg
from tests.lib.models import conv_net, example_models
from tunerd.cluster.layout import local_layout
from tunerd.errors import InputError
from tunerd.frontend.kernels import Selection, kernels_of
from tunerd.frontend.model import read_model
from tunerd.records import Store
from tunerd.runs import plan
from tunerd.runs.run import search
from tunerd.settings import TuneSettings
from tunerd.system import host, targets
from tunerd.telemetry.progress import open_progress
from tunerd.vocabulary import TargetSpec, Task

WEIGHTS = {"conv": 2, "dense": 1}


@pytest.fixture(scope="module")
def summary() -> ModuleType:
    return stock_summary


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return stock_benchmark


def record(at_secs: float, task_id: str, secs: float | None) -> dict[str, Any]:
    return {
        "at_secs": at_secs,
        "task_id": task_id,
        "candidate_id": f"{task_id} {at_secs}",
        "run_secs": None if secs is None else [secs],
        "error": "it fell" if secs is None else None,
        "trace": "[[],[]]",
    }


def run(tuner: str, *records: dict[str, Any], seed: int = 0, ended: str = "complete") -> Any:
    return {"tuner": tuner, "seed": seed, "ended": ended, "records": list(records)}


STOCK = run("stock", record(60, "conv", 3e-3), record(60, "dense", 2e-3), record(200, "conv", 1e-3))
TUNERD = run(
    "tunerd",
    record(8, "dense", 3e-3),
    record(9, "conv", None),
    record(10, "conv", 2e-3),
    record(15, "dense", 2e-3),
    record(18, "conv", 1e-3),
    record(20, "conv", 0.5e-3),
)


def second_look(**secs: float) -> dict[str, Any]:
    """Return what both tasks' second look found: the same time for each, by run."""
    return {"tasks": {t: {n: {"run_secs": [s]} for n, s in secs.items()} for t in WEIGHTS}}


def write(folder: Path, *runs: dict[str, Any]) -> None:
    for each in runs:
        header = {k: v for k, v in each.items() if k not in ("records", "ended")}
        lines = [header, *each["records"], {"ended": each["ended"], "secs": 1.0}]
        path = folder / f"{each['tuner']}-{each['seed']}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tasks = [{"task_id": t, "weight": w} for t, w in WEIGHTS.items()]
    facts = {"model": "tiny", "target": "llvm", "tasks": tasks}
    (folder / "comparison.json").write_text(json.dumps(facts))


def test_a_curve_begins_when_every_task_has_a_number(summary: ModuleType) -> None:
    assert summary.curve_of(TUNERD, WEIGHTS) == [
        (10, pytest.approx(7e-3)),
        (15, pytest.approx(6e-3)),
        (18, pytest.approx(4e-3)),
        (20, pytest.approx(3e-3)),
    ]


def test_records_of_one_moment_are_one_point_of_the_curve(summary: ModuleType) -> None:
    assert [at for at, _ in summary.curve_of(STOCK, WEIGHTS)] == [60, 200]


def test_start_up_and_failed_trials_count_in_trials_per_second(summary: ModuleType) -> None:
    found = summary.summary_of(TUNERD, WEIGHTS)
    assert (found["trials"], found["failed"]) == (6, 1)
    assert found["trials_per_sec"] == pytest.approx(6 / 20)
    assert found["trials_by_task"] == {"conv": 4, "dense": 2}


def test_a_seed_is_compared_with_the_same_seed(summary: ModuleType) -> None:
    late = run("tunerd", record(50, "conv", 1e-3), record(100, "dense", 2e-3), seed=1)
    found = summary.summarize([STOCK, {**STOCK, "seed": 1}, TUNERD, late], WEIGHTS, None)
    first, second = found["pairs"]
    assert (first["reach_secs"], first["reach_fraction"]) == (18, pytest.approx(0.09))
    assert (second["reach_secs"], second["reach_fraction"]) == (100, pytest.approx(0.5))
    assert first["trials_per_sec_ratio"] == pytest.approx((6 / 20) / (3 / 200))


def test_a_quality_that_was_never_reached_has_no_time(summary: ModuleType) -> None:
    slow = run("tunerd", record(5, "conv", 1.0), record(5, "dense", 1.0))
    (pair,) = summary.summarize([STOCK, slow], WEIGHTS, None)["pairs"]
    assert pair["reach_secs"] is pair["reach_fraction"] is None


def test_the_best_are_also_compared_after_equally_many_trials_of_each_task(
    summary: ModuleType,
) -> None:
    short = run("stock", record(9, "conv", 4e-3), record(9, "conv", 5e-3), record(9, "dense", 2e-3))
    (pair,) = summary.summarize([short, TUNERD], WEIGHTS, None)["pairs"]
    assert pair["equal_trials"] == 3  # tunerd's first of "dense", and of "conv" a failed one, too
    assert pair["equal_stock_secs"] == pytest.approx(2 * 4e-3 + 2e-3)
    assert pair["equal_tunerd_secs"] == pytest.approx(2 * 2e-3 + 3e-3)
    assert pair["equal_ratio"] == pytest.approx(10 / 7)
    assert pair["equal_again_ratio"] is None  # nobody has looked
    name = "tunerd-0, equal trials"
    assert set(summary.bests_in([short, TUNERD])) == {"stock-0", "tunerd-0", name}
    found = second_look(**{"stock-0": 3e-3, "tunerd-0": 1e-3, name: 2e-3})
    (pair,) = summary.summarize([short, TUNERD], WEIGHTS, found)["pairs"]
    assert pair["equal_again_ratio"] == pytest.approx(1.5)
    assert pair["latency_ratio"] == pytest.approx(3.0)


def test_the_second_look_decides_the_final_latency(summary: ModuleType) -> None:
    found = second_look(default=9e-3, **{"stock-0": 2e-3, "tunerd-0": 1e-3})
    summarized = summary.summarize([STOCK, TUNERD], WEIGHTS, found)
    assert [r["remeasured_secs"] for r in summarized["runs"]] == pytest.approx([6e-3, 3e-3])
    assert summarized["pairs"][0]["latency_ratio"] == pytest.approx(2.0)
    assert summarized["default_remeasured_secs"] == pytest.approx(27e-3)


def test_a_wrong_or_failed_best_candidate_gives_no_final_latency(summary: ModuleType) -> None:
    found = second_look(**{"stock-0": 2e-3, "tunerd-0": 1e-3})
    found["tasks"]["conv"]["stock-0"]["wrong"] = {"message": "it differs"}
    found["tasks"]["dense"]["tunerd-0"] = {"stage": "run", "message": "it fell"}
    runs = summary.summarize([STOCK, TUNERD], WEIGHTS, found)["runs"]
    assert [r["remeasured_secs"] for r in runs] == [None, None]


def test_the_table_has_medians_with_the_range_of_the_seeds(summary: ModuleType) -> None:
    runs = [
        run("tunerd", record(at, "conv", 1e-3), record(at, "dense", 1e-3), seed=seed)
        for seed, at in enumerate((10, 20, 40))
    ]
    lines = summary.table(summary.summarize(runs, WEIGHTS, None), "cuda").splitlines()
    (row,) = [line for line in lines if "from the start to the last record" in line]
    assert "| 20 s (10 s to 40 s) |" in row
    (row,) = [line for line in lines if "trials per second" in line]
    assert row.endswith("| at least 10\N{MULTIPLICATION SIGN} |")


def test_the_table_says_in_how_many_seeds_a_quality_was_reached(summary: ModuleType) -> None:
    slow = run("tunerd", record(5, "conv", 1.0), record(5, "dense", 1.0), seed=1)
    runs = [STOCK, {**STOCK, "seed": 1}, TUNERD, slow]
    lines = summary.table(summary.summarize(runs, WEIGHTS, None), "llvm").splitlines()
    (row,) = [line for line in lines if "until the weighted latency" in line]
    assert "| 18 s, 1 of 2 seeds |" in row


def test_a_run_that_was_cut_short_is_named_under_the_table(summary: ModuleType) -> None:
    short = {**STOCK, "ended": "cut short"}
    text = summary.table(summary.summarize([short, TUNERD], WEIGHTS, None), "llvm")
    assert "Seed 0 of stock was cut short: 3 trials." in text
    assert "tunerd was" not in text


def test_a_line_that_was_not_finished_is_left_out(summary: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, STOCK)
    path = tmp_path / "stock-0.jsonl"
    *lines, end = path.read_text().splitlines()
    path.write_text("\n".join([*lines, '{"at_secs": 300.0, "task_', end]))
    found = summary.load_run(path)
    assert len(found["records"]) == 3
    assert found["ended"] == "complete"


def test_the_report_is_made_from_the_folder_alone(summary: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, STOCK, TUNERD)
    table = summary.report(tmp_path)
    assert "| trials | 3 | 6 |" in table
    document = json.loads((tmp_path / "benchmark.json").read_text())
    assert [len(r["records"]) for r in document["runs"]] == [3, 6]
    assert document["best"]["tunerd-0"]["conv"]["trace"] == "[[],[]]"
    ET.parse(tmp_path / "benchmark.svg")


# --- tasks -------------------------------------------------------------------------------------


def test_searches_side_by_side_are_compared_after_as_many_trials(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, first in (("before", 4e-3), ("after", 2e-3)):
        folder = tmp_path / name
        folder.mkdir()
        tasks = [{"task_id": task, "weight": weight} for task, weight in WEIGHTS.items()]
        (folder / "comparison.json").write_text(json.dumps({"tasks": tasks}))
        searched = [record(1, "conv", first), record(2, "dense", None), record(3, "dense", 1e-3)]
        searched += [record(4 + i, "conv", 9e-3) for i in range(15)] + [record(20, "conv", 1e-3)]
        lines = [{"tuner": "tunerd"}, *searched, {"ended": "complete", "secs": 21}]
        (folder / "tunerd-0.jsonl").write_text("\n".join(map(json.dumps, lines)))
    out = tmp_path / "searches.json"
    folders = [str(tmp_path / name) for name in ("before", "after")]
    monkeypatch.setattr("sys.argv", ["compare_searches", *folders, "--out", str(out)])
    compare_searches.main()
    printed = capsys.readouterr().out
    before, after = printed.splitlines()[2:]
    assert before == "| before | 1 | 0.95 (0.95 to 0.95) | 9.00 ms | 3.00 ms | 3.00 ms | 3.00 ms |"
    assert "| 5.00 ms | 3.00 ms |" in after
    monkeypatch.setattr("sys.argv", ["compare_searches", str(out)])
    compare_searches.main()
    assert capsys.readouterr().out == printed
    more = json.loads(out.read_text())
    for kept in more["found"]:
        kept["searches"] = {f"{seed}": kept["searches"]["0"] for seed in range(1, 9)}
    (tmp_path / "more.json").write_text(json.dumps(more))
    files = [str(out), str(tmp_path / "more.json")]
    monkeypatch.setattr("sys.argv", ["compare_searches", *files, "--chance"])
    compare_searches.main()
    *_, after, unlike = capsys.readouterr().out.splitlines()
    assert after.startswith("| after | 9 |")
    name, *_, apart, equal, _, _ = unlike.strip("| ").split(" | ")
    assert (name, equal) == ("after against before", "p 1")
    assert float(apart.removeprefix("p ")) < 1e-4  # one of the 48,620 orders of 18, and its mirror


def test_tvms_own_tuner_has_llvm_work_at_its_default_level() -> None:
    ours = TargetSpec("llvm", '{"kind": "llvm", "mcpu": "znver4", "opt-level": 2}')
    stock = stock_tuner.target_of_tvm(ours)
    assert json.loads(stock.json) == {"kind": "llvm", "mcpu": "znver4"}
    cuda = TargetSpec("cuda", '{"arch": "sm_90", "kind": "cuda"}')
    assert stock_tuner.target_of_tvm(cuda) == cuda


def task(task_id: str, weight: int = 1, flops: float = 1e6) -> Task:
    return Task(task_id, task_id, weight, flops, (), (), TargetSpec("llvm", "{}"), "")


TASKS = [task("a"), task("b", weight=3), task("c", flops=9e6)]


@pytest.mark.parametrize(
    ("wanted", "listed", "ids"),
    [
        (None, ["c", "a"], ["c", "a"]),
        ("1", ["c", "a"], ["c"]),
        ("a,b", ["c"], ["a", "b"]),
        (None, [], ["c", "b", "a"]),
        ("2", [], ["c", "b"]),
    ],
)
def test_tasks_come_from_the_list_its_first_or_by_id(
    benchmark: ModuleType, wanted: str | None, listed: list[str], ids: list[str]
) -> None:
    weights = {t.task_id: t.weight for t in TASKS}
    entries = [{"task_id": i, "weight": weights[i]} for i in listed]
    assert [t.task_id for t in benchmark.chosen(wanted, entries, TASKS)] == ids


@pytest.mark.parametrize(
    "entry", [{"task_id": "d", "weight": 1}, {"task_id": "b", "weight": 2}], ids=["gone", "weight"]
)
def test_a_list_that_does_not_fit_the_model_is_refused(
    benchmark: ModuleType, entry: dict[str, Any]
) -> None:
    with pytest.raises(InputError, match=entry["task_id"]):
        benchmark.chosen(None, [entry], TASKS)


def test_runs_of_another_comparison_are_not_mixed(benchmark: ModuleType, tmp_path: Path) -> None:
    facts = {"model": "m", "share": [], "target": "llvm", "batch": 64, "tasks": []}
    benchmark.write_comparison(tmp_path / "comparison.json", facts | {"trials_per_task": 128})
    benchmark.write_comparison(tmp_path / "comparison.json", facts | {"trials_per_task": 128})
    with pytest.raises(InputError, match="trials per task"):
        benchmark.write_comparison(tmp_path / "comparison.json", facts | {"trials_per_task": 64})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"), [("light_squeezenet", "llvm"), ("light_resnet50", "cuda")]
)
def test_the_lists_fit_the_example_models(
    benchmark: ModuleType, tmp_path: Path, name: str, kind: str
) -> None:
    onnx.save(example_models().make(name), tmp_path / f"{name}.onnx")
    target = targets.cpu_target_json(1) if kind == "llvm" else targets.cuda_target("9.0")
    kernels = kernels_of(read_model(tmp_path / f"{name}.onnx"), target)
    listed = benchmark.lists_of(name, kind)
    assert len(benchmark.chosen(None, listed, kernels.tasks)) == len(listed) > 0


@pytest.mark.skipif(host.facts().usable_cores < 2, reason="slices of half the cores need two")
def test_a_search_for_some_tasks_leaves_only_their_trials(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    onnx.save(conv_net(), path)
    folder = tmp_path / "run"
    settings = TuneSettings(model=path, out=folder, cpu_pct=50, slice_kind="simulated")
    layout = local_layout(settings)
    tasks = kernels_of(plan.read(settings), layout.target).tasks
    heaviest = max(tasks, key=lambda t: t.flops)
    selection = Selection((heaviest.task_id,), 5)
    with open_progress(quiet=True) as progress:
        search(settings, progress, selection)
    with Store.read(folder) as store:
        records = list(store.records())
    assert {r.candidate.task_id for r in records} == {heaviest.task_id}
    assert sum(not r.candidate.is_default for r in records) == 5
    assert not (folder / "artifact").exists()


def test_a_selected_task_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    onnx.save(conv_net(), path)
    selection = Selection(("ffffffffffff",), 5)
    with pytest.raises(InputError, match="no task ffffffffffff"):
        selection.among(kernels_of(read_model(path), targets.cpu_target_json(1)).tasks)


# --- the plot ----------------------------------------------------------------------------------

CURVES = {"one": [[(1.0, 9e-3), (30.0, 1e-3)], [(2.0, 8e-3)]], "two": [[(0.5, 5e-3)]]}


def test_a_plot_has_every_curve_and_its_end() -> None:
    root = ET.fromstring(curves_svg("Best", CURVES))
    titles = [t.text for t in root.iter("{http://www.w3.org/2000/svg}title")]
    assert titles == [
        "one: 1.00\N{NO-BREAK SPACE}ms after 30 s",
        "one: 8.00\N{NO-BREAK SPACE}ms after 2 s",
        "two: 5.00\N{NO-BREAK SPACE}ms after 0.5 s",
    ]


def test_equal_factors_of_time_are_equally_wide_in_a_plot() -> None:
    text = curves_svg("Best", {"one": [[(1.0, 3e-3), (10.0, 2e-3), (100.0, 1e-3)]]})
    (path,) = ET.fromstring(text).iter("{http://www.w3.org/2000/svg}path")
    first, second, third = (
        float(part.split("V")[0].split(" ")[0]) for part in path.attrib["d"][1:].split("H")
    )
    assert second - first == pytest.approx(third - second, abs=0.3)


def test_a_plot_suits_light_and_dark_pages() -> None:
    assert "prefers-color-scheme: dark" in curves_svg("Best", CURVES)


def test_names_in_a_plot_cannot_become_markup() -> None:
    text = curves_svg("<script>", {"<b>": [[(1.0, 1.0)]]})
    assert "<script>" not in text
    assert "<b>" not in text


@pytest.mark.parametrize("curves", [{}, {"one": []}, {"one": [[(0.0, 1.0)]]}])
def test_a_plot_without_a_positive_point_is_refused(curves: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"drawn|positive"):
        curves_svg("Best", curves)
