"""The password of a Prefect server: generated once, in a file that only its owner can read.

Anyone who may use the server's API can run flows. So every client presents the password: Prefect's programs find it in
the environment, never on a command line, and users paste it into the page.
"""

import os
import secrets
import stat
from pathlib import Path

from draftstore.errors import DraftstoreError
from draftstore.storage.locks import hold

AUTH_FILE = "auth"
"""Name of the file in the server's state folder."""
BYTES = 32


class SecretError(DraftstoreError):
    """The password file cannot be trusted: others can read it, or it is empty."""


def auth_string(state: Path) -> str:
    """Return the server's `USER:PASSWORD` from its state folder; make one if there is none."""
    path = state / AUTH_FILE
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    with os.fdopen(os.open(path, flags, 0o600), "r+", encoding="utf-8") as file:
        hold(file.fileno())  # of several that start together, one generates it
        found, text = os.fstat(file.fileno()), file.read().strip()
        if stat.S_IMODE(found.st_mode) & 0o077 or found.st_uid != os.geteuid():
            raise SecretError(f"others can read the password in {path}: remove the file to get a new one")
        if not text:
            text = f"draftstore:{secrets.token_hex(BYTES)}"
            file.write(f"{text}\n")
    return text
