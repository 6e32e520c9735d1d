"""Which device gets which job: models that serve, and tuning runs, on the GPUs of a cluster.

    placer.py      events in, instructions out: who waits, who runs where, what memory is promised
    values.py      devices, jobs, what is seen of them, and the instructions
    policies/      which of the devices that can take a job it gets; one file each

It has no clock and starts nothing: whoever runs the jobs tells it what happened and when. An
instance of MIG is a device of its own. Nothing here makes, ends or resizes one.
"""
