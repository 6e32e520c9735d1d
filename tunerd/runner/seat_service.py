"""A model that a runner holds for an engine, until the connection ends.

Inputs and outputs lie in shared memory, whose descriptor comes with the request; then some bytes
wake the runner, and some tell what came of it:

    byte which, int32 segment, uint32 lent
                             start there, with these buffers, whose inputs are others' where `lent`
                             is not 0: in memory of that number, whose descriptor comes with the
                             first of these messages; what was paused goes on. Where `which` is GONE
                             that memory is needed no more, and there is no answer
    byte what, int32 segment, double at
                             DONE, PAUSED before that segment, or FAILED with a message of `wire`
                             behind it: {"failure": ...}; `at` is when, by time.monotonic(), which
                             both sides share

With several buffers a request is written and asked for while another one runs, and the runner goes
on to it at once: they are answered in the order in which they were asked for. What pauses has no
such company. The flag of the shared memory asks for a pause.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from tunerd.artifacts.segments import Pauses
from tunerd.runner import sampling
from tunerd.system import wire
from tunerd.system.shared_arrays import SharedArrays
from tunerd.vocabulary import Arrays, Stage, TensorSpec, to_json

ASKED = struct.Struct("<BiI")
TOLD = struct.Struct("<Bid")
DONE, PAUSED, FAILED = range(3)
GONE = 255

Run = Callable[[Arrays, Pauses], Arrays]


class Buffers(NamedTuple):
    """Where the tensors of one request lie, by name."""

    inputs: Arrays
    outputs: Arrays


def in_order(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Return inputs in the order in which they lie in memory that is not one model's."""
    return sorted(specs, key=lambda spec: spec.name)


class SharedTensors:
    """`buffers` are a model's inputs and outputs, which may have names in common.

    Args:
        count: how many requests have buffers of their own.
        descriptor: of the memory that the other side made; None makes it.
    """

    def __init__(
        self,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        *,
        count: int = 1,
        descriptor: int | None = None,
    ) -> None:
        specs = [*inputs, *outputs] * count
        named = [replace(spec, name=str(nth)) for nth, spec in enumerate(specs)]
        self.memory = SharedArrays(named, descriptor)
        arrays = iter(self.memory.arrays.values())
        self.buffers = tuple(
            Buffers(
                {spec.name: next(arrays) for spec in inputs},
                {spec.name: next(arrays) for spec in outputs},
            )
            for _ in range(count)
        )


class SeatService(Pauses):
    """Answers one engine with one model. `run` is a SegmentedModel or a SegmentedCapture."""

    def __init__(
        self, connection: socket.socket, device: sampling.Device, run: Run, shared: SharedTensors
    ) -> None:
        self._connection, self._device = connection, device
        self._run, self._shared = run, shared
        self._lent: dict[int, Arrays] = {}  # by number

    def serve(self) -> None:
        """Serve until the connection ends: then wire.Closed is raised, or another OSError."""
        while True:
            inputs, outputs = self._await_start()
            try:
                for name, array in self._run(inputs, self).items():
                    np.copyto(outputs[name], array)
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

    def _await_start(self) -> Buffers:
        """Return with which buffers; of what goes on they are not told again."""
        while True:
            asked, descriptors, _, _ = socket.recv_fds(
                self._connection, ASKED.size, 1, socket.MSG_WAITALL
            )
            if len(asked) < ASKED.size:
                raise wire.Closed("the engine closed the connection")
            which, _, lent = ASKED.unpack(asked)
            if which == GONE:
                self._lent.pop(lent, None)
                continue
            own = self._shared.buffers[which]
            if descriptors:
                specs = [TensorSpec(n, a.shape, str(a.dtype)) for n, a in own.inputs.items()]
                memory = SharedArrays(in_order(specs), descriptors[0])
                memory.close()
                self._lent[lent] = memory.arrays
            return Buffers(self._lent[lent], own.outputs) if lent else own

    def _tell(self, what: int, segment: int = 0) -> None:
        self._connection.sendall(TOLD.pack(what, segment, time.monotonic()))
