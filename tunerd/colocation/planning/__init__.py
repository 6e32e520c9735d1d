"""What is each model of a mix to get: shares, lanes, tenants per launch. And what it may expect.

Parts, in the order in which a mix meets them:

    mix.py          the file: models, their rates and objectives, what may be chosen
    curves.py       measured points: what a launch takes at a share, with so many tenants in it
    launched.py     points of launches of several tenants, measured by the engine
    engine_cost.py  what the engine itself takes
    features.py     what an artifact's manifest says of its work and its memory
    pairs.py        what one costs another: measured, estimated, or assumed to be none
    kept.py         points of an artifact that were measured before, beside it
    team.py         all of that as a team shares it
    estimates.py    the estimate: boosted trees over measured pairs, intervals, and a refusal
    queueing.py     waiting times of a lane: M/G/1, and launches of several requests
    placement.py    who runs where, and what each member may expect of it
    world.py        one placement -> what each member may expect, and what it breaks
    neighbours.py   who runs beside whom in one
    columns.py      lanes as columns of an integer program, members that are alike counted
    search.py       placements: greedy, then exact where the mix is small, and the gap
    slices.py       groups in launches, in slices of their own beside others' lanes
    answer.py       the best placement, "one after another", or "they do not fit, because"
    proof.py        the plan's load, run: what was expected against what came
    planned.py      all of that as one value

Nothing here starts a device but what runs `colocation.bench`: the functions called `measure`, and
`prove`.
"""
