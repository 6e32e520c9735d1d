"""What a report says as a JSON document, of one run and of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tunerd.report.comparison import NamedRun, against_first, task_rows
from tunerd.report.disturbance_words import disturbance_json
from tunerd.report.drift_section import drift_json
from tunerd.report.fidelity_section import fidelity_json
from tunerd.report.figures import headline
from tunerd.report.story import Story
from tunerd.report.table import outcome_json
from tunerd.report.time_table import time_json
from tunerd.vocabulary import finite, to_json


def story_json(story: Story) -> dict[str, Any]:
    """Return a run for json.dumps. `result` is as `tunerd tune --json` has it; None without one."""
    document: dict[str, Any] = finite(
        story.facts.to_json()
        | {
            "headline": headline(story).text,
            "is_finished": not story.is_unfinished,
            "began_at": story.began_at,
            "sessions": story.sessions,
            "tuning_secs": story.tuning_secs,
            "trials": story.trials,
            "trials_failed": story.failed,
            "trials_open": story.open_trials,
            "attempts_repeated": story.repeated,
            "result": outcome_json(story.outcome) if story.outcome else None,
            "tasks": [
                to_json(task)
                | {"is_tuned": task.is_tuned, "is_decided": task.task_id not in story.undecided}
                for task in story.tasks
            ],
            "slices": to_json(story.slices),
            "failures": to_json(story.failures),
            "history": to_json(story.history),
            "conditions": to_json(story.conditions),
            "fidelity": fidelity_json(story.tasks),
            "drift": drift_json(story.drift),
            "disturbed": disturbance_json(story.disturbed, story.tasks, story.model_disturbed_by),
            "time_use": time_json(story.time_use) if story.time_use else None,
        }
    )
    return document


def comparison_json(runs: Sequence[NamedRun]) -> dict[str, Any]:
    """Return runs for json.dumps, each but the first beside the first."""
    document: dict[str, Any] = finite(
        {
            "runs": [
                {"label": run.label, "folder": str(run.folder)} | story_json(run.story)
                for run in runs
            ],
            "against_first": [
                {
                    "label": other.run.label,
                    "is_comparable": other.comparison is not None,
                    "obstacles": list(other.obstacles),
                    "remarks": list(other.remarks),
                    "comparison": to_json(other.comparison),
                }
                for other in against_first(runs)
            ],
            "tasks": [
                {
                    "task_id": row.task_id,
                    "name": row.name,
                    "best_secs": [task.best_secs if task else None for task in row.tasks],
                    "default_secs": [task.default_secs if task else None for task in row.tasks],
                }
                for row in task_rows(runs)
            ],
        }
    )
    return document
