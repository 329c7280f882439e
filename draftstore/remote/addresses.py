"""Addresses of the lookup service, and non-blocking resolution of host names.

Addresses are `unix:/run/draftstore.sock`, `/run/draftstore.sock`, `tcp://10.0.0.7:7781`, `10.0.0.7:7781`,
`[::1]:7781`, or `tls://drafts.example:7781`, which is encrypted.
"""

import os
import socket
import ssl
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from draftstore.errors import DraftstoreError

DEFAULT_PORT = 7781
SOCKET_VARIABLE = "DRAFTSTORE_SOCKET"
MAX_SOCKET_PATH = 107
"""Maximum bytes of a Unix socket's path."""

_EXPECTED = "expected unix:/path, /path, tcp://host:port, tls://host:port or host:port"
_SCHEMES = ("tcp://", "tls://")


class Address(NamedTuple):
    """A Unix socket (`path`), or a host and port, and whether connections to it are encrypted."""

    path: str = ""
    host: str = ""
    port: int = 0
    tls: bool = False

    @classmethod
    def parse(cls, text: "str | Path | Address") -> "Address":
        """Parse an address.

        Raises:
            DraftstoreError: it is invalid.
        """
        if isinstance(text, Address):
            return text
        text = str(text)
        if text.startswith("unix:"):
            return _socket_at(text.removeprefix("unix:").removeprefix("//"), text)
        if "/" in text and not text.startswith(_SCHEMES):
            return _socket_at(text, text)
        return _port_at(text)

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'tls' if self.tls else 'tcp'}://{host}:{self.port}"


def _socket_at(path: str, text: str) -> Address:
    """Return the address of a Unix socket."""
    if not path.startswith("/") or "\0" in path:
        raise DraftstoreError(f"the address {text!r} has no absolute path: {_EXPECTED}")
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise DraftstoreError(
            f"the path of a Unix socket has at most {MAX_SOCKET_PATH} bytes, {path!r} has "
            f"{len(os.fsencode(path))}: put the socket into a folder with a shorter name"
        )
    return Address(path=path)


def _port_at(text: str) -> Address:
    """Return the address of a host and port."""
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
        raise DraftstoreError(f"the address {text!r} names no host and port: {_EXPECTED}")
    return Address(host=host, port=port, tls=text.startswith("tls://"))


def default_socket() -> Path:
    """Return the default socket of `draftstore serve` and its clients.

    $DRAFTSTORE_SOCKET, or draftstore.sock in $XDG_RUNTIME_DIR, or lookup.sock in this user's folder under the
    directory for temporary files.
    """
    if given := os.environ.get(SOCKET_VARIABLE):
        return Path(given)
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "draftstore.sock"
    return own_folder() / "lookup.sock"


def own_folder() -> Path:
    """Return this user's folder under the directory for temporary files; it need not exist."""
    return Path(tempfile.gettempdir()) / f"draftstore-{os.getuid()}"


def check_owner(path: str) -> None:
    """Refuse a socket in `own_folder` if another user owns that: anyone could create a folder of that name.

    Raises:
        PermissionError: the folder is not this user's, or others may write to it.
    """
    folder = own_folder()
    if Path(path).parent != folder:
        return
    found = folder.lstat()
    if found.st_uid not in (0, os.getuid()) or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o022:
        raise PermissionError(f"{folder} belongs to another user, or others may write in it")


Destination = tuple[int, Any]
"""A socket family, and an address for `socket.connect`."""


class Endpoint:
    """The destinations of an address, tried in turn.

    A host name may have several (`localhost` has ::1 and 127.0.0.1), and resolving it may take seconds, so that happens
    in a thread. After a failure the next one is used; when all have failed, the name is resolved again.
    """

    def __init__(
        self,
        address: Address,
        *,
        tls: ssl.SSLContext | None = None,
        resolve: Callable[..., list[Any]] = socket.getaddrinfo,
        clock: Callable[[], float] = time.monotonic,
        refresh: float = 5.0,
    ) -> None:
        """Start resolving the address.

        Args:
            address: a Unix socket, or host and port.
            tls: context for encrypted connections; None: plain ones.
            resolve: replacement of `socket.getaddrinfo`.
            clock: returns seconds.
            refresh: minimum seconds between two resolutions.
        """
        self.address = address
        self.tls = tls
        self._resolve = resolve
        self._clock = clock
        self._refresh = refresh
        self._places: list[Destination] = []
        self._next = 0
        self._named = False
        self.renew()
        if address.path:
            self._places = [(socket.AF_UNIX, address.path)]
            return
        try:
            self._places = self._look_up(socket.AI_NUMERICHOST)
        except OSError:
            self._named = True
            self._look_up_later()

    def __len__(self) -> int:
        return len(self._places)

    def renew(self) -> None:
        """Drop a resolution in progress: a forked process does not have its thread."""
        self._asked = float("-inf")
        self._known = threading.Event()
        self._lock = threading.Lock()

    def pick(self) -> Destination:
        """Return the destination to connect to."""
        places = self._places
        if not places:
            self._look_up_later()
            raise OSError(f"the host name {self.address.host!r} is not resolved")
        if self.address.path:
            check_owner(self.address.path)
        return places[self._next % len(places)]

    def failed(self, place: Destination) -> None:
        """Move on to the destination after `place`."""
        with self._lock:
            places = self._places
            if not places or places[self._next % len(places)] != place:
                return  # another thread has moved on already
            self._next = (self._next + 1) % len(places)
        if self._next == 0:
            self._look_up_later()

    def wait(self, seconds: float) -> None:
        """Wait until the host name is resolved or resolution fails."""
        if self._named and not self._places:
            self._known.wait(seconds)

    def _look_up_later(self) -> None:
        """Resolve the name in a thread, unless that was done recently."""
        with self._lock:
            now = self._clock()
            if not self._named or now - self._asked < self._refresh:
                return
            self._asked = now
        threading.Thread(target=self._look_up_now, name="draftstore-resolve", daemon=True).start()

    def _look_up_now(self) -> None:
        """Resolve the name; on failure the known destinations stay."""
        with suppress(OSError, UnicodeError):
            found = self._look_up(0)
            with self._lock:
                if found and found != self._places:
                    self._places, self._next = found, 0
        self._known.set()

    def _look_up(self, flags: int) -> list[Destination]:
        """Return the host's destinations, without duplicates."""
        host, port = self.address.host, self.address.port
        found = self._resolve(host, port, type=socket.SOCK_STREAM, flags=flags)
        return list(dict.fromkeys((int(family), place) for family, _, _, _, place in found))
