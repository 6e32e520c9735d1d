"""Write operators that TVM does not know, or knows wrongly, as others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunerd.frontend.onnx import decompositions, quantized, selections, suppression, transforms
from tunerd.frontend.onnx.builder import Builder, Decomposition, decompose
from tunerd.frontend.onnx.graphs import STANDARD_DOMAINS
from tunerd.frontend.onnx.inference import infer_shapes
from tunerd.frontend.onnx.loops import unrolled_loops
from tunerd.frontend.onnx.recurrent import unrolled
from tunerd.frontend.onnx.resampling import resampled

if TYPE_CHECKING:
    import onnx

# Operators whose functions, as the standard has them, replace them. TVM's importer takes Attention
# for another vendor's operator of that name, and lacks the others, or attributes of theirs.
_FUNCTIONS = {
    "Attention",
    "CausalConvWithState",
    "Celu",
    "CenterCropPad",
    "LinearAttention",
    "NegativeLogLikelihoodLoss",
    "RotaryEmbedding",
    "SoftmaxCrossEntropyLoss",
    "SpaceToDepth",
    "SwiGLU",
    "Swish",
}
_DOMAIN = "tunerd.functions"
_MAX_DEPTH = 8  # of functions that are made of functions
_DECOMPOSITIONS: dict[str, Decomposition] = {
    "BatchNormalization": decompositions.trained_norm,
    "Col2Im": decompositions.folded,
    "Compress": decompositions.compressed,
    "ConvInteger": quantized.convolved_integers,
    "CumProd": decompositions.scanned,
    "CumSum": decompositions.scanned,
    "DFT": transforms.transformed,
    "DeformConv": selections.deformed,
    "Det": decompositions.determinant,
    "Dropout": decompositions.kept_all,
    "EyeLike": decompositions.identity_like,
    "GRU": unrolled,
    "LSTM": unrolled,
    "MaxPool": decompositions.pooled_places,
    "NonMaxSuppression": suppression.suppressed,
    "QLinearConv": quantized.convolved,
    "QLinearMatMul": quantized.multiplied,
    "RNN": unrolled,
    "Resize": resampled,
    "ReverseSequence": decompositions.turned,
    "STFT": transforms.transformed_frames,
    "TensorScatter": decompositions.updated,
    "TfIdfVectorizer": selections.counted_grams,
    "TopK": selections.ranked,
    "Unsqueeze": decompositions.listed_axes,
}


def primitive(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return `proto` with some operators as ONNX's functions for them, and loops unrolled.

    Raises Refused for a loop that cannot be.
    """
    return unrolled_loops(_inlined(proto))


def _inlined(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return `proto` with some operators as the functions that ONNX defines for them."""
    from onnx import helper, inliner

    for _ in range(_MAX_DEPTH):
        if not any(_is_inlined(node) for node in proto.graph.node):
            break
        proto = infer_shapes(proto)
        build = Builder(proto)
        for node in proto.graph.node:
            function = _function_of(node, build) if _is_inlined(node) else None
            if function is not None:
                function.domain = node.domain = _DOMAIN
                function.name = node.op_type = f"{node.op_type}{len(proto.functions)}"
                proto.functions.append(function)
        if not proto.functions:
            break
        proto.opset_import.append(helper.make_opsetid(_DOMAIN, 1))
        proto = inliner.inline_local_functions(proto, convert_version=True)
    return proto


def _is_inlined(node: onnx.NodeProto) -> bool:
    if node.domain not in STANDARD_DOMAINS:
        return False
    if node.op_type == "LayerNormalization":  # TVM's has one output
        return any(node.output[1:])
    return node.op_type in _FUNCTIONS


def _function_of(node: onnx.NodeProto, build: Builder) -> onnx.FunctionProto | None:
    """Return the body of a node's operator, for the types of its inputs; None where it has none."""
    import onnx
    from onnx import defs

    schema = defs.get_schema(node.op_type, build.opset, "")
    fixed = [v for v in schema.function_opset_versions if v <= build.opset]
    if fixed:
        return onnx.FunctionProto.FromString(schema.get_function_with_opset_version(max(fixed)))
    open_ = [v for v in schema.context_dependent_function_opset_versions if v <= build.opset]
    if not open_:
        return None
    types = [build.type_proto(name).SerializeToString() for name in node.input]
    body = schema.get_context_dependent_function_with_opset_version(
        max(open_), node.SerializeToString(), types
    )
    return onnx.FunctionProto.FromString(body)


def written_out(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return `proto`, whose shapes are inferred, with operators as simpler ones; may change it.

    Raises Refused for what cannot be written so.
    """
    proto = unrolled_loops(proto)  # of conditions that are constants by now
    if not decompose(proto, _DECOMPOSITIONS):
        return proto
    return infer_shapes(proto)
