"""Ray: nodes, and the tuners and slices that live on them.

nodes (who has what) -> crew (who works in a run) -> actors (Ray) -> workers (what an actor runs).
"""
