"""The password of a Prefect server: made once, in a file that only its owner can read.

Whoever may use the server's API can have the worker run code. So every client shows the password: Prefect's programs
find it in the environment, never on a command line, and people paste it into the page.
"""

import contextlib
import os
import secrets
import stat
import tempfile
from pathlib import Path

from draftstore.errors import DraftstoreError

AUTH_FILE = "auth"
"""Name of the file in the server's state folder."""
USER = "draftstore"
BYTES = 32


class SecretError(DraftstoreError):
    """The file of the password cannot be trusted: others can read it, or it is empty."""


def auth_string(state: Path) -> str:
    """Return the server's `USER:PASSWORD` from its state folder; make one if there is none."""
    path = state / AUTH_FILE
    if not path.exists():
        _make(path)
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), encoding="utf-8") as file:
        found, text = os.fstat(file.fileno()), file.read().strip()
    if stat.S_IMODE(found.st_mode) & 0o077 or found.st_uid != os.geteuid():
        raise SecretError(f"others know the password in {path}: remove the file, and a new one is made")
    if not text:
        raise SecretError(f"{path} is empty: remove it, and a new one is made")
    return text


def _make(path: Path) -> None:
    """Write a new password; if others do so at the same time, one of them stays."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.") as file:  # of mode 0600
        file.write(f"{USER}:{secrets.token_hex(BYTES)}\n")
        file.flush()
        os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(file.name)  # the whole file at once, and never over another one
