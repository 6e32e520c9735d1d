"""A convolution by cuDNN as a value, and the descriptors of its graph as values.

    y = activation(alpha conv(x, w) + residual + bias)

Images lie as [n, h, w, c] and filters as [k, r, s, c]. cuDNN's graph API takes descriptors, objects
with attributes: here they are values (`described`), which `cudnn` sends.

Names and numbers are those of cudnn_graph.h of cuDNN 9.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

from tunerd.libraries.packages import LibraryCallError
from tunerd.vocabulary import BF16, FP16, FP32, TF32

_ALIGNMENT = 16  # bytes; TVM's tensors have more

_TYPES = {"float32": 0, "float16": 2, "bfloat16": 9}  # cudnnDataType_t
_PRECISIONS = {
    ("float32", FP32),
    ("float32", TF32),
    ("float16", FP16),
    ("bfloat16", BF16),
}
_ADD = 0  # cudnnPointwiseMode_t
_ACTIVATIONS = {
    "": None,
    "relu": 100,
    "relu6": 100,
    "tanh": 101,
    "sigmoid": 102,
    "gelu": 104,
    "swish": 106,
    "gelu_tanh": 107,
}
ACTIVATIONS = tuple(_ACTIVATIONS)


class Kind(IntEnum):
    """cudnnBackendDescriptorType_t."""

    POINTWISE = 0
    CONVOLUTION = 1
    ENGINE = 2
    CONFIG = 3
    HEURISTIC = 4
    PLAN = 5
    KNOB = 7
    CONVOLVE = 10
    COMBINE = 13
    GRAPH = 15
    PACK = 16
    TENSOR = 17
    DEVICE = 38


class Type(IntEnum):
    """cudnnBackendAttributeType_t."""

    HANDLE = 0
    DATA_TYPE = 1
    BOOLEAN = 2
    INT64 = 3
    FLOAT = 4
    DOUBLE = 5
    POINTER = 6
    CONVOLUTION_MODE = 7
    HEURISTIC_MODE = 8
    KNOB_TYPE = 9
    NOTE = 11
    POINTWISE_MODE = 14
    DESCRIPTOR = 15
    CHAR = 24


# Shared memory of a block that asks for it in bytes, threads and blocks of an SM, by compute
# capability (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability").
_ARCHITECTURES = {
    "sm_80": (163 << 10, 2048, 32),
    "sm_86": (99 << 10, 1536, 16),
    "sm_89": (99 << 10, 1536, 24),
    "sm_90": (227 << 10, 2048, 32),
    "sm_100": (227 << 10, 2048, 32),
    "sm_120": (99 << 10, 1536, 24),
}


@dataclass(frozen=True)
class Image:
    """A packed tensor [n, h, w, c]."""

    dtype: str
    shape: tuple[int, int, int, int]


@dataclass(frozen=True)
class Configuration:
    """Which kernels compute a graph, in one version of the library."""

    engine: int  # its global index
    knobs: tuple[tuple[int, int], ...]  # types and values
    workspace_bytes: int


@dataclass(frozen=True)
class ConvolutionCall:
    """A convolution, and how it is computed.

    Its pointers are x, the filters, then the residual and the bias where it has them, y, and the
    workspace.
    """

    x: Image
    filters: tuple[int, int, int, int]  # [k, r, s, c of a group], of x's type
    y: Image
    strides: tuple[int, int]
    dilations: tuple[int, int]
    before: tuple[int, int]  # padding
    after: tuple[int, int]
    precision: str = FP32
    activation: str = ""
    alpha: float = 1.0
    has_residual: bool = False  # of y's type and shape
    has_bias: bool = False  # of y's type, a value for each of its channels
    configuration: Configuration | None = None

    @property
    def text(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"), sort_keys=True)

    @staticmethod
    def parse(text: str) -> ConvolutionCall:
        """Read the text of a call; raises ValueError, KeyError or TypeError for what is none."""
        said = json.loads(text)
        x, y = (Image(said[n]["dtype"], tuple(said[n]["shape"])) for n in "xy")
        pairs = ("filters", "strides", "dilations", "before", "after")
        tuples = {name: tuple(said[name]) for name in pairs}
        chosen = said["configuration"]
        knobs = [(int(k), int(v)) for k, v in chosen["knobs"]] if chosen else []
        made = chosen and Configuration(chosen["engine"], tuple(knobs), chosen["workspace_bytes"])
        return ConvolutionCall(**{**said, **tuples, "x": x, "y": y, "configuration": made})

    @property
    def problem(self) -> str | None:
        """Say why cuDNN has no such convolution, None where it may have."""
        if (self.x.dtype, self.precision) not in _PRECISIONS:
            return f"cuDNN convolves no {self.x.dtype} in {self.precision}"
        if self.y.dtype not in (self.x.dtype, "float32"):
            return f"its result is {self.y.dtype}, of {self.x.dtype}"
        return None


# --- descriptors as values ---------------------------------------------------------------------

Attribute = tuple[int, Type, tuple[Any, ...]]  # its name, its type and its values


@dataclass(frozen=True)
class Described:
    """A descriptor. Values of the type of descriptors are the names of others."""

    name: str
    kind: Kind
    attributes: tuple[Attribute, ...]


NUMBERS = {"x": 1, "filters": 2, "residual": 3, "bias": 4, "y": 5}


def described(call: ConvolutionCall) -> tuple[Described, ...]:
    """Return the descriptors of a call's graph, each after those that it names; "graph" is last."""
    y = call.y
    given = [_tensor("x", call.x.dtype, call.x.shape), _tensor("y", y.dtype, y.shape)]
    given.append(_tensor("filters", call.x.dtype, call.filters))
    steps: list[tuple[str, int, str]] = []  # pointwise operations: name, mode, second operand
    if call.has_residual:
        given.append(_tensor("residual", y.dtype, y.shape))
        steps.append(("add residual", _ADD, "residual"))
    if call.has_bias:
        given.append(_tensor("bias", y.dtype, (1, 1, 1, y.shape[3])))
        steps.append(("add bias", _ADD, "bias"))
    activation = _ACTIVATIONS[call.activation]
    if activation is not None:
        steps.append(("activate", activation, ""))
    results = [f"before {name}" for name, _, _ in steps] + ["y"]
    between = [_tensor(r, "float32", y.shape, number=10 + i) for i, r in enumerate(results[:-1])]
    operations = list(_convolution(call, results[0]))
    for i, (name, mode, operand) in enumerate(steps):
        operations += _pointwise(name, mode, results[i], operand, results[i + 1], call.activation)
    names = ("convolve", *(name for name, _, _ in steps))
    graph = Described("graph", Kind.GRAPH, ((801, Type.DESCRIPTOR, names),))
    return (*given, *between, *operations, graph)


