"""Ray: nodes, and the tuners and slices that live on them.

nodes (who has what) -> membership (who works in a run) -> ray_cluster (Ray) -> actor_bodies (what
an actor runs).
"""
