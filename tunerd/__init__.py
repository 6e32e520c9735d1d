"""Tune neural networks for the share of a GPU on which they will be served."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunerd.system.version import __version__

if TYPE_CHECKING:
    from tunerd.artifacts.loading import LoadedModel, LoadError, MismatchWarning, load


__all__ = ["LoadError", "LoadedModel", "MismatchWarning", "__version__", "load"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from tunerd.artifacts import loading

        return getattr(loading, name)
    raise AttributeError(f"module 'tunerd' has no attribute '{name}'")
