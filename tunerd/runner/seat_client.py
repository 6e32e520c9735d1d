"""The engine's end of a runner that holds a model for it: `seat_service` says what goes over it."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

import numpy as np

from tunerd.artifacts.segments import Cut
from tunerd.runner.base import UNKNOWN, Company
from tunerd.runner.client import MODEL_SECS, ModelRunError, RunnerClient
from tunerd.runner.host import Blame, RunnerHost
from tunerd.runner.seat_service import ASKED, DONE, PAUSED, TOLD, SharedTensors
from tunerd.system import wire
from tunerd.system.codec import value_from
from tunerd.vocabulary import Arrays, Failure, Kind, Stage, TensorSpec, to_json


class Cutting(NamedTuple):
    """The segments of a model: the seconds of each, and after which kernel it ends."""

    secs: tuple[float, ...]
    ends: tuple[int, ...]


class SeatClient(RunnerClient):
    """One thread takes the seat; `pause`, `give_up` and `is_lost` are for others.

    Requests are written in any threads, each in buffers of its own, asked for one after the other,
    and their answers are awaited in that order, one after the other.

    Args:
        is_alone: says whether nothing else of the device has run while this seat did: a fault that
            all of them see is then its own.
    """

    def __init__(self, host: RunnerHost, is_alone: Callable[[], bool] = lambda: False) -> None:
        super().__init__(host)
        self._is_alone = is_alone
        self._is_given_up = False
        self._shared: SharedTensors | None = None

    def take(
        self,
        artifact: str,
        inputs: Arrays,
        outputs: Sequence[TensorSpec],
        cut: Cut,
        *,
        buffers: int = 1,
    ) -> Cutting:
        """Have the process load an artifact and try it; return its segments.

        Args:
            inputs: to try it on; later ones have their shapes and types.
            cut: how long a segment may be in seconds, or after which kernels they end.
            buffers: how many requests may be there at a time.

        Raises ModelRunError where it does not run, and as `prove` does.
        """
        given = [TensorSpec(n, tuple(a.shape), str(a.dtype)) for n, a in inputs.items()]
        self._shared = shared = SharedTensors(given, outputs, count=buffers)
        self.write(inputs)
        body = {
            "op": "seat",
            "artifact": artifact,
            "inputs": [to_json(spec) for spec in given],
            "outputs": [to_json(spec) for spec in outputs],
            "cut": cut,
            "buffers": buffers,
        }
        try:
            self._ask(body, [], timeout_secs=MODEL_SECS)
            assert self._connection is not None
            assert shared.memory.descriptor is not None
            socket.send_fds(self._connection, [b"\0"], [shared.memory.descriptor])
            answer = self._receive()
        except (OSError, ValueError) as error:
            raise ModelRunError(self._lost(error)) from error
        finally:
            shared.memory.close()
        if "failure" in answer:
            self._fail(answer)
        return Cutting(tuple(answer["segment_secs"]), tuple(answer["ends"]))

    def write(self, inputs: Arrays, which: int = 0) -> None:
        """Put inputs by name where the process finds them: into the buffers of that number."""
        assert self._shared is not None
        for name, array in inputs.items():
            np.copyto(self._shared.buffers[which].inputs[name], array)

    def read(self, which: int = 0) -> Arrays:
        """Return copies of the outputs of the last run with these buffers."""
        assert self._shared is not None
        outputs = self._shared.buffers[which].outputs
        return {name: array.copy() for name, array in outputs.items()}

    def ask(self, segment: int, which: int = 0) -> None:
        """Have it run from a segment on; who awaits the answer finds out where that fails."""
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.sendall(ASKED.pack(which, segment))

    def answer(self) -> int | None:
        """Await what came of it; return before which segment it paused, None at the end.

        Raises ModelRunError, for no fault of its own where the process was found to be lost before.
        """
        connection = self._connection
        if connection is None:  # who found that has ended the process: another may run by now
            lost = Failure(Stage.RUN, Kind.COLLATERAL, "its process was lost before it ran")
            raise ModelRunError(lost)
        try:
            told = connection.recv(TOLD.size, socket.MSG_WAITALL)
            if len(told) < TOLD.size:
                raise wire.Closed("the other side closed the connection")
            what, following = TOLD.unpack(told)
            answer = {} if what in (DONE, PAUSED) else self._receive()
        except (OSError, ValueError) as error:
            raise ModelRunError(self._lost(error)) from error
        if answer:
            self._fail(answer)
        return int(following) if what == PAUSED else None

    def close(self) -> None:
        """End the connection and give up the shared memory; the process ends by itself then."""
        self._disconnect()
        self._shared = None

    # --- for other threads -----------------------------------------------------------------------

    def ask_to_pause(self, is_wanted: bool) -> None:
        """Have the process pause after its segment, or not any more."""
        if self._shared is not None:
            self._shared.memory.flag = is_wanted

    def give_up(self) -> None:
        """Blame nobody for what is found from now on: whoever calls ends the process."""
        self._is_given_up = True

    @property
    def is_lost(self) -> bool:
        """Whether the process is seen to be gone. Takes nothing of what it has sent."""
        connection = self._connection
        if connection is None:
            return True
        end = select.poll()
        try:
            # Not by reading: who awaits an answer may take it first, and then there is none to see.
            end.register(connection, select.POLLRDHUP)
            return bool(end.poll(0))
        except (OSError, ValueError):  # it was closed meanwhile
            return True

    def _fail(self, answer: dict[str, object]) -> NoReturn:
        raise ModelRunError(self._checked(value_from(Failure, answer["failure"])))

    def _blamed(self, failure: Failure, company: Company = UNKNOWN) -> Failure:
        return super()._blamed(failure, Company(is_alone=self._is_alone()))

    def _lose(self, reason: str, *, is_alone: bool = False) -> Blame:
        if self._is_given_up:
            self._disconnect()
            return Blame()
        return super()._lose(reason, is_alone=is_alone)
