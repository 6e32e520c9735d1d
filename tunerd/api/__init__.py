"""tunerd from Python: what the commands do, as functions that return values.

    run = tunerd.tune("model.onnx", gpu_pct=40, budget_secs=600)
    print(run.verdict, run.speedup.value)
    y = run.artifact.load()(x)

Nothing here prints, configures logging or ends the process. Errors for people are TunerdError:
`tunerd/errors.py` draws their tree. What takes long tells of it through callbacks.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tunerd.api.colocation import colocate_bench, colocate_check, colocate_regulate
    from tunerd.api.matrices import Matrix, MatrixOptions, carry_out_matrix, matrix
    from tunerd.api.mixes import colocate_plan
    from tunerd.api.placing import colocate_place, foresee_place
    from tunerd.api.run import Artifact, ReviewedShare, Run, open_run
    from tunerd.api.sizes import SizedRun, carry_out_sizes, results_of, tune_sizes
    from tunerd.api.studies import ProfileResult, bench, compare, profile
    from tunerd.api.tuning import (
        Plan,
        TuneOptions,
        carry_out,
        choose_precision,
        choose_share,
        plan,
        plan_of,
        review_share,
        tune,
    )

# Who tunes needs nothing of what serves, and nobody needs all.
_MODULES = {
    "colocation": ("colocate_bench", "colocate_check", "colocate_regulate"),
    "matrices": ("Matrix", "MatrixOptions", "carry_out_matrix", "matrix"),
    "mixes": ("colocate_plan",),
    "placing": ("colocate_place", "foresee_place"),
    "run": ("Artifact", "ReviewedShare", "Run", "open_run"),
    "sizes": ("SizedRun", "carry_out_sizes", "results_of", "tune_sizes"),
    "studies": ("ProfileResult", "bench", "compare", "profile"),
    "tuning": (
        *("Plan", "TuneOptions", "carry_out", "choose_precision", "choose_share", "plan"),
        *("plan_of", "review_share", "tune"),
    ),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

# What a program does not configure logging for is not printed.
logging.getLogger("tunerd").addHandler(logging.NullHandler())

__all__ = [
    "Artifact",
    "Matrix",
    "MatrixOptions",
    "Plan",
    "ProfileResult",
    "ReviewedShare",
    "Run",
    "SizedRun",
    "TuneOptions",
    "bench",
    "carry_out",
    "carry_out_matrix",
    "carry_out_sizes",
    "choose_precision",
    "choose_share",
    "colocate_bench",
    "colocate_check",
    "colocate_place",
    "colocate_plan",
    "colocate_regulate",
    "compare",
    "foresee_place",
    "matrix",
    "open_run",
    "plan",
    "plan_of",
    "profile",
    "results_of",
    "review_share",
    "tune",
    "tune_sizes",
]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
