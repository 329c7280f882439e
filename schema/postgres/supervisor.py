"""The process that keeps an embedded PostgreSQL server up as long as it has clients.

Every client holds a shared lock on a file, which the kernel releases however the client ends. The first client starts
the supervisor, which outlives it and stops the server once it gets that lock exclusively: during the stop, new clients
wait for the lock. Only one supervisor runs (`SUPERVISOR_LOCK`). The server ends with its supervisor, killed by the
kernel if necessary; every server process inherits `SERVER_LOCK`: when it can be taken, none is left.

It runs in a bare interpreter: `python -I -S -c ... PLAN`, see `schema.embedded`. Once the server accepts connections it
closes its standard output; text written there before is the reason why it cannot.
"""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

from schema.postgres import cluster, programs
from schema.postgres.plan import (
    CLIENTS_LOCK,
    LOG,
    SERVER_LOCK,
    SUPERVISOR_LOCK,
    ClusterError,
    ClusterPlan,
    say,
)
from schema.postgres.state import Announcer, last_words, try_lock

TICK = 0.1
"""Seconds between two checks for clients."""
LOG_BYTES = 4 << 20
LOG_CHECK = 10.0
"""Seconds between two checks of the log's size."""
RESTARTS = 5
RESTART_WINDOW = 60.0
"""Maximum restarts of a failed server within a window in seconds."""
ENDING_SECONDS = 30.0
"""Seconds that processes of an earlier server have to end."""
STOP_SECONDS = ((signal.SIGINT, 60.0), (signal.SIGQUIT, 10.0), (signal.SIGKILL, 10.0))
"""Fast shutdown, immediate shutdown, kill: each with its time limit in seconds."""
WATCHED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD}


