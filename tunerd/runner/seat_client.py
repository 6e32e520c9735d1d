"""The engine's end of a runner that holds a model for it: `seat_service` says what goes over it."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tunerd.artifacts.segments import Cut
from tunerd.runner.base import UNKNOWN, Company
from tunerd.runner.client import MODEL_SECS, ModelRunError, RunnerClient
from tunerd.runner.host import Blame, RunnerHost
from tunerd.runner.seat_service import ASKED, GONE, TOLD, Buffers, SharedTensors
from tunerd.system import wire
from tunerd.system.codec import value_from
from tunerd.vocabulary import Arrays, Failure, Kind, Stage, TensorSpec, to_json


class Cutting(NamedTuple):
    """The segments of a model: the seconds of each, and after which kernel it ends."""

    secs: tuple[float, ...]
    ends: tuple[int, ...]


class Told(NamedTuple):
    """What came of a request: DONE, PAUSED before a segment, or FAILED; `at`: time.monotonic()."""

    what: int
    segment: int
    at: float


class SeatClient(RunnerClient):
    """Who loads it has it first. From then on nothing here waits, but for `failure` and `close`.

    Requests are written in any threads, each in buffers of its own. They are asked for and heard of
    by one thread at a time, and answered in the order in which they were asked for. When one has
    failed, or the process has ended, `failure` is for a thread that may wait: nobody else may ask
    or hear any more.

    Args:
        is_alone: says whether nothing else of the device has run while this seat did: a fault that
            all of them see is then its own.
    """

    def __init__(self, host: RunnerHost, is_alone: Callable[[], bool] = lambda: False) -> None:
        super().__init__(host)
        self._is_alone = is_alone
        self._is_given_up = False
        self._shared: SharedTensors | None = None
        self._heard = b""  # of a message that has not come to its end

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
        for name, array in inputs.items():
            np.copyto(shared.buffers[0].inputs[name], array)
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
            failure = value_from(Failure, answer["failure"])
            raise ModelRunError(self._checked(failure))
        self._connection.settimeout(0.0)
        return Cutting(tuple(answer["segment_secs"]), tuple(answer["ends"]))

    @property
    def buffers(self) -> tuple[Buffers, ...]:
        """Return where requests and their outputs lie, which the process reads and writes."""
        return () if self._shared is None else self._shared.buffers

    @property
    def descriptor(self) -> int:
        """Return that of the connection, negative where there is none."""
        connection = self._connection
        return -1 if connection is None else connection.fileno()

    def ask(
        self, segment: int, which: int = 0, lent: int = 0, descriptor: int | None = None
    ) -> None:
        """Have it run from a segment on; who hears of it finds out where that fails.

        Args:
            lent: the number of other memory that has the inputs; 0 where the buffers have them.
            descriptor: of that memory, where the process is not known to have it.
        """
        self._send(ASKED.pack(which, segment, lent), descriptor)

    def forget(self, lent: int) -> None:
        """Have it give up memory of that number."""
        self._send(ASKED.pack(GONE, 0, lent))

    def _send(self, message: bytes, descriptor: int | None = None) -> None:
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(OSError):  # some bytes always fit: few are asked for at once
                if descriptor is None:
                    connection.send(message)
                else:
                    socket.send_fds(connection, [message], [descriptor])

    def hear(self) -> Told | None:
        """Take the next answer, if it is there. Raises OSError at its end."""
        connection = self._connection
        if connection is None:
            raise wire.Closed("its process was lost before")
        try:
            heard = connection.recv(TOLD.size - len(self._heard))
        except BlockingIOError:
            return None
        if not heard:
            raise wire.Closed("the other side closed the connection")
        heard = self._heard + heard
        if len(heard) < TOLD.size:
            self._heard = heard
            return None
        self._heard = b""
        return Told(*TOLD.unpack(heard))

    def failure(self, found: OSError | None) -> ModelRunError:
        """Say what has failed, or how the process has ended; it is of no use any more.

        For no fault of its own where the process was found to be lost before.

        Args:
            found: what `hear` has raised; None where FAILED was told.
        """
        connection = self._connection
        if connection is None:  # who found that has ended the process: another may run by now
            lost = Failure(Stage.RUN, Kind.COLLATERAL, "its process was lost before it ran")
            return ModelRunError(lost)
        if found is not None:
            return ModelRunError(self._lost(found))
        try:
            connection.settimeout(MODEL_SECS)
            failure = value_from(Failure, self._receive()["failure"])
        except (OSError, ValueError) as error:
            return ModelRunError(self._lost(error))
        return ModelRunError(self._checked(failure))

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

    def _blamed(self, failure: Failure, company: Company = UNKNOWN) -> Failure:
        return super()._blamed(failure, Company(is_alone=self._is_alone()))

    def _lose(self, reason: str, *, is_alone: bool = False) -> Blame:
        if self._is_given_up:
            self._disconnect()
            return Blame()
        return super()._lose(reason, is_alone=is_alone)
