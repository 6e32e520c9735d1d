"""The process of a slice: loads libraries, runs them, answers over a Unix socket.

    python -m tunerd.runner.process --socket PATH --device cuda|cpu [--cores 0,1] [--leash]

It listens on PATH, serves exactly one connection, and exits by itself when that ends: a GPU client
that ends by itself disturbs nobody. On a leash it ends when its standard input does, in the middle
of a kernel, too: for clients that share their GPU with nobody.

Requests are JSON with binary blobs (`wire`):

    prove                             -> the device as this process sees it
    measure   builds, profile, bests  -> one result per build, sent as each is measured
    compare   builds, profile         -> results of the builds sampled in turns
    agree     two builds              -> null, or how the second differs from the first
    run_model artifact, inputs        -> outputs
    compare_models artifacts, profile -> results of whole models sampled in turns
    load      artifact or build       -> seconds of a repeat, or a failure
    repeat    start_at, stop_at       -> at once that it was heard; when it has stopped, how it ran
    stop                              -> stops what repeats without stop_at; has no answer
    close                             -> the process ends

Before the results of `compare` and `compare_models` come signs, one a second at most, that samples
are being taken: {"goes_on": true}. A failure says what it did: a "crash" has left a context that
answers nothing any more, and only another runner can go on.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunerd.errors import DiskError
from tunerd.system import wire
from tunerd.system.files import disk_errors_said
from tunerd.system.without_torch import keep_torch_from_tvm

if TYPE_CHECKING:
    from tunerd.runner.load import Repeated
    from tunerd.vocabulary import Stage

_FIRST_CONNECTION_SECS = 60.0
_SIGN_SECS = 1.0  # seldom: whoever reads them may work on the cores that are measured


def main() -> None:
    parser = argparse.ArgumentParser(description="one slice's runner; started by tunerd")
    parser.add_argument("--socket", required=True, type=Path)
    parser.add_argument("--device", required=True, choices=("cuda", "cpu"))
    parser.add_argument("--cores", type=_cores, default=())
    parser.add_argument("--leash", action="store_true")
    arguments = parser.parse_args()
    keep_torch_from_tvm()
    # Ctrl-C reaches the whole terminal; whoever started this runner decides when it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if arguments.cores:  # before any thread is started: each inherits it
        os.sched_setaffinity(0, arguments.cores)
    if arguments.leash:
        threading.Thread(target=_end_with_input, daemon=True).start()
    listener = socket.socket(socket.AF_UNIX)
    # Bound under another name first: a path that exists can be connected to.
    hidden = f"{arguments.socket}.new"
    listener.bind(hidden)
    os.chmod(hidden, 0o600)
    listener.listen(1)
    os.rename(hidden, arguments.socket)
    with _said("imports"):
        _preload(arguments.device)
    listener.settimeout(_FIRST_CONNECTION_SECS)
    try:
        connection, _ = listener.accept()
    except TimeoutError:
        sys.exit("nobody connected")
    finally:
        listener.close()
        arguments.socket.unlink(missing_ok=True)
    connection.settimeout(None)
    with connection, contextlib.suppress(wire.Closed, BrokenPipeError, ConnectionResetError):
        _Runner(connection, arguments.device, arguments.cores).serve()


@contextlib.contextmanager
def _said(what: str) -> Iterator[None]:
    """Write to the slice's log how long a part of the start has taken."""
    since = time.monotonic()
    yield
    print(
        f"{time.time():.1f} {what}: {time.monotonic() - since:.1f} s", file=sys.stderr, flush=True
    )


def _preload(device: str) -> None:
    """Import what takes long, and leave a GPU alone: its guard may be clearing it yet."""
    from tunerd.runner import cuda_device, tvm_runtime

    with contextlib.suppress(Exception):  # the proof will tell
        tvm_runtime.import_runtime()
        if device == "cuda":
            cuda_device.preload()


def _end_with_input() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)  # kernels run without the GIL, so this thread gets its turn


def _cores(text: str) -> tuple[int, ...]:
    return tuple(int(c) for c in text.split(","))


