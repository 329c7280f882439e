"""What the load needs of the service's frames, as docs/frames.md describes them."""

import socket
import struct

HEADER = struct.Struct("<IBBBBQ")
"""Bytes of the payload, version, operation, status, flags, request id."""
STATUS = 6
DURATION = slice(HEADER.size + 20, HEADER.size + 24)
"""Bytes of an answer that state how long the lookup took: these and the id alone differ from answer to answer."""


def frame(number: int, payload: bytes) -> bytes:
    """Return a frame with a request id."""
    return HEADER.pack(len(payload), 1, 2, 0, 0, number) + payload


def numbered(request: bytes, number: int) -> bytes:
    """Return a frame with another request id."""
    return request[:8] + number.to_bytes(8, "little") + request[HEADER.size :]


def content(answer: bytes) -> bytes:
    """Return an answer without its id and its duration."""
    return answer[:8] + answer[HEADER.size : DURATION.start] + answer[DURATION.stop :]


def connect(address: str) -> socket.socket:
    """Connect to a Unix socket."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(address)
    return sock


class Caller:
    """Sends frames over one connection and takes their answers, with as little else as Python allows."""

    def __init__(self, address: str) -> None:
        self._socket = connect(address)
        self._buffer = bytearray(1 << 22)
        self._view = memoryview(self._buffer)

    def ask(self, request: bytes) -> bytes:
        """Send a frame and return its answer."""
        self._socket.sendall(request)
        received = self._socket.recv_into(self._buffer)
        while received < HEADER.size or received < HEADER.size + HEADER.unpack_from(self._buffer)[0]:
            received += self._socket.recv_into(self._view[received:])
        return bytes(self._view[:received])

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()
