"""A network that a test may freeze: what it carries is held back, and neither side is told."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


class FreezingProxy:
    """Carries connections to another address until it is frozen; then it takes them, and says nothing."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._flowing = threading.Event()
        self._flowing.set()
        self._sockets: list[socket.socket] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        self._start(self._accept)

    def freeze(self) -> None:
        """Carry nothing."""
        self._flowing.clear()

    def thaw(self) -> None:
        """Carry on, what was held back too."""
        self._flowing.set()

    def close(self) -> None:
        """End all connections."""
        self._flowing.set()
        for end in [self._listening, *self._sockets]:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                self._sockets.append(client)
                self._start(self._connect, client)

    def _connect(self, client: socket.socket) -> None:
        self._flowing.wait()
        try:
            server = socket.create_connection(self._target)
        except OSError:
            client.close()
            return
        self._sockets.append(server)
        self._start(self._carry, client, server)
        self._carry(server, client)

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self._flowing.wait()
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _start(self, call: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=call, args=arguments, daemon=True).start()


@contextmanager
def freezing_proxy(host: str, port: int) -> Iterator[FreezingProxy]:
    """Run a proxy."""
    proxy = FreezingProxy(host, port)
    try:
        yield proxy
    finally:
        proxy.close()


@contextmanager
def silent_port() -> Iterator[int]:
    """Return a port that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        taken: list[socket.socket] = []

        def accept() -> None:
            with suppress(OSError):
                while True:
                    taken.append(listening.accept()[0])

        threading.Thread(target=accept, daemon=True).start()
        yield int(listening.getsockname()[1])
        with suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)
        for end in taken:
            end.close()
