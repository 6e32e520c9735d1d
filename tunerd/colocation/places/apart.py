"""One run of a member in a process of its own, where a fault reaches nobody else."""

from __future__ import annotations

import math
import threading
from pathlib import Path

from tunerd.colocation import artifacts
from tunerd.colocation.places.base import FaultedApartError
from tunerd.runner.client import ModelRunError
from tunerd.runner.seat_client import SeatClient
from tunerd.slices.base import ProcessSlice
from tunerd.vocabulary import Arrays

_LIMIT_SECS = 60.0  # to start, load and run


def run_apart(made: ProcessSlice, artifact: Path, inputs: Arrays) -> Arrays:
    """Start a slice's process for one run of an artifact; return the outputs, and end it.

    Raises FaultedApartError where the run faults or does not end, and as SeatClient does where
    the artifact cannot be loaded there.
    """
    client = SeatClient(made, lambda: True)
    reason = f"it did not end within {_LIMIT_SECS:g} s"
    limit = threading.Timer(_LIMIT_SECS, made.fence, (reason,), {"is_alone": True})
    limit.daemon = True
    limit.start()
    try:
        client.prove()
        tried_on, outputs = artifacts.sample_inputs(artifact), artifacts.outputs_of(artifact)
        client.take(str(artifact), tried_on, outputs, math.inf)
        client.write(inputs)
        try:
            client.run(0)
        except ModelRunError as error:
            raise FaultedApartError(error.failure.message) from error
        return client.read()
    finally:
        limit.cancel()
        client.close()
        made.close()
