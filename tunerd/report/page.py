"""One self-contained HTML page about a run: it opens offline and asks nothing of any server."""

from __future__ import annotations

from tunerd.records import Store
from tunerd.records.paths import Paths
from tunerd.report.blocks import pairs, section
from tunerd.report.condition_section import condition_section
from tunerd.report.drift_section import drift_section
from tunerd.report.facts_section import facts_section
from tunerd.report.failure_section import failure_section
from tunerd.report.fidelity_section import fidelity_section
from tunerd.report.figures import headline, share_asked
from tunerd.report.frame import page, write_page
from tunerd.report.latency_section import latency_section
from tunerd.report.markup import Child, Markup, element
from tunerd.report.run_sections import correctness_section, history_section, model_section
from tunerd.report.slice_section import obtained_texts, slice_section
from tunerd.report.story import Story, story_of
from tunerd.report.task_section import task_section
from tunerd.report.time_section import where_time_went_section
from tunerd.system.text import duration_text, secs_text


def write_report(paths: Paths, store: Store) -> None:
    """Write the page of a run into its folder, in one step."""
    write_page(paths.report, report_page(story_of(store)))


def report_page(story: Story) -> str:
    """Return the page about a run; of one without a result, as far as it got."""
    outcome = story.outcome
    return page(
        f"{story.name}: {headline(story).text}",
        latency_section(outcome) if outcome else _no_latency(),
        slice_section(story),
        task_section(story),
        fidelity_section(outcome.tasks) if outcome else None,
        history_section(story.history),
        correctness_section(outcome) if outcome else None,
        where_time_went_section(story.time_use),
        drift_section(story.drift),
        failure_section(story),
        condition_section(story),
        facts_section(story),
        model_section(story),
        head=_header(story),
    )


def _header(story: Story) -> Markup:
    verdict = headline(story)
    where = [share_asked(story.settings), *obtained_texts(story)]
    return element(
        "header",
        element(
            "p",
            element("bdi", story.name, class_="model"),
            *(element("span", element("bdi", text)) for text in where),
            class_="eyebrow",
        ),
        element("h1", verdict.claim, " ", element("span", f"{verdict.grounds}.")),
        pairs(_key_figures(story), "figures"),
        class_=verdict.tone,
    )


def _key_figures(story: Story) -> list[tuple[str, Child]]:
    figures: list[tuple[str, Child]] = []
    if story.outcome is not None:
        compared = story.outcome.end_to_end
        figures += [
            ("Default", secs_text(compared.base_secs)),
            ("Tuned", secs_text(compared.new_secs)),
        ]
    tuned = sum(t.is_tuned for t in story.tasks)
    figures.append(("Tuned tasks", f"{tuned} of {len(story.tasks)}"))
    if story.undecided:
        figures.append(("Undecided tasks", f"{len(story.undecided):,}"))
    figures.append(("Trials", f"{story.trials:,}"))
    if story.open_trials and story.is_unfinished:
        figures.append(("Open trials", f"{story.open_trials:,}"))
    figures.append(("Time", duration_text(story.tuning_secs)))
    return figures


def _no_latency() -> Markup:
    words = "The run did not come to compile and time the whole model."
    return section("Before and after", lead=words)
