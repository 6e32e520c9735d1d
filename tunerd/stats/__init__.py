"""Samples -> statements: intervals, verdicts, ranks; nothing here measures anything."""
