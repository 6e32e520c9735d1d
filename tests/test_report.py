"""The page, the terminal table and the JSON document say what the outcome says, and no more."""

# ruff: noqa: RUF001  the multiplication sign and the en dash are what people read

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tunerd.report import HistoryPoint
from tunerd.report.figures import by_share, headline, spread
from tunerd.report.page import write_report
from tunerd.report.svg import history_plot, ratio_mark
from tunerd.report.table import outcome_json, outcome_table
from tunerd.report.words import duration_text, percent_text, ratio_texts, secs_range_text, secs_text
from tunerd.time_use import time_use
from tunerd.vocabulary import (
    Activity,
    Candidate,
    CapProof,
    Comparison,
    Correctness,
    Latency,
    Model,
    Origin,
    Outcome,
    Phase,
    PhaseTime,
    Span,
    TargetSpec,
    TaskOutcome,
    TensorSpec,
    Verdict,
    Verification,
)

HOSTILE = "<script>alert('x')</script>\x1b[31m&\"\u202e"


def comparison(base: float, new: float, verdict: Verdict = Verdict.FASTER) -> Comparison:
    ratio = base / new
    return Comparison(verdict, base, new, ratio, ratio * 0.98, ratio * 1.02)


def task(index: int, *, tuned: bool = True, rng: random.Random) -> TaskOutcome:
    default = rng.uniform(20e-6, 900e-6)
    best = default / rng.uniform(1.1, 9) if tuned else default
    origin = Origin.SEARCH if tuned else Origin.DEFAULT
    name = f"fused_conv2d_add_relu{index}"
    unsure = comparison(default, default / 1.01, Verdict.CANNOT_TELL)
    return TaskOutcome(
        task_id=f"{index:012x}",
        name=name,
        weight=rng.choice((1, 1, 2, 3, 6)),
        trials=rng.randrange(16, 90),
        failed=rng.randrange(0, 12),
        default_secs=default,
        best_secs=best,
        winner=Candidate(f"{index:012x}", f"{index * 7919:016x}", origin),
        comparison=comparison(default, best) if tuned else unsure,
        note="" if tuned else "no finalist is faster than the default by an interval",
    )


def untried(index: int) -> TaskOutcome:
    """A task for which the search found no candidate, so that nothing is known but its default."""
    return TaskOutcome(
        task_id=f"{index:012x}",
        name=f"stem_conv2d{index}",
        weight=1,
        trials=0,
        failed=0,
        default_secs=None,
        best_secs=None,
        winner=Candidate(f"{index:012x}", f"{index:016x}", Origin.DEFAULT),
        comparison=None,
        note="the search found no candidate",
    )


