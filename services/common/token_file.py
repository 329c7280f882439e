"""Changes to the token file, for the command `draftstore tokens`."""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from draftstore.storage.files import replacing
from draftstore.storage.locks import lock
from services.common.permissions import Grant, PermissionsError, read_grants

_HEAD = "# Written by `draftstore tokens`, which preserves entries but not comments.\n"


def change_grants(path: Path, change: Callable[[list[Grant]], list[Grant]]) -> None:
    """Read the entries of a token file, change them and write them back; one process at a time.

    Args:
        path: the file; a new one is readable by its owner alone.
        change: maps the old entries to the new ones.

    Raises:
        PermissionsError: the file or its folder cannot be used.
    """
    try:
        held = lock(path.parent)
    except OSError as error:
        raise PermissionsError(f"the folder {path.parent} cannot be used: {error.strerror}") from None
    try:
        with held:
            grants = read_grants(path) if path.exists() else []
            _replace(path, _to_toml(change(grants)).encode())
    except OSError as error:
        raise PermissionsError(f"the token file {path} cannot be written: {error.strerror}") from None


def _replace(path: Path, data: bytes) -> None:
    path = path.resolve()  # a symbolic link stays one
    with replacing(path, 0o600) as temporary:
        with suppress(FileNotFoundError, PermissionError):
            before = path.stat()
            os.chown(temporary, before.st_uid, before.st_gid)
            temporary.chmod(before.st_mode & 0o777)
        temporary.write_bytes(data)


def _to_toml(grants: list[Grant]) -> str:
    entries = (
        f"\n[[token]]\nname = {_quoted(grant.name)}\nsha256 = {_quoted(grant.digest)}\n"
        f"releases = [{', '.join(map(_quoted, sorted(grant.releases)))}]\n"
        + (f"appends = [{', '.join(map(_quoted, sorted(grant.appends)))}]\n" if grant.appends else "")
        + (f"max_budget = {grant.max_budget}\n" if grant.max_budget is not None else "")
        for grant in grants
    )
    return _HEAD + "".join(entries)


def _quoted(text: str) -> str:
    """Return a TOML string: as in JSON, except for one character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
