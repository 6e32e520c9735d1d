"""A model -> Lowered: read, shapes fixed, simplified, imported, as calls of kernels.

onnx_file -> shapes, batch -> simplify -> rewrites, converters -> constants -> lowering; `reference`
runs the same file in ONNX Runtime. `OnnxGraph` and `RelaxGraph` are what a model is given as.
"""
