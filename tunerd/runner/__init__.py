"""Build -> Measurement: how kernels and models are timed, alone and beside others."""
