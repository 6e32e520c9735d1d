"""Processes in which requests are tried, where a fault reaches nobody else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from tunerd.colocation.places.base import FaultedApartError
from tunerd.colocation.work import Seat
from tunerd.runner.client import ModelRunError, RunnerClient
from tunerd.slices.base import ProcessSlice
from tunerd.vocabulary import Arrays, Kind

_LIMIT_SECS = 60.0  # to start, load and run


class Triers:
    """Those of one place. Args:
    start: makes what starts a process whose faults reach nobody else.
    artifact_of: says what a seat runs.
    """

    def __init__(
        self, start: Callable[[], ProcessSlice], artifact_of: Callable[[Seat], Path]
    ) -> None:
        self._start, self.artifact_of = start, artifact_of
        self._lock = threading.Lock()  # held while these change
        self._running: set[ProcessSlice] = set()
        self._is_ended = False

    def one(self) -> ProcessTrier:
        """Return one, for one thread, which closes it."""
        return ProcessTrier(self)

    def end(self) -> None:
        """End what runs, in any thread, and have nothing else begin."""
        with self._lock:
            self._is_ended = True
            for made in self._running:
                made.fence("the engine was closed", is_alone=False)

    def started(self) -> ProcessSlice:
        """Return what starts a new process; raises RuntimeError after `end`."""
        with self._lock:
            if self._is_ended:
                raise RuntimeError("the engine was closed")
            made = self._start()
            self._running.add(made)
        return made

    def ended(self, made: ProcessSlice) -> None:
        with self._lock:
            self._running.discard(made)


class ProcessTrier:
    """A process that starts when it is needed, and again after a fault."""

    def __init__(self, triers: Triers) -> None:
        self._triers = triers
        self._made: ProcessSlice | None = None
        self._client: RunnerClient | None = None
        self._tried: set[Path] = set()  # by this process, which holds them

    def run(self, seat: Seat, inputs: Arrays) -> Arrays:
        """Run a seat's artifact once; return the outputs.

        Raises FaultedApartError where the run faults or does not end, RuntimeError where the place
        is closed, ModelRunError where the artifact does not run, and HostError or
        InfrastructureError where no process starts.
        """
        artifact = self._triers.artifact_of(seat)
        try:
            return self._run(artifact, inputs)
        except ModelRunError as error:
            if error.failure.kind.is_fault:
                self.close()
                raise FaultedApartError(error.failure.message) from error
            has_others = self._tried > {artifact}
            self.close()
            if error.failure.kind is Kind.OUT_OF_MEMORY and has_others:
                return self._run(artifact, inputs)
            raise

    def _run(self, artifact: Path, inputs: Arrays) -> Arrays:
        if self._made is None or self._client is None:
            self._made = self._triers.started()
            self._client = RunnerClient(self._made)
        self._tried.add(artifact)
        reason = f"it did not end within {_LIMIT_SECS:g} s"
        limit = threading.Timer(_LIMIT_SECS, self._made.fence, (reason,), {"is_alone": True})
        limit.daemon = True
        limit.start()
        try:
            self._client.prove()
            return self._client.run_model(str(artifact), inputs)
        finally:
            limit.cancel()

    def close(self) -> None:
        """End the process, if there is one; another may start."""
        made, self._made = self._made, None
        client, self._client = self._client, None
        self._tried.clear()
        if client is not None:
            client.close()
        if made is not None:
            made.close()
            self._triers.ended(made)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
