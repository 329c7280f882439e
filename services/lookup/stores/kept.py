"""The releases as last read from the catalogue, kept in a file beside the socket.

A process of the service that starts while the database is away serves them, where it would otherwise serve nothing.
"""

import json
import logging
import os
import secrets
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from psycopg.conninfo import conninfo_to_dict

from draftstore.errors import DraftstoreError
from draftstore.storage.files import json_text
from schema.database import database_url, is_embedded
from schema.errors import DatabaseUrlError
from schema.home import data_home
from schema.notices import LiveRelease

LOG = logging.getLogger(__name__)
_PLACE = ("host", "hostaddr", "port", "dbname", "options")
_TYPES = (str, int, str, str, str, list)
"""Types of the fields of a release."""


class Kept(NamedTuple):
    """What the file holds.

    Attributes:
        releases: all releases of the catalogue.
        read_at: when the catalogue was last read, as Unix time in seconds.
    """

    releases: list[LiveRelease]
    read_at: float


class KeptReleases:
    """The file, which every process of the service writes; its time of change is that of the last read."""

    def __init__(self, path: Path) -> None:
        """Read and write nothing yet."""
        self._path = path
        self._written: bytes | None = None
        self._complained = False

    @classmethod
    def beside(cls, socket: Path) -> "KeptReleases":
        """Return the file that belongs to a socket."""
        path = socket.absolute()
        return cls(path.with_name(f"{path.name}.releases"))

    def keep(self, releases: Sequence[LiveRelease]) -> None:
        """Note that the catalogue was read just now; the file is replaced if the releases have changed."""
        document = {"database": _database(), "releases": [release._asdict() for release in releases]}
        data = json_text(document).encode()
        try:
            if data == self._written:
                with suppress(FileNotFoundError):
                    os.utime(self._path, follow_symlinks=False)
                    return
            _replace(self._path, data)
            self._written, self._complained = data, False
        except OSError as error:
            if not self._complained:
                LOG.warning("the releases cannot be kept in %s: %s", self._path, error.strerror)
            self._complained = True

    def load(self) -> Kept | None:
        """Return what was kept; None if there is nothing that this user wrote about this database."""
        try:
            return self._load()
        except FileNotFoundError:
            return None
        except (DraftstoreError, OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            LOG.warning("the releases kept in %s cannot be used: %s", self._path, error)
            return None

    def _load(self) -> Kept | None:
        """Read the file."""
        # Not to wait for the other end of a pipe.
        descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
                raise PermissionError("it is no file, it belongs to another user, or others may write to it")
            document: dict[str, Any] = json.loads(file.read())
        if document["database"] != _database():
            return None
        releases = [LiveRelease(**entry) for entry in document["releases"]]
        if any(
            not isinstance(value, kind)
            for entry in releases
            for value, kind in zip(entry, _TYPES, strict=True)
        ):
            raise TypeError("a release has a field of another type")
        return Kept(releases, found.st_mtime)


def _database() -> dict[str, str]:
    """Return which database the releases come from, without a password."""
    if is_embedded(reading=True):
        return {"home": str(data_home())}
    try:
        parts = conninfo_to_dict(database_url(reading=True))
    except DatabaseUrlError:
        return {}
    return {key: str(parts[key]) for key in _PLACE if parts.get(key) is not None}


def _replace(path: Path, data: bytes) -> None:
    """Replace a file atomically by one for this user alone, whatever others put into a folder that they share."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
