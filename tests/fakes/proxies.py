"""A port whose service hangs."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


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
