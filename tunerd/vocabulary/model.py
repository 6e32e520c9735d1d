"""A model and its tasks."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from tunerd.vocabulary import winograd

if TYPE_CHECKING:
    import numpy as np

Arrays = dict[str, "np.ndarray"]


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape (elements per axis, all positive) and NumPy dtype name of one tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Layout:
    """How a kernel wants a weight: its axes split, and the parts in another order.

    split: the shape with each axis of the weight as one or several axes.
    axes: of that, as numpy.transpose takes them.
    winograd: the outputs of a tile in each direction, where a kernel takes filters of shape [3, 3,
        in, out] as Winograd's algorithm transforms them; these are split. 0: weights as they are.
    """

    split: tuple[int, ...]
    axes: tuple[int, ...]
    winograd: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.split[axis] for axis in self.axes)

    def of(self, weight: np.ndarray) -> np.ndarray:
        """Return a weight in this layout, as a copy that lies in one piece."""
        if self.winograd:
            weight = winograd.transformed(weight, self.winograd)
        return weight.reshape(self.split).transpose(self.axes).copy()

    def back(self, laid_out: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """Return a weight of this shape from what `of` has made of it.

        It is the same, but for rounding where filters are transformed.
        """
        order = sorted(range(len(self.axes)), key=lambda n: self.axes[n])
        as_one = laid_out.transpose(order)
        if self.winograd:
            return winograd.restored(as_one, self.winograd, shape)
        return as_one.reshape(shape)

    def place(self, index: Sequence[Any], shape: Sequence[int]) -> list[Any]:
        """Return the index at which `of` puts an element of a weight of this shape.

        index: of integers, or of TVM's expressions; so is what is returned. Transformed filters
            have no such elements.
        """
        parts: list[Any] = []
        for at, extent in zip(index, shape, strict=True):
            inner, first = extent, len(parts)
            while inner > 1 or len(parts) == first:
                outer, inner = inner, inner // self.split[len(parts)]
                part = at if inner == 1 else at // inner
                parts.append(part if outer == extent else part % (outer // inner))
        parts += [0] * (len(self.split) - len(parts))  # of one element each
        return [parts[axis] for axis in self.axes]


@dataclass(frozen=True)
class Behind:
    """What an output is computed from."""

    dtypes: frozenset[str]  # of all values on the way, and its own
    is_input: bool  # whether an input is among them


# Blocks by which sources know kernels of quantized products, which the graph's pass writes.
INTEGER_PRODUCTS = "integer_products"  # sums
STAGED = "staged"  # padded or moved values that it reads
VNNI_LANES, VNNI_GROUP = 16, 4  # of an instruction: sums, and products that are added up to each


@dataclass(frozen=True)
class Ways:
    """A model's outputs, by name for each set of inputs, computed in ways that are all right."""

    known: tuple[Arrays, ...]  # where least is rounded off
    others: tuple[tuple[Arrays, ...], ...]  # the same, but for rounding
    steps: Mapping[str, float]  # by output, one step of those that are of few values


@dataclass(frozen=True)
class Packed:
    """What another process of this machine makes a graph of."""

    content: bytes = field(repr=False)
    key: str = ""  # of a file with its large weights, in `content`
    fd: int | None = None  # that file, open


class Graph(Protocol):
    """What a model computes, as its author wrote it, with every shape fixed."""

    kind: ClassVar[str]  # how processes tell graphs apart
    reference: ClassVar[str]  # what runs it unchanged, that compiled models must agree with

    @property
    def file_name(self) -> str:
        """A name for a file of it, by its content."""

    def packed(self) -> Packed:
        """Return it for another process; the file is open as long as the graph is there."""

    def to_bytes(self) -> bytes:
        """Return what such a file holds; ModelError where none can hold it."""

    def weight_bytes(self) -> int:
        """Return what its weights take, about."""

    def outputs(self) -> tuple[TensorSpec, ...]:
        """Return its outputs in order; ModelError for those that no artifact can have."""

    def simplified(self, inputs: tuple[TensorSpec, ...]) -> tuple[Self, tuple[str, ...]]:
        """Return a graph of the same values that is simpler, and notes; may take seconds."""

    def to_relax(self, model: str) -> Any:
        """Return TVM's IRModule of it, with inputs input_0 and so on; ModelError where none is."""

    def with_rounded_weights(self, precision: str) -> Self:
        """Return it with float32 weights rounded to a precision, and widened again."""

    def behind(self, outputs: Sequence[TensorSpec]) -> Mapping[str, Behind]:
        """Return by name what each output is computed from."""

    def ways(self, inputs: Sequence[Arrays]) -> Ways | None:
        """Compute the outputs in other ways than `run`; None where there is none."""

    def run(self, inputs: Sequence[Arrays]) -> list[Arrays]:
        """Return the outputs for each set of inputs, on this machine's CPU."""


