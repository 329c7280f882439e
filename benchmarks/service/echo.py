"""The least that a service can do, a process of its own: `python -m benchmarks.service.echo SOCKET`.

asyncio.Protocol on uvloop. The payload of a request begins with the number of bytes that its answer's payload shall
have, so that the bytes on the wire are those of real requests and answers, and what is left is the cost of the
transport.
"""

import asyncio
import signal
import struct
import sys
from typing import Any

import uvloop

from benchmarks.service.frames import HEADER, frame

WANTED = struct.Struct("<I")
ZEROS = bytes(1 << 22)


class Echo(asyncio.Protocol):
    """Answers each request with the bytes that it asks for."""

    def __init__(self) -> None:
        self._rest = b""
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer the requests that are whole."""
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
