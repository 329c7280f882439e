"""Frames as in docs/team/frames.md, and a minimal service that echoes them: `python -m benchmarks.service.echo`.

asyncio.Protocol on uvloop. The payload of a request begins with the size of its answer's payload, so that as many bytes
are sent as with real requests and answers, and only the cost of the transport remains.
"""

import asyncio
import signal
import socket
import struct
import sys
from typing import Any

import uvloop

HEADER = struct.Struct("<IBBBBQ")
"""Bytes of the payload, version, operation, status, zero, request id."""
STATUS = 6
DURATION = slice(HEADER.size + 20, HEADER.size + 24)
"""Bytes of an answer with the duration of the lookup: only these and the id differ between answers."""
WANTED = struct.Struct("<I")
ZEROS = bytes(1 << 22)


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
    """Sends frames over one connection and receives their answers, with minimal overhead in Python."""

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


class Echo(asyncio.Protocol):
    """Answers each request with the requested number of bytes."""

    def __init__(self) -> None:
        self._rest = b""
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer all complete requests."""
        data = self._rest + data if self._rest else data
        while len(data) >= HEADER.size + WANTED.size:
            length, *_, number = HEADER.unpack_from(data)
            end = HEADER.size + length
            if len(data) < end:
                break
            (wanted,) = WANTED.unpack_from(data, HEADER.size)
            self._transport.write(frame(number, ZEROS[:wanted]))
            data = data[end:]
        self._rest = data


def echo_frame(request: bytes, answer_bytes: int) -> bytes:
    """Return a frame of the size of a request, for an answer whose payload has so many bytes."""
    return frame(0, WANTED.pack(answer_bytes) + bytes(len(request) - HEADER.size - WANTED.size))


async def serve(path: str) -> None:
    """Answer on a Unix socket until SIGTERM."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    async with await loop.create_unix_server(Echo, path):
        await stop.wait()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1]))
