"""ONNX files: read, shapes fixed, simplified, rewritten; and ONNX Runtime as the reference."""
