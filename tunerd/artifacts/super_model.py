"""A model that serves several tenants at once: models of one architecture, each its own weights.

The artifact has kernels for some numbers of lanes. A launch of R lanes serves R requests, of any
tenants: `slots` tell each lane where the weights of its tenant begin, in units of SLOT_BYTES from
those of the tenant that the artifact came with. Weights of all tenants are mapped in the host's
memory; the device has as many of them as a budget allows (`pieces`).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tunerd.artifacts.captured import CapturedModel, Recorder
from tunerd.artifacts.device import open_device, preload_cuda, sm_count, zeros
from tunerd.artifacts.lanes import Request, StagedLanes, fill, rows, smallest
from tunerd.artifacts.loading import LoadedModel
from tunerd.artifacts.manifest import (
    COUNTERS,
    SLOTS,
    WEIGHTS,
    LoadError,
    Manifest,
    by_sizes,
    check_files,
    nearest,
    read_tenant,
    stored_at,
)
from tunerd.artifacts.pieces import Pieces
from tunerd.artifacts.pinned import pinned_copies
from tunerd.artifacts.weights import layout_of, map_weights, unpacked, view
from tunerd.system.arrays import dtype_of
from tunerd.vocabulary import Arrays, TensorSpec


class SuperModel(LoadedModel):
    """A loaded artifact for several tenants.

    It is called as a `LoadedModel` is, for the tenant that it came with, whose name is `own`; with
    `run` for others, once they were added. `inputs` and `outputs` are those of one request, and
    `manifest` is that of its largest number of lanes. Calls from several threads take turns.
    """

    def __init__(
        self,
        folder: Path,
        variants: Sequence[Manifest],
        *,
        device: int | None,
        tenant_bytes: int | None,
    ) -> None:
        """Load the variants of each number of lanes, whose files were checked.

        It has a LoadedModel of each, and is none of its own: nothing of that class is prepared.
        """
        is_cuda = variants[0]["target"]["kind"] == "cuda"
        if is_cuda:
            preload_cuda()
        import tvm

        self._tvm, self._folder, self._turn = tvm, folder, threading.Lock()
        self._device = open_device(tvm, is_cuda, device)
        seen = sm_count(self._device, is_cuda)
        chosen = [nearest(group, seen) for group in by_sizes(variants).values()]
        chosen.sort(key=lambda variant: int(variant["tenants"]))
        self.manifest = chosen[-1]
        self.inputs, self.outputs = (
            tuple(TensorSpec(e["name"], tuple(e["shape"]), e["dtype"]) for e in self.manifest[key])
            for key in ("inputs", "outputs")
        )
        self.counts = tuple(int(variant["tenants"]) for variant in chosen)
        self._casts = {name: of for v in chosen for name, of in v["casts"].items()}
        self.own = str(self.manifest["model"]["name"])
        mapped = map_weights(stored_at(folder, self.manifest, WEIGHTS))
        self._layout = layout_of(mapped)
        self._tenants: dict[str, np.ndarray[Any, Any]] = {self.own: self._layout.bytes_of(mapped)}
        self._pieces = Pieces(
            _CudaMemory(tvm, self._device, self.piece_bytes)
            if is_cuda
            else _HostMemory(tvm, self.piece_bytes),
            self._tenants,
            self.own,
            None if tenant_bytes is None else self._pieces_in(tenant_bytes),
        )
        self._copies: list[tuple[int, Any]] = []  # of the own weights, for timing
        self._timed: tuple[Mapping[str, Any], dict[str, Any]] | None = None  # inputs, on the device
        weights = self._layout.views(self._pieces.first, flat=True)
        self._lanes = {
            int(variant["tenants"]): self._loaded(variant, weights, device) for variant in chosen
        }

    # --- tenants -------------------------------------------------------------------------------

    @property
    def piece_bytes(self) -> int:
        """What one more tenant takes on the device."""
        return self._layout.size

    @property
    def tenants(self) -> tuple[str, ...]:
        """All tenants that may be served, its own first."""
        return tuple(self._tenants)

    @property
    def resident(self) -> tuple[str, ...]:
        """Those whose weights are on the device, the least recently used first."""
        return self._pieces.resident

    @property
    def brought(self) -> int:
        """How many times a tenant's weights were brought to the device."""
        return self._pieces.brought

    def limit_weights(self, size_bytes: int) -> None:
        """Have tenants' weights take no more of the device's memory than this, from now on.

        Raises LoadError where it is not enough for one.
        """
        self._pieces.limit(self._pieces_in(size_bytes))

    def is_resident(self, name: str) -> bool:
        """Say whether a tenant's weights are on the device."""
        return self._pieces.is_resident(name)

    def add(self, name: str, source: str | os.PathLike[str] | Mapping[str, Any]) -> None:
        """Have one more tenant, whose weights stay in the host's memory until they are used.

        Args:
            source: a folder that `tunerd tenant` wrote, any artifact of the same architecture, or
                weights by name as arrays.

        Raises LoadError for weights of another architecture, and ValueError for a name that is
        taken.
        """
        if name in self._tenants:
            raise ValueError(f"there is a tenant '{name}'; choose another name, or remove it first")
        weights = dict(source) if isinstance(source, Mapping) else self._read(Path(source))
        for cast, (origin, dtype) in self._casts.items():
            if cast not in weights and origin in weights:
                weights[cast] = weights[origin].astype(dtype_of(dtype))
        if problem := self._layout.problem(weights):
            given = "the given weights" if isinstance(source, Mapping) else source
            raise LoadError(
                f"{given} cannot be a tenant of {self._folder}: {problem}; give weights of the "
                "same architecture, or an artifact of their own"
            )
        self._tenants[name] = self._layout.bytes_of(weights)

    def remove(self, name: str) -> None:
        """Have a tenant no more. Raises RuntimeError while a launch uses its weights."""
        if name == self.own:
            raise ValueError(f"tenant '{name}' is the artifact's own; the others may be removed")
        self._pieces.forget(name)

    def bring(self, names: Iterable[str]) -> None:
        """Have tenants' weights on the device when this returns, where they were not.

        Others go for that, those that were not used for longest. Any thread may call it. Raises
        RuntimeError where all pieces are held.
        """
        for name in names:
            self._pieces.hold([name])
            self._pieces.release([name])

    def hold(self, names: Sequence[str]) -> None:
        """As `bring`, and they stay there until `release` of the same names."""
        self._pieces.hold(names)

    def release(self, names: Sequence[str]) -> None:
        """Undo `hold`."""
        self._pieces.release(names)

    # --- inference -----------------------------------------------------------------------------

    def run(self, requests: Sequence[Request]) -> list[Arrays]:
        """Return the outputs by name of each request: a tenant, and its inputs by name.

        Of the compiled numbers of lanes the smallest that takes all is launched, and of more
        requests than the largest takes several in turn. Raises KeyError for a tenant that was not
        added, TypeError and ValueError for inputs that the model does not take, RuntimeError where
        the device may not have the weights of all tenants of a launch.
        """
        checked = [
            (tenant, {spec.name: self._on_host(given[spec.name]) for spec in self.inputs})
            for tenant, given in ((t, self._request(t, inputs)) for t, inputs in requests)
        ]
        outputs: list[Arrays] = []
        while (done := len(outputs)) < len(checked):
            lanes = self._lanes[smallest(self.counts, len(checked) - done)]
            outputs += self._launched(lanes, checked[done : done + lanes.manifest["tenants"]])
        return outputs

    def __call__(self, *inputs: Any) -> Arrays:
        """Return the outputs by name of its own tenant; takes what a LoadedModel takes."""
        return self.run([(self.own, self._by_name(inputs))])[0]

    def run_dlpack(self, *inputs: Any, stream: Any = None) -> dict[str, Any]:
        """Return what a call returns as tensors on the device; the call waits for them."""
        self._handle_of(stream)
        return {name: self._to_device(array) for name, array in self(*inputs).items()}

    def staged_lanes(self, stream: Any, count: int = 1) -> dict[int, tuple[StagedLanes, ...]]:
        """Return CUDA graphs of each number of lanes, `count` of each, as engines use them.

        They run on `stream` one after the other. Raises what `LoadedModel.captured` does.
        """
        return {
            lanes: tuple(
                StagedLanes(recorder, self._pieces, is_ahead=count > 1) for _ in range(count)
            )
            for lanes, recorder in ((n, of.recorder(stream)) for n, of in self._lanes.items())
        }

    def captured_lanes(self, tenants: Sequence[str], stream: Any = None) -> CapturedModel:
        """Return a CUDA graph that serves these tenants, a row each of its inputs and outputs.

        It has as many rows as the smallest number of lanes that takes them. Their weights stay on
        the device while it lives. Takes and raises what `LoadedModel.captured` does, and KeyError.
        """
        lanes = self._lanes[smallest(self.counts, len(tenants))]
        made = lanes.captured(stream)
        slots = self._pieces.hold(tenants)
        weakref.finalize(made, self._pieces.release, list(tenants))
        rest = lanes.manifest["tenants"] - len(slots)
        made.write({SLOTS: np.array(slots + slots[:1] * rest, np.int32)})
        return made

    def timed_calls(self, inputs: Mapping[str, Any], calls: int) -> float:
        """Return the host's seconds for `calls` launches of the largest number of lanes.

        All lanes have the same inputs, and weights of their own, which are copies.
        """
        count = self.counts[-1]
        model = self._lanes[count]
        with self._turn:
            while len(self._copies) < count - 1:
                self._copies.append(self._pieces.copied(self.own))
            slots = [0, *(slot for slot, _ in self._copies)]
            model.weights[SLOTS].copyfrom(np.array(slots, np.int32))
            if self._timed is None or self._timed[0] is not inputs:
                wide = {
                    s.name: np.stack([self._on_host(inputs[s.name])] * count) for s in self.inputs
                }
                self._timed = inputs, {n: self._to_device(rows) for n, rows in wide.items()}
            return model.timed_calls(self._timed[1], calls)

    @property
    def weights(self) -> dict[str, Any]:
        """Its own tenant's weights by name, as tensors on the device."""
        return self._layout.views(self._pieces.first)

    def instrument(self, seen: Any) -> None:
        for lanes in self._lanes.values():
            lanes.instrument(seen)

    def recorder(self, stream: Any) -> Recorder:
        raise ValueError("the model serves several tenants: take its `staged_lanes`")

    # --- how -----------------------------------------------------------------------------------

    def _pieces_in(self, size_bytes: int) -> int:
        if size_bytes < self.piece_bytes:
            raise LoadError(
                f"{size_bytes} bytes are not enough for one tenant of {self._folder}, which "
                f"takes {self.piece_bytes}; give more"
            )
        return size_bytes // self.piece_bytes

    def _loaded(
        self, variant: Manifest, weights: Mapping[str, Any], device: int | None
    ) -> LoadedModel:
        """Load the model of one number of lanes: its tensors have a row for each of them."""
        count = variant["tenants"]
        own = {SLOTS: zeros(self._tvm, (count,), "int32", self._device), **weights}
        names = [SLOTS, *variant["weights"]]
        if counters := variant["counters"]:
            shape, dtype = counters["shape"], counters["dtype"]
            own[COUNTERS] = zeros(self._tvm, shape, dtype, self._device)
            names.append(COUNTERS)
        wide = {
            key: [e | {"shape": [count, *e["shape"]]} for e in variant[key]]
            for key in ("inputs", "outputs")
        }
        variant = variant | wide | {"weights": names}
        known = {variant["files"][WEIGHTS]: own}
        return LoadedModel(self._folder, [variant], device=device, known=known, own=known)

    def _launched(self, lanes: LoadedModel, requests: Sequence[Request]) -> list[Arrays]:
        names = [tenant for tenant, _ in requests]
        slots = np.zeros(lanes.manifest["tenants"], np.int32)
        inputs = {spec.name: np.zeros(spec.shape, dtype_of(spec.dtype)) for spec in lanes.inputs}
        held = self._pieces.hold(names)
        try:
            fill(slots, inputs, held, [given for _, given in requests])
            with self._turn:
                lanes.weights[SLOTS].copyfrom(slots)
                return rows(lanes(inputs), len(requests))
        finally:
            self._pieces.release(names)

    def _request(self, tenant: str, inputs: Any) -> dict[str, Any]:
        if tenant not in self._tenants:
            raise KeyError(f"there is no tenant '{tenant}'; add it first")
        given = self._by_name((inputs,) if isinstance(inputs, Mapping) else tuple(inputs))
        for spec in self.inputs:
            self._checked(given[spec.name], spec)
        return given

    def _read(self, folder: Path) -> Arrays:
        """Return the weights in a folder, which are of the same architecture, by name."""
        manifest = read_tenant(folder)
        if manifest.get("architecture") != self.manifest["architecture"]:
            raise LoadError(
                f"{folder} is not of the architecture of {self._folder}: another file, another "
                "precision or an older tunerd made it; make it with `tunerd tenant MODEL.onnx "
                f"--like {self._folder}`, or load it as an artifact of its own"
            )
        check_files(folder, [manifest], needed=(WEIGHTS,))
        return unpacked(map_weights(stored_at(folder, manifest, WEIGHTS)), manifest)


