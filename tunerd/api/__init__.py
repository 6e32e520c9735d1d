"""tunerd from Python: what the commands do, as functions that return values.

    run = tunerd.tune("model.onnx", gpu_pct=40, budget_secs=600)
    print(run.verdict, run.speedup.value)
    y = run.artifact.load()(x)

Nothing here prints, configures logging or ends the process. Errors for people are TunerdError:
`tunerd/errors.py` draws their tree. What takes long tells of it through callbacks.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from tunerd.system.lazy_names import lazy_name

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
    "tunerd.api.colocation": ("colocate_bench", "colocate_check", "colocate_regulate"),
    "tunerd.api.matrices": ("Matrix", "MatrixOptions", "carry_out_matrix", "matrix"),
    "tunerd.api.mixes": ("colocate_plan",),
    "tunerd.api.placing": ("colocate_place", "foresee_place"),
    "tunerd.api.run": ("Artifact", "ReviewedShare", "Run", "open_run"),
    "tunerd.api.sizes": ("SizedRun", "carry_out_sizes", "results_of", "tune_sizes"),
    "tunerd.api.studies": ("ProfileResult", "bench", "compare", "profile"),
    "tunerd.api.tuning": (
        *("Plan", "TuneOptions", "carry_out", "choose_precision", "choose_share", "plan"),
        *("plan_of", "review_share", "tune"),
    ),
}

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
    return lazy_name(__name__, _MODULES, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
