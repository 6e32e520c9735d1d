"""Relax: the import of an ONNX graph, passes over it, and its lowering to calls of kernels."""
