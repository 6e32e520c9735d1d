"""What the process of a runner answers over its socket.

Requests are JSON with binary blobs (`wire`):

    prove                             -> the device as this process sees it
    measure   builds, profile, bests  -> one result per build, sent as each is measured
    compare   builds, profile         -> results of the builds sampled in turns
    agree     two builds              -> null, or how the second differs from the first
    run_model artifact, inputs, alone -> outputs
    compare_models artifacts, profile -> results of whole models sampled in turns
    prepare_pytorch way, module       -> how it is ready to be timed, or a failure
    compare_with_pytorch artifact, ways, profile
                                      -> results of the model and the ways sampled in turns
    load      artifact or build       -> seconds of a repeat, or a failure
    repeat    start_at, stop_at       -> at once that it was heard; when it has stopped, how it ran
    stop                              -> stops what repeats without stop_at; has no answer
    seat      artifact, tensors, limit_secs, and a descriptor of shared memory
                                      -> seconds of each segment, or a failure; from then on what
                                         `seat_service` says, to the end of the connection
    close                             -> the process ends

Before the results of what is sampled in turns come signs, one a second at most, that samples
are being taken: {"goes_on": true}. A failure says what it did: a "crash" has left a context that
answers nothing any more, and only another runner can go on.
"""

from __future__ import annotations

import functools
import math
import os
import select
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tunerd.artifacts.lane_check import outputs_of
from tunerd.artifacts.loading import load
from tunerd.artifacts.segments import segmented
from tunerd.errors import DiskError
from tunerd.runner import sampling
from tunerd.runner.agreement import disagreement
from tunerd.runner.base import TorchModule
from tunerd.runner.load import Repeated, repeated_kernel, repeated_model
from tunerd.runner.pytorch import PyTorchWays, UnfitError
from tunerd.runner.seat_service import SeatService, SharedTensors
from tunerd.system import wire
from tunerd.system.codec import arrays_from, arrays_to, value_from
from tunerd.system.files import disk_errors_said
from tunerd.vocabulary import Build, Failure, Kind, Profile, Stage, TensorSpec, to_json

_SIGN_SECS = 1.0  # seldom: whoever reads them may work on the cores that are measured


def say_secs(what: str, since: float) -> None:
    """Write to the slice's log how long a part of the start has taken, by time.monotonic()."""
    took_secs = time.monotonic() - since
    print(f"{time.time():.1f} {what}: {took_secs:.1f} s", file=sys.stderr, flush=True)


