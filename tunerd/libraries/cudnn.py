"""Plans of cuDNN: named by its heuristics, made of their names, and run on a stream.

An engine and the choices of its knobs say which kernels compute a graph. They are named for a
device that is described, so that no GPU is needed; a plan is made of them where the device is.

Numbers are those of cudnn_graph.h of cuDNN 9.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from tunerd.libraries import packages
from tunerd.libraries.cudnn_graphs import (
    NUMBERS,
    Attribute,
    Configuration,
    ConvolutionCall,
    Described,
    Kind,
    Type,
    described,
)
from tunerd.libraries.packages import LibraryCallError
from tunerd.vocabulary import CUDNN, FP32

MAX_WORKSPACE_BYTES = 64 << 20
# cudnnBackendAttributeName_t, where they are used more than once
_CONFIG_ENGINE, _CONFIG_KNOBS, _CONFIG_WORKSPACE = 300, 302, 303
_PLAN_WORKSPACE = 402
_KNOB_NAME, _KNOB_VALUE = 600, 601
_ENGINE_INDEX, _ENGINE_NOTES = 1301, 1303
_RESULTS = 202

_HEURISTIC_MODES = (3, 1, 2)  # cudnnBackendHeurMode_t: A, B, fallback
_MOST_KNOBS, _MOST_NOTES = 64, 16
# cudnnBackendNumericalNote_t
_TENSOR_CORE, _NARROWS_INPUTS, _NARROW_SUMS, _NONDETERMINISTIC = 0, 1, 2, 4

_C_TYPES: Mapping[Type, Any] = {
    Type.HANDLE: ctypes.c_void_p,
    Type.BOOLEAN: ctypes.c_bool,
    Type.INT64: ctypes.c_int64,
    Type.FLOAT: ctypes.c_float,
    Type.DOUBLE: ctypes.c_double,
    Type.POINTER: ctypes.c_void_p,
    Type.DESCRIPTOR: ctypes.c_void_p,
    Type.CHAR: ctypes.c_char,
}  # all others are enumerations


class Descriptors:
    """Descriptors that were sent, by name. They live until they are closed."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._pointers: dict[str, ctypes.c_void_p] = {}
        self._unnamed: list[ctypes.c_void_p] = []

    def __getitem__(self, name: str) -> ctypes.c_void_p:
        return self._pointers[name]

    def send(self, each: Described, *more: Attribute) -> None:
        """Make a descriptor, with attributes of this process besides its own."""
        pointer = self.new(each.kind)
        self._pointers[each.name] = pointer
        for name, kind, values in (*each.attributes, *more):
            if kind == Type.DESCRIPTOR:
                values = tuple(self._pointers[v].value for v in values)
            elif kind in (Type.HANDLE, Type.POINTER):
                values = tuple(getattr(v, "value", v) for v in values)
            array = (_C_TYPES.get(kind, ctypes.c_int) * len(values))(*values)
            self._checked(
                f"attribute {name} of {each.name}",
                self._library.cudnnBackendSetAttribute(
                    pointer, name, kind, ctypes.c_int64(len(values)), array
                ),
            )
        self._checked(each.name, self._library.cudnnBackendFinalize(pointer))

    def new(self, kind: Kind) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        status = self._library.cudnnBackendCreateDescriptor(kind, ctypes.byref(made))
        self._checked("a descriptor", status)
        self._unnamed.append(made)
        return made

    def values(self, of: ctypes.c_void_p, name: int, kind: Type, most: int) -> list[Any]:
        """Return the values of an attribute."""
        array = (_C_TYPES.get(kind, ctypes.c_int) * most)()
        count = self._got(of, name, kind, most, array)
        return list(array[:count])

    def parts(self, of: ctypes.c_void_p, name: int, kind: Kind, most: int) -> list[ctypes.c_void_p]:
        """Return the descriptors, of a kind, that an attribute has."""
        made = [self.new(kind) for _ in range(most)]
        array = (ctypes.c_void_p * most)(*(m.value for m in made))
        return made[: self._got(of, name, Type.DESCRIPTOR, most, array)]

    def count(self, of: ctypes.c_void_p, name: int) -> int:
        """Return how many descriptors an attribute has, at most."""
        return self._got(of, name, Type.DESCRIPTOR, 0, None)

    def _got(self, of: ctypes.c_void_p, name: int, kind: Type, most: int, array: Any) -> int:
        count = ctypes.c_int64()
        self._checked(
            f"attribute {name}",
            self._library.cudnnBackendGetAttribute(
                of, name, kind, ctypes.c_int64(most), ctypes.byref(count), array
            ),
        )
        return count.value if array is None else min(most, count.value)

    def _checked(self, what: str, status: int) -> None:
        checked(self._library, what, status)

    def close(self) -> None:
        for pointer in reversed(self._unnamed):
            self._library.cudnnBackendDestroyDescriptor(pointer)
        self._unnamed.clear()


