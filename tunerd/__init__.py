"""Tune neural networks for the share of a GPU on which they will be served."""

from __future__ import annotations

__version__ = "0.1.0"