class RunnerService:
    """Answers one connection with what one device says."""

    def __init__(self, connection: socket.socket, device: str, cores: Sequence[int]) -> None:
        self._connection = connection
        self._device: sampling.Device
        try:
            if device == "cuda":
                from tunerd.runner.cuda_device import CudaDevice

                since = time.monotonic()
                self._device = CudaDevice()
                say_secs("context", since)
            else:
                self._device = sampling.CpuDevice(cores)
            self._problem = ""
        except Exception as error:  # told to whoever asks for a proof
            self._problem = f"{type(error).__name__}: {error}"
        self._models: dict[str, Any] = {}
        self._pytorch = PyTorchWays(device, cores)
        self._repeated: Repeated | None = None
        self._said_at = 0.0  # time.monotonic() of the last request or sign

    def serve(self) -> None:
        while True:
            body, blobs = wire.receive(self._connection)
            operation = body["op"]
            if operation == "close":
                return
            if operation == "stop":  # of a load that had stopped by itself
                continue
            if self._problem:
                wire.send(self._connection, {"error": self._problem})
                continue
            handler = {
                "prove": self._prove,
                "measure": self._measure_each,
                "compare": self._compare,
                "agree": self._agree,
                "run_model": self._run_model,
                "compare_models": self._compare_models,
                "prepare_pytorch": self._prepare_pytorch,
                "compare_with_pytorch": self._compare_with_pytorch,
                "load": self._load,
                "repeat": self._repeat,
                "seat": self._seat,
            }[operation]
            self._said_at = time.monotonic()
            try:
                with disk_errors_said(Path(tempfile.gettempdir())):
                    handler(body, blobs)
            except DiskError as error:
                wire.send(self._connection, {"disk": str(error)})

    def _goes_on(self) -> None:
        """Tell the slice, if that was not just told, that what it waits for does not hang."""
        if (now := time.monotonic()) >= self._said_at + _SIGN_SECS:
            self._said_at = now
            wire.send(self._connection, {"goes_on": True})

    def _send_failure(self, stage: Stage, error: Exception) -> None:
        failed = sampling.failure_on(self._device, stage, error)
        wire.send(self._connection, {"failure": to_json(failed)})

    def _prove(self, _: Any, __: list[bytearray]) -> None:
        wire.send(self._connection, {"facts": {**self._device.facts(), "pid": os.getpid()}})

    def _measure_each(self, body: Any, blobs: list[bytearray]) -> None:
        profile = Profile(**body["profile"])
        bests = body["best_secs"]
        for entry, library, best_secs in zip(body["builds"], blobs, bests, strict=True):
            build = value_from(Build, entry, library=bytes(library))
            wire.send(self._connection, {"starting": build.candidate.candidate_id})
            result = sampling.measure(
                self._device, build, profile, rival_secs=best_secs or math.inf
            )
            wire.send(self._connection, {"result": _result_json(result)})

    def _compare(self, body: Any, blobs: list[bytearray]) -> None:
        builds = _builds(body, blobs)
        results = sampling.compare(
            self._device, builds, profile=Profile(**body["profile"]), goes_on=self._goes_on
        )
        wire.send(self._connection, {"results": [_result_json(r) for r in results]})

    def _agree(self, body: Any, blobs: list[bytearray]) -> None:
        reference, build = _builds(body, blobs)
        failed = disagreement(self._device, reference, build)
        if failed is not None:
            failed = sampling.as_left(self._device, failed)
        wire.send(self._connection, {"failure": to_json(failed)})

    def _run_model(self, body: Any, blobs: list[bytearray]) -> None:
        try:
            model, inputs = self._loaded(body["artifact"]), arrays_from(body["inputs"], blobs)
            if body["alone"]:
                outputs = outputs_of(model, load(body["alone"]), inputs)
            else:
                outputs = model(inputs)
        except Exception as error:
            self._send_failure(Stage.RUN, error)
            return
        specs, out = arrays_to(outputs)
        wire.send(self._connection, {"outputs": specs}, out)

    def _compare_models(self, body: Any, _: list[bytearray]) -> None:
        profile = Profile(**body["profile"])
        self._sample_in_turns([self._timed(a, profile) for a in body["artifacts"]], profile)

    def _prepare_pytorch(self, body: Any, blobs: list[bytearray]) -> None:
        inputs = len(body["inputs"])
        module = TorchModule(
            body["made_by"],
            body["precision"],
            arrays_from(body["inputs"], blobs[:inputs]),
            arrays_from(body["outputs"], blobs[inputs:]),
        )
        try:
            said = self._pytorch.prepare(body["way"], module)
        except UnfitError as error:
            failed = Failure(Stage.LOAD, Kind.REFUSED, str(error))
            wire.send(self._connection, {"failure": to_json(failed)})
        except Exception as error:
            self._send_failure(Stage.LOAD, error)
        else:
            wire.send(self._connection, {"said": said})

    def _compare_with_pytorch(self, body: Any, _: list[bytearray]) -> None:
        profile = Profile(**body["profile"])
        ways = [functools.partial(self._pytorch.timed, way, profile) for way in body["ways"]]
        ready = [self._timed(body["artifact"], profile), *map(self._made, ways)]
        self._sample_in_turns(ready, profile)

    def _timed(self, artifact: str, profile: Profile) -> Any:
        return self._made(lambda: sampling.TimedModel(self._loaded(artifact), profile))

    def _made(self, make: Callable[[], Any]) -> Any:
        """Return what is ready to be sampled, or why it is not."""
        try:
            return make()
        except Exception as error:
            return sampling.failure_on(self._device, Stage.LOAD, error)
        finally:
            self._goes_on()

    def _sample_in_turns(self, ready: Sequence[Any], profile: Profile) -> None:
        results = sampling.interleaved(self._device, ready, profile=profile, goes_on=self._goes_on)
        assert all(isinstance(r, Failure | tuple) for r in results)
        wire.send(self._connection, {"results": [_result_json(r) for r in results]})

    def _load(self, body: Any, blobs: list[bytearray]) -> None:
        try:
            if body["artifact"]:
                model = self._loaded(body["artifact"])
                self._repeated = repeated_model(self._device, model)
            else:
                build = value_from(Build, body["build"], library=bytes(blobs[0]))
                with tempfile.TemporaryDirectory(prefix="tunerd-load-") as folder:
                    self._repeated = repeated_kernel(self._device, build, Path(folder))
        except Exception as error:
            self._send_failure(Stage.LOAD, error)
            return
        wire.send(self._connection, {"once_secs": self._repeated.once_secs})

    def _repeat(self, body: Any, _: list[bytearray]) -> None:
        repeated = self._repeated
        if repeated is None:
            wire.send(self._connection, {"error": "no work is ready"})
            return
        wire.send(self._connection, {"begun": True})
        stop_at = body["stop_at"]
        heard = [self._connection]

        def told() -> bool:  # to stop, or by the end of the connection
            return bool(select.select(heard, (), (), 0)[0])

        try:
            repeated.run(body["start_at"], math.inf if stop_at is None else stop_at, told)
        except Exception as error:
            self._send_failure(Stage.RUN, error)
            return
        times = [repeated.starts.tobytes(), repeated.ends.tobytes()]
        wire.send(self._connection, {"calls": repeated.calls}, times)

    def _seat(self, body: Any, _: list[bytearray]) -> None:
        descriptor = socket.recv_fds(self._connection, 1, 1)[1][0]
        inputs, outputs = (
            [value_from(TensorSpec, said) for said in body[which]]
            for which in ("inputs", "outputs")
        )
        shared = SharedTensors(inputs, outputs, count=body["buffers"], descriptor=descriptor)
        shared.memory.close()
        since = time.monotonic()
        try:
            run = segmented(self._loaded(body["artifact"]), shared.buffers[0].inputs, body["cut"])
            say_secs("model and its graphs", since)
        except Exception as error:
            self._send_failure(Stage.LOAD, error)
            return
        wire.send(self._connection, {"segment_secs": run.segment_secs, "ends": run.ends})
        SeatService(self._connection, self._device, run, shared).serve()

    def _loaded(self, artifact: str) -> Any:
        if artifact not in self._models:
            self._models[artifact] = load(artifact, beside=self._models.values())
        return self._models[artifact]


def _builds(body: Any, blobs: Sequence[bytearray]) -> list[Build]:
    described = zip(body["builds"], blobs, strict=True)
    return [value_from(Build, entry, library=bytes(library)) for entry, library in described]


def _result_json(result: tuple[int, Sequence[float]] | Failure) -> dict[str, Any]:
    """Describe calls per sample with the samples, or a failure."""
    if isinstance(result, Failure):
        return {"failure": to_json(result)}
    calls, samples = result
    return {"calls": calls, "run_secs": list(samples)}
