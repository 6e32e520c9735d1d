"""Names of a package that are imported when they are used."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib import import_module
from typing import Any


def lazy_name(package: str, modules: Mapping[str, Collection[str]], name: str) -> Any:
    """Return what a package's `__getattr__` is asked for.

    modules: the names in each module, which is called as it is imported.

    Raises AttributeError for a name in none of them.
    """
    for module, names in modules.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module '{package}' has no attribute '{name}'")