def configurations(call: ConvolutionCall, device: str) -> list[Configuration]:
    """Return what cuDNN's heuristics name for a call on a described device, the best first.

    Left out is what rounds operands or sums further than the call's precision says, what sums in an
    order that differs from run to run, and what wants too large a workspace. Raises
    packages.MissingLibraryError, and LibraryCallError where cuDNN has no such graph.
    """
    library = packages.load(CUDNN)
    found: dict[Configuration, None] = {}  # in their order
    with contextlib.closing(Descriptors(library)) as sent:
        for each in described(call):
            sent.send(each)
        content = tuple(bytes([b]) for b in device.encode() + b"\0")
        sent.send(Described("device", Kind.DEVICE, ((2702, Type.CHAR, content),)))
        for mode in _HEURISTIC_MODES:
            name = f"heuristic {mode}"
            attributes: tuple[Attribute, ...] = (
                (201, Type.DESCRIPTOR, ("graph",)),
                (200, Type.HEURISTIC_MODE, (mode,)),
                (204, Type.DESCRIPTOR, ("device",)),
            )
            with contextlib.suppress(LibraryCallError):  # a mode that does not know such graphs
                sent.send(Described(name, Kind.HEURISTIC, attributes))
                most = sent.count(sent[name], _RESULTS)
                for config in sent.parts(sent[name], _RESULTS, Kind.CONFIG, most):
                    if (said := _configuration(sent, config, call)) is not None:
                        found[said] = None
    return list(found)


def _configuration(
    sent: Descriptors, config: ctypes.c_void_p, call: ConvolutionCall
) -> Configuration | None:
    """Return what a configuration says, None for one that is not wanted."""
    (engine,) = sent.parts(config, _CONFIG_ENGINE, Kind.ENGINE, 1)
    notes = set(sent.values(engine, _ENGINE_NOTES, Type.NOTE, _MOST_NOTES))
    unwanted = {_NARROWS_INPUTS, _NARROW_SUMS, _NONDETERMINISTIC}
    if call.precision == FP32:
        unwanted.add(_TENSOR_CORE)
    (workspace_bytes,) = sent.values(config, _CONFIG_WORKSPACE, Type.INT64, 1)
    if notes & unwanted or workspace_bytes > MAX_WORKSPACE_BYTES:
        return None
    (index,) = sent.values(engine, _ENGINE_INDEX, Type.INT64, 1)
    knobs = []
    for knob in sent.parts(config, _CONFIG_KNOBS, Kind.KNOB, _MOST_KNOBS):
        (kind,) = sent.values(knob, _KNOB_NAME, Type.KNOB_TYPE, 1)
        knobs.append((kind, *sent.values(knob, _KNOB_VALUE, Type.INT64, 1)))
    return Configuration(index, tuple(sorted(knobs)), workspace_bytes)


