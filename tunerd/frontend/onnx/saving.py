"""A model that a program holds -> a file, named by its content."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

from tunerd.errors import ModelError
from tunerd.system.files import write_whole

if TYPE_CHECKING:
    import onnx

_MAX_NAME_CHARS = 60


def content_name(proto: onnx.ModelProto) -> str:
    """Return a name for a model's file: its graph's, and the beginning of its content's sha256."""
    name = re.sub(r"[^\w.-]+", "_", str(proto.graph.name))[:_MAX_NAME_CHARS].strip("._-")
    return f"{name or 'model'}-{hashlib.sha256(_content(proto)).hexdigest()[:8]}"


def save_in(folder: Path, proto: onnx.ModelProto) -> Path:
    """Write a model into a private folder, which is made, and return its path.

    Raises ModelError for a model beyond the 2 GiB that a message of protobuf may have.
    """
    path = folder / f"{content_name(proto)}.onnx"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.is_file():
        write_whole(path, _content(proto))
    return path


def _content(proto: onnx.ModelProto) -> bytes:
    try:
        return bytes(proto.SerializeToString(deterministic=True))
    except ValueError as error:
        raise ModelError(
            f"the model cannot be written as one message ({error}); save it with its weights in "
            "files of their own, and give the path"
        ) from None
