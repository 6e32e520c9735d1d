"""Load an artifact and run it. Needs tvm, tvm-ffi and numpy, and nothing else of tunerd's.

An artifact is a folder:

    manifest.json   what it is, for whom, and the sha256 of the other files
    model.so        the compiled model: relax functions, kernels, no weights
    weights.bin     uint64 n | n bytes of JSON | padding | the tensors, each aligned to 64 bytes
    sample.bin      inputs on which it was timed, in the same form, where the user gave some

A packed one has these for several shares of a device, or for several sizes of the inputs;
`tunerd.artifacts.manifest` says how, and `tunerd.artifacts.sized` chooses between sizes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np

from tunerd.artifacts.device import (
    OwnThreads,
    enable,
    mismatches,
    open_device,
    preload_cuda,
    sm_count,
)
from tunerd.artifacts.libraries import mismatches as other_versions
from tunerd.artifacts.libraries import provide
from tunerd.artifacts.manifest import (
    LIBRARY,
    SAMPLE,
    SLOTS,
    WEIGHTS,
    LoadError,
    Manifest,
    check_files,
    is_counter,
    nearest,
    read_all_variants,
    stored_at,
)
from tunerd.artifacts.weights import in_one_piece, map_weights
from tunerd.vocabulary import Arrays, TensorSpec

if TYPE_CHECKING:
    from tunerd.artifacts.captured import CapturedModel, Recorder, StagedModel, StagedSegments
    from tunerd.artifacts.segments import Cut

__all__ = ["LoadError", "LoadedModel", "MismatchWarning", "load", "map_weights"]


class MismatchWarning(UserWarning):
    """The artifact runs, but elsewhere than on what it was tuned for."""


def load(
    path: str | os.PathLike[str],
    *,
    device: int | None = None,
    beside: Iterable[LoadedModel] = (),
    tenant_bytes: int | None = None,
) -> LoadedModel:
    """Check an artifact's files against its manifest and load it.

    `device` is the index of the GPU, 0 if not given; an artifact for CPUs takes none. Of several
    shares in one artifact, the kernels tuned for the nearest number of SMs (on CPUs: cores) are
    loaded. Warns with MismatchWarning where the device, its SMs or its cores are not those of the
    tuning. Raises LoadError for files that are missing or changed, and for libraries, or a CPU's
    instructions, that kernels need and that are missing, before any code of theirs runs.
    Of several sizes in one artifact a `SizedModel` comes back, which chooses at each call.

    Of an artifact that serves several tenants a `SuperModel` comes back. `tenant_bytes` is how much
    memory of the device their weights may take, without a limit if not given.

    Weights that models of `beside` have, by the sha256 that the manifests name, are copied from
    there, on the device, and are not read: artifacts of one model at several shares have the same.
    A file is read of which they lack a tensor.
    """
    folder = Path(path)
    variants = read_all_variants(folder)
    if "tenants" in variants[0]:
        from tunerd.artifacts.super_model import SuperModel

        check_files(folder, variants)
        return SuperModel(folder, variants, device=device, tenant_bytes=tenant_bytes)
    known = _known(beside, variants)
    check_files(folder, variants, unread=known)
    if variants[0].get("sizes"):
        from tunerd.artifacts.sized import SizedModel

        return SizedModel(folder, variants, device=device, known=known)
    return LoadedModel(folder, variants, device=device, known=known)


class LoadedModel:
    """A loaded artifact. Call it with NumPy arrays, or `run_dlpack` it with tensors of the device.

    `manifest` is that of the variant that runs. Calls from several threads take turns: TVM's
    virtual machine carries out one at a time, and the model has one set of buffers. To run two at
    once, load the artifact twice, and on a GPU give each a stream.
    """

    def __init__(
        self,
        folder: Path,
        variants: Sequence[Manifest],
        *,
        device: int | None,
        known: Mapping[str, Mapping[str, Any]],
        own: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    ) -> None:
        """Load a variant whose files were checked.

        known: weights of others, by the sha256 of their file and by name, to be copied.
        own: weights that are on the device, in the same way, and are used where they lie. Weights
            of one name in two files are two tensors: shares may lay them out differently.
        """
        is_cuda = variants[0]["target"]["kind"] == "cuda"
        if is_cuda:
            preload_cuda()
        import tvm
        from tvm.runtime.vm import VirtualMachine

        self._tvm = tvm
        self._folder = folder
        self._turn = threading.Lock()  # held while the virtual machine runs
        self._stream = 0  # on which the last call was queued
        self._device = open_device(tvm, is_cuda, device)
        seen = sm_count(self._device, is_cuda)
        self.manifest = manifest = nearest(variants, seen)
        self.inputs = _specs(manifest["inputs"])
        self.outputs = _specs(manifest["outputs"])
        for sentence in mismatches(manifest, variants, seen, self._device, is_cuda):
            warnings.warn(sentence, MismatchWarning, stacklevel=3)
        provide(manifest, device or 0)
        for sentence in other_versions(manifest):
            warnings.warn(sentence, MismatchWarning, stacklevel=3)
        if not is_cuda:
            enable(manifest)
        self._threads = None if is_cuda else OwnThreads(tvm, manifest)
        library_path = stored_at(folder, manifest, LIBRARY)
        weights_path = stored_at(folder, manifest, WEIGHTS)
        try:
            self._held = _library(manifest["files"][LIBRARY], library_path)
            self._library = self._held.module
            # The virtual machine keeps the list and adds the CPU to it.
            self._machine = VirtualMachine(self._library, [self._device])
            self._main = self._machine["main"]
        except Exception as error:  # TVM raises many kinds
            raise LoadError(
                f"{library_path} cannot be loaded here: {error}; it was compiled for another "
                "kind of machine or another TVM, so tune on this one"
            ) from error
        loaded = known.get(manifest["files"][WEIGHTS])
        weights = map_weights(weights_path) if loaded is None else loaded
        if missing := [name for name in manifest["weights"] if name not in weights]:
            raise LoadError(
                f"{weights_path} has no tensor '{missing[0]}', which the manifest names; copy "
                "the folder again"
            )
        there = own.get(manifest["files"][WEIGHTS], {})
        others = {name: weights[name] for name in manifest["weights"] if name not in there}
        if is_cuda:
            empty = functools.partial(tvm.runtime.empty, device=self._device)
            placed = in_one_piece(others, empty)
        else:
            to_device = self._to_device if loaded is None else self._copied
            placed = {name: to_device(weight) for name, weight in others.items()}
        self._weights = tuple((placed | dict(there))[name] for name in manifest["weights"])
        self._device.sync()  # the weights are there, whichever stream reads them first

    @property
    def weights(self) -> dict[str, Any]:
        """The weights by name, as tensors on the device, which the model reads at each call."""
        return dict(zip(self.manifest["weights"], self._weights, strict=True))

    @property
    def weights_of_files(self) -> dict[str, dict[str, Any]]:
        """All weights that it has on the device, by the sha256 of their file and by name."""
        return {self.manifest["files"][WEIGHTS]: self.weights}

    @property
    def sample(self) -> Arrays | None:
        """The inputs by name on which the model was timed; None where those were random."""
        if SAMPLE not in self.manifest["files"]:
            return None
        return map_weights(stored_at(self._folder, self.manifest, SAMPLE))

    def __call__(self, *inputs: Any) -> Arrays:
        """Return the outputs by name, as NumPy arrays.

        Takes one array per input in order, or one dict of arrays by name. An array is a NumPy
        array or anything with `__dlpack__`; what lies on the device already is not copied.
        """
        outputs = self.run_dlpack(*inputs)
        return {name: output.numpy() for name, output in outputs.items()}

    def run_dlpack(self, *inputs: Any, stream: Any = None) -> dict[str, Any]:
        """Return the outputs by name as tensors on the device, which `from_dlpack` takes as is.

        Takes what a call takes. On a GPU the work is queued on `stream`, a handle of CUDA as an
        int or what has `__cuda_stream__`, as streams of cuda.core and PyTorch have; without it, on
        the default stream. The call does not wait for it: synchronize before an input is
        overwritten or another stream reads an output. A call on another stream than the last one's
        waits for that one first, which must still exist, since both use the same buffers.

        Raises ValueError for a stream where the model runs on CPUs.
        """
        queue = self._handle_of(stream)
        with self._running(), self._queued_on(queue):
            outputs = self._main(*self._placed(inputs), *self._weights)
        names = (o.name for o in self.outputs)
        return dict(zip(names, self._fields(outputs), strict=True))

    def captured(self, stream: Any = None) -> CapturedModel:
        """Return the model as a CUDA graph with inputs and outputs of its own, for servers.

        It is queued on `stream`, as `run_dlpack` takes it, or on one of its own, which does not
        wait for the default stream. A model may be captured several times, and these run at once;
        weights are shared. A launch takes the host some microseconds.

        Raises ValueError where the model runs on CPUs, and RuntimeError with CUDA's name for an
        error. Needs the package cuda-bindings.
        """
        from tunerd.artifacts.captured import CapturedModel

        return CapturedModel(self.recorder(stream))

    def staged(self, stream: Any, count: int = 1) -> tuple[StagedModel, ...]:
        """Return the model as CUDA graphs that begin and end in host memory, as engines use them.

        They run on `stream` one after the other: with two, the inputs of one may be written while
        the other runs. Takes and raises what `captured` does.
        """
        from tunerd.artifacts.captured import StagedModel

        recorder = self.recorder(stream)
        return tuple(StagedModel(recorder, is_ahead=count > 1) for _ in range(count))

    def staged_segments(self, stream: Any, limits: Cut) -> StagedSegments:
        """Return the model as `staged` does, in several graphs.

        Args:
            limits: how long segments may be in seconds, or after which kernels they end.
        """
        from tunerd.artifacts.captured import StagedSegments

        return StagedSegments(self.recorder(stream), limits)

    def recorder(self, stream: Any) -> Recorder:
        """Return what makes graphs of the model on a stream; takes and raises what `captured` does.

        Slots of tenants are one of its inputs.
        """
        from tunerd.artifacts.captured import Recorder

        if self.manifest["target"]["kind"] != "cuda":
            raise ValueError("the model runs on CPUs: there is nothing to capture; call it")
        weights = {n: self._copied(w) if is_counter(n) else w for n, w in self.weights.items()}
        slots = weights.pop(SLOTS, None)
        inputs = self.inputs
        if slots is not None:
            inputs = (*inputs, TensorSpec(SLOTS, tuple(slots.shape), str(slots.dtype)))
        handle = None if stream is None else self._handle_of(stream)
        given = list(weights.values())
        return Recorder(self._library, self._device, inputs, self.outputs, given, handle)

    def timed_calls(self, inputs: Mapping[str, Any], calls: int) -> float:
        """Return the host's seconds for `calls` calls in a row, with one wait at the end.

        The inputs are on the device before the clock starts, and no output leaves it. Calls from
        other threads wait until the last has ended.
        """
        arguments = (*self._placed((inputs,)), *self._weights)
        main, device = self._main, self._device
        with self._running():
            device.sync()
            started = time.perf_counter()
            for _ in range(calls):
                main(*arguments)
            device.sync()
            return time.perf_counter() - started

    def instrument(self, seen: Callable[..., None] | None) -> None:
        """Have TVM's virtual machine call `seen` before and after what it calls; None ends that.

        It gets the function, its name, whether it is before, the result if it is after, and the
        arguments, in the thread that runs the model; what it raises ends that call of the model.
        """
        self._machine.set_instrument(seen)

    def _handle_of(self, stream: Any) -> int:
        if stream is None:
            return 0
        if self.manifest["target"]["kind"] != "cuda":
            raise ValueError("a stream was given, but the model runs on CPUs: give none")
        if hasattr(stream, "__cuda_stream__"):
            return int(stream.__cuda_stream__()[1])
        return int(stream)

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """Have the virtual machine for this thread alone, and on CPUs the model's own threads."""
        with self._turn:
            if self._threads is not None:
                self._threads.use()
            yield

    @contextlib.contextmanager
    def _queued_on(self, stream: int) -> Iterator[None]:
        """Have what TVM queues in this block go to a stream of the device."""
        if stream != self._stream:
            self._device.sync(self._stream)
            self._stream = stream
        if not stream:  # TVM's own
            yield
            return
        import tvm_ffi

        with tvm_ffi.use_raw_stream(self._device, stream):
            yield

    def _placed(self, inputs: tuple[Any, ...]) -> list[Any]:
        given = self._by_name(inputs)
        return [self._as_tensor(given[spec.name], spec) for spec in self.inputs]

    def _by_name(self, inputs: tuple[Any, ...]) -> dict[str, Any]:
        if len(inputs) == 1 and isinstance(inputs[0], Mapping):
            given = dict(inputs[0])
        elif len(inputs) == len(self.inputs):
            given = dict(zip((i.name for i in self.inputs), inputs, strict=True))
        else:
            raise TypeError(
                f"got {len(inputs)} arrays; the model takes {len(self.inputs)}, in this order, or "
                f"a dict of them: {_listed(self.inputs)}"
            )
        expected = {i.name for i in self.inputs}
        if given.keys() != expected:
            raise TypeError(
                f"got inputs named {sorted(given)}; the model takes {_listed(self.inputs)}"
            )
        return given

    def _as_tensor(self, value: Any, spec: TensorSpec) -> Any:
        return self._to_device(self._checked(value, spec))

    def _checked(self, value: Any, spec: TensorSpec) -> Any:
        if not hasattr(value, "__dlpack__"):
            raise TypeError(
                f"input '{spec.name}' is a {type(value).__name__}; give a NumPy array or something "
                "with __dlpack__"
            )
        shape, dtype = tuple(value.shape), str(value.dtype).removeprefix("torch.")
        if shape != spec.shape or dtype != spec.dtype:
            raise ValueError(
                f"input '{spec.name}' is {dtype}{list(shape)}; the model takes "
                f"{spec.dtype}{list(spec.shape)}"
            )
        return value

    def _to_device(self, value: Any) -> Any:
        runtime = self._tvm.runtime
        try:
            tensor = runtime.from_dlpack(value)
        except (RuntimeError, BufferError) as error:  # not aligned, not contiguous, read-only
            if value.__dlpack_device__()[0] != runtime.cpu().dlpack_device_type():
                raise ValueError(f"a tensor cannot be used where it lies: {error}") from None
            array = value if isinstance(value, np.ndarray) else np.from_dlpack(value)
            # Not np.ascontiguousarray: it gives a scalar a dimension.
            return runtime.tensor(np.asarray(array, order="C"), device=self._device)
        return tensor if tensor.device == self._device else self._copied(tensor)

    def _on_host(self, value: Any) -> np.ndarray[Any, Any]:
        if isinstance(value, np.ndarray):
            return value
        host: np.ndarray[Any, Any] = self._tvm.runtime.from_dlpack(value).numpy()
        return host

    def _copied(self, tensor: Any) -> Any:
        there = self._tvm.runtime.empty(tensor.shape, tensor.dtype, self._device)
        tensor.copyto(there)
        return there

    def _fields(self, outputs: Any) -> list[Any]:
        return [outputs] if isinstance(outputs, self._tvm.runtime.Tensor) else list(outputs)


