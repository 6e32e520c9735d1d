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

from tests.lib.report_runs import (
    HOSTILE,
    conditions,
    cpu_outcome,
    gpu_outcome,
    sampled,
    untried,
    view,
)
from tunerd.records.tally import Disturbed
from tunerd.report.disturbance_text import disturbance_json, disturbance_sentences
from tunerd.report.figures import by_share, headline, outcome_headline, rivals
from tunerd.report.html import write_page
from tunerd.report.markdown import run_markdown
from tunerd.report.page import report_page
from tunerd.report.plot import history_plot
from tunerd.report.run_result import next_try
from tunerd.report.svg import ratio_mark
from tunerd.report.table import outcome_json, outcome_table
from tunerd.stats.interval import median_interval
from tunerd.system.text import duration_text, percent_text, ratio_texts, secs_range_text, secs_text
from tunerd.telemetry.history import ConditionPoint, FailureKind, HistoryPoint
from tunerd.telemetry.time_use import time_use
from tunerd.vocabulary import DEFAULT_SOURCE, Activity, Conditions, Measurement, Span
from tunerd.vocabulary.outcome import (
    COMPILED,
    EAGER,
    TUNED_BESIDE_PYTORCH,
    Accuracy,
    Comparison,
    Finalist,
    Latency,
    Outcome,
    Verification,
)
from tunerd.vocabulary.verdict import Interval, Verdict


def write(folder: Path, outcome: Outcome | None, **changes: Any) -> str:
    path = folder / "report.html"
    write_page(path, report_page(view(outcome, **changes)))
    return path.read_text(encoding="utf-8")


def plain(text: str) -> str:
    """Return `text` with each run of white space, no-break spaces too, as one blank."""
    return " ".join(text.split())


class Page(HTMLParser):
    """The page as a strict reader sees it: balanced tags, its text, its attributes."""

    VOID = frozenset({"meta", "col", "br", "wbr"})

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
        if not {"style", "script"} & set(self.open):
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


def test_the_page_loads_nothing_and_runs_one_script_of_its_own(tmp_path: Path) -> None:
    html = write(tmp_path, cpu_outcome())
    page = Page(html)
    assert not {"link", "img", "iframe", "object", "base"} & {t for t, _ in page.tags}
    assert [attributes for tag, attributes in page.tags if tag == "script"] == [{}]
    for _, attributes in page.tags:
        assert not {"src", "href", "action", "style", "onclick", "onload"} & set(attributes)
    html = html.replace("http://www.w3.org/2000/svg", "")  # a name, which nobody fetches
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
        failures=(FailureKind(HOSTILE, 1, HOSTILE + "</pre>", 1),),
        settings={HOSTILE: HOSTILE, "gpu_pct": HOSTILE, "shapes": {HOSTILE: [1]}},
        host={"gpus": [{"name": HOSTILE}]},
    )
    page = Page(html)
    assert page.open == []
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert html.count("<script") == 1
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
    assert outcome_headline(gpu_outcome()).text == sentence
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
    assert "Share asked 40% of a GPU" in text
    assert "Search asked until little more can be gained" in text
    assert "580.159.04" in text
    assert "apache-tvm" in text


def test_shares_of_time_are_of_the_schedules_that_are_shipped() -> None:
    outcome = gpu_outcome()
    shares = by_share(outcome.tasks)
    assert math.isclose(sum(s.share for s in shares if s.share is not None), 1.0)
    heaviest = max(outcome.tasks, key=lambda t: t.weight * (t.best_secs or 0))
    assert shares[0].task is heaviest
    assert shares[-1].share is None


def test_the_page_says_how_near_each_output_is(tmp_path: Path) -> None:
    outcome = gpu_outcome()
    accuracy = (Accuracy("scores", 0.00123, 6, 5), Accuracy("boxes", 0.5))
    verification = dataclasses.replace(outcome.verification, accuracy=accuracy)
    text = Page(write(tmp_path, dataclasses.replace(outcome, verification=verification))).text
    assert "off by at most 0.0012 of its largest value; the same class is first in 5 of 6" in text
    assert "off by at most 0.5 of its largest value" in text


def test_what_to_try_next_is_said_of_a_model_in_fp32_on_a_gpu() -> None:
    assert "--precision fp16" in next_try(gpu_outcome(), None)
    assert next_try(gpu_outcome(), "fp32") == next_try(cpu_outcome(), None) == ""


