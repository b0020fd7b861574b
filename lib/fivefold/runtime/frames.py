"""Frames on a socket: a JSON header and bytes, each with its length before it."""

from __future__ import annotations

import json
import socket
import struct

HEAD = struct.Struct(">QQ")


def write_frame(to: socket.socket, header: dict, data: bytes = b"") -> None:
    text = json.dumps(header).encode()
    to.sendall(HEAD.pack(len(text), len(data)) + text)
    if data:
        to.sendall(data)


def read_frame(source: socket.socket, limit: int) -> tuple[dict, bytes]:
    """The next frame; raises EOFError when the other end is gone, ValueError when it is larger than `limit` bytes."""
    text, data = HEAD.unpack(_exactly(source, HEAD.size))
    if text + data > limit:
        raise ValueError(f"a frame of {text + data} bytes is larger than the limit of {limit}")
    return json.loads(_exactly(source, text)), _exactly(source, data)


def _exactly(source: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        piece = source.recv(min(size - len(received), 1 << 20))
        if not piece:
            raise EOFError("the other end has closed")
        received += piece
    return bytes(received)