def sampled(median: float, rng: random.Random, size: int = 31) -> tuple[float, ...]:
    """Return samples whose median is `median` exactly, with a tail above it as latencies have."""
    half = [rng.expovariate(1) * 0.012 for _ in range(size // 2)]
    around = (*(median * (1 - 0.4 * h) for h in half), median, *(median * (1 + h) for h in half))
    return tuple(rng.sample(around, len(around)))


def gpu_outcome(tasks: int = 43, seed: int = 1) -> Outcome:
    """What a run of a ResNet at 40% of a GPU could end with."""
    rng = random.Random(seed)
    done = tuple(task(i, tuned=i % 11 != 5, rng=rng) for i in range(max(0, tasks - 1)))
    default, tuned = 12.34e-3, 5.87e-3
    return Outcome(
        model=Model(
            name="light_resnet50",
            digest="6b0e" * 16,
            inputs=(TensorSpec("gpu_0/data_0", (1, 3, 224, 224), "float32"),),
            outputs=(TensorSpec("gpu_0/softmax_1", (1, 1000), "float32"),),
            proto=None,  # type: ignore[arg-type]
            notes=("53 batch norms folded into convolutions",),
        ),
        target=TargetSpec("cuda", "{}"),
        tasks=(*done, untried(tasks)) if tasks else (),
        verification=Verification(Correctness.RIGHT, 3, 1e-3, 1e-4, 0.118, "3 of 3 seeds agree"),
        latencies=(
            Latency("default", sampled(default, rng)),
            Latency("tuned", sampled(tuned, rng)),
        ),
        end_to_end=Comparison(Verdict.FASTER, default, tuned, 2.102, 2.053, 2.158),
        artifact="/home/someone/runs/resnet/artifact",
        proofs=tuple(
            CapProof(f"mps-0-{i}", "NVIDIA H200", 52, 132, "mps", True, "580.159.04", "9.0", 4242)
            for i in range(2)
        ),
    )


def cpu_outcome() -> Outcome:
    """What a run of a SqueezeNet on half the cores could end with: ONNX Runtime stays ahead."""
    rng = random.Random(3)
    outcome = gpu_outcome(tasks=20)
    return dataclasses.replace(
        outcome,
        model=dataclasses.replace(outcome.model, name="light_squeezenet"),
        target=TargetSpec("llvm", "{}"),
        latencies=(
            Latency("default", sampled(588e-3, rng)),
            Latency("tuned", sampled(66.1e-3, rng)),
            Latency("onnxruntime", sampled(34.2e-3, rng)),
        ),
        end_to_end=Comparison(Verdict.FASTER, 0.588, 0.0661, 8.896, 8.71, 9.02),
        proofs=(CapProof("cpu-0-0", "AMD EPYC 9354", 1, 2, "affinity", True),),
    )


def history() -> list[HistoryPoint]:
    rng = random.Random(5)
    best, points = 12.1e-3, [HistoryPoint(1.5, None, 0)]
    for step in range(1, 900):
        best *= 1 - 0.02 * rng.random() ** 6 if best > 5.6e-3 else 1
        points.append(HistoryPoint(6 + step / 3, best, 3 * step))
    return points


def spans_of(worker: str, role: str, *parts: tuple[Activity, float]) -> list[Span]:
    """Return spans one after the other, each as long as it says."""
    spans, at = [], 0.0
    for activity, secs in parts:
        spans.append(Span(worker, activity, at, at + secs, role))
        at += secs
    return spans


SEARCHED = PhaseTime(Phase.SEARCH, 0.0, 300.0, 1, tuple((c, 280.0 + c) for c in range(16)))
TIME_USE = time_use(
    [
        *spans_of(
            "tuner-0",
            "tuner",
            (Activity.WAIT, 12.5),
            (Activity.SEARCH, 61.0),
            (Activity.BUILD, 190.2),
        ),
        *spans_of("mps-0-0", "slice", (Activity.IDLE, 131.5), (Activity.MEASURE, 151.0)),
        *spans_of("mps-0-1", "slice", (Activity.IDLE, 139.0), (Activity.MEASURE, 144.4)),
    ],
    [SEARCHED],
)
FAILURES = [
    ("compile", 118, "error: ptxas: entry function uses too much shared data (0x1a000 bytes)"),
    ("timeout", 4, "no answer within 10 s"),
]
SETTINGS = {"model": Path("light_resnet50.onnx"), "gpu_pct": 40, "trials": None, "seed": 0}
HOST = {
    "cores": 16,
    "packages": {"apache-tvm": "0.27.0.post1", "ray": "2.60.0"},
    "gpus": [{"name": "NVIDIA H200", "sm_count": 132}],
}


def write(folder: Path, outcome: Outcome, **changes: Any) -> str:
    given: dict[str, Any] = {
        "history": history(),
        "time_use": TIME_USE,
        "failures": FAILURES,
        "settings": SETTINGS,
        "host": HOST,
    }
    path = folder / "report.html"
    write_report(path, outcome=outcome, **(given | changes))
    return path.read_text(encoding="utf-8")


def plain(text: str) -> str:
    """Return `text` with each run of white space, no-break spaces too, as one blank."""
    return " ".join(text.split())


class Page(HTMLParser):
    """The page as a strict reader sees it: balanced tags, its text, its attributes."""

    VOID = frozenset({"meta", "col", "br"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.pieces: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.pieces.append(data)

    @property
    def text(self) -> str:
        return plain(" ".join(self.pieces))


def terminal(outcome: Outcome, width: int = 160) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(outcome_table(outcome))
    return plain(console.export_text())


def with_verdict(verdict: Verdict, ratio: float = 1.02) -> Outcome:
    outcome = gpu_outcome()
    compared = Comparison(verdict, 5.9e-3, 5.9e-3 / ratio, ratio, ratio - 0.05, ratio + 0.05)
    return dataclasses.replace(outcome, end_to_end=compared)


# --- the page ----------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", [gpu_outcome(), cpu_outcome()], ids=["gpu", "cpu"])
def test_the_page_is_balanced_html(tmp_path: Path, outcome: Outcome) -> None:
    page = Page(write(tmp_path, outcome))
    assert page.open == []
    assert [tag for tag, _ in page.tags][:2] == ["html", "head"]


def test_the_page_loads_nothing_and_runs_nothing(tmp_path: Path) -> None:
    html = write(tmp_path, cpu_outcome())
    page = Page(html)
    assert not {"script", "link", "img", "iframe", "object", "base"} & {t for t, _ in page.tags}
    for _, attributes in page.tags:
        assert not {"src", "href", "action", "style", "onclick", "onload"} & set(attributes)
    assert not re.search(r"https?:|url\(|@import|javascript:", html)


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    outcome = gpu_outcome(tasks=3)
    proof = dataclasses.replace(outcome.proofs[0], device=HOSTILE, driver=HOSTILE)
    bad = dataclasses.replace(outcome.tasks[0], name=HOSTILE, note=HOSTILE)
    outcome = dataclasses.replace(
        outcome,
        model=dataclasses.replace(outcome.model, name=HOSTILE, notes=(HOSTILE,)),
        tasks=(bad, *outcome.tasks[1:]),
        proofs=(proof,),
        latencies=(*outcome.latencies, Latency(HOSTILE, (1e-3,) * 8)),
        verification=dataclasses.replace(outcome.verification, message=HOSTILE),
        artifact=HOSTILE,
    )
    html = write(
        tmp_path,
        outcome,
        time_use=time_use([Span(HOSTILE, Activity.BUILD, 0.0, 1.0, HOSTILE)], []),
        failures=[(HOSTILE, 1, HOSTILE + "</pre>")],
        settings={HOSTILE: HOSTILE, "gpu_pct": HOSTILE},
        host={"gpus": [{"name": HOSTILE}]},
    )
    page = Page(html)
    assert page.open == []
    assert "script" not in {tag for tag, _ in page.tags}
    assert "<script" not in html
    assert "\x1b" not in html
    assert "\u202e" not in html
    assert page.text.count("<script>alert('x')</script>") >= 10


def test_a_name_that_is_no_unicode_can_be_written(tmp_path: Path) -> None:
    outcome = gpu_outcome(tasks=2)
    outcome = dataclasses.replace(outcome, artifact="runs/\udcff")
    assert "\N{REPLACEMENT CHARACTER}" in write(tmp_path, outcome)


def test_the_verdict_comes_first(tmp_path: Path) -> None:
    page = Page(write(tmp_path, gpu_outcome()))
    sentence = (
        "2.10× faster than the default schedules (95% interval 2.05–2.16), "
        "verified against ONNX Runtime on 3 seeds"
    )
    assert headline(gpu_outcome()).text == sentence
    assert page.text.index(sentence) < page.text.index("Before and after")


def test_the_page_shows_the_numbers_of_the_outcome(tmp_path: Path) -> None:
    outcome = gpu_outcome()
    text = Page(write(tmp_path, outcome)).text
    for entry in outcome.tasks:
        assert entry.name in text
        assert plain(secs_text(entry.default_secs)) in text
        assert plain(secs_text(entry.best_secs)) in text
        if entry.is_tuned:
            assert entry.comparison is not None
            assert entry.winner.candidate_id in text
            assert f"{entry.comparison.ratio:.2f}×" in text
    assert "Default 12.3 ms" in text
    assert "Tuned 5.87 ms" in text
    assert f"{sum(t.trials for t in outcome.tasks):,}" in text
    assert "52 of 132 SMs (39.4%)" in text
    assert "Asked: 40% of a GPU" in text
    assert "580.159.04" in text
    assert "apache-tvm" in text


def test_shares_of_time_are_of_the_schedules_that_are_shipped() -> None:
    outcome = gpu_outcome()
    shares = by_share(outcome.tasks)
    assert math.isclose(sum(s.share for s in shares if s.share is not None), 1.0)
    heaviest = max(outcome.tasks, key=lambda t: t.weight * (t.best_secs or 0))
    assert shares[0].task is heaviest
    assert shares[-1].share is None


def test_onnx_runtime_stands_beside_them_on_cpus(tmp_path: Path) -> None:
    text = Page(write(tmp_path, cpu_outcome(), settings={"cpu_pct": 50})).text
    assert re.search(r"ONNX Runtime ONNX Runtime: median 34\.2 ms", text)
    assert "1 of 2 cores (50.0%)" in text
    assert "50% of the CPU cores" in text


def test_a_task_that_stays_at_its_default_says_why(tmp_path: Path) -> None:
    text = Page(write(tmp_path, gpu_outcome())).text
    assert "default no finalist is faster than the default by an interval" in text
    assert "the search found no candidate" in text
    assert "cannot tell 0.99–1.03" in text


def test_tasks_after_the_25th_fold_away(tmp_path: Path) -> None:
    text = Page(write(tmp_path, gpu_outcome(tasks=43))).text
    assert "and 18 more" in text


def test_a_model_without_tasks_has_a_page(tmp_path: Path) -> None:
    page = Page(write(tmp_path, gpu_outcome(tasks=0)))
    assert "The model has no task that can be tuned." in page.text
    assert page.open == []


def test_a_run_that_tuned_nothing_says_so(tmp_path: Path) -> None:
    outcome = with_verdict(Verdict.SAME, 1.001)
    outcome = dataclasses.replace(outcome, tasks=tuple(untried(i) for i in range(3)))
    page = Page(
        write(tmp_path, outcome, history=[], time_use=None, failures=[], settings={}, host={})
    )
    assert "No gain: as fast as the default schedules" in page.text
    assert "every task stays at its default schedule" in page.text
    assert "0 of 3 tasks use a tuned schedule, 3 stay at the default" in page.text
    assert page.open == []


def test_missing_and_infinite_numbers_are_dashes(tmp_path: Path) -> None:
    outcome = gpu_outcome(tasks=2)
    nan, inf = math.nan, math.inf
    outcome = dataclasses.replace(
        outcome,
        end_to_end=Comparison(Verdict.CANNOT_TELL, nan, nan, nan, nan, nan),
        latencies=(Latency("default", ()), Latency("tuned", (nan, inf))),
        verification=dataclasses.replace(outcome.verification, worst_error=inf),
        proofs=(),
    )
    page = Page(write(tmp_path, outcome))
    assert "No end-to-end latency was measured." in page.text
    assert "No slice has proved its cap." in page.text
    assert not re.search(r"\b(nan|inf|None)\b", page.text)


def test_one_straggler_does_not_flatten_the_bars(tmp_path: Path) -> None:
    outcome = gpu_outcome(tasks=1)
    default = outcome.latencies[0]
    slow = dataclasses.replace(default, run_secs=(*default.run_secs[:-1], 60.0))
    outcome = dataclasses.replace(outcome, latencies=(slow, outcome.latencies[1]))
    html = write(tmp_path, outcome)
    widths = re.findall(r'class="bar \w+" x="0" y="6" width="([\d.]+)%"', html)
    assert float(widths[0]) > 70
    assert "1 beyond the end of the scale" in html


def test_the_page_says_where_the_time_went_and_draws_it_for_each_worker(tmp_path: Path) -> None:
    page = Page(write(tmp_path, gpu_outcome()))
    text = plain(page.text)
    assert "Where the time went" in text
    assert "2 slices busy 49.2% of the search" in text
    assert "16 cores 95.8% busy in the search, from 93.3% to 98.3%" in text
    drawn = [a for tag, a in page.tags if tag == "rect" and "span " in (a.get("class") or "")]
    assert [a["class"] for a in drawn] == [
        f"span {activity}"
        for activity in ("wait", "search", "build", "idle") + ("idle", "measure", "idle") * 2
    ]
    widths = [float((a["width"] or "").rstrip("%")) for a in drawn]
    assert sum(widths) == pytest.approx(300, abs=0.1)


def test_the_old_page_stays_where_the_new_one_cannot_be_made(tmp_path: Path) -> None:
    before = write(tmp_path, gpu_outcome())
    with pytest.raises(AttributeError):
        write(tmp_path, gpu_outcome(), settings=None)
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == before
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


# --- the words ---------------------------------------------------------------------------------


def test_a_wrong_result_outweighs_any_speed() -> None:
    outcome = gpu_outcome()
    wrong = Verification(Correctness.WRONG, 3, 1e-3, 1e-4, 31.4, "output 0 differs")
    said = headline(dataclasses.replace(outcome, verification=wrong))
    assert said.tone == "bad"
    assert said.text == (
        "Wrong result: the tuned model disagrees with ONNX Runtime on 3 seeds, "
        "by 31.4 × the tolerance"
    )


def test_speed_without_a_checked_result_is_not_celebrated() -> None:
    outcome = gpu_outcome()
    unknown = Verification(Correctness.CANNOT_TELL, 3, 1e-3, 1e-4, 0.0, "the reference is constant")
    said = headline(dataclasses.replace(outcome, verification=unknown))
    assert said.tone == "neutral"
    assert "cannot tell whether its results are right" in said.text


@pytest.mark.parametrize(
    ("verdict", "ratio", "words"),
    [
        (Verdict.SLOWER, 0.9, "No gain: 0.90× the speed of the default schedules, slower"),
        (Verdict.SAME, 1.0, "No gain: as fast as the default schedules (ratio 1.00"),
        (Verdict.CANNOT_TELL, 1.02, "Cannot tell whether it is faster"),
    ],
)
def test_no_gain_is_said_neutrally(verdict: Verdict, ratio: float, words: str) -> None:
    said = headline(with_verdict(verdict, ratio))
    assert said.text.startswith(words)
    assert said.tone == "neutral"


@pytest.mark.parametrize(
    ("secs", "text"),
    [
        (None, "–"),
        (math.nan, "–"),
        (0.0, "0 s"),
        (1.234e-6, "1.23 µs"),
        (3.4e-9, "0.00340 µs"),
        (999.4e-6, "999 µs"),
        (999.6e-6, "1.00 ms"),
        (9.996e-3, "10.0 ms"),
        (0.588, "588 ms"),
        (12.3456, "12.3 s"),
    ],
)
def test_a_latency_has_three_digits_and_the_unit_that_fits(secs: float | None, text: str) -> None:
    assert plain(secs_text(secs)) == text


def test_a_range_of_latencies_shows_that_its_ends_differ() -> None:
    assert plain(secs_range_text(12.331e-3, 12.384e-3)) == "12.33–12.38 ms"
    assert plain(secs_range_text(0.999e-3, 1.002e-3)) == "0.999–1.002 ms"


def test_durations_and_shares_read_as_people_say_them() -> None:
    durations = (0.25, 43, 59.7, 150, 600, 3900, 7199.9)
    assert [duration_text(s) for s in durations] == [
        "0.2 s", "43 s", "1 min", "2 min 30 s", "10 min", "1 h 05 min", "2 h 00 min",
    ]  # fmt: skip
    assert [percent_text(f) for f in (None, 0.0, 0.0001, 0.394)] == ["–", "0.0%", "<0.1%", "39.4%"]


def test_a_tight_interval_gets_the_digits_to_be_seen() -> None:
    assert ratio_texts(2.1, 2.05, 2.16) == ("2.10", "2.05–2.16")
    assert ratio_texts(1.013, 1.0122, 1.0138) == ("1.0130", "1.0122–1.0138")


def test_the_interval_of_a_median_is_that_of_the_sign_test() -> None:
    seen = spread([float(i) for i in range(1, 21)])
    assert seen is not None
    assert (seen.low_secs, seen.median_secs, seen.high_secs) == (6.0, 10.5, 15.0)
    few = spread([1.0, 2.0, 3.0])
    assert few is not None
    assert few.low_secs is None


# --- plots -------------------------------------------------------------------------------------


def test_the_history_shows_its_values_to_the_pointer() -> None:
    plot = history_plot([HistoryPoint(3, 0.588, 4), HistoryPoint(60, 0.0661, 90)])
    assert plot is not None
    titles = [plain(t) for t in re.findall("<title>(.*?)<", plot)]
    assert titles == ["588 ms after 3 s, 4 trials", "66.1 ms after 1 min, 90 trials"]


@pytest.mark.parametrize(
    ("verdict", "style"),
    [
        (Verdict.FASTER, "better"),
        (Verdict.SLOWER, "worse"),
        (Verdict.SAME, "open"),
        (Verdict.CANNOT_TELL, "open"),
    ],
)
def test_the_mark_of_a_ratio_claims_no_more_than_the_verdict(verdict: Verdict, style: str) -> None:
    mark = ratio_mark(Comparison(verdict, 2.0, 1.9, 1.05, 1.01, 1.1), scale=(0.8, 2.0))
    assert f'class="dot {style}"' in mark


def test_a_long_history_stays_small() -> None:
    points = [HistoryPoint(1 + i, 1 / (1 + i), i) for i in range(20_000)]
    plot = history_plot(points)
    assert plot is not None
    assert plot.count("<title>") <= 151


@pytest.mark.parametrize(
    "points",
    [
        [],
        [HistoryPoint(0, None, 0)],
        [HistoryPoint(0, 1e-3, 0)],
        [HistoryPoint(0, 0.0, 0), HistoryPoint(0, 0.0, 1)],
        [HistoryPoint(0, 1e-3, 0), HistoryPoint(0, 5e-4, 1)],
        [HistoryPoint(0, 1e-3, 0), HistoryPoint(1e6, 1e-9, 1)],
    ],
)
def test_a_short_or_odd_history_breaks_nothing(tmp_path: Path, points: list[HistoryPoint]) -> None:
    assert Page(write(tmp_path, gpu_outcome(tasks=1), history=points)).open == []


# --- terminal and JSON -------------------------------------------------------------------------


def test_the_terminal_shows_the_twenty_heaviest_tasks() -> None:
    outcome = gpu_outcome(tasks=43)
    text = terminal(outcome)
    shown = [s.task.name for s in by_share(outcome.tasks)]
    assert all(re.search(rf"{name}\b", text) for name in shown[:20])
    assert not re.search(rf"{shown[20]}\b", text)
    assert "and 23 more" in text
    assert text.startswith("2.10× faster")


def test_the_terminal_names_the_tasks_that_stay_at_their_default_and_why() -> None:
    text = terminal(gpu_outcome(tasks=8))
    assert (
        "at the default, no finalist is faster than the default by an interval: "
        "fused_conv2d_add_relu5"
    ) in text
    assert "at the default, the search found no candidate: stem_conv2d8" in text


@pytest.mark.parametrize("width", [1, 20, 40, 80])
def test_the_terminal_may_be_narrow(width: int) -> None:
    assert terminal(gpu_outcome(), width)


def test_brackets_and_escapes_in_names_reach_no_terminal() -> None:
    outcome = gpu_outcome(tasks=2)
    odd = dataclasses.replace(outcome.tasks[0], name="[bold]x[/]\x1b]0;title\x07")
    text = terminal(dataclasses.replace(outcome, tasks=(odd,)))
    assert "[bold]x[/]" in text
    assert "\x1b" not in text


def test_the_document_is_json_with_the_derived_figures() -> None:
    outcome = gpu_outcome(tasks=12)
    document = json.loads(json.dumps(outcome_json(outcome), allow_nan=False))
    assert document["hit_rate"] == outcome.hit_rate
    assert document["verdict"] == "faster"
    assert document["ratio"] == 2.102
    assert document["tasks_tuned"] == 10
    assert document["tasks"][0]["best_secs"] == outcome.tasks[0].best_secs
    assert document["tasks"][0]["is_tuned"] is True
    assert document["kernels_default_secs"] is None
    assert "proto" not in document["model"]
    assert len(document["latencies"][0]["run_secs"]) == 31


def test_the_document_has_null_for_what_is_no_number() -> None:
    compared = Comparison(Verdict.CANNOT_TELL, math.nan, math.inf, math.nan, 0.0, math.inf)
    document = outcome_json(dataclasses.replace(gpu_outcome(tasks=1), end_to_end=compared))
    assert document["ratio"] is None
    assert json.dumps(document, allow_nan=False)