class Plan:
    """A call that is ready. Lives as long as the process."""

    def __init__(self, call: ConvolutionCall, handle: Handle) -> None:
        """Make a call's plan again; raises LibraryCallError where that is not to be had here."""
        if call.configuration is None:
            raise LibraryCallError("the call says no engine of cuDNN's")
        self._handle = handle
        names = ["x", "filters"]
        names += ["residual"] if call.has_residual else []
        names += ["bias"] if call.has_bias else []
        self._ids = tuple(NUMBERS[name] for name in (*names, "y"))
        self._sent = Descriptors(handle.library)
        try:
            self._make(call, call.configuration)
        except LibraryCallError as error:
            self._sent.close()
            raise LibraryCallError(
                f"the plan by engine {call.configuration.engine} with knobs "
                f"{dict(call.configuration.knobs)} cannot be made again here: {error}"
            ) from error

    def _make(self, call: ConvolutionCall, chosen: Configuration) -> None:
        sent, handle = self._sent, self._handle.value
        for each in described(call):
            sent.send(each, *(((800, Type.HANDLE, (handle,)),) if each.kind == Kind.GRAPH else ()))
        engine: tuple[Attribute, ...] = (
            (1300, Type.DESCRIPTOR, ("graph",)),
            (_ENGINE_INDEX, Type.INT64, (chosen.engine,)),
        )
        sent.send(Described("engine", Kind.ENGINE, engine))
        for kind, value in chosen.knobs:
            knob: tuple[Attribute, ...] = (
                (_KNOB_NAME, Type.KNOB_TYPE, (kind,)),
                (_KNOB_VALUE, Type.INT64, (value,)),
            )
            sent.send(Described(f"knob {kind}", Kind.KNOB, knob))
        knobs = tuple(f"knob {kind}" for kind, _ in chosen.knobs)
        config: tuple[Attribute, ...] = ((_CONFIG_ENGINE, Type.DESCRIPTOR, ("engine",)),)
        config += ((_CONFIG_KNOBS, Type.DESCRIPTOR, knobs),) if knobs else ()
        sent.send(Described("config", Kind.CONFIG, config))
        of_handle: Attribute = (400, Type.HANDLE, (handle,))
        of_config: Attribute = (401, Type.DESCRIPTOR, ("config",))
        sent.send(Described("plan", Kind.PLAN, (of_handle, of_config)))
        (needed,) = sent.values(sent["plan"], _PLAN_WORKSPACE, Type.INT64, 1)
        if needed > chosen.workspace_bytes:
            raise LibraryCallError(
                f"it needs a workspace of {needed} bytes, not {chosen.workspace_bytes}"
            )

    def __call__(self, pointers: Sequence[int | None], stream: int) -> None:
        """Queue the convolution on a stream."""
        *tensors, workspace = pointers
        attributes: tuple[Attribute, ...] = (
            (1000, Type.INT64, self._ids),
            (1001, Type.POINTER, tuple(tensors)),
            (1003, Type.POINTER, (workspace,)),
        )
        with contextlib.closing(Descriptors(self._handle.library)) as sent:
            sent.send(Described("pack", Kind.PACK, attributes))
            self._handle.execute(self._sent["plan"], sent["pack"], stream)


class Handle:
    """cuDNN on the current device."""

    def __init__(self) -> None:
        self.library = packages.load(CUDNN)
        self.value = ctypes.c_void_p()
        self._turn = threading.Lock()  # the stream is said in the handle
        status = self.library.cudnnCreate(ctypes.byref(self.value))
        checked(self.library, "a handle", status)

    def plan(self, text: str) -> Plan:
        return Plan(ConvolutionCall.parse(text), self)

    def execute(self, plan: ctypes.c_void_p, pack: ctypes.c_void_p, stream: int) -> None:
        with self._turn:
            status = self.library.cudnnSetStream(self.value, ctypes.c_void_p(stream))
            checked(self.library, "the stream", status)
            status = self.library.cudnnBackendExecute(self.value, plan, pack)
            checked(self.library, "the plan", status)


def checked(library: Any, what: str, status: int) -> None:
    """Raise LibraryCallError for a cudnnStatus_t that is no success."""
    if status:
        name = library.cudnnGetErrorString
        name.restype = ctypes.c_char_p
        reason = ctypes.create_string_buffer(1024)
        library.cudnnGetLastErrorString(reason, ctypes.c_size_t(len(reason)))
        said = reason.value.decode(errors="replace").strip()
        raise LibraryCallError(
            f"cuDNN refuses {what}: {name(status).decode()} (status {status})"
            + (f", {said}" if said else "")
        )