def test_onnx_runtime_stands_beside_them_on_cpus(tmp_path: Path) -> None:
    text = Page(write(tmp_path, cpu_outcome(), settings={"cpu_pct": 50})).text
    assert re.search(r"ONNX Runtime ONNX Runtime: median 34\.2 ms", text)
    assert "1 of 2 cores (50.0%)" in text
    assert "50% of the CPU cores" in text


def test_on_cpus_the_headline_compares_with_onnx_runtime_first(tmp_path: Path) -> None:
    said = outcome_headline(cpu_outcome())
    assert said.claim == "0.517× the speed of ONNX Runtime, slower"
    assert said.tone == "neutral"
    assert said.small == "8.90× faster than the default schedules (95% interval 8.71–9.02)"
    text = Page(write(tmp_path, cpu_outcome())).text
    assert text.index("0.517× the speed of ONNX Runtime, slower") < text.index(said.small)
    assert text.index("ONNX Runtime 34.2 ms") < text.index("Tuned 66.1 ms")
    shown = terminal(cpu_outcome())
    assert shown.startswith("0.517× the speed of ONNX Runtime, slower")
    assert said.small in shown


def with_pytorch(outcome: Outcome, *, tuned_secs: float) -> Outcome:
    """Return an outcome of which PyTorch was timed beside the tuned model, eager and compiled."""
    ways = ((EAGER, 3e-3), (COMPILED, 1.5e-3), (TUNED_BESIDE_PYTORCH, tuned_secs))
    rng = random.Random(5)
    timed = [Latency(way, sampled(secs, rng)) for way, secs in ways]
    remarks = ("PyTorch eager: torch 2.14.1, one CUDA graph", "<b>a remark</b>")
    return dataclasses.replace(outcome, latencies=(*outcome.latencies, *timed), remarks=remarks)


def test_where_pytorch_was_timed_the_headline_compares_with_its_fastest_way(tmp_path: Path) -> None:
    outcome = with_pytorch(gpu_outcome(), tuned_secs=1e-3)
    said = headline(view(outcome))
    assert re.fullmatch(r"1\.[45]\d*× faster than torch\.compile at 40% of NVIDIA H200", said.claim)
    assert said.tone == "better"
    assert said.small.startswith("2.10× faster than the default schedules")
    page = Page(write(tmp_path, outcome))
    assert re.search(r"torch\.compile 1\.\d+ ms", page.text)
    assert "<b>a remark</b>" in page.text
    shown = terminal(outcome)
    assert re.search(r"torch\.compile 1\.\d+ ms", shown)
    assert "PyTorch eager: torch 2.14.1, one CUDA graph" in shown
    assert "- PyTorch eager: torch 2.14.1, one CUDA graph" in run_markdown(view(outcome))
    document = outcome_json(outcome)
    assert [rival["name"] for rival in document["rivals"]] == ["torch.compile"]
    assert document["remarks"] == list(outcome.remarks)


@pytest.mark.parametrize(("tuned_secs", "first"), [(1e-3, "ONNX Runtime"), (9e-3, "torch.compile")])
def test_of_two_rivals_the_headline_compares_with_the_one_ahead(
    tuned_secs: float, first: str
) -> None:
    outcome = with_pytorch(cpu_outcome(), tuned_secs=tuned_secs)
    assert next(iter(rivals(outcome))).name == first
    assert first in outcome_headline(outcome).claim


def test_pytorch_that_could_not_be_timed_is_said_and_changes_no_verdict() -> None:
    outcome = gpu_outcome()
    said = "PyTorch was not timed: net.py has no function net"
    without = dataclasses.replace(outcome, remarks=(said,))
    assert outcome_headline(without) == outcome_headline(outcome)
    assert said in terminal(without)


def test_onnx_runtime_that_is_overtaken_is_the_good_news() -> None:
    outcome = cpu_outcome()
    default, tuned, onnxruntime = outcome.latencies
    slow = dataclasses.replace(onnxruntime, run_secs=tuple(2.6 * s for s in onnxruntime.run_secs))
    outcome = dataclasses.replace(outcome, latencies=(default, tuned, slow))
    assert outcome_headline(outcome).claim.endswith("× faster than ONNX Runtime")
    assert outcome_headline(outcome).tone == "better"
    stays = dataclasses.replace(outcome, tasks=tuple(untried(i) for i in range(3)))
    assert "No gain: as fast as the default schedules" in outcome_headline(stays).small


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
        write(tmp_path, outcome, history=(), time_use=None, failures=(), settings={}, host={})
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
    assert "The run ended before its slices were planned." in page.text
    assert not re.search(r"\b(nan|inf|None)\b", page.text)


