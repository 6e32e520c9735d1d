"""Shorter timings, for every process of a test run that finds this folder in its PYTHONPATH.

A whole model is timed for seconds, so that a difference of a hundredth is told from noise. No test
asks for that, and some hundred runs would each wait for it. Python imports this module at start;
it changes the constants below as soon as their module has been imported.
"""

from __future__ import annotations

import atexit
import gc
import sys
from importlib.machinery import PathFinder

# Thousands of processes start so, and most need no `typing`, nor what `importlib.abc` imports.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any


def _model_samples(module: Any) -> None:
    from dataclasses import replace

    module.MODEL = replace(module.MODEL, min_samples=10, max_samples=10, min_sample_secs=0.005)


def _finalists(module: Any) -> None:
    module.FINAL_SAMPLES = 20  # the least
    module.FINAL_SAMPLE_SECS = dict.fromkeys(module.FINAL_SAMPLE_SECS, 0.0005)


def _first_warm_up(module: Any) -> None:
    module._FIRST_WARM_UP_SECS = module._WARM_UP_SECS


def _rounds(module: Any) -> None:
    module._CELL_SAMPLE_SECS = dict.fromkeys(module._CELL_SAMPLE_SECS, 0.005)


def _engine_load(module: Any) -> None:
    module._LEAST_SECS, module._MOST_SECS = 0.25, 0.5


def _pair_rounds(module: Any) -> None:
    module.measure.__kwdefaults__["round_secs"] = 0.25


def _no_collection(module: Any) -> None:
    module._collect = lambda: None  # no test serves for long


_CHANGES: dict[str, Callable[[Any], None]] = {
    "tunerd.vocabulary.measurement": _model_samples,
    "tunerd.runner.profiles": _finalists,
    "tunerd.colocation.planning.engine_cost": _engine_load,
    "tunerd.colocation.planning.pairs": _pair_rounds,
    "tunerd.colocation.undisturbed": _no_collection,
    "tunerd.studies.matrix.profiles": _rounds,
    "tunerd.studies.profile.measuring": _first_warm_up,
}


class _Finder:
    """Finds the modules of `_CHANGES`, and changes them at the end of their import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        change = _CHANGES.get(fullname)
        spec = PathFinder.find_spec(fullname, path, target) if change else None
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            change(module)

        loader.exec_module = exec_module
        return spec


# Imports make many objects and no garbage: looking for it took a seventh of them.
gc.set_threshold(100_000, 20, 50)
atexit.register(gc.freeze)
sys.meta_path.insert(0, _Finder())
