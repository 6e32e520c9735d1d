"""Capped shares of a GPU: a guard outside the cluster owns the MPS daemon and its clients."""
