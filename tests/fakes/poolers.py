"""A pooler of PostgreSQL's sessions: it lends a process of the server to each client for one transaction at a time."""

import multiprocessing
import select
import socket
import socketserver
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from psycopg.conninfo import conninfo_to_dict

from tests.fakes.waiting import SECONDS

ENCRYPTED = struct.pack("!I", 80877103), struct.pack("!I", 80877104)
"""Requests for TLS and for encryption by GSSAPI, before the first packet."""
WHOLE, PARTS = (b"Q", b"S"), (b"P", b"B", b"D", b"E", b"C", b"H")
"""Messages that the server answers with that it is ready, and those that need one of them at their end."""


def read(sock: socket.socket, size: int) -> bytes:
    """Return so many bytes; ConnectionError if there are no more."""
    found = b""
    while len(found) < size:
        if not (part := sock.recv(size - len(found))):
            raise ConnectionError
        found += part
    return found


def read_message(sock: socket.socket) -> tuple[bytes, bytes]:
    """Return the kind and the content of a message."""
    kind, size = struct.unpack("!cI", read(sock, 5))
    return kind, read(sock, size - 4)


def packed(kind: bytes, content: bytes) -> bytes:
    """Return a message as bytes."""
    return struct.pack("!cI", kind, len(content) + 4) + content


class Pooler(socketserver.ThreadingTCPServer):
    """A pooler before the server of a URL, which takes no password. Processes keep the parameters of a first client.

    Args:
        url: of any database of the server.
        turns: lend the process that was used longest ago, not the last one.
    """

    daemon_threads = True

    def __init__(self, url: str, *, turns: bool) -> None:
        super().__init__(("127.0.0.1", 0), Client)
        parts = conninfo_to_dict(url)
        self.place = f"{parts['host']}/.s.PGSQL.{parts['port']}"
        self.turns = turns
        self.idle, self.welcomes = dict[bytes, list[socket.socket]](), dict[bytes, bytes]()
        self.lock = threading.Lock()

    def url(self, user: str, database: str) -> str:
        """Return the URL of a database behind the pooler."""
        return f"postgresql://{user}@127.0.0.1:{self.server_address[1]}/{database}"

    def borrow(self, start: bytes) -> socket.socket:
        """Return an idle process that began with these parameters, or a new one."""
        with self.lock:
            if idle := self.idle.setdefault(start, []):
                return idle.pop(0 if self.turns else -1)
            process = socket.socket(socket.AF_UNIX)
            process.connect(self.place)
            process.sendall(struct.pack("!I", len(start) + 4) + start)
            said, kind = b"", b""
            while kind not in (b"Z", b"E"):
                kind, content = read_message(process)
                own = kind == b"K"  # a process of its own making is announced
                said += packed(kind, struct.pack("!II", 7, 7) if own else content)
            self.welcomes.setdefault(start, said)
            return process


class Client(socketserver.BaseRequestHandler):
    """A client of the pooler."""

    server: Pooler

    def handle(self) -> None:
        """Serve a client until it leaves."""
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        start = ENCRYPTED[0]
        while start in ENCRYPTED:
            if start := read(self.request, struct.unpack("!I", read(self.request, 4))[0] - 4):
                self.request.sendall(b"N" if start in ENCRYPTED else b"")
        process = self.server.borrow(start)
        self.server.idle[start].append(process)
        self.request.sendall(self.server.welcomes[start])
        with suppress(ConnectionError):
            while (message := read_message(self.request))[0] != b"X":
                process = self.server.borrow(start)
                self.relay(process, message, self.server.idle[start])

    def relay(self, process: socket.socket, message: tuple[bytes, bytes], idle: list[socket.socket]) -> None:
        """Pass messages on until the transaction ends; the process is idle before the client knows."""
        waiting, parts, held, state = 0, False, False, b"I"
        sock = self.request
        while True:
            kind, content = message
            if sock is process:
                waiting, state = (waiting - 1, content) if kind == b"Z" else (waiting, state)
            else:
                waiting += kind in WHOLE
                parts = kind in PARTS or (parts and kind != b"S")
                held = (
                    kind in PARTS and kind != b"H"
                )  # the server keeps the end of its answer until it is asked for
            done = not waiting and not parts and state == b"I"
            if done:
                idle.append(process)
            (self.request if sock is process else process).sendall(packed(*message))
            if done:
                return
            sock = select.select([self.request] if held else [process, self.request], [], [], SECONDS)[0][0]
            message = read_message(sock)


@contextmanager
def pooler(url: str, *, turns: bool = False) -> Iterator[Pooler]:
    """Run a pooler before a server, in a process of its own: some calls of psycopg block all threads of theirs."""
    with Pooler(url, turns=turns) as server:
        process = multiprocessing.get_context("fork").Process(target=server.serve_forever, daemon=True)
        process.start()
        yield server
        process.kill()
        process.join()
