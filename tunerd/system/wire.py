"""Framed messages between a slice and its runner over a Unix socket.

A message is one JSON object and any number of binary blobs:

    uint64 n | n bytes: {"body": ..., "blobs": [sizes]} | the blobs, one after another

All integers are little-endian. Nothing is unpickled: what arrives is data.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

_SIZE = struct.Struct("<Q")
MAX_HEADER_BYTES = 64 << 20
MAX_BLOB_BYTES = 4 << 30


Blob = bytes | bytearray | memoryview


class Closed(ConnectionError):
    """The other side is gone."""


def send(sock: socket.socket, body: Any, blobs: Sequence[Blob] = ()) -> None:
    """Send one message; raises OSError where the other side is gone."""
    header = json.dumps({"body": body, "blobs": [len(b) for b in blobs]}).encode()
    sock.sendall(_SIZE.pack(len(header)) + header)
    for blob in blobs:
        sock.sendall(blob)


def receive(sock: socket.socket) -> tuple[Any, list[bytearray]]:
    """Return (body, blobs) of the next message.

    Raises Closed at the end of the stream, TimeoutError after the socket's timeout, and ValueError
    for what is no message.
    """
    (size,) = _SIZE.unpack(_exactly(sock, _SIZE.size))
    if size > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {size} bytes is over the limit of {MAX_HEADER_BYTES}")
    header = json.loads(_exactly(sock, size))
    sizes = header["blobs"]
    if any(not isinstance(s, int) or s < 0 or s > MAX_BLOB_BYTES for s in sizes):
        raise ValueError(f"blob sizes {sizes} are outside 0..{MAX_BLOB_BYTES}")
    return header["body"], [_exactly(sock, s) for s in sizes]


def _exactly(sock: socket.socket, size: int) -> bytearray:
    buffer = bytearray(size)
    view = memoryview(buffer)
    while view:
        got = sock.recv_into(view)
        if not got:
            raise Closed("the other side closed the connection")
        view = view[got:]
    return buffer
