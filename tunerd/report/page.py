"""The page of a run: it opens offline and asks nothing of any server."""

from __future__ import annotations

from tunerd.records import Store
from tunerd.records.paths import Paths
from tunerd.report import html
from tunerd.report.condition_section import condition_section
from tunerd.report.drift_section import drift_section
from tunerd.report.facts_section import facts_section, model_section
from tunerd.report.fidelity_section import fidelity_section
from tunerd.report.figures import headline, obtained_texts, rivals, share_asked
from tunerd.report.run_sections import (
    correctness_section,
    failure_section,
    history_section,
    latency_section,
)
from tunerd.report.run_view import RunView, run_view_of
from tunerd.report.slice_section import slice_section
from tunerd.report.task_section import task_section
from tunerd.report.time_section import time_section
from tunerd.report.view import View
from tunerd.system.text import duration_text, secs_text


def write_report(paths: Paths, store: Store) -> None:
    """Write the page of a run into its folder, in one step."""
    html.write_page(paths.report, report_page(run_view_of(store)))


def report_page(view: RunView) -> str:
    """Return the page about a run; of one without a result, as far as it got."""
    outcome, verdict = view.outcome, headline(view)
    sections = (
        latency_section(outcome),
        slice_section(view),
        task_section(view),
        fidelity_section(outcome.tasks) if outcome else None,
        history_section(view),
        correctness_section(outcome),
        time_section(view.time_use),
        drift_section(view.drift),
        failure_section(view),
        condition_section(view),
        facts_section(view),
        model_section(view),
    )
    return html.page(
        View(
            verdict.claim,
            sections,
            tone=verdict.tone,
            grounds=verdict.grounds,
            small=verdict.small,
            name=view.name,
            facts=(share_asked(view.settings), *obtained_texts(view)),
            figures=_key_figures(view),
            title=f"{view.name}: {verdict.text}",
        )
    )


def _key_figures(view: RunView) -> list[tuple[str, str]]:
    figures = []
    if view.outcome is not None:
        compared = view.outcome.end_to_end
        figures += [
            *((each.name, secs_text(each.compared.base_secs)) for each in rivals(view.outcome)),
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
