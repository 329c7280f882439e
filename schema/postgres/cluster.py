"""A PostgreSQL cluster on disk: its creation, its socket, and its server's command line."""

import os
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from schema.postgres.plan import (
    DATA,
    MAJOR,
    NAME,
    PORT,
    READER,
    SOCKET_BYTES,
    SOCKET_FILE,
    ClusterError,
    ClusterPlan,
)
from schema.postgres.programs import run

SETTINGS = {
    "cluster_name": NAME,
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "fsync": "on",
    "full_page_writes": "on",
    "synchronous_commit": "on",
    "max_connections": "100",
    "shared_buffers": "256MB",
    "maintenance_work_mem": "256MB",
    "max_wal_size": "4GB",
    # no replication: a table created and filled in one transaction then needs no WAL
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "logging_collector": "off",
    "log_destination": "stderr",
    "log_checkpoints": "off",
    "log_line_prefix": "%m [%p] ",
    "log_timezone": "UTC",
    "timezone": "UTC",
}
PLAIN_PATH = re.compile(r"[A-Za-z0-9/._+-]+")


def ensure_cluster(plan: ClusterPlan, binaries: Path, keep: int) -> None:
    """Create the cluster if it is missing; under a temporary name first, so that only complete clusters are used."""
    data = Path(plan.base) / DATA
    if data.is_dir():
        version = (data / "PG_VERSION").read_text().strip() if (data / "PG_VERSION").exists() else "none"
        if version != MAJOR:
            raise ClusterError(
                f"{data} was made by PostgreSQL {version}, and this is PostgreSQL {MAJOR}: with the version of "
                "draftstore that made it, write the catalogue to a file with pg_dump; then move the folder away and, "
                "with this version, fill a new one with pg_restore (see docs/operations.md)"
            )
        return
    unfinished = data.with_name(f"{DATA}.unfinished")
    if unfinished.exists():
        shutil.rmtree(unfinished)
    unfinished.mkdir(mode=0o700)
    if plan.switches_user:
        os.chown(unfinished, plan.uid, plan.gid)
    initdb = [str(binaries / "bin" / "initdb"), "-D", str(unfinished), "-U", NAME]
    initdb += ["--auth=peer", "--encoding=UTF8", "--locale=C"]
    initdb += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
    _must(plan, initdb, keep)
    single = [str(binaries / "bin" / "postgres"), "--single", "-j", "-D", str(unfinished), "template1"]
    _must(plan, single, keep, f"CREATE DATABASE {NAME};\n\n".encode())
    unfinished.rename(data)
    fsync_folder(data.parent)


def _must(plan: ClusterPlan, arguments: list[str], keep: int, given: bytes = b"") -> None:
    status, printed = run(plan, arguments, keep, given)
    if status or "ERROR:" in printed or "FATAL:" in printed:
        raise ClusterError(f"{arguments[0]} ended with status {status}: {printed[-2_000:]}")


def fsync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def socket_folder(plan: ClusterPlan, previous: str | None) -> Path:
    """Return a private folder with a path short enough for a socket; create it if missing.

    It lies beside the cluster, or under /tmp if that path is too long or has characters with a meaning in URLs or host
    lists; `previous` is the folder used before.
    """
    beside = Path(plan.base) / "run"
    if len(os.fsencode(beside / SOCKET_FILE)) <= SOCKET_BYTES and PLAIN_PATH.fullmatch(str(beside)):
        with suppress(FileExistsError):
            beside.mkdir(mode=0o700)
            if plan.switches_user:
                os.chown(beside, plan.uid, plan.gid)
        return beside
    if previous and _is_private(Path(previous), plan.uid):
        return Path(previous)
    short = Path(tempfile.mkdtemp(prefix=f"{NAME}-", dir="/tmp"))
    if plan.switches_user:
        os.chown(short, plan.uid, plan.gid)
    return short


def _is_private(folder: Path, uid: int) -> bool:
    """Return True if a path is a folder (not a link) that belongs to the account and is closed to others."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return found.st_mode == 0o040700 and found.st_uid == uid


def remove_stale(plan: ClusterPlan, sockets: Path) -> None:
    """Remove the lock files of a killed server; call only when none of its processes is left.

    They name its process id, which another process or a zombie may have by now: the server would refuse to start.
    """
    for left in (
        Path(plan.base) / DATA / "postmaster.pid",
        sockets / SOCKET_FILE,
        sockets / f"{SOCKET_FILE}.lock",
    ):
        left.unlink(missing_ok=True)


def server_command(plan: ClusterPlan, binaries: Path, sockets: Path) -> list[str]:
    """Return the server's command line, after writing the files that control access."""
    base = Path(plan.base)
    rules = {
        "pg_hba.conf": f"local all {NAME},{READER} peer map={NAME}\n",
        "pg_ident.conf": "".join(f'{NAME} "{plan.user}" {role}\n' for role in (NAME, READER)),
    }
    for name, text in rules.items():
        (base / name).write_text(text)
        (base / name).chmod(0o644)
    settings = {
        **SETTINGS,
        "unix_socket_directories": str(sockets),
        "hba_file": str(base / "pg_hba.conf"),
        "ident_file": str(base / "pg_ident.conf"),
    }
    command = [str(binaries / "bin" / "postgres"), "-D", str(base / DATA), "-p", str(PORT)]
    return [*command, *(part for name, value in settings.items() for part in ("-c", f"{name}={value}"))]


def is_ready(plan: ClusterPlan, pid: int) -> bool:
    """Return True if the server with this process id accepts connections, according to its pid file."""
    try:
        lines = (Path(plan.base) / DATA / "postmaster.pid").read_text(errors="replace").splitlines()
    except OSError:
        return False
    return len(lines) >= 8 and lines[0].strip() == str(pid) and lines[7].strip() == "ready"