class _Runner:
    def __init__(self, connection: socket.socket, device: str, cores: Sequence[int]) -> None:
        from tunerd.runner import sampling

        self._connection = connection
        self._measure = sampling
        self._device: sampling.Device
        try:
            if device == "cuda":
                from tunerd.runner.cuda_device import CudaDevice

                with _said("context"):
                    self._device = CudaDevice()
            else:
                self._device = sampling.CpuDevice(cores)
            self._problem = ""
        except Exception as error:  # told to whoever asks for a proof
            self._problem = f"{type(error).__name__}: {error}"
        self._models: dict[str, Any] = {}
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
                "load": self._load,
                "repeat": self._repeat,
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
        from tunerd.vocabulary import to_json

        failed = self._measure.failure_on(self._device, stage, error)
        wire.send(self._connection, {"failure": to_json(failed)})

    def _prove(self, _: Any, __: list[bytes]) -> None:
        wire.send(self._connection, {"facts": {**self._device.facts(), "pid": os.getpid()}})

    def _measure_each(self, body: Any, blobs: list[bytes]) -> None:
        from tunerd.runner.messages import build_from, profile_from, result_to

        profile = profile_from(body["profile"])
        bests = body["best_secs"]
        for entry, library, best_secs in zip(body["builds"], blobs, bests, strict=True):
            build = build_from(entry, library)
            wire.send(self._connection, {"starting": build.candidate.candidate_id})
            result = self._measure.measure(
                self._device, build, profile, rival_secs=best_secs or math.inf
            )
            wire.send(self._connection, {"result": result_to(result)})

    def _compare(self, body: Any, blobs: list[bytes]) -> None:
        from tunerd.runner.messages import build_from, profile_from, result_to

        builds = [build_from(e, b) for e, b in zip(body["builds"], blobs, strict=True)]
        results = self._measure.compare(
            self._device, builds, profile=profile_from(body["profile"]), goes_on=self._goes_on
        )
        wire.send(self._connection, {"results": [result_to(r) for r in results]})

    def _agree(self, body: Any, blobs: list[bytes]) -> None:
        from tunerd.runner.agreement import disagreement
        from tunerd.runner.messages import build_from
        from tunerd.vocabulary import to_json

        reference, build = (build_from(e, b) for e, b in zip(body["builds"], blobs, strict=True))
        failed = disagreement(self._device, reference, build)
        if failed is not None:
            failed = self._measure.as_left(self._device, failed)
        wire.send(self._connection, {"failure": to_json(failed)})

    def _run_model(self, body: Any, blobs: list[bytes]) -> None:
        from tunerd.system.codec import arrays_from, arrays_to
        from tunerd.vocabulary import Stage

        try:
            outputs = self._loaded(body["artifact"])(arrays_from(body["inputs"], blobs))
        except Exception as error:
            self._send_failure(Stage.RUN, error)
            return
        specs, out = arrays_to(outputs)
        wire.send(self._connection, {"outputs": specs}, out)

    def _compare_models(self, body: Any, _: list[bytes]) -> None:
        from tunerd.runner.messages import profile_from, result_to
        from tunerd.vocabulary import Failure, Stage

        profile = profile_from(body["profile"])
        ready: list[Any] = []
        for artifact in body["artifacts"]:
            try:
                ready.append(self._measure.TimedModel(self._loaded(artifact), profile))
            except Exception as error:
                ready.append(self._measure.failure_on(self._device, Stage.LOAD, error))
            self._goes_on()
        results = self._measure.interleaved(
            self._device, ready, profile=profile, goes_on=self._goes_on
        )
        assert all(isinstance(r, Failure | tuple) for r in results)
        wire.send(self._connection, {"results": [result_to(r) for r in results]})

    def _load(self, body: Any, blobs: list[bytes]) -> None:
        from tunerd.runner.load import repeated_kernel, repeated_model
        from tunerd.runner.messages import build_from
        from tunerd.vocabulary import Stage

        try:
            if body["artifact"]:
                model = self._loaded(body["artifact"])
                self._repeated = repeated_model(self._device, model)
            else:
                build = build_from(body["build"], blobs[0])
                with tempfile.TemporaryDirectory(prefix="tunerd-load-") as folder:
                    self._repeated = repeated_kernel(self._device, build, Path(folder))
        except Exception as error:
            self._send_failure(Stage.LOAD, error)
            return
        wire.send(self._connection, {"once_secs": self._repeated.once_secs})

    def _repeat(self, body: Any, _: list[bytes]) -> None:
        from tunerd.vocabulary import Stage

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

    def _loaded(self, artifact: str) -> Any:
        from tunerd.artifacts.loading import load

        if artifact not in self._models:
            self._models[artifact] = load(artifact, beside=self._models.values())
        return self._models[artifact]


if __name__ == "__main__":
    main()