def test_one_straggler_does_not_flatten_the_bars(tmp_path: Path) -> None:
    outcome = gpu_outcome(tasks=1)
    default = outcome.latencies[0]
    slow = dataclasses.replace(default, run_secs=(*default.run_secs[:-1], 60.0))
    outcome = dataclasses.replace(outcome, latencies=(slow, outcome.latencies[1]))
    html = write(tmp_path, outcome)
    widths = re.findall(r'class="bar \w+" x="0" y="6" width="([\d.]+)%"', html)
    assert max(map(float, widths)) > 70
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
    with pytest.raises(TypeError):
        write(tmp_path, gpu_outcome(), settings=None)
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == before
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


# --- the words ---------------------------------------------------------------------------------


def test_a_wrong_result_outweighs_any_speed() -> None:
    outcome = gpu_outcome()
    wrong = Verification(Verdict.WRONG, 3, 1e-3, 1e-4, 31.4, "output 0 differs")
    said = outcome_headline(dataclasses.replace(outcome, verification=wrong))
    assert said.tone == "bad"
    assert said.text == (
        "Wrong result: the tuned model disagrees with ONNX Runtime on 3 seeds, "
        "by 31.4 × the tolerance"
    )


def test_speed_without_a_checked_result_is_not_celebrated() -> None:
    outcome = gpu_outcome()
    unknown = Verification(Verdict.CANNOT_TELL, 3, 1e-3, 1e-4, 0.0, "the reference is constant")
    said = outcome_headline(dataclasses.replace(outcome, verification=unknown))
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
    said = outcome_headline(with_verdict(verdict, ratio))
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
    assert ratio_texts(Interval(2.1, 2.05, 2.16)) == ("2.10", "2.05–2.16")
    assert ratio_texts(Interval(1.013, 1.0122, 1.0138)) == ("1.0130", "1.0122–1.0138")


def test_the_interval_of_a_median_is_that_of_the_sign_test() -> None:
    seen = median_interval([float(i) for i in range(1, 21)])
    assert seen is not None
    assert (seen.low, seen.value, seen.high) == (6.0, 10.5, 15.0)
    few = median_interval([1.0, 2.0, 3.0])
    assert few is not None
    assert (few.low, few.high) == (-math.inf, math.inf)


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
    assert Page(write(tmp_path, gpu_outcome(tasks=1), history=tuple(points))).open == []


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


# --- others on the device ----------------------------------------------------------------------

CAUSE = "1 process of others: pid 4242"


def seen_of(disturbed: int, unknown: int) -> tuple[ConditionPoint, ...]:
    """Return conditions of 400 trials: the first ones disturbed, the last ones not judged."""
    return tuple(
        dataclasses.replace(
            point,
            conditions=dataclasses.replace(
                point.conditions,
                strangers=None if i >= 400 - unknown else int(i < disturbed),
                disturbed_by=CAUSE if i < disturbed else "",
            ),
        )
        for i, point in enumerate(conditions(gpus=2))
    )


def test_the_page_says_how_many_trials_others_disturbed_on_which_device(tmp_path: Path) -> None:
    by = Disturbed(30, 400, CAUSE)
    html = write(tmp_path, gpu_outcome(), conditions=seen_of(30, 9), disturbed=by)
    assert (
        "30 of 400 trials were measured beside others or with clocks held down, mostly by this: "
        "1 process of others: pid 4242. Whether others had processes there is unknown of 9 trials."
    ) in plain(html)
    assert re.findall(r'data-label="Disturbed">(\d+)<', html) == ["15", "15"]


def test_a_run_that_nobody_disturbed_says_nothing_of_it() -> None:
    outcome = gpu_outcome()
    assert disturbance_sentences(Disturbed(0, 400), outcome.tasks, outcome.disturbed_by) == []


def test_finals_that_did_not_become_quiet_are_told() -> None:
    result = Measurement((1e-3,), 1, "final", "q", 52, Conditions(disturbed_by="power brake"))
    first, *others = gpu_outcome().tasks
    finalist = Finalist("0" * 16, DEFAULT_SOURCE, None, result)
    tasks = (dataclasses.replace(first, finalists=(finalist,)), *others)
    assert disturbance_sentences(Disturbed(), tasks, CAUSE) == [
        "The device did not become quiet: the finalists of 1 task and the whole model were "
        f"measured all the same ({CAUSE}). The same command measures that again."
    ]
    assert disturbance_json(Disturbed(3, 9, CAUSE), tasks) == {
        "trials": 3,
        "trials_of": 9,
        "trials_by": CAUSE,
        "tasks": [first.task_id],
        "model_by": "",
    }
