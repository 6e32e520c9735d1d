"""What stands for Triton: its module for Python models, and a server with a dynamic batcher.

Only what the README.md of Triton's Python backend (r23.10) says of a model that is not
decoupled: requests come in batches, `execute` is called by one thread and returns a response for
each of them, in order.
"""

from __future__ import annotations

import json
import queue
import re
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar

import numpy as np

TYPES = {"TYPE_FP32": "float32", "TYPE_FP16": "float16", "TYPE_INT64": "int64"}
# Of model_config.proto (r23.10): those of each message that a test may meet.
FIELDS = {
    "": "name backend max_batch_size dynamic_batching model_transaction_policy instance_group "
    "parameters input output",
    "input": "name data_type format dims reshape is_shape_tensor allow_ragged_batch optional",
    "output": "name data_type dims reshape label_filename is_shape_tensor",
    "instance_group": "name kind count rate_limiter gpus secondary_devices profile passive",
    "model_transaction_policy": "decoupled",
    "parameters": "key value",
    "value": "string_value",
    "reshape": "shape",
    "dynamic_batching": "preferred_batch_size max_queue_delay_microseconds preserve_ordering",
}


class Tensor:
    def __init__(self, name: str, array: np.ndarray[Any, Any]) -> None:
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray[Any, Any]:
        return self._array


class TritonError(Exception):
    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED = range(6)
    ALREADY_EXISTS, CANCELLED = 6, 7

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        super().__init__(message)
        self.code = code


class InferenceResponse:
    def __init__(
        self, output_tensors: Sequence[Tensor] = (), error: TritonError | None = None
    ) -> None:
        self.outputs = {t.name(): t.as_numpy() for t in output_tensors}
        self.error = error


class InferenceRequest:
    def __init__(
        self,
        tensors: Mapping[str, np.ndarray[Any, Any]],
        outputs: Sequence[str],
        timeout_us: int,
        parameters: Mapping[str, Any],
    ) -> None:
        self._tensors = [Tensor(name, array) for name, array in tensors.items()]
        self._outputs, self._timeout_us = list(outputs), timeout_us
        self._parameters = json.dumps(parameters) if parameters else ""
        self.cancelled = False

    def inputs(self) -> list[Tensor]:
        return self._tensors

    def requested_output_names(self) -> list[str]:
        return self._outputs

    def parameters(self) -> str:
        return self._parameters

    def timeout(self) -> int:
        return self._timeout_us

    def is_cancelled(self) -> bool:
        return self.cancelled


class Metric:
    def __init__(self, kind: str) -> None:
        self._kind, self._value = kind, 0.0

    def increment(self, by: float) -> None:
        assert by >= 0 or self._kind == MetricFamily.GAUGE
        self._value += by

    def set(self, value: float) -> None:
        assert self._kind == MetricFamily.GAUGE
        self._value = value

    def value(self) -> float:
        return self._value


class MetricFamily:
    COUNTER, GAUGE = "counter", "gauge"
    every: ClassVar[dict[str, dict[tuple[tuple[str, str], ...], Metric]]] = {}

    def __init__(self, name: str, description: str, kind: str) -> None:
        assert description
        self._kind = kind
        self._metrics = MetricFamily.every[name] = {}

    def Metric(self, labels: Mapping[str, str]) -> Metric:
        made = self._metrics[tuple(sorted(labels.items()))] = Metric(self._kind)
        return made


def metric(name: str, **labels: str) -> float:
    """Return the sum of a family's metrics that have these labels."""
    wanted = set(labels.items())
    return sum(m.value() for known, m in MetricFamily.every[name].items() if wanted <= set(known))


def parsed(text: str) -> dict[str, Any]:
    """Read the text form of a model configuration; fields that it does not know are errors."""
    words = re.findall(r'"(?:[^"\\]|\\.)*"|[\w.-]+|[\[\]{}:,]', text)
    found, rest = _message(words, "")
    assert not rest
    return found


