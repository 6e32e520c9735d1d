"""A model as TensorRT runs it: built from its ONNX file, under the cap of this process.

Takes what `pip install tensorrt` brings, of version 10 or later. An engine computes in the types of
the file. TensorRT times its own kernels while it builds, so what is built under a cap is for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def engine_of(path: Path, inputs: Sequence[Any], *, tf32: bool) -> Callable[[], Any]:
    """Build a file and return a call that queues one inference on PyTorch's current stream.

    Args:
        tf32: whether products of float32 may be in TF32.
        inputs: tensors of PyTorch on the GPU, in the order of the file.

    Raises ImportError where TensorRT is not installed, and RuntimeError for a file that it refuses.
    """
    import tensorrt as trt
    import torch

    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    # The types of the file; from version 11 on there are no other networks.
    typed = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    network = builder.create_network(0 if typed is None else 1 << int(typed))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(path)):
        said = [parser.get_error(nth).desc() for nth in range(parser.num_errors)]
        raise RuntimeError(f"TensorRT does not read {path.name}: {'; '.join(said)}")
    config = builder.create_builder_config()
    if not tf32:
        config.clear_flag(trt.BuilderFlag.TF32)  # which is on by default
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise RuntimeError(f"TensorRT makes no engine of {path.name}")
    engine = trt.Runtime(logger).deserialize_cuda_engine(plan)
    context = engine.create_execution_context()
    types = {
        trt.DataType.FLOAT: torch.float32,
        trt.DataType.HALF: torch.float16,
        trt.DataType.INT32: torch.int32,
        trt.DataType.INT64: torch.int64,
        trt.DataType.BOOL: torch.bool,
    }
    given = iter(inputs)
    tensors = {}
    for nth in range(engine.num_io_tensors):
        name = engine.get_tensor_name(nth)
        dtype, shape = types[engine.get_tensor_dtype(name)], tuple(engine.get_tensor_shape(name))
        tensors[name] = torch.empty(shape, dtype=dtype, device="cuda")
        if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT:
            tensors[name].copy_(next(given))
        context.set_tensor_address(name, tensors[name].data_ptr())

    def call() -> tuple[Any, ...]:
        if not context.execute_async_v3(torch.cuda.current_stream().cuda_stream):
            raise RuntimeError("TensorRT does not run its engine; its log says why")
        return tuple(tensors.values())

    return call
