"""Requests and answers of the Open Inference Protocol (KServe's version 2), JSON and binary.

What `tritonclient` and KServe's clients send over HTTP: a JSON document that names the tensors,
which hold their values as lists or, with the binary extension, follow the document as raw bytes in
the order of their names there. The header `Inference-Header-Content-Length` says where it ends.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tunerd.colocation import Engine, MemberError, RefusedError
from tunerd.errors import InputError

JSON = "application/json"
HEADER = "Inference-Header-Content-Length"
DATATYPES = {
    "BOOL": "bool",
    "UINT8": "uint8",
    "UINT16": "uint16",
    "UINT32": "uint32",
    "UINT64": "uint64",
    "INT8": "int8",
    "INT16": "int16",
    "INT32": "int32",
    "INT64": "int64",
    "FP16": "float16",
    "FP32": "float32",
    "FP64": "float64",
}
_NAMES = {dtype: name for name, dtype in DATATYPES.items()}


@dataclass(frozen=True)
class Inference:
    """One request. timeout_secs: the client's own deadline, from now; tenant: who asks."""

    inputs: dict[str, np.ndarray[Any, Any]]
    identity: str | None
    timeout_secs: float | None
    tenant: str | None
    outputs: dict[str, bool] | None  # by name, whether as bytes; None: all
    is_binary: bool  # outputs of which nothing else is said


@dataclass(frozen=True)
class Answer:
    status: int  # of HTTP
    body: bytes
    headers: dict[str, str]


async def answer(engine: Engine, model: str, body: bytes, header: str | None) -> Answer:
    """Have an engine answer the body of a request, or say what is wrong with it."""
    try:
        asked = read(body, header)
        outputs = await engine.asubmit(
            model, asked.inputs, deadline_secs=asked.timeout_secs, tenant=asked.tenant
        )
        return Answer(200, *written(model, outputs, asked))
    except RefusedError as error:
        status, why = 503, str(error)
    except MemberError as error:
        status, why = 500, str(error)
    except (InputError, TypeError, ValueError) as error:
        status, why = 400, str(error)
    return Answer(status, json.dumps({"detail": why}).encode(), {"Content-Type": JSON})


def datatype_of(dtype: str) -> str:
    """Return the protocol's name of a NumPy dtype."""
    return _NAMES[dtype]


def read(body: bytes, header: str | None) -> Inference:
    """Read the body of a request; `header` is the value of HEADER, where there is one.

    Raises ValueError for what is not of the protocol, with what is wrong.
    """
    size = len(body) if header is None else int(header)
    if not 0 < size <= len(body):
        raise ValueError(f"{HEADER} is {size}, and the body has {len(body)} bytes")
    document = json.loads(body[:size])
    if not isinstance(document, dict) or not isinstance(document.get("inputs"), list):
        raise ValueError("the document has no list 'inputs'")
    rest = memoryview(body)[size:]
    inputs = {}
    for entry in document["inputs"]:
        array, rest = _tensor(entry, rest)
        inputs[str(entry["name"])] = array
    if len(rest):
        raise ValueError(f"{len(rest)} bytes follow the last tensor")
    parameters = document.get("parameters", {})
    timeout = parameters.get("timeout")  # microseconds, as Triton has it
    is_binary = bool(parameters.get("binary_data_output", False))
    outputs = document.get("outputs")
    return Inference(
        inputs,
        document.get("id"),
        None if timeout is None else float(timeout) / 1e6,
        parameters.get("tenant"),
        None
        if outputs is None
        else {str(o["name"]): _wants_bytes(o.get("parameters", {}), is_binary) for o in outputs},
        is_binary,
    )


def written(
    model: str, outputs: Mapping[str, np.ndarray[Any, Any]], asked: Inference
) -> tuple[bytes, dict[str, str]]:
    """Return the body and the headers of an answer. ValueError for an output that is not there."""
    chosen = asked.outputs
    if chosen is None:
        chosen = dict.fromkeys(outputs, asked.is_binary)
    if missing := chosen.keys() - outputs.keys():
        raise ValueError(f"{model} has no output '{min(missing)}'; it has {', '.join(outputs)}")
    entries, tail = [], []
    for name, as_bytes in chosen.items():
        array = np.ascontiguousarray(outputs[name])
        entry: dict[str, Any] = {
            "name": name,
            "datatype": datatype_of(str(array.dtype)),
            "shape": list(outputs[name].shape),
        }
        if as_bytes:
            entry["parameters"] = {"binary_data_size": array.nbytes}
            tail.append(array.tobytes())
        else:
            entry["data"] = array.ravel().tolist()
        entries.append(entry)
    document: dict[str, Any] = {"model_name": model, "outputs": entries}
    if asked.identity is not None:
        document["id"] = asked.identity
    head = json.dumps(document).encode()
    if not tail:
        return head, {"Content-Type": JSON}
    headers = {"Content-Type": "application/octet-stream", HEADER: str(len(head))}
    return b"".join([head, *tail]), headers


def _tensor(entry: Mapping[str, Any], rest: memoryview) -> tuple[np.ndarray[Any, Any], memoryview]:
    try:
        name, shape = str(entry["name"]), tuple(int(n) for n in entry["shape"])
        dtype = np.dtype(DATATYPES[entry["datatype"]])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"an input lacks a name, a shape or a known datatype ({error})") from None
    if any(size < 0 for size in shape):
        raise ValueError(f"{name} has the shape {list(shape)}")
    size = entry.get("parameters", {}).get("binary_data_size")
    if size is None:
        values = np.asarray(entry.get("data", ()), dtype).ravel()
        if values.size != math.prod(shape):
            raise ValueError(f"{name} has {values.size} values for the shape {list(shape)}")
        return values.reshape(shape), rest
    if size != math.prod(shape) * dtype.itemsize or size > len(rest):
        raise ValueError(f"{name} has {size} bytes for {dtype}{list(shape)}; {len(rest)} came")
    return np.frombuffer(rest[:size], dtype).reshape(shape), rest[size:]


def _wants_bytes(parameters: Mapping[str, Any], usual: bool) -> bool:
    return bool(parameters.get("binary_data", usual))