def _message(words: list[str], kind: str) -> tuple[dict[str, Any], list[str]]:
    found: dict[str, Any] = {}
    while words and words[0] != "}":
        field, *words = words
        assert field in FIELDS[kind].split(), f"{kind or 'a configuration'} has no field {field}"
        if words[0] == ":":
            words = words[1:]
        value, words = _value(words, field)
        if isinstance(value, list) and isinstance(found.get(field), list):
            value = found[field] + value
        if field == "parameters":
            value = found.get(field, {}) | {value["key"]: value["value"]}
        found[field] = value
    return found, words


def _value(words: list[str], field: str) -> tuple[Any, list[str]]:
    first, *words = words
    if first == "{":
        found, words = _message(words, field)
        return found, words[1:]
    if first == "[":
        values = []
        while words[0] != "]":
            value, words = _value(words, field)
            values.append(value)
            words = words[words[0] == "," :]
        return values, words[1:]
    if re.fullmatch(r"-?\d+", first):
        return int(first), words
    if first.startswith('"'):
        return json.loads(first), words
    return {"true": True, "false": False}.get(first, first), words


class Server:
    """Serves one instance of a model: checks requests, makes batches, and hands on responses."""

    def __init__(self, model: Any, config: str) -> None:
        self.config = parsed(config)
        self.batches: list[int] = []
        self._waiting: queue.Queue[tuple[InferenceRequest, Future[InferenceResponse]] | None]
        self._waiting = queue.Queue()
        (group,) = self.config["instance_group"]
        assert group["count"] == 1
        self._model = model
        model.initialize(
            {
                "model_config": json.dumps(self.config),
                "model_instance_kind": group["kind"].removeprefix("KIND_"),
                "model_instance_device_id": "0",
                "model_name": self.config["name"],
                "model_repository": "/models",
                "model_version": "1",
            }
        )
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def infer(
        self,
        tensors: Mapping[str, np.ndarray[Any, Any]],
        *,
        outputs: Sequence[str] = (),
        timeout_us: int = 0,
        is_cancelled: bool = False,
        **parameters: Any,
    ) -> Future[InferenceResponse]:
        self._check(tensors)
        known = [output["name"] for output in self.config["output"]]
        request = InferenceRequest(tensors, outputs or known, timeout_us, parameters)
        request.cancelled = is_cancelled
        future: Future[InferenceResponse] = Future()
        self._waiting.put((request, future))
        return future

    def unload(self) -> None:
        """Take no more, answer what waits, and finalize, as when a model is unloaded."""
        self._waiting.put(None)
        self._thread.join()
        self._model.finalize()

    def _check(self, tensors: Mapping[str, np.ndarray[Any, Any]]) -> None:
        known = {entry["name"]: entry for entry in self.config["input"]}
        assert tensors.keys() <= known.keys()
        for name, entry in known.items():
            if name not in tensors:
                assert entry.get("optional"), f"{name} is missing"
                continue
            array = tensors[name]
            assert array.dtype == TYPES[entry["data_type"]]
            dims = entry["dims"]
            assert array.ndim == 1 + len(dims)
            assert all(want in (-1, has) for want, has in zip(dims, array.shape[1:], strict=True))
            assert len(array) <= self.config["max_batch_size"]

    def _work(self) -> None:
        while (entry := self._waiting.get()) is not None:
            batch, size = [entry], _size(entry[0])
            is_last = False
            while not self._waiting.empty() and size < self.config["max_batch_size"]:
                following = self._waiting.get()
                if following is None:
                    is_last = True
                    break
                batch.append(following)
                size += _size(following[0])
            self._execute(batch)
            if is_last:
                return

    def _execute(self, batch: list[tuple[InferenceRequest, Future[InferenceResponse]]]) -> None:
        self.batches.append(len(batch))
        responses = self._model.execute([request for request, _ in batch])
        assert len(responses) == len(batch)
        assert all(isinstance(response, InferenceResponse) for response in responses)
        for (_, future), response in zip(batch, responses, strict=True):
            future.set_result(response)


def _size(request: InferenceRequest) -> int:
    return len(request.inputs()[0].as_numpy())
