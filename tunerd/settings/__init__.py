"""What flags and recipe files fill in, checked once, at the edge."""

from tunerd.settings.tune import TuneSettings, parse_duration

__all__ = ["TuneSettings", "parse_duration"]