def _known(
    beside: Iterable[LoadedModel], variants: Sequence[Manifest]
) -> dict[str, dict[str, Any]]:
    """Return what models have of weights files, of those of which they have all that is named."""
    found: dict[str, dict[str, Any]] = {}
    for model in beside:
        for sha256, weights in model.weights_of_files.items():
            found.setdefault(sha256, {}).update(weights)
    for variant in variants:
        sha256 = variant["files"].get(WEIGHTS)
        if not found.get(sha256, {}).keys() >= {*variant["weights"]}:
            found.pop(sha256, None)
    return found


class _Library:
    """A compiled library that is loaded; models of one architecture may have it in common."""

    def __init__(self, path: Path) -> None:
        import tvm

        self.module = tvm.runtime.load_module(str(path.resolve()))


_libraries: WeakValueDictionary[str, _Library] = WeakValueDictionary()  # by sha256


def _library(sha256: str, path: Path) -> _Library:
    """Return a library, loaded once for all that have it: its code is on the device once."""
    found = _libraries.get(sha256)
    if found is None:
        found = _libraries[sha256] = _Library(path)
    return found


def _specs(entries: list[dict[str, Any]]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(e["name"], tuple(e["shape"]), e["dtype"]) for e in entries)


def _listed(specs: tuple[TensorSpec, ...]) -> str:
    return ", ".join(f"{s.name} ({s.dtype}{list(s.shape)})" for s in specs)
