"""Schedules by MetaSchedule's sketches. A recipe is TVM's Trace.as_json(), without spaces."""

from __future__ import annotations

import json

from tunerd.candidates.base import (
    CandidateSource,
    LoweredKernel,
    Search,
    SearchSettings,
    module_of,
)
from tunerd.candidates.metaschedule.tensor_cores import MARK, register_intrinsics
from tunerd.vocabulary import METASCHEDULE, TargetSpec, Task


class MetaScheduleSource(CandidateSource):
    """Takes every task; one that has no sketch tells so when it is asked for candidates."""

    name = METASCHEDULE

    def imports(self, target: TargetSpec) -> tuple[str, ...]:
        return ("tvm.s_tir.meta_schedule", "xgboost")

    def lower(self, task: Task, recipe: str, lanes: int | None = None) -> LoweredKernel:
        if MARK in recipe:
            register_intrinsics()  # seconds long, and fp32 schedules without them need none
        from tvm.s_tir import Schedule
        from tvm.s_tir.schedule import Trace

        schedule = Schedule(module_of(task), error_render_level="fast")
        Trace.apply_json_to_schedule(json.loads(recipe), schedule)
        return LoweredKernel(schedule.mod)

    def search(self, settings: SearchSettings) -> Search:
        from tunerd.candidates.metaschedule.search import Searcher

        return Searcher(
            seed=settings.seed,
            threads=settings.threads,
            island_number=settings.island_number,
            sms=settings.sms,
        )
