"""Put machine code into the imports of a library, which TVM has packed with CUDA source.

The layout (TVM's src/target/codegen.cc and cuda_fallback_module.cc): integers are little-endian
and of 8 bytes, strings and lists have their length before them.

    size of the rest | list: where each module's children begin | list: children, by position
    | for each module: string kind | unless its kind is "_lib": string bytes

The bytes of a CUDA module are: string format | list of functions | string code. A function is:

    string key | string name | list of types, 4 bytes each | list of strings: launch parameters
    | list of tags, 4 bytes each
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from tunerd.candidates.base import DeviceKernel

_LIBRARY = b"_lib"  # the host's code, which has no bytes here
_CUDA = b"cuda"  # the kind of a CUDA module, and the format of one that holds source

# A DLDataType: code, bits, lanes.
_DTYPES = {
    "handle": struct.pack("<BBH", 3, 64, 1),
    "tensormap": struct.pack("<BBH", 3, 64, 1),  # passed by value; its handle says where it is
    "int32": struct.pack("<BBH", 0, 32, 1),
    "int64": struct.pack("<BBH", 0, 64, 1),
}
_LAUNCH = (
    b"blockIdx.x",
    b"blockIdx.y",
    b"blockIdx.z",
    b"threadIdx.x",
    b"tirx.use_dyn_shared_memory",
)

_PLAIN, _TENSOR_MAP = struct.pack("<i", 0), struct.pack("<i", 1)  # tags

T = TypeVar("T")


def with_cubins(blob: bytes, source: bytes, cubins: Mapping[str, bytes]) -> bytes:
    """Replace the CUDA module of `source` by one for each distinct cubin.

    Args:
        cubins: by the name of each kernel of the source; several may be in one.

    Raises KeyError where a kernel has none, and ValueError where no module holds the source.
    """
    modules = _unpacked(blob)
    head, tail = _string(_CUDA), _string(source)
    holding = [m for m in modules if m.kind == _CUDA and m.body.endswith(tail)]
    old = next((m for m in holding if m.body.startswith(head)), None)
    if old is None:
        raise ValueError("no CUDA module of the library holds the source")
    functions_in: dict[bytes, list[bytes]] = {}
    for name, function in _functions(old.body).items():
        functions_in.setdefault(cubins[name], []).append(function)
    new = [
        _Module(_CUDA, _string(b"cubin") + _list(functions) + _string(cubin))
        for cubin, functions in functions_in.items()
    ]
    for module in modules:
        module.children = [x for c in module.children for x in (new if c is old else (c,))]
    position = modules.index(old)
    modules[position : position + 1] = new
    return _packed(modules)


def with_kernels(blob: bytes, kernels: Iterable[DeviceKernel]) -> bytes:
    """Add a CUDA module for each kernel, as a child of the library."""
    modules = _unpacked(blob)
    new = [_Module(_CUDA, _cubin_body(kernel)) for kernel in kernels]
    library = next((m for m in modules if m.kind == _LIBRARY), None)
    if library is None:
        library = _Module(_LIBRARY, b"", list(modules))
        modules.insert(0, library)
    library.children += new
    return _packed([*modules, *new])


def _cubin_body(kernel: DeviceKernel) -> bytes:
    has_maps = "tensormap" in kernel.types
    tags = [_TENSOR_MAP if t == "tensormap" else _PLAIN for t in kernel.types if has_maps]
    function = (
        _string(kernel.symbol.encode())
        + _string(b"")
        + _list(_DTYPES[t] for t in kernel.types)
        + _list(_string(tag) for tag in _LAUNCH)
        + _list(tags)
    )
    return _string(b"cubin") + _list([function]) + _string(kernel.cubin)


@dataclass(eq=False)
class _Module:
    kind: bytes
    body: bytes = field(repr=False)
    children: list[_Module] = field(default_factory=list)


def _unpacked(blob: bytes) -> list[_Module]:
    reader = _Reader(blob)
    reader.integer()
    begins, positions = reader.list_of(reader.integer), reader.list_of(reader.integer)
    modules = []
    while not reader.ended:
        kind = reader.string()
        modules.append(_Module(kind, b"" if kind == _LIBRARY else reader.string()))
    for module, begin, end in zip(modules, begins, begins[1:], strict=False):
        module.children = [modules[position] for position in positions[begin:end]]
    return modules


def _packed(modules: list[_Module]) -> bytes:
    begins, children = [0], []
    for module in modules:
        children += [modules.index(child) for child in module.children]
        begins.append(len(children))
    parts = [_list(map(_integer, begins)), _list(map(_integer, children))]
    for module in modules:
        parts.append(_string(module.kind))
        if module.kind != _LIBRARY:
            parts.append(_string(module.body))
    return _string(b"".join(parts))


def _functions(body: bytes) -> dict[str, bytes]:
    """Return the bytes of each function of a CUDA module, by its key."""
    reader = _Reader(body)
    reader.string()
    found = {}
    for _ in range(reader.integer()):
        start = reader.at
        key = reader.string()
        reader.string()
        reader.list_of(lambda: reader.take(4))
        reader.list_of(reader.string)
        reader.list_of(lambda: reader.take(4))
        found[key.decode()] = body[start : reader.at]
    return found


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    @property
    def ended(self) -> bool:
        return self.at >= len(self._data)

    def take(self, size: int) -> bytes:
        self.at += size
        return self._data[self.at - size : self.at]

    def integer(self) -> int:
        return int(struct.unpack("<Q", self.take(8))[0])

    def string(self) -> bytes:
        return self.take(self.integer())

    def list_of(self, item: Callable[[], T]) -> list[T]:
        return [item() for _ in range(self.integer())]


def _integer(value: int) -> bytes:
    return struct.pack("<Q", value)


def _string(data: bytes) -> bytes:
    return _integer(len(data)) + data


def _list(items: Iterable[bytes]) -> bytes:
    packed = list(items)
    return _integer(len(packed)) + b"".join(packed)
