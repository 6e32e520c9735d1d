"""What MetaSchedule's sketches of a task leave open, as numbers that a search screens and ranks.

design_space (the sketches) -> knobs, access -> design (a choice, and what it amounts to) ->
estimate, cost_model (how long it may take).
"""
