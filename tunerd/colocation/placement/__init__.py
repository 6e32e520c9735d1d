"""Which device gets which job: models that serve, and tuning runs, on the GPUs of a cluster.

    placer.py      events in, instructions out: who waits, who runs where, what memory is promised
    values.py      devices, jobs, what is seen of them, and the instructions
    policies/      which of the devices that can take a job it gets; one file each
    job_file.py    the file that says which jobs there are
    host.py        the devices of one machine, and the programs on them; through Ray on others
    keeper.py      ends a program in order when whoever placed it ends
    fleet.py       the devices of all machines
    placing.py     the jobs of a file placed, started, and tried again

The placer has no clock and starts nothing: whoever runs the jobs tells it what happened and when.
An instance of MIG is a device of its own. Nothing here makes, ends or resizes one.
"""