@dataclass(frozen=True)
class Model:
    """A model with every shape fixed, simplified; what the tasks are extracted from."""

    name: str
    digest: str  # sha256 of the weights and the graph with its shapes fixed, hex
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    graph: Graph = field(repr=False, compare=False)
    notes: tuple[str, ...] = ()  # what import had to change, for the report
    precision: str = ""  # that kernels compute in; "": as exported


@dataclass(frozen=True)
class TargetSpec:
    """What code is generated for. `json` is TVM's own target description."""

    kind: str  # "llvm" or "cuda"
    json: str  # of the slice's host or GPU, never the builder's

    @property
    def is_cuda(self) -> bool:
        return self.kind == "cuda"


# What kernels compute in; sums are in fp32 in each.
FP32, TF32, FP16, BF16 = "fp32", "tf32", "fp16", "bf16"
STORED_AS = " are stored as "  # in the note of a model that says how much of it has 16 bits
AS_EXPORTED = "as exported"  # what is said where no precision was asked for

# Where kernels serve several models (builder.tenants): the unit of distances between the models'
# weights, and to what each tensor of a model's is aligned, as what cudaMalloc returns.
SLOT_BYTES = 256


@dataclass(frozen=True)
class Task:
    """One distinct kernel of a model, or of several models of one architecture at once.

    What it takes and computes is said of one model: `in_lanes` says what is taken of several.
    """

    task_id: str  # 12 hex digits, the same for equal workloads of any model, in any process
    name: str
    weight: int  # calls per inference
    flops: float  # of one call, of all models; 0 where TVM cannot tell
    args: tuple[TensorSpec, ...]  # the function's arguments in order, outputs last
    weight_args: tuple[int, ...]  # which arguments hold constants of the model
    target: TargetSpec = field(repr=False)
    mod_json: str = field(repr=False)  # the unscheduled IRModule, as tvm.ir.save_json writes it
    precision: str = FP32  # that it computes in, whatever its tensors' types
    tenants: int = 1  # models whose calls it takes together

    def for_tenants(self, count: int) -> Task:
        """Return the task of this kernel for so many models; of the ids each follows from each."""
        if count == self.tenants:
            return self
        own = int(self.task_id, 16) ^ _of_count(self.tenants) ^ _of_count(count)
        flops = self.flops / self.tenants * count
        return replace(self, task_id=f"{own:012x}", flops=flops, tenants=count)


def _of_count(tenants: int) -> int:
    digest = hashlib.sha256(f"{tenants} tenants".encode()).hexdigest()
    return 0 if tenants == 1 else int(digest[:12], 16)


def in_lanes(
    specs: Sequence[TensorSpec], weights: Collection[int], count: int
) -> tuple[TensorSpec, ...]:
    """Return what a kernel of several models takes, from what that of one does.

    First the lanes' slots; of a weight the one that slots count from, flat; of all else a row for
    each lane (`builder.tenants`).
    """
    return (
        TensorSpec("slots", (count,), "int32"),
        *(
            replace(s, shape=(math.prod(s.shape),) if i in weights else (count, *s.shape))
            for i, s in enumerate(specs)
        ),
    )


def architecture(target_json: Any) -> str:
    """Return the GPU's or CPU's architecture that a target's code is for; empty: it says none.

    Core counts and host parts of a target may differ between hosts with the same device.
    """
    try:
        fields = json.loads(target_json)
    except (ValueError, TypeError, RecursionError):
        return ""
    return str(fields.get("arch") or fields.get("mcpu") or "") if isinstance(fields, dict) else ""
