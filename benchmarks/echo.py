"""The least that a service can do, a process of its own: `python -m benchmarks.echo SOCKET`.

asyncio.Protocol on uvloop, as the lookup service has it. Requests and answers have the header of the service's frames;
the payload of a request begins with the bytes that its answer's payload shall have, all zero. So the sizes on the wire
are those of real requests and answers, and what is left is the cost of the transport.
"""

import asyncio
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.loadplan import LoadPlan

REQUEST = struct.Struct("<I4xQI")
ANSWER = struct.Struct("<IBBBBQ")
MOST = 1 << 22
START_SECONDS = 30.0


class Echo(asyncio.Protocol):
    """Answers each request with as many bytes as it asks for."""

    _nothing = bytes(MOST)

    def __init__(self) -> None:
        self._rest = b""
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer the requests that are whole."""
        if self._rest:
            data = self._rest + data
        while len(data) >= REQUEST.size:
            length, number, wanted = REQUEST.unpack_from(data)
            if len(data) < ANSWER.size + length:
                break
            self._transport.write(ANSWER.pack(wanted, 1, 0x82, 0, 0, number) + self._nothing[:wanted])
            data = data[ANSWER.size + length :]
        self._rest = data


def echo_frame(request: bytes, answer_bytes: int) -> bytes:
    """Return a frame of the same size as a request, for an answer whose payload has so many bytes."""
    length = len(request) - ANSWER.size
    return REQUEST.pack(length, 0, answer_bytes) + bytes(length - 4)


def echo_plan(plan: LoadPlan) -> LoadPlan:
    """Return a plan with requests and answers of the same sizes, those of the first build, for the echo."""
    sizes = [len(next(iter(answers.values()))) for answers in plan.answers]
    frames = [echo_frame(frame, size) for frame, size in zip(plan.frames, sizes, strict=True)]
    return LoadPlan(frames, plan.kinds, plan.names, [{0: bytes(size)} for size in sizes])


async def serve(path: str) -> None:
    """Answer on a Unix socket until SIGTERM."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    server = await loop.create_unix_server(Echo, path)
    async with server:
        await stop.wait()


@contextmanager
def echo_server() -> Iterator[tuple[str, int]]:
    """Run an echo in a process of its own; yield its socket and its process id."""
    with tempfile.TemporaryDirectory(prefix="draftstore-echo-") as folder:
        path = f"{folder}/echo.sock"
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.echo", path], cwd=Path(__file__).parent.parent, env=os.environ
        )
        try:
            until = time.monotonic() + START_SECONDS
            while not Path(path).exists():
                if process.poll() is not None or time.monotonic() > until:
                    raise SystemExit("the echo does not start")
                time.sleep(0.02)
            yield path, process.pid
        finally:
            with suppress(ProcessLookupError):
                process.terminate()
            process.wait(10)


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1]))
