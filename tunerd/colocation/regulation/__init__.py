"""Where the models of a mix stop, and which of their parts do not run at once: found by measuring.

After GACER (arXiv 2304.11745), which cuts each tenant's sequence of operators by pointers and lets
segments of several run beside each other, by coordinate descent. Here:

    values.py    a regulation: where each member stops, and which parts are apart
    search.py    coordinate descent over regulations, by whatever measures one; no clock
    measure.py   measures one by the engine under a closed load
    find.py      both, with the baselines: a plan that was found, and what was measured

A compiled artifact has kernels for one batch: operators are not cut into chunks along the batch, as
GACER does besides.
"""
