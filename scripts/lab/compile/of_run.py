"""A run on CPUs as it is compiled again: its model's kernels, and the winners of its tasks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tunerd.builder.objects import Objects


@dataclass(frozen=True)
class OfRun:
    """What a run leaves for a compilation."""

    kernels: Any
    winners: dict[str, Any]  # of the tasks that the model has now, by task_id
    target: Any
    pct: int
    proofs: Any

    def compile(self, folder: Path, *, tuned: bool = True, objects: Objects | None = None) -> None:
        """Write the artifact with the winners, or with default schedules alone."""
        from tunerd.artifacts.compile import compile_artifact

        compile_artifact(
            self.kernels.lowered, self.kernels.tasks, self.winners if tuned else {}, self.target,
            folder, model=self.kernels.model, pct=self.pct, proofs=self.proofs, objects=objects,
        )  # fmt: skip


def of_run(run: Path, onnx: Path) -> OfRun:
    from tunerd.artifacts.manifest import read_manifest
    from tunerd.frontend.kernels import kernels_of
    from tunerd.frontend.model import read_model
    from tunerd.records.store import Store
    from tunerd.vocabulary import TargetSpec

    said = read_manifest(run / "artifact")
    target = TargetSpec(said["target"]["kind"], said["target"]["json"])
    kernels = kernels_of(read_model(onnx), target)
    with Store.read(run) as store:
        known = {task.task_id for task in kernels.tasks}
        outcomes = [o for o in store.task_outcomes() if o.task_id in known]
        winners = {o.task_id: o.winner for o in outcomes if o.is_tuned}
        return OfRun(kernels, winners, target, said["share"]["pct"], store.proofs()[:1])
