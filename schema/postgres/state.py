"""The state of a server, published by its supervisor in a small locked file that is never stale.

Each state is a new file, locked before it gets its name. If the file is unlocked, its writer has ended, whatever the
file says.
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
    """The state of a server: "ready", "starting" or "stopped"; process ids and the folder of its socket if any.

    `kept`: it stays up without clients until it is stopped.
    """

    base: Path
    status: str = "stopped"
    supervisor: int | None = None
    server: int | None = None
    sockets: str | None = None
    kept: bool = False

    @property
    def url(self) -> str | None:
        """The server's URL, when ready."""
        if self.sockets is None:
            return None
        # An explicit port, since libpq would use the environment's.
        return f"postgresql://{NAME}@/{NAME}?host={quote(self.sockets, safe='/')}&port={PORT}"


def server_state(base: Path) -> ServerState:
    """Return the state of a place's server, without starting it."""
    try:
        descriptor = os.open(base / STATE, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return ServerState(base)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        replaced = os.fstat(descriptor).st_nlink == 0  # by a newer state, after it was opened
    except BlockingIOError:
        return ServerState(base, **json.loads(os.read(descriptor, 1 << 16)))
    finally:
        os.close(descriptor)
    return server_state(base) if replaced else ServerState(base)


def last_words(base: Path) -> dict[str, Any]:
    """Return the final state of the last supervisor; empty if there was none."""
    try:
        state = json.loads((base / STATE).read_text())
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


class Announcer:
    """Publishes the supervisor's state: each one under a lock held while it is true."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self._held: int | None = None

    def publish(self, **state: Any) -> None:
        """Replace the state atomically."""
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
    """Return the descriptor of a locked file; None if another process holds a conflicting lock."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
