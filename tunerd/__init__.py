"""Tune neural networks for the share of a GPU on which they will be served.

The names below are imported when they are used: `import tunerd` is light, and an installation that
only serves artifacts has no more than `tunerd.load` needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunerd.system.lazy_names import lazy_name
from tunerd.system.version import __version__

if TYPE_CHECKING:
    from tunerd.api import (
        Artifact,
        Matrix,
        Plan,
        ProfileResult,
        Run,
        SizedRun,
        bench,
        compare,
        matrix,
        open_run,
        plan,
        profile,
        tune,
        tune_sizes,
    )
    from tunerd.artifacts.loading import LoadedModel, LoadError, MismatchWarning, load
    from tunerd.artifacts.sized import SizedModel
    from tunerd.artifacts.super_model import SuperModel
    from tunerd.errors import TunerdError

_API = (
    "Artifact",
    "Matrix",
    "Plan",
    "ProfileResult",
    "Run",
    "SizedRun",
    "bench",
    "compare",
    "matrix",
    "open_run",
    "plan",
    "profile",
    "tune",
    "tune_sizes",
)
_MODULES = {
    "tunerd.api": _API,
    "tunerd.artifacts.loading": ("LoadError", "LoadedModel", "MismatchWarning", "load"),
    "tunerd.artifacts.sized": ("SizedModel",),
    "tunerd.artifacts.super_model": ("SuperModel",),
    "tunerd.errors": ("TunerdError",),
}

__all__ = [
    "Artifact",
    "LoadError",
    "LoadedModel",
    "Matrix",
    "MismatchWarning",
    "Plan",
    "ProfileResult",
    "Run",
    "SizedModel",
    "SizedRun",
    "SuperModel",
    "TunerdError",
    "__version__",
    "bench",
    "compare",
    "load",
    "matrix",
    "open_run",
    "plan",
    "profile",
    "tune",
    "tune_sizes",
]


def __getattr__(name: str) -> Any:
    return lazy_name(__name__, _MODULES, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