class _CudaMemory:
    """Pieces in the memory of a GPU."""

    def __init__(self, tvm: Any, device: Any, size: int) -> None:
        self._tvm, self._device, self._size = tvm, device, size
        device.sync()  # this thread has the device's context
        self._copies = pinned_copies()

    def make(self) -> Any:
        copies = self._copies
        with contextlib.nullcontext() if copies is None else copies.beside_captures():
            return self._tvm.runtime.empty((self._size,), "uint8", self._device)

    def address(self, piece: Any) -> int:
        return int(piece.data_ptr())

    def fill(self, piece: Any, data: Any) -> None:
        if self._copies is not None:
            self._copies.copy(self.address(piece), data)
            return
        view(piece, data.shape, "uint8", 0).copyfrom(data)
        self._device.sync()


class _HostMemory:
    """Pieces in the host's memory: mapped, so that they begin at a page."""

    def __init__(self, tvm: Any, size: int) -> None:
        self._tvm, self._size = tvm, size

    def make(self) -> Any:
        array = np.frombuffer(mmap.mmap(-1, self._size), np.uint8)
        return self._tvm.runtime.from_dlpack(array)

    def address(self, piece: Any) -> int:
        return int(piece.data_ptr())

    def fill(self, piece: Any, data: Any) -> None:
        view(piece, data.shape, "uint8", 0).copyfrom(data)
