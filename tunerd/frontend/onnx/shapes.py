"""Fix the shapes of a model's inputs, from the file and from what the user gave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tunerd.errors import InputError, ModelError

if TYPE_CHECKING:
    import onnx

Shape = tuple[int, ...]
MAX_RANK = 32  # of NumPy before 2.0
MAX_DIM = 2**31 - 1  # what TVM's 32-bit indices reach
_UNNAMED = ("", "?", "-1", "None")  # what exporters write for a dimension without a name


@dataclass(frozen=True)
class Declared:
    """An input as the file declares it. A dimension is a number, a name, or None: open, unnamed."""

    name: str
    dims: tuple[int | str | None, ...] | None  # None: the file does not say how many there are

    def __str__(self) -> str:
        if self.dims is None:
            return f"{self.name}:?"
        return f"{self.name}:{','.join('?' if d is None else str(d) for d in self.dims)}"


def declared_inputs(graph: onnx.GraphProto) -> tuple[Declared, ...]:
    """Return the real inputs in order: initializers may be listed as inputs, too."""
    constants = {i.name for i in graph.initializer}
    return tuple(_declared(i) for i in graph.input if i.name not in constants)


def _declared(value: onnx.ValueInfoProto) -> Declared:
    if not value.type.HasField("tensor_type"):
        raise ModelError(f"input '{value.name}' is not a tensor; only tensors can be inputs")
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return Declared(value.name, None)
    dims: list[int | str | None] = []
    for dim in tensor.shape.dim:
        if dim.HasField("dim_value") and dim.dim_value > 0:
            dims.append(int(dim.dim_value))
        else:
            name = dim.dim_param.strip()
            dims.append(None if name in _UNNAMED else name)
    return Declared(value.name, tuple(dims))


def resolve_shapes(
    inputs: tuple[Declared, ...],
    *,
    shapes: Mapping[str, Shape],
    dims: Mapping[str, int],
) -> dict[str, Shape]:
    """Return the shape of every input.

    Raises InputError for a name or a number that does not fit the file, and ModelError with the
    flags to give where a dimension stays open.
    """
    _check_names(inputs, shapes, dims)
    bound = dict(dims)
    for declared in inputs:
        if declared.name in shapes:
            _bind(declared, shapes[declared.name], bound)
    fixed: dict[str, Shape] = {}
    flags: list[str] = []
    for declared in inputs:
        if declared.name in shapes:
            fixed[declared.name] = shapes[declared.name]
            continue
        if declared.dims is None:
            flags.append(f"--shape {declared.name}:N,N,...")
            continue
        known = [bound.get(d, d) if isinstance(d, str) else d for d in declared.dims]
        if None in known:
            wanted = ",".join(str(d) if isinstance(d, int) else "N" for d in known)
            flags.append(f"--shape {declared.name}:{wanted}")
            continue
        flags.extend(f"--dim {d}={_likely(i)}" for i, d in enumerate(known) if isinstance(d, str))
        fixed[declared.name] = tuple(d for d in known if isinstance(d, int))
    if flags:
        found = "; ".join(str(d) for d in inputs if d.dims is None or not _is_closed(d))
        raise ModelError(
            f"the model leaves input dimensions open ({found}); "
            f"fix them, for example with {' '.join(dict.fromkeys(flags))}"
        )
    return fixed


def _likely(axis: int) -> str:
    return "1" if axis == 0 else "N"


def _is_closed(declared: Declared) -> bool:
    return declared.dims is not None and all(isinstance(d, int) for d in declared.dims)


def _check_names(
    inputs: tuple[Declared, ...], shapes: Mapping[str, Shape], dims: Mapping[str, int]
) -> None:
    names = [d.name for d in inputs]
    for name, shape in shapes.items():
        if name not in names:
            raise InputError(f"the model has no input '{name}'; its inputs are {_listed(names)}")
        if any(not 1 <= d <= MAX_DIM for d in shape):
            at_fault = "below 1" if min(shape) < 1 else f"above {MAX_DIM}"
            raise InputError(
                f"the shape {','.join(map(str, shape))} of '{name}' has a dimension {at_fault}; "
                f"every dimension must be 1 or more, up to {MAX_DIM}"
            )
    open_names = sorted({d for i in inputs for d in i.dims or () if isinstance(d, str)})
    for name, size in dims.items():
        if name not in open_names:
            has = "all their sizes are fixed; for another batch give --batch"
            if open_names:
                has = f"the open ones are {_listed(open_names)}"
            raise InputError(f"the model's inputs have no open dimension '{name}': {has}")
        if not 1 <= size <= MAX_DIM:
            raise InputError(f"dimension '{name}' is {size}; it must be 1 or more, up to {MAX_DIM}")


def _listed(names: list[str]) -> str:
    return ", ".join(f"'{n}'" for n in names)


def _bind(declared: Declared, shape: Shape, bound: dict[str, int]) -> None:
    """Check a given shape against the file's, and note what its named dimensions are."""
    if declared.dims is None:
        return
    given = f"{declared.name}:{','.join(map(str, shape))}"
    if len(shape) != len(declared.dims):
        raise InputError(
            f"--shape {given} has {len(shape)} dimensions; "
            f"the model's input has {len(declared.dims)} ({declared})"
        )
    for axis, (size, found) in enumerate(zip(shape, declared.dims, strict=True)):
        if isinstance(found, int) and found != size:
            advice = f"; to change the batch, give --batch {size}" if axis == 0 else ""
            raise InputError(
                f"--shape {given} differs from the model's own {declared} in dimension {axis}: "
                f"only open dimensions can be set{advice}"
            )
        if isinstance(found, str) and bound.setdefault(found, size) != size:
            raise InputError(
                f"dimension '{found}' is given as {bound[found]} and, "
                f"with --shape {given}, as {size}; give one of them"
            )


def fix_shapes(proto: onnx.ModelProto, shapes: Mapping[str, Shape]) -> None:
    """Write input shapes into `proto` and drop every other shape, which may contradict them.

    Raises ModelError where an output is not a tensor.
    """
    graph = proto.graph
    constants = {i.name for i in graph.initializer}
    inputs = [i for i in graph.input if i.name not in constants]
    del graph.input[:]
    graph.input.extend(inputs)
    proto.ir_version = max(proto.ir_version, 4)  # before, initializers had to be inputs
    for value in graph.input:
        dims = value.type.tensor_type.shape
        del dims.dim[:]
        dims.SetInParent()
        for size in shapes[value.name]:
            dims.dim.add().dim_value = size
    del graph.value_info[:]
    for value in graph.output:
        if value.type.WhichOneof("value") not in ("tensor_type", None):
            raise ModelError(
                f"output '{value.name}' is not a tensor; only tensors can be outputs, so export "
                "the model without it"
            )
        value.type.tensor_type.ClearField("shape")
