"""What a report says as a JSON document, of one run and of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tunerd.report.comparison import NamedRun, against_first, task_rows
from tunerd.report.disturbance_text import disturbance_json
from tunerd.report.drift_section import drift_json
from tunerd.report.fidelity_section import fidelity_json
from tunerd.report.figures import headline, share_words
from tunerd.report.run_view import RunView
from tunerd.report.table import outcome_json
from tunerd.report.time_section import time_json
from tunerd.vocabulary import finite, to_json


def run_view_json(view: RunView) -> dict[str, Any]:
    """Return a run for json.dumps. `result` is as `tunerd tune --json` has it; None without one."""
    document: dict[str, Any] = finite(
        view.facts.to_json()
        | {
            "headline": headline(view).text,
            "is_finished": not view.is_unfinished,
            "began_at": view.began_at,
            "sessions": view.sessions,
            "tuning_secs": view.tuning_secs,
            "trials": view.trials,
            "trials_failed": view.failed,
            "trials_open": view.open_trials,
            "attempts_repeated": view.repeated,
            "result": outcome_json(view.outcome, share=share_words(view)) if view.outcome else None,
            "tasks": [
                to_json(task)
                | {"is_tuned": task.is_tuned, "is_decided": task.task_id not in view.undecided}
                for task in view.tasks
            ],
            "slices": to_json(view.slices),
            "failures": to_json(view.failures),
            "history": to_json(view.history),
            "conditions": to_json(view.conditions),
            "fidelity": fidelity_json(view.tasks),
            "drift": drift_json(view.drift),
            "disturbed": disturbance_json(view.disturbed, view.tasks, view.model_disturbed_by),
            "time_use": time_json(view.time_use) if view.time_use else None,
        }
    )
    return document


def comparison_json(runs: Sequence[NamedRun]) -> dict[str, Any]:
    """Return runs for json.dumps, each but the first beside the first."""
    document: dict[str, Any] = finite(
        {
            "runs": [
                {"label": run.label, "folder": str(run.folder)} | run_view_json(run.view)
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