def _tensor(name: str, dtype: str, shape: Sequence[int], *, number: int | None = None) -> Described:
    """Describe a tensor that lies as [n, h, w, c], in cuDNN's order n, c, h, w."""
    n, h, w, c = shape
    return Described(
        name,
        Kind.TENSOR,
        (
            (901, Type.DATA_TYPE, (_TYPES[dtype],)),
            (902, Type.INT64, (n, c, h, w)),
            (903, Type.INT64, (h * w * c, 1, w * c, c)),
            (906, Type.INT64, (NUMBERS[name] if number is None else number,)),
            (900, Type.INT64, (_ALIGNMENT,)),
            (907, Type.BOOLEAN, (number is not None,)),  # between operations, not in memory
        ),
    )


def _convolution(call: ConvolutionCall, result: str) -> Iterator[Described]:
    yield Described(
        "convolution",
        Kind.CONVOLUTION,
        (
            (100, Type.DATA_TYPE, (_TYPES["float32"],)),  # sums are
            (101, Type.CONVOLUTION_MODE, (1,)),  # a cross-correlation
            (106, Type.INT64, (2,)),
            (102, Type.INT64, call.dilations),
            (103, Type.INT64, call.strides),
            (104, Type.INT64, call.after),
            (105, Type.INT64, call.before),
        ),
    )
    yield Described(
        "convolve",
        Kind.CONVOLVE,
        (
            (702, Type.DESCRIPTOR, ("convolution",)),
            (704, Type.DESCRIPTOR, ("x",)),
            (703, Type.DESCRIPTOR, ("filters",)),
            (705, Type.DESCRIPTOR, (result,)),
            (700, Type.FLOAT, (call.alpha,)),
            (701, Type.FLOAT, (0.0,)),
        ),
    )


def _pointwise(
    name: str, mode: int, x: str, operand: str, result: str, activation: str
) -> Iterator[Described]:
    clips: tuple[Attribute, ...] = ()
    if activation == "relu6" and not operand:
        clips = ((4, Type.DOUBLE, (6.0,)),)
    precision: Attribute = (1, Type.DATA_TYPE, (_TYPES["float32"],))
    kind: Attribute = (0, Type.POINTWISE_MODE, (mode,))
    yield Described(f"how to {name}", Kind.POINTWISE, (kind, precision, *clips))
    second: tuple[Attribute, ...] = ((752, Type.DESCRIPTOR, (operand,)),) if operand else ()
    yield Described(
        name,
        Kind.COMBINE,
        (
            (750, Type.DESCRIPTOR, (f"how to {name}",)),
            (751, Type.DESCRIPTOR, (x,)),
            *second,
            (753, Type.DESCRIPTOR, (result,)),
        ),
    )


def device_text(arch: str, sms: int, l2_bytes: int) -> str:
    """Return a device as cuDNN reads one, by its architecture ("sm_90").

    As a process sees it that is limited to a share by MPS: with the SMs of the share. What cuDNN
    asks for besides is of the usual size. Raises LibraryCallError for an architecture that is not
    known here.
    """
    if arch not in _ARCHITECTURES:
        raise LibraryCallError(f"nothing is known here of a GPU of {arch}, so cuDNN names no plans")
    block_bytes, threads, blocks = _ARCHITECTURES[arch]
    return json.dumps(
        {
            "version": 1,
            "deviceName": arch,
            "deviceVer": 10 * int(arch.removeprefix("sm_")),
            "driverVer": 13000,
            "cudaDeviceId": 0,
            "pciDeviceId": 0,
            "isTccDriver": 0,
            "supportCoopLaunch": 1,
            "multiProcessorCount": sms,
            "warpSize": 32,
            "regsPerBlock": 65536,
            "maxRegistersPerSM": 65536,
            "maxSharedMemoryPerBlock": 48 << 10,
            "maxSharedMemoryPerBlockOptin": block_bytes,
            "reservedSharedMemoryPerBlock": 1024,
            "oversizedSharedMemoryPerBlock": 0,
            "maxThreadsPerBlock": 1024,
            "maxThreadsPerSM": threads,
            "maxCtasPerSM": blocks,
            "maxGridSize": [2**31 - 1, 65535, 65535],
            "maxBlockSize": [1024, 1024, 64],
            "l2CacheSize": l2_bytes,
            "totalGlobalMem": 64 << 30,
            "smClockRateKHz": 1_700_000,
            "memClockRateKHz": 2_600_000,
            "memoryBusWidth": 5120,
        }
    )
