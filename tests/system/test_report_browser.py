"""Reports in a real browser: they fetch nothing, run their own script alone, and fit."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import axe_core_python
import pytest

from tests.lib import gate_runs
from tests.lib.browser import Tab, opened_browser
from tests.lib.matrix_samples import OFF, losses, samples_of
from tests.lib.report_runs import (
    conditions,
    cpu_outcome,
    finished_run,
    gpu_outcome,
    run_facts,
    searched_run,
    view,
)
from tests.system.test_auto_share import profiled
from tests.system.test_matrix import result_of_samples
from tunerd.colocation.bench import Benched
from tunerd.colocation.load.result import LoadResult, TenantResult
from tunerd.colocation.plan import LoadChoice, Plan
from tunerd.colocation.planning.answer import unknown
from tunerd.colocation.planning.curves import Curves
from tunerd.colocation.planning.estimates import Calibration, Checked
from tunerd.colocation.planning.mix import Mix
from tunerd.colocation.planning.pairs import Pair, Pairs, Side
from tunerd.colocation.planning.planned import PlannedMix
from tunerd.records import Store
from tunerd.report import html
from tunerd.report.calibration import calibration_plot
from tunerd.report.colocation import bench_page
from tunerd.report.comparison import NamedRun, named
from tunerd.report.comparison_page import comparison_page
from tunerd.report.gate import gate_page
from tunerd.report.matrix_page import matrix_page
from tunerd.report.mix import mix_page
from tunerd.report.page import report_page
from tunerd.report.run_view import RunView, SliceView, run_view_of
from tunerd.report.share_page import share_page
from tunerd.report.sizes_page import sizes_page
from tunerd.report.view import Plot, Section, View
from tunerd.studies.compare.decide import decide
from tunerd.studies.compare.sides import load_sides
from tunerd.telemetry.history import FailureKind
from tunerd.telemetry.time_use import time_use
from tunerd.vocabulary import Activity, SliceSpec, Span
from tunerd.vocabulary.outcome import Latency, Outcome
from tunerd.vocabulary.verdict import Interval

NAMES = (
    "<script>window.ran = 1</script>",
    "<img src=x onerror='window.ran = 1'>",
    "\"'><svg onload=window.ran=1>",
    "</title></style></script><script>window.ran = 1</script>",
    "x" * 3000,
    "מודל שלום עולם \u202e gnp.exe",
    "\N{MAN}\N{ZERO WIDTH JOINER}\N{WOMAN}\N{ZERO WIDTH JOINER}\N{GIRL}" * 200,
    "\N{PILE OF POO}\N{ZERO WIDTH JOINER}" * 20,
    "javascript:window.ran=1//" + "/very/long/path" * 60,
)


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with opened_browser() as opened:
        yield opened


def hostile_view() -> RunView:
    """A run in which everything that comes from outside is out to do harm."""
    outcome = gpu_outcome(tasks=30)
    tasks = tuple(
        dataclasses.replace(task, name=NAMES[i % len(NAMES)], note=NAMES[(i + 3) % len(NAMES)])
        for i, task in enumerate(outcome.tasks)
    )
    proofs = tuple(dataclasses.replace(p, device=NAMES[1], driver=NAMES[4]) for p in outcome.proofs)
    model = dataclasses.replace(outcome.model, name=NAMES[3], notes=NAMES)
    outcome = dataclasses.replace(
        outcome,
        model=model,
        tasks=tasks,
        proofs=proofs,
        latencies=(*outcome.latencies, Latency(NAMES[0], (1e-3,) * 9), Latency(NAMES[4], (1e-3,))),
        verification=dataclasses.replace(outcome.verification, message=NAMES[2]),
        artifact=NAMES[7],
    )
    return view(
        outcome,
        settings={NAMES[0]: NAMES, "gpu_pct": NAMES[1], "dims": {NAMES[5]: 3}, "model": NAMES[7]},
        host={"hostname": NAMES[6], "packages": [[NAMES[0], NAMES[4]]], "gpus": [{NAMES[2]: 1}]},
        failures=tuple(FailureKind(name, 3, name, i) for i, name in enumerate(NAMES)),
        slices=tuple(
            SliceView(name, SliceSpec(name, "mps", 40, gpu_uuid=NAMES[4]), proofs[0], 2, 3)
            for name in NAMES
        ),
        time_use=time_use([Span(n, Activity.BUILD, 0.0, 9.0, NAMES[0]) for n in NAMES], []),
        conditions=tuple(
            dataclasses.replace(p, slice_id=NAMES[i % 3]) for i, p in enumerate(conditions())
        ),
    )


def benched() -> Benched:
    """Two tenants under two policies, one of which has no name that a page should believe."""
    load = LoadChoice(kind="poisson", duration=5)
    members = [{"name": name, "artifact": Path("a"), "rate": 10} for name in ("one", "two")]
    plan = Plan.model_validate({"members": members, "load": load})
    tenant = TenantResult("one", NAMES[0], 90, 88, 1, 1, 0, 1e-3, 2e-3, 3e-3, 9.0, 5e-3, 0.9, 0.95)
    results = tuple(
        LoadResult(
            policy, "threads", (tenant, replace(tenant, p99_secs=secs)), 5.0, 1e-2 / secs, 0.9,
            0.95, 0.2, 1e-4, {"one": 1 << 20}, {},
        )
        for policy, secs in (("time", 3e-3), ("space", 2e-3))
    )  # fmt: skip
    return Benched(plan, results, ())


def mix() -> PlannedMix:
    """A mix of which not enough was measured."""
    members = [{"name": name, "artifact": "/a", "rate": 10, "slo_ms": 5} for name in ("one", "two")]
    wanted = Mix.model_validate({"members": members})
    pairs = Pairs((), "cpu")
    return PlannedMix(wanted, Path("m"), unknown(NAMES[:3]), None, None, Curves(), pairs, "few")


def calibration() -> View:
    """How good estimates of four pairs are, one of them outside of its interval."""
    checked = []
    for number in range(4):
        value = 1 + number / 10
        pair = Pair(*2 * [Side(NAMES[0], "net", 50, {})], "cpu", Interval(value, value, value), "")
        checked.append(Checked(pair, Interval(1.1, 1.0, 1.25)))
    plot = Plot(calibration_plot(Calibration(tuple(checked))))
    return View("Slowdowns", [Section("Estimated and measured", [plot])])


def gate(folder: Path) -> str:
    """Return the page of a gate between two runs that their names would break."""

    def named(seed: int, **given: float) -> Outcome:
        ended = gate_runs.outcome(seed, **given)  # type: ignore[arg-type]
        task = replace(ended.tasks[0], name=NAMES[0])
        model = replace(ended.model, name=NAMES[1])
        return replace(ended, model=model, tasks=(task, *ended.tasks[1:]))

    base = gate_runs.run_of(folder / "base", named(1))
    new = gate_runs.run_of(folder / "new", named(2, slower=1.2))
    return gate_page(decide(*load_sides(str(base), str(new)), fail_above=0.05))


def pages(folder: Path) -> dict[str, str]:
    hostile = hostile_view()
    profile = profiled({10: 10e-3, 40: 2.15e-3, 100: 2e-3}, 5e-3)
    sized = [("batch 1", view(cpu_outcome()), cpu_outcome(), Path(NAMES[1]))]
    runs = (
        NamedRun(NAMES[4], Path("a"), hostile),
        NamedRun(NAMES[0], Path("b"), view(cpu_outcome())),
        NamedRun(NAMES[5], Path("c"), view(None)),
        *(NamedRun(f"run {i}", Path(str(i)), view(gpu_outcome(tasks=8))) for i in range(5)),
    )
    return {
        "gpu": report_page(view(gpu_outcome())),
        "several-gpus": report_page(view(gpu_outcome(), conditions=conditions(gpus=8))),
        "cpu": report_page(view(cpu_outcome())),
        "killed": report_page(view(None, history=(), time_use=None)),
        "hostile": report_page(hostile),
        "runs": comparison_page(runs),
        "matrix": matrix_page(result_of_samples(samples_of(losses(OFF)), NAMES[0])),
        "profile": share_page(replace(profile, proofs=((100, gpu_outcome().proofs[0]),))),
        "sizes": sizes_page(NAMES[2], sized, ()),
        "colocation": bench_page(benched()),
        "mix": mix_page(mix()),
        "calibration": html.page(calibration()),
        "gate": gate(folder),
    }


KINDS = (
    "gpu", "several-gpus", "cpu", "killed", "hostile", "runs", "matrix", "profile", "sizes",
    "colocation", "mix", "calibration", "gate",
)  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    found = {}
    for name, page in pages(folder).items():
        found[name] = folder / f"{name}.html"
        found[name].write_text(page, encoding="utf-8")
    return found


OVERFLOWING = """
(() => {
  const wide = document.documentElement.clientWidth;
  const out = [];
  for (const e of document.body.querySelectorAll('*')) {
    const box = e.getBoundingClientRect();
    const inside = e.closest('pre') && e.tagName !== 'PRE';
    if (box.width && (box.right > wide + 0.5 || box.left < -0.5) && !inside && !e.closest('.tip'))
      out.push(`${e.tagName}.${e.getAttribute('class')} ${box.left} to ${box.right}`);
  }
  return [document.documentElement.scrollWidth - wide, out.slice(0, 5)];
})()
"""
# Relative luminance and contrast as WCAG 2.2 has them, of every text against the page.
LEAST_CONTRAST = """
(() => {
  const of = (color) => {
    const [r, g, b, a = 1] = color.match(/[0-9.]+/g).map(Number);
    const line = (c) => ((c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return a === 0 ? null : 0.2126 * line(r) + 0.7152 * line(g) + 0.0722 * line(b);
  };
  const page = of(getComputedStyle(document.body).backgroundColor);
  let least = 99;
  for (const e of document.querySelectorAll('main *, header *, footer *')) {
    if (![...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())) continue;
    const style = getComputedStyle(e);
    const ink = of(e instanceof SVGElement ? style.fill : style.color);
    const [high, low] = [Math.max(ink, page), Math.min(ink, page)];
    least = Math.min(least, (high + 0.05) / (low + 0.05));
  }
  return least;
})()
"""
AXE = Path(axe_core_python.__file__).with_name("axe.min.js")
VIOLATIONS = """
axe.run({runOnly: RULES}).then((found) => found.violations.map(
  (v) => `${v.id}: ${v.nodes.length}, ${v.nodes[0].html.slice(0, 160)}`))
"""
TIP = "(t => t.hidden ? '' : t.textContent)(document.querySelector('.tip'))"


@pytest.mark.parametrize("name", ["gpu", "several-gpus", "cpu", "killed", "hostile", "runs"])
def test_a_page_asks_for_nothing_but_itself_and_complains_of_nothing(
    tab: Tab, written: dict[str, Path], name: str
) -> None:
    tab.open(written[name])
    assert tab.run("document.querySelectorAll('section').length") >= 5
    assert tab.requests == [written[name].as_uri()]
    assert tab.complaints == []


@pytest.mark.parametrize("width", [360, 600, 900])
@pytest.mark.parametrize("name", KINDS)
def test_nothing_overflows_sideways(
    tab: Tab, written: dict[str, Path], name: str, width: int
) -> None:
    tab.open(written[name], width=width)
    tab.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    assert tab.run(OVERFLOWING) == [0, []]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["gpu", "runs"])
def test_text_can_be_read_in_both_colour_schemes(
    tab: Tab, written: dict[str, Path], name: str, scheme: str
) -> None:
    tab.open(written[name], scheme=scheme)
    page = tab.run("getComputedStyle(document.body).backgroundColor")
    assert (page == "rgb(22, 24, 26)") is (scheme == "dark")
    assert tab.run(LEAST_CONTRAST) >= 4.5


@pytest.mark.parametrize("name", [kind for kind in KINDS if kind != "several-gpus"])
def test_axe_finds_no_barrier(tab: Tab, written: dict[str, Path], name: str) -> None:
    for width, scheme, rules in (
        (1200, "light", "undefined"),
        (360, "dark", "['color-contrast', 'scrollable-region-focusable']"),
    ):
        tab.open(written[name], width=width, scheme=scheme)
        tab.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
        tab.run(f"{AXE.read_text(encoding='utf-8')};1")
        assert tab.run(VIOLATIONS.replace("RULES", rules)) == []


def test_nothing_moves_so_that_there_is_nothing_to_reduce(written: dict[str, Path]) -> None:
    page = written["gpu"].read_text(encoding="utf-8")
    assert not re.search(r"transition|animation|@keyframes|scroll-behavior|<animate", page)


@pytest.mark.parametrize("name", ["gpu", "matrix"])
def test_a_printed_page_has_what_is_folded_away_and_dark_text(
    tab: Tab, written: dict[str, Path], name: str
) -> None:
    tab.open(written[name], scheme="dark")
    tab.call("Emulation.setEmulatedMedia", media="print")
    assert tab.run(LEAST_CONTRAST) >= 4.5
    assert tab.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    tab.call("Emulation.setEmulatedMedia", media="")


@pytest.mark.parametrize("name", KINDS)
def test_a_page_weighs_little(written: dict[str, Path], name: str) -> None:
    assert written[name].stat().st_size < 1.5e6


@pytest.mark.parametrize("name", ["hostile", "runs"])
def test_hostile_names_are_shown_and_run_nothing(
    tab: Tab, written: dict[str, Path], name: str
) -> None:
    tab.open(written[name])
    shown = tab.run("document.body.textContent")
    assert "<script>window.ran = 1</script>" in shown
    assert "\u202e" not in shown
    tab.point_at("svg.plot")
    tab.wait_for(TIP)
    assert tab.run("typeof window.ran") == "undefined"
    assert tab.run("document.querySelectorAll('img, iframe, body script').length") == 1


def test_what_is_smuggled_into_a_page_is_stopped_by_its_policy(
    tab: Tab, written: dict[str, Path], tmp_path: Path
) -> None:
    page = written["cpu"].read_text()
    bad = "<script>window.ran = 1</script><img src='http://127.0.0.1:9/x' onerror='window.ran = 1'>"
    (tmp_path / "bad.html").write_text(page.replace("<main>", f"<main>{bad}"))
    tab.open(tmp_path / "bad.html")
    assert tab.run("typeof window.ran") == "undefined"
    assert any("Content Security Policy" in said for said in tab.complaints)


def test_pointing_at_the_line_shows_the_nearest_value(tab: Tab, written: dict[str, Path]) -> None:
    tab.open(written["gpu"])
    tab.point_at("svg.chart", x=0.99, y=0.2)
    assert "after" in tab.wait_for(TIP)
    last = tab.run(TIP)
    tab.point_at("svg.chart", x=0.3, y=0.5)
    tab.wait_for(f"{TIP} !== {json.dumps(last)}")
    assert "trials" in tab.run(TIP)
    assert tab.run("document.querySelectorAll('svg.chart .found.on').length") == 1


def test_a_line_of_one_point_is_seen_without_pointing(tab: Tab, written: dict[str, Path]) -> None:
    tab.open(written["colocation"])
    shown = (
        "[...document.querySelectorAll('svg.chart .point')].map(p => getComputedStyle(p).opacity)"
    )
    assert tab.run(shown) == ["1", "1"]
    tab.open(written["gpu"])
    assert set(tab.run(shown)) == {"0"}


@pytest.mark.parametrize(
    ("selector", "words"),
    [
        (".bar-row svg .bar.default", "Default schedules: median"),
        (".spans svg .span.search", "search: "),
        (".tasks .dot", "95% interval"),
        ("figure:nth-of-type(1) svg.chart", "MHz"),
        ("figure:nth-of-type(2) svg.chart", "W ("),
        ("figure:nth-of-type(3) svg.chart", "°C"),
    ],
)
def test_pointing_at_a_mark_shows_its_value(
    tab: Tab, written: dict[str, Path], selector: str, words: str
) -> None:
    tab.open(written["gpu"])
    tab.point_at(selector)
    tab.wait_for(f"{TIP}.replaceAll('\\u00a0', ' ').includes({json.dumps(words)})")


def test_the_value_stays_on_a_narrow_screen(tab: Tab, written: dict[str, Path]) -> None:
    tab.open(written["hostile"], width=360)
    for x in (0.0, 1.0):
        tab.point_at("svg.chart", x=min(0.999, x))
        tab.wait_for(TIP)
        left, right = tab.run(
            "(b => [b.left, b.right])(document.querySelector('.tip').getBoundingClientRect())"
        )
        assert left >= 0
        assert right <= 360


def test_the_arrow_keys_walk_along_a_line(tab: Tab, written: dict[str, Path]) -> None:
    tab.open(written["cpu"])
    tab.run("document.querySelector('svg.chart').focus({preventScroll: true})")
    tab.press("ArrowRight")
    first = tab.wait_for(TIP)
    tab.press("ArrowRight")
    assert tab.wait_for(f"(said => said !== {json.dumps(first)} && said)({TIP})")
    tab.press("Escape")
    tab.wait_for(f"{TIP} === ''")


def test_pages_of_real_stores_open(tab: Tab, tmp_path: Path) -> None:
    folders = [
        finished_run(tmp_path / "done"),
        finished_run(tmp_path / "other", run_facts(device="NVIDIA H200")),
        searched_run(tmp_path / "killed"),
    ]
    views = []
    for folder in folders:
        with Store.read(folder) as store:
            views.append(run_view_of(store))
    texts = [*map(report_page, views), comparison_page(named(folders, views))]
    for number, page in enumerate(texts):
        path = tmp_path / f"{number}.html"
        path.write_text(page, encoding="utf-8")
        tab.open(path, width=360)
        assert tab.complaints == []
        assert tab.run(OVERFLOWING) == [0, []]
