"""For tests of slices, candidate sources and policies of your own: the suites that tunerd's pass.

A suite is a class for pytest: derive from it, and say in its first fixture what is tested. Nothing
else in tunerd imports this package; it needs pytest.
"""

from __future__ import annotations

from tunerd.slices.simulated import SimulatedSlice
from tunerd.testing.policies import PolicyContract
from tunerd.testing.simulation import Story, World
from tunerd.testing.slices import SliceContract
from tunerd.testing.sources import SourceContract

__all__ = [
    "PolicyContract",
    "SimulatedSlice",
    "SliceContract",
    "SourceContract",
    "Story",
    "World",
]