class ServerSupervisor:
    """The loop that supervises one server."""

    def __init__(self, plan: ClusterPlan) -> None:
        self.plan = plan
        self.base = Path(plan.base)
        self.clients = os.open(self.base / CLIENTS_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.announcer = Announcer(self.base)
        self.sockets: Path | None = None
        self.server: subprocess.Popen[bytes] | None = None
        self.server_lock: int | None = None
        self.status = "starting"
        self.kept = False
        self.stopping = False
        self.starts: list[float] = []

    def run(self) -> None:
        """Start the server, keep it up, stop it; raise ClusterError if it does not stay up."""
        try:
            self.start()
            _close_output()
            self.watch()
        finally:
            self.stop()

    def start(self) -> None:
        """Start the server and return when it accepts connections."""
        before = last_words(self.base)
        self.publish("starting")
        self.bound_log()
        self.server_lock = self.wait_for_remains()
        binaries = programs.usable_binaries(self.plan, self.server_lock)
        cluster.ensure_cluster(self.plan, binaries, self.server_lock)
        self.sockets = cluster.socket_folder(self.plan, before.get("sockets"))
        cluster.remove_stale(self.plan, self.sockets)
        command = cluster.server_command(self.plan, binaries, self.sockets)
        self.starts.append(time.monotonic())
        log = os.open(self.base / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self.server = programs.launch(self.plan, command, self.server_lock, stdout=log, stderr=log)
        finally:
            os.close(log)
        while not cluster.is_ready(self.plan, self.server.pid):
            if self.server.poll() is not None:
                raise ClusterError(f"PostgreSQL ended when it started: {self.log_end()}")
            self.receive(0.01)
            if self.stopping:
                return
        self.publish("ready")

    def wait_for_remains(self) -> int:
        """Return the server's lock once no process of an earlier server holds it."""
        if self.server_lock is not None:
            os.close(self.server_lock)  # processes of the old server may still hold theirs
        deadline = time.monotonic() + ENDING_SECONDS
        while (lock := try_lock(self.base / SERVER_LOCK, fcntl.LOCK_EX)) is None:
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"processes of an earlier server in {self.base} have not ended: find them with "
                    f"`fuser {self.base / SERVER_LOCK}`, end them, and try again"
                )
            time.sleep(0.01)
        return lock

    def watch(self) -> None:
        """Return when the server has no more clients or a stop was requested."""
        assert self.server is not None
        last_seen = last_look = time.monotonic()
        while not self.stopping:
            self.receive(TICK)
            now = time.monotonic()
            if os.fstat(self.clients).st_nlink == 0:
                return  # the folder was removed
            if self.kept or not self.alone():
                last_seen = now
            elif now - last_seen >= self.plan.linger or self.server.poll() is not None:
                return  # holding the clients' lock
            else:
                fcntl.flock(self.clients, fcntl.LOCK_UN)
            if self.server.poll() is not None:
                self.restart()
            if now - last_look > LOG_CHECK:
                self.bound_log()
                last_look = now

    def alone(self) -> bool:
        """Return True if no client is left; if so, the clients' lock is held on return."""
        try:
            fcntl.flock(self.clients, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def restart(self) -> None:
        """Restart a server that ended by itself, a limited number of times."""
        assert self.server is not None
        say(f"the server ended with status {self.server.returncode}: starting it again")
        self.starts = [start for start in self.starts if time.monotonic() - start < RESTART_WINDOW]
        if len(self.starts) > RESTARTS:
            raise ClusterError(f"the server ended {len(self.starts)} times in {RESTART_WINDOW:.0f} s")
        self.start()

    def receive(self, seconds: float) -> None:
        """Wait that long for a signal: SIGUSR1 keeps the server up without clients, SIGTERM stops it."""
        received = signal.sigtimedwait(WATCHED, seconds)
        if received is None:
            return
        if received.si_signo in (signal.SIGTERM, signal.SIGINT):
            self.stopping = True
        elif received.si_signo == signal.SIGUSR1:
            self.kept = True
            self.publish(self.status)

    def stop(self) -> None:
        """Stop the server in any state."""
        if self.server and self.server.poll() is None:
            for how, seconds in STOP_SECONDS:
                self.server.send_signal(how)
                with suppress(subprocess.TimeoutExpired):
                    self.server.wait(seconds)
                    break
        if self.sockets and self.sockets.parent != self.base:
            shutil.rmtree(self.sockets, ignore_errors=True)
        with suppress(OSError):
            self.publish("stopped")

    def publish(self, status: str) -> None:
        """Publish the state of the server."""
        self.status = status
        ready = status == "ready"
        self.announcer.publish(
            status=status,
            supervisor=os.getpid(),
            server=self.server.pid if self.server and ready else None,
            sockets=str(self.sockets) if self.sockets and ready else None,
            kept=self.kept,
        )

    def bound_log(self) -> None:
        """Rotate a long log, keeping one old copy; the server goes on writing to the same file."""
        log = self.base / LOG
        if log.stat().st_size > LOG_BYTES:
            shutil.copyfile(log, log.with_suffix(".log.old"))
            os.truncate(log, 0)

    def log_end(self) -> str:
        """Return the last lines of the log, which say why the server ended."""
        lines = (self.base / LOG).read_text(errors="replace").splitlines()[-20:]
        reasons = [line for line in lines if "FATAL:" in line or "PANIC:" in line or "HINT:" in line]
        return " ".join(reasons or lines[-3:])


def _close_output() -> None:
    """Release the client that waits on standard output."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def _open_log(base: Path) -> None:
    """Redirect standard error to the end of the log."""
    log = os.open(base / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 2)
    os.close(log)


def main() -> None:
    """Become the supervisor for the plan in the last argument, unless one is running."""
    plan = ClusterPlan(**json.loads(sys.argv[-1]))
    if os.fork():
        os._exit(0)  # leaves the client no child to reap
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a client may ignore it, which is inherited
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    base = Path(plan.base)
    lock = try_lock(base / SUPERVISOR_LOCK, fcntl.LOCK_EX)
    if lock is None:
        return
    _open_log(base)
    try:
        ServerSupervisor(plan).run()
    except ClusterError as error:
        say(str(error))
        _report(str(error))
    except Exception as error:  # noqa: BLE001 - whatever it is, the waiting client needs the reason
        say(traceback.format_exc())
        _report(f"{type(error).__name__}: {error}")


def _report(reason: str) -> None:
    """Write the reason why there is no server to the waiting client, if still there."""
    with suppress(OSError):
        os.write(1, reason.encode(errors="backslashreplace"))
