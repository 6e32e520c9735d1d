"""What flags and recipe files fill in, checked once, at the edge.

Each field says how it is said on a command line and in a recipe; both are derived from here.
"""

from tunerd.settings.texts import parse_duration
from tunerd.settings.tune import TuneSettings

__all__ = ["TuneSettings", "parse_duration"]
