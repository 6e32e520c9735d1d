"""A model that a runner holds for an engine, until the connection ends.

Inputs and outputs lie in shared memory, whose descriptor comes with the request; then some bytes
wake the runner, and some tell what came of it:

    int32 segment            start there; what was paused goes on
    byte what, int32 segment DONE, PAUSED before that segment, or FAILED with a message of `wire`
                             behind it: {"failure": ...}

The flag of the shared memory asks for a pause.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from tunerd.artifacts.segments import Pauses
from tunerd.runner import sampling
from tunerd.system import wire
from tunerd.system.shared_arrays import SharedArrays
from tunerd.vocabulary import Arrays, Stage, TensorSpec, to_json

ASKED = struct.Struct("<i")
TOLD = struct.Struct("<Bi")
DONE, PAUSED, FAILED = range(3)

Run = Callable[[Arrays, Pauses], Arrays]


class SharedTensors:
    """A model's inputs and outputs by name, which may have names in common.

    Args:
        descriptor: of the memory that the other side made; None makes it.
    """

    def __init__(
        self,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        descriptor: int | None = None,
    ) -> None:
        places = [replace(spec, name=str(i)) for i, spec in enumerate((*inputs, *outputs))]
        self.memory = SharedArrays(places, descriptor)
        arrays = list(self.memory.arrays.values())
        self.inputs = {s.name: a for s, a in zip(inputs, arrays, strict=False)}
        self.outputs = {s.name: a for s, a in zip(outputs, arrays[len(inputs) :], strict=True)}


class SeatService(Pauses):
    """Answers one engine with one model. `run` is a SegmentedModel or a SegmentedCapture."""

    def __init__(
        self, connection: socket.socket, device: sampling.Device, run: Run, shared: SharedTensors
    ) -> None:
        self._connection, self._device = connection, device
        self._run, self._shared = run, shared

    def serve(self) -> None:
        """Serve until the connection ends: then wire.Closed is raised, or another OSError."""
        while True:
            self._await_start()
            try:
                for name, array in self._run(self._shared.inputs, self).items():
                    np.copyto(self._shared.outputs[name], array)
            except Exception as error:
                failed = sampling.failure_on(self._device, Stage.RUN, error)
                self._tell(FAILED)
                wire.send(self._connection, {"failure": to_json(failed)})
            else:
                self._tell(DONE)

    def wanted(self) -> bool:
        return self._shared.memory.flag

    def pause(self, segment: int) -> None:
        self._tell(PAUSED, segment)
        self._await_start()

    def _await_start(self) -> None:
        if len(self._connection.recv(ASKED.size, socket.MSG_WAITALL)) < ASKED.size:
            raise wire.Closed("the engine closed the connection")

    def _tell(self, what: int, segment: int = 0) -> None:
        self._connection.sendall(TOLD.pack(what, segment))
