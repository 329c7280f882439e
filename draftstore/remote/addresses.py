"""Addresses of the lookup service, its default socket, and requirements of Unix sockets.

Addresses are `unix:/run/draftstore.sock`, `/run/draftstore.sock`, `tcp://10.0.0.7:7781`, `10.0.0.7:7781`,
`[::1]:7781`, or `tls://drafts.example:7781`, which is encrypted. A Unix socket with `*` in its name denotes the sockets
of several services for the same files.
"""

import os
import socket
import stat
import tempfile
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from draftstore.errors import DraftstoreError

DEFAULT_PORT = 7781
_EXPECTED = "expected unix:/path, /path, tcp://host:port, tls://host:port or host:port"
_SCHEMES = ("tcp://", "tls://")
MAX_SOCKET_PATH = 107
"""Maximum bytes of a Unix socket's path."""


class Address(NamedTuple):
    """A Unix socket (`path`, possibly a pattern), or a host and port, and whether connections are encrypted."""

    path: str = ""
    host: str = ""
    port: int = 0
    tls: bool = False

    @classmethod
    def parse(cls, text: "str | Path | Address") -> "Address":
        """Parse an address; DraftstoreError if it is invalid."""
        if isinstance(text, Address):
            return text
        text = str(text)
        if text.startswith("unix:") or ("/" in text and not text.startswith(_SCHEMES)):
            return _socket_at(text)
        return _port_at(text)

    def places(self) -> list[tuple[int, Any]]:
        """Resolve it to pairs of a socket family and an address for `socket.connect`.

        Raises:
            OSError: the host is unknown, no such socket exists, or it may be another user's.
        """
        if self.path:
            check_owner(self.path)
            path = Path(self.path)
            paths = sorted(path.parent.glob(path.name)) if "*" in path.name else [path]
            if not paths:
                raise FileNotFoundError(f"no socket {path}")
            return [(socket.AF_UNIX, str(each)) for each in paths]
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except ValueError as error:
            raise OSError(f"{self.host!r} is not a host name: {error}") from None
        return list(dict.fromkeys((int(family), place) for family, _, _, _, place in found))

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'tls' if self.tls else 'tcp'}://{host}:{self.port}"


def _socket_at(text: str) -> Address:
    path = str(Path(text.removeprefix("unix:")))
    if not path.startswith("/") or "\0" in path:
        raise DraftstoreError(f"the address {text!r} has no absolute path: {_EXPECTED}")
    if (size := len(os.fsencode(path))) > MAX_SOCKET_PATH:
        raise DraftstoreError(
            f"a Unix socket's path has at most {MAX_SOCKET_PATH} bytes, {path!r} has {size}: use a shorter path"
        )
    return Address(path=path)


def _port_at(text: str) -> Address:
    schemed = text.startswith(_SCHEMES)
    try:
        parts = urlsplit(text if schemed else f"tcp://{text}")
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise DraftstoreError(f"the address {text!r} cannot be read ({error}): {_EXPECTED}") from None
    if port is None and schemed:
        port = DEFAULT_PORT
    extra = parts.path.strip("/") or parts.query or parts.fragment or parts.username
    if not host or not port or extra or any(letter.isspace() for letter in host):
        raise DraftstoreError(f"the address {text!r} has no host and port: {_EXPECTED}")
    return Address(host=host, port=port, tls=text.startswith("tls://"))


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
