"""Serve the members of a plan with Triton Inference Server's Python backend.

    mkdir -p models/members/1
    cp recipes/serving/triton_model.py models/members/1/model.py
    python recipes/serving/triton_config.py plan.yaml > models/members/config.pbtxt
    tritonserver --model-repository models

Triton, 23.10 or newer, needs tunerd in the Python of its backend. It starts this file in a process
for each GPU, which holds the engine of the plan. A request names its member in the parameter
`member`, and may name a `tenant`; its `timeout` (microseconds) is the deadline. Tensors have a
first axis more than the member's: inferences, which the engine takes one by one.

Triton hands over what has come while the last batch ran, and takes nothing before all of a batch
have their answers: a short model waits for the longest of its batch, whatever the policy. An error
is one request's and not the batch's. Triton ends a process that does not answer with SIGKILL: with
`place: mps` that process is no client of MPS, and nobody else is taken along. With `place:
in-process` it is one where an MPS daemon runs for its GPU, which it warns of, and takes all others
along.

The engine's counters are among the metrics on Triton's port for Prometheus, 8002.

What Triton calls and when, and what a request and a response have, was read in README.md of
Triton's Python backend at its branch r23.10, and the names of calls, keys, codes and metrics were
looked up in src/pb_stub.cc and src/stub_launcher.cc there and at r26.06:
https://github.com/triton-inference-server/python_backend. 23.10 is the first with `is_cancelled`
and the code CANCELLED. In tests a stand-in takes Triton's part.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from tunerd.colocation import Engine, MemberError, RefusedError
from tunerd.errors import InputError
from tunerd.vocabulary import Arrays

DRAIN_SECS = 30.0
OUTCOMES = ("completed", "failed", "refused", "cancelled")


class TritonPythonModel:
    """What Triton asks for by this name: one engine, for one instance of the model."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the members; Triton takes requests when this has returned."""
        if args["model_instance_kind"] == "GPU":
            _see_only(int(args["model_instance_device_id"]))
        config = json.loads(args["model_config"])
        self._engine = Engine(config["parameters"]["plan"]["string_value"]).start()
        self._metrics = Metrics(self._engine, args["model_instance_device_id"])

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answer each request, in order: all are in the engine before the first is waited for."""
        asked = [self._asked(request) for request in requests]
        responses = [_answered(*each) for each in zip(requests, asked, strict=True)]
        self._metrics.update()
        return responses

    def finalize(self) -> None:
        """Answer what was taken, and stop. Triton has sent its last request before."""
        self._engine.close(drain_secs=DRAIN_SECS)
        self._metrics.update()

    def _asked(self, request: Any) -> list[Future[Arrays]] | Exception:
        """Have the engine take a request, or return why it does not."""
        if request.is_cancelled():
            return InterruptedError("the client does not want it any more")
        futures: list[Future[Arrays]] = []
        try:
            parameters = json.loads(request.parameters() or "{}")
            member = parameters.get("member") or self._only_member()
            tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            timeout_us = request.timeout()
            for nth in range(_inferences(tensors)):
                future = self._engine.submit(
                    member,
                    {name: array[nth] for name, array in tensors.items()},
                    deadline_secs=timeout_us / 1e6 if timeout_us else None,
                    tenant=parameters.get("tenant"),
                )
                futures.append(future)
        except (InputError, RefusedError, TypeError, ValueError) as error:
            for future in futures:
                future.cancel()
            return error
        return futures

    def _only_member(self) -> str:
        names = list(self._engine.stats().members)
        if len(names) > 1:
            raise InputError(f"say in the parameter `member` which one: {', '.join(names)}")
        return names[0]


class Metrics:
    """What an engine counts, as Triton's own metrics."""

    def __init__(self, engine: Engine, device: str) -> None:
        self._engine = engine
        family = pb_utils.MetricFamily
        # Triton wants families to live as long as their metrics.
        self._requests = family(
            name="tunerd_requests_total",
            description="Requests by how they ended",
            kind=family.COUNTER,
        )
        self._seconds = family(
            name="tunerd_request_seconds_sum",
            description="From the arrival of a completed request to its answer",
            kind=family.COUNTER,
        )
        self._planned = family(
            name="tunerd_planned_bytes",
            description="Memory that a member was planned to take",
            kind=family.GAUGE,
        )
        self._faults = family(
            name="tunerd_faults_total", description="Members that faulted", kind=family.COUNTER
        )
        here = {"instance": device}
        self._ended, self._secs = {}, {}
        for name, member in engine.stats().members.items():
            labels = here | {"model": name}
            for outcome in OUTCOMES:
                told = labels | {"outcome": outcome}
                self._ended[name, outcome] = self._requests.Metric(labels=told)
            self._secs[name] = self._seconds.Metric(labels=labels)
            self._planned.Metric(labels=labels).set(member.planned_bytes)
        self._faulted = self._faults.Metric(labels=here)

    def update(self) -> None:
        """Count what has happened since."""
        stats = self._engine.stats()
        for name, member in stats.members.items():
            for outcome in OUTCOMES:
                _count(self._ended[name, outcome], getattr(member, outcome))
            _count(self._secs[name], member.latency_secs)
        _count(self._faulted, len(stats.faults))


def _count(metric: Any, value: float) -> None:
    metric.increment(value - metric.value())


def _see_only(device: int) -> None:
    """Have one of the GPUs that Triton sees be the only one here, before CUDA starts."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else [str(n) for n in range(device + 1)]
    os.environ["CUDA_VISIBLE_DEVICES"] = names[device]


def _inferences(tensors: Arrays) -> int:
    counts = {len(array) for array in tensors.values()}
    if len(counts) != 1:
        raise ValueError(f"the tensors have {sorted(counts)} inferences; they must have as many")
    return counts.pop()


def _answered(request: Any, asked: list[Future[Arrays]] | Exception) -> Any:
    """Return the response to a request, when all its inferences have ended."""
    try:
        if isinstance(asked, Exception):
            raise asked
        answers = [future.result() for future in asked]
        # Where a client names none, Triton names those of all members.
        names = [name for name in request.requested_output_names() if name in answers[0]]
        tensors = [pb_utils.Tensor(name, np.stack([a[name] for a in answers])) for name in names]
        return pb_utils.InferenceResponse(output_tensors=tensors)
    except Exception as error:
        said = pb_utils.TritonError(str(error), _code_of(error))
        return pb_utils.InferenceResponse(error=said)


def _code_of(error: Exception) -> Any:
    codes = pb_utils.TritonError
    match error:
        case RefusedError():
            return codes.UNAVAILABLE
        case InputError() | TypeError() | ValueError():
            return codes.INVALID_ARG
        case InterruptedError():
            return codes.CANCELLED
        case MemberError():
            return codes.INTERNAL
    return codes.UNKNOWN
