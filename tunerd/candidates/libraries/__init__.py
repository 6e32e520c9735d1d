"""Kernels of libraries that compute what a task does. `tunerd.libraries` says how they run."""
