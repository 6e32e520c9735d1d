"""Model -> Kernels: simplified, lowered, and its tasks extracted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tunerd.errors import InputError
from tunerd.frontend.model import FixedModel, simplified
from tunerd.vocabulary import Model, TargetSpec, Task

if TYPE_CHECKING:
    from tunerd.frontend.relax.lowering import Lowered


@dataclass(frozen=True)
class Extracted:
    """What a search has to know of a model."""

    tasks: tuple[Task, ...]
    touched_bytes: int  # over how much an inference reaches: `profiles` says what that is for


@dataclass(frozen=True)
class Kernels(Extracted):
    """A model as kernels, and the tasks that tuning them makes."""

    model: Model
    lowered: Lowered = field(repr=False)


@dataclass(frozen=True)
class Selection:
    """Some tasks of a model, and how many trials each of them may have."""

    task_ids: tuple[str, ...]
    trials_per_task: int

    def among(self, tasks: Sequence[Task]) -> tuple[Task, ...]:
        """Return the selected ones of a model's tasks; InputError where it has not all of them."""
        if missing := set(self.task_ids) - {t.task_id for t in tasks}:
            raise InputError(
                f"the model has no task {', '.join(sorted(missing))} for this target; `tunerd "
                "tune --dry-run --json` lists those that it has"
            )
        return tuple(t for t in tasks if t.task_id in self.task_ids)


def kernels_of(fixed: FixedModel, target: TargetSpec) -> Kernels:
    """Simplify and lower a model and extract its tasks; ModelError where that cannot be done."""
    from tunerd.frontend.relax.lowering import lower, touched_bytes
    from tunerd.frontend.tasks import extract_tasks

    model, tenants = simplified(fixed), fixed.tenants
    del fixed  # its weights, where nobody else has them
    lowered = lower(model, target)
    tasks = extract_tasks(lowered, target, precision=model.precision, tenants=tenants)
    model = replace(model, notes=(*model.notes, *lowered.notes))
    return Kernels(tasks, touched_bytes(lowered), model, lowered)
