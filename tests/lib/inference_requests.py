"""Requests of the Open Inference Protocol as its clients send them, and what is in the answers.

The recipes that serve are on the path when this is imported.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.lib import ROOT
from tunerd.vocabulary import Arrays

RECIPES = ROOT / "recipes" / "serving"
sys.path.insert(0, str(RECIPES))
import open_inference  # noqa: E402


def document(given: Arrays, **more: Any) -> dict[str, Any]:
    tensors = [
        {
            "name": name,
            "shape": list(array.shape),
            "datatype": open_inference.datatype_of(str(array.dtype)),
            "data": array.ravel().tolist(),
        }
        for name, array in given.items()
    ]
    return {"id": "7", "inputs": tensors} | more


def binary(given: Arrays) -> tuple[bytes, dict[str, str]]:
    said = document(given, parameters={"binary_data_output": True})
    for entry in said["inputs"]:
        del entry["data"]
        entry["parameters"] = {"binary_data_size": given[entry["name"]].nbytes}
    head = json.dumps(said).encode()
    body = head + b"".join(array.tobytes() for array in given.values())
    return body, {open_inference.HEADER: str(len(head))}


def outputs_of(body: bytes, headers: Mapping[str, str]) -> Arrays:
    size = int(headers.get(open_inference.HEADER, len(body)))
    rest, found = body[size:], {}
    for entry in json.loads(body[:size])["outputs"]:
        dtype = open_inference.DATATYPES[entry["datatype"]]
        if "data" in entry:
            values = np.array(entry["data"], dtype)
        else:
            taken = entry["parameters"]["binary_data_size"]
            values, rest = np.frombuffer(rest[:taken], dtype), rest[taken:]
        found[entry["name"]] = values.reshape(entry["shape"])
    assert not rest
    return found
