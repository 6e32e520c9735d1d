"""Replicas of an artifact side by side, and beside other load."""
