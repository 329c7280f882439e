"""What a supervisor tells of its server: a small file that the supervisor keeps locked, so that it is never stale.

Each state is a new file, locked before it gets its name. Whoever finds the file unlocked knows that its author has
ended, whatever it says.
"""

import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from schema.postgres.plan import NAME, PORT, STATE


@dataclass(frozen=True)
class ServerState:
    """What is known of a server without using it.

    Attributes:
        base: The folder of the cluster, its locks and its log.
        status: "ready", "starting" or "stopped".
        supervisor: Process id of the supervisor, while there is one.
        server: Process id of the server, when it is ready.
        sockets: The folder of its socket, when it is ready.
        kept: Whether it stays up without clients, until it is stopped.
    """

    base: Path
    status: str = "stopped"
    supervisor: int | None = None
    server: int | None = None
    sockets: str | None = None
    kept: bool = False

    @property
    def url(self) -> str | None:
        """Return the URL of the server, when it is ready."""
        if self.sockets is None:
            return None
        # With the port, or libpq would take that of the environment.
        return f"postgresql://{NAME}@/{NAME}?host={quote(self.sockets, safe='/')}&port={PORT}"


def server_state(base: Path) -> ServerState:
    """Return what the server of a place is doing, starting nothing."""
    try:
        descriptor = os.open(base / STATE, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return ServerState(base)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return ServerState(base, **json.loads(os.read(descriptor, 1 << 16)))
    finally:
        os.close(descriptor)
    return ServerState(base)


def last_words(base: Path) -> dict[str, Any]:
    """Return what the last supervisor said before it ended; nothing if there was none."""
    try:
        state = json.loads((base / STATE).read_text())
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


class Announcer:
    """The supervisor's side: each state under a lock that it holds while the state is true."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self._held: int | None = None

    def tell(self, **state: Any) -> None:
        """Replace the state, in one step."""
        temporary = self.base / f".{STATE}.tmp"
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, json.dumps(state).encode())
        temporary.replace(self.base / STATE)
        if self._held is not None:
            os.close(self._held)
        self._held = descriptor


def try_lock(path: Path, kind: int) -> int | None:
    """Return the descriptor of a file under a lock; None if others hold it in a way that forbids this one."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
