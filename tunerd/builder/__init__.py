"""Candidate -> Build: a candidate compiled to a library that a slice loads without a compiler."""
