"""What others, or clocks held down, did to a run: for the page, the terminal and the document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tunerd.records.tally import Disturbed
from tunerd.system.text import count_text, one_line
from tunerd.vocabulary.outcome import TaskOutcome


def trials_sentence(disturbed: Disturbed) -> str:
    """Return how many trials of the search were disturbed and by whom, "" where none was."""
    if not disturbed.trials:
        return ""
    return (
        f"{disturbed.trials:,} of {count_text(disturbed.of, 'trial')} "
        f"{'was' if disturbed.trials == 1 else 'were'} measured beside others or with clocks held "
        f"down, mostly by this: {one_line(disturbed.mostly)}."
    )


def finals_sentence(tasks: Sequence[TaskOutcome], model_by: str) -> str:
    """Return what of the finals was disturbed, "" where nothing was.

    Args:
        model_by: what disturbed the timing of the whole model.
    """
    causes = [task.disturbed_by for task in tasks if task.disturbed_by and task.taken is None]
    parts = [f"the finalists of {count_text(len(causes), 'task')}"] if causes else []
    parts += ["the whole model"] if model_by else []
    if not parts:
        return ""
    return (
        f"The device did not become quiet: {' and '.join(parts)} were measured all the same "
        f"({one_line(model_by or causes[0])}). The same command measures that again."
    )


def disturbance_sentences(
    disturbed: Disturbed, tasks: Sequence[TaskOutcome] = (), model_by: str = ""
) -> list[str]:
    """Return both sentences, or those of them that there are."""
    return list(filter(None, (trials_sentence(disturbed), finals_sentence(tasks, model_by))))


def disturbance_json(
    disturbed: Disturbed, tasks: Sequence[TaskOutcome] = (), model_by: str = ""
) -> dict[str, Any]:
    """Return the same for json.dumps."""
    return {
        "trials": disturbed.trials,
        "trials_of": disturbed.of,
        "trials_by": disturbed.mostly,
        "tasks": [t.task_id for t in tasks if t.disturbed_by and t.taken is None],
        "model_by": model_by,
    }
