"""Location of this user's lookup service, and requirements of Unix sockets."""

import os
import stat
import tempfile
from pathlib import Path

MAX_SOCKET_PATH = 107
"""Maximum bytes of a Unix socket's path."""


def default_socket() -> Path:
    """Return the default socket of `draftstore serve` and its clients: $DRAFTSTORE_SOCKET or a per-user path."""
    if given := os.environ.get("DRAFTSTORE_SOCKET"):
        return Path(given)
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "draftstore.sock"
    return own_folder() / "lookup.sock"


def own_folder() -> Path:
    """Return this user's folder in the directory for temporary files; it need not exist."""
    return Path(tempfile.gettempdir()) / f"draftstore-{os.getuid()}"


def check_owner(path: str) -> None:
    """Refuse a socket in `own_folder` if another user owns the folder: anyone could create one of that name.

    Raises:
        PermissionError: the folder is not this user's, or others may write in it.
    """
    folder = own_folder()
    if Path(path).parent != folder:
        return
    found = folder.lstat()
    if found.st_uid not in (0, os.getuid()) or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o022:
        raise PermissionError(f"{folder} belongs to another user, or others may write in it")
