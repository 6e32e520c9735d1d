"""The machine, below everything: processes, files, devices, clocks, logs."""
