"""Runs of members in processes of their own, where a fault reaches nobody else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tunerd.colocation.places.base import FaultedApartError
from tunerd.runner.client import ModelRunError, RunnerClient
from tunerd.slices.base import ProcessSlice
from tunerd.vocabulary import Arrays

_LIMIT_SECS = 60.0  # to start, load and run


class Apart:
    """Each run has a process that runs nothing else: another model's memory would hide a fault."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held while these change
        self._running: set[ProcessSlice] = set()
        self._closing: set[threading.Thread] = set()
        self._is_ended = False

    def run(self, made: ProcessSlice, artifact: Path, inputs: Arrays) -> Arrays:
        """Start a slice's process for one run of an artifact; return the outputs.

        The process ends afterwards, and nobody waits for that: after a fault it takes seconds.

        Raises FaultedApartError where the run faults or does not end, RuntimeError after `end`,
        ModelRunError where the artifact does not run, and HostError or InfrastructureError where no
        process starts.
        """
        with self._held(made) as client:
            return _run(client, made, artifact, inputs)

    def end(self) -> None:
        """End what runs, in any thread, and have nothing else begin."""
        with self._lock:
            self._is_ended = True
            for made in self._running:
                made.fence("the engine was closed", is_alone=False)

    def close(self) -> None:
        """Wait until each process has ended; after `end`, by whoever called `run`."""
        with self._lock:
            closing = [*self._closing]
        for thread in closing:
            thread.join()

    @contextmanager
    def _held(self, made: ProcessSlice) -> Iterator[RunnerClient]:
        client = RunnerClient(made)
        with self._lock:
            if self._is_ended:
                raise RuntimeError("the engine was closed")
            self._running.add(made)
        try:
            yield client
        finally:
            thread = threading.Thread(target=self._close, args=(client, made))
            with self._lock:
                self._closing.add(thread)
            thread.start()

    def _close(self, client: RunnerClient, made: ProcessSlice) -> None:
        try:
            client.close()
            made.close()
        finally:
            with self._lock:
                self._running.discard(made)
                self._closing.discard(threading.current_thread())


def _run(client: RunnerClient, made: ProcessSlice, artifact: Path, inputs: Arrays) -> Arrays:
    reason = f"it did not end within {_LIMIT_SECS:g} s"
    limit = threading.Timer(_LIMIT_SECS, made.fence, (reason,), {"is_alone": True})
    limit.daemon = True
    limit.start()
    try:
        client.prove()
        return client.run_model(str(artifact), inputs)
    except ModelRunError as error:
        if error.failure.kind.is_fault:
            raise FaultedApartError(error.failure.message) from error
        raise
    finally:
        limit.cancel()
