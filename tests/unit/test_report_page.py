"""The page says what the outcome says, and no more."""

# ruff: noqa: RUF001  the multiplication sign and the en dash are what people read

from __future__ import annotations

import dataclasses
import math
import random
import re
from pathlib import Path

import pytest

from tests.lib.report_pages import Page, plain, terminal, with_verdict, write
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
from tunerd.report.markdown import run_markdown
from tunerd.report.run_result import next_try
from tunerd.report.table import outcome_json
from tunerd.system.text import secs_text
from tunerd.telemetry.history import ConditionPoint, FailureKind
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
)
from tunerd.vocabulary.verdict import Verdict

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
