"""One self-contained HTML page about a run: it opens offline and asks nothing of any server."""

from __future__ import annotations

from tunerd.records import Store
from tunerd.records.paths import Paths
from tunerd.report.components import pairs, section
from tunerd.report.condition_section import condition_section
from tunerd.report.drift_section import drift_section
from tunerd.report.facts_section import facts_section
from tunerd.report.failure_section import failure_section
from tunerd.report.fidelity_section import fidelity_section
from tunerd.report.figures import against_onnxruntime, headline, share_asked
from tunerd.report.latency_section import latency_section
from tunerd.report.layout import page, write_page
from tunerd.report.markup import Child, Markup, element
from tunerd.report.run_sections import correctness_section, history_section, model_section
from tunerd.report.run_view import RunView, run_view_of
from tunerd.report.slice_section import obtained_texts, slice_section
from tunerd.report.task_section import task_section
from tunerd.report.time_section import where_time_went_section
from tunerd.system.text import duration_text, secs_text
from tunerd.vocabulary.outcome import ONNX_RUNTIME


def write_report(paths: Paths, store: Store) -> None:
    """Write the page of a run into its folder, in one step."""
    write_page(paths.report, report_page(run_view_of(store)))


def report_page(view: RunView) -> str:
    """Return the page about a run; of one without a result, as far as it got."""
    outcome = view.outcome
    return page(
        f"{view.name}: {headline(view).text}",
        latency_section(outcome) if outcome else _no_latency(),
        slice_section(view),
        task_section(view),
        fidelity_section(outcome.tasks) if outcome else None,
        history_section(view.history),
        correctness_section(outcome) if outcome else None,
        where_time_went_section(view.time_use),
        drift_section(view.drift),
        failure_section(view),
        condition_section(view),
        facts_section(view),
        model_section(view),
        head=_header(view),
    )


def _header(view: RunView) -> Markup:
    verdict = headline(view)
    where = [share_asked(view.settings), *obtained_texts(view)]
    return element(
        "header",
        element(
            "p",
            element("bdi", view.name, class_="model"),
            *(element("span", element("bdi", text)) for text in where),
            class_="eyebrow",
        ),
        element("h1", verdict.claim, " ", element("span", f"{verdict.grounds}.")),
        element("p", element("small", f"{verdict.small}.")) if verdict.small else None,
        pairs(_key_figures(view), "figures"),
        class_=verdict.tone,
    )


def _key_figures(view: RunView) -> list[tuple[str, Child]]:
    figures: list[tuple[str, Child]] = []
    if view.outcome is not None:
        compared = view.outcome.end_to_end
        beside = against_onnxruntime(view.outcome)
        figures += [
            *([(ONNX_RUNTIME, secs_text(beside.base_secs))] if beside else []),
            ("Tuned", secs_text(compared.new_secs)),
            ("Default", secs_text(compared.base_secs)),
        ]
    tuned = sum(t.is_tuned for t in view.tasks)
    figures.append(("Tuned tasks", f"{tuned} of {len(view.tasks)}"))
    if view.undecided:
        figures.append(("Undecided tasks", f"{len(view.undecided):,}"))
    figures.append(("Trials", f"{view.trials:,}"))
    if view.open_trials and view.is_unfinished:
        figures.append(("Open trials", f"{view.open_trials:,}"))
    figures.append(("Time", duration_text(view.tuning_secs)))
    return figures


def _no_latency() -> Markup:
    words = "The run did not come to compile and time the whole model."
    return section("Before and after", lead=words)
