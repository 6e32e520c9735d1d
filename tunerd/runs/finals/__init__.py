"""Records -> Outcome: the quiet second look that chooses, and whether the result is right and fast.

best_builds (of the search) -> winners (by task), in the slices of quiet -> finals (the whole model)
-> verify, compare.
"""
