"""What a kernel computes, read from its TIR: what sources that match kernels share."""
