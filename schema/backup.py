"""The catalogue as one file: builds, releases, statistics and the trees that lie in PostgreSQL.

Stores are folders that never change, so any program that copies files backs them up. A backup is an archive of pg_dump;
it is restored into a server of the same or a newer major version.
"""

import secrets
import subprocess
from pathlib import Path

from draftstore.errors import StoreError
from draftstore.storage import files
from draftstore.storage.manifest import manifest_digest
from schema.clients import client_command
from schema.database import connect, migrate, require_schema
from schema.errors import DatabaseError


class BackupError(DatabaseError):
    """A backup cannot be written or read, or the database already has builds."""


def back_up(target: Path) -> None:
    """Write a backup, as of one moment; other programs may go on. A killed backup leaves `target` as it was.

    Only this user may read it: its statistics quote the corpora.

    Raises:
        BackupError: pg_dump fails.
        DatabaseError: the server is down, or the tables have another revision.
    """
    require_schema()
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        partial.touch(mode=0o600, exist_ok=False)
        _run("pg_dump", "--format=custom", "--no-owner", "--no-privileges", f"--file={partial}")
        files.fsync_path(partial)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def restore(source: Path) -> None:
    """Fill the database from a backup, in one transaction, and migrate its tables to this version's revision.

    What the file says is run as the owner of the database: it must be trusted.

    Raises:
        BackupError: the file is no backup, or the catalogue has builds.
        DatabaseError: the server is down, or the backup comes from a newer version of draftstore.
    """
    if not source.is_file():
        raise BackupError(f"{source} does not exist: name a file that `draftstore db backup` wrote")
    with connect(check=False, autocommit=True) as connection:
        tables = connection.execute("SELECT to_regclass('builds') IS NOT NULL").fetchone()
        if tables == (True,) and connection.execute("SELECT 1 FROM builds LIMIT 1").fetchone():
            raise BackupError(
                "the catalogue has builds, which a restore would replace: restore into an empty database, or with "
                "another DRAFTSTORE_HOME"
            )
    options = (
        "--clean",
        "--if-exists",
        "--no-owner",
        "--no-privileges",
        "--single-transaction",
        "--exit-on-error",
    )
    _run("pg_restore", *options, str(source))
    migrate()


def missing_stores() -> list[tuple[int, str]]:
    """Return id and folder of each finished build whose store is not there, or is another one."""
    with connect() as connection:
        rows = connection.execute(
            "SELECT id, path, digest FROM builds WHERE state = 'finished' ORDER BY id"
        ).fetchall()
    return [(row[0], row[1]) for row in rows if not _is_store(Path(row[1]), row[2])]


def _is_store(path: Path, digest: str) -> bool:
    try:
        return manifest_digest(path) == digest
    except (StoreError, OSError):
        return False


def _run(program: str, *arguments: str) -> None:
    """Run a client program to its end.

    Raises:
        BackupError: it fails; the message has what it said.
    """
    command, environment = client_command(program, *arguments)
    done = subprocess.run(  # noqa: S603 - our own arguments
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise BackupError(f"{program} failed: {done.stderr.strip()[-2_000:]}")
