"""Changes to the token file, for the command `draftstore tokens`."""

import fcntl
import json
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from services.common.permissions import Grant, PermissionsError, read_grants

_HEAD = "# Written by `draftstore tokens`, which keeps the entries and no comments.\n"


def change_grants(path: Path, change: Callable[[list[Grant]], list[Grant]]) -> None:
    """Read the entries of a token file, change them and write them back; one process at a time.

    Args:
        path: the file; a new one is readable by its owner alone.
        change: maps the old entries to the new ones.

    Raises:
        PermissionsError: the file or its folder cannot be used.
    """
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise PermissionsError(f"the folder {path.parent} cannot be used: {error.strerror}") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        grants = read_grants(path) if path.exists() else []
        _replace(path, _to_toml(change(grants)).encode())
        os.fsync(folder)
    except OSError as error:
        raise PermissionsError(f"the file of tokens {path} cannot be written: {error.strerror}") from None
    finally:
        os.close(folder)


def _replace(path: Path, data: bytes) -> None:
    """Replace a file atomically, keeping its owner and permissions."""
    path = path.resolve()  # a symbolic link stays one
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            with suppress(FileNotFoundError, PermissionError):
                before = path.stat()
                os.chown(descriptor, before.st_uid, before.st_gid)
                os.fchmod(descriptor, before.st_mode & 0o777)
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _to_toml(grants: list[Grant]) -> str:
    """Return the text of a token file."""
    entries = (
        f"\n[[token]]\nname = {_quoted(grant.name)}\nsha256 = {_quoted(grant.digest)}\n"
        f"releases = [{', '.join(map(_quoted, sorted(grant.releases)))}]\n"
        + (f"max_budget = {grant.max_budget}\n" if grant.max_budget is not None else "")
        for grant in grants
    )
    return _HEAD + "".join(entries)


def _quoted(text: str) -> str:
    """Return a TOML string: as in JSON, except for one character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
