"""What one run of the lookup service is told."""

import ipaddress
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

from draftstore.errors import LookupServiceError
from services.lookup.limits import Limits
from services.lookup.stores.targets import Target

DRAFT_PORT = 7781
HTTP_PORT = 7780
LOOPBACK = "127.0.0.1"
_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - to recognize them


class ListenAddress(NamedTuple):
    """A place to listen at with TCP.

    Attributes:
        host: a name or an address.
        port: 0 takes a free one.
    """

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, port: int) -> Self:
        """Read `HOST:PORT`, `HOST`, `:PORT` (every address) or `[ADDRESS]:PORT`.

        Args:
            text: what a user wrote.
            port: taken where none is named.

        Raises:
            LookupServiceError: it is nothing of that kind.
        """
        host, colon, digits = text.strip().rpartition(":")
        if not colon or text.rstrip().endswith("]") or (":" in host and not host.startswith("[")):
            host, digits = text.strip(), str(port)  # no port, or a bare IPv6 address
        host = host.removeprefix("[").removesuffix("]")
        bare = host.isdecimal()  # a port alone: getaddrinfo would take it for the address 0.0.30.100
        if bare or not (digits.isascii() and digits.isdecimal() and int(digits) < 1 << 16) or "/" in host:
            raise LookupServiceError(
                f"{text!r} is no place to listen at: expected HOST:PORT, such as {LOOPBACK}:{port}"
            )
        return cls(host or "0.0.0.0", int(digits))  # noqa: S104 - the user wrote `:PORT`; needs tokens

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def reached_as(self) -> "ListenAddress":
        """The same as a program on this machine would name it."""
        return self._replace(host=LOOPBACK) if self.host in _EVERYWHERE else self

    def addresses(self) -> list[str]:
        """Return the addresses that the host stands for, IPv4 first.

        Raises:
            LookupServiceError: the name is unknown.
        """
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except OSError as error:
            raise LookupServiceError(
                f"the host of {self} is unknown here ({error.strerror}): name an address of this machine"
            ) from None
        return list(dict.fromkeys(str(entry[4][0]) for entry in sorted(found, key=lambda entry: entry[0])))

    def is_loopback(self) -> bool:
        """Tell whether nobody but this machine can reach it.

        Raises:
            LookupServiceError: the name is unknown.
        """
        return all(
            ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in self.addresses()
        )


@dataclass(frozen=True)
class LookupSettings:
    """What one run of the service is told.

    Attributes:
        socket: the Unix socket of the binary protocol.
        socket_mode: its permissions.
        listen: where the binary protocol is spoken over TCP too.
        http: where JSON, health, metrics and the page are; None leaves them out.
        stores: directories that are served.
        releases: names of the catalogue that are served; without these and `stores` all that draft.
        backend: where the entries of CREST stores are read; None is what each was built for.
        workers: processes that look up.
        tokens: the file of tokens.
        anonymous: whoever reaches the service may use it, also from other machines.
        wait: start even if nothing can be served yet.
        poll_seconds: between two looks at the catalogue, where no notice comes.
        hang_seconds: of silence after which a worker is ended and started again.
        limits: of requests.
        log_format: `text` or `json`.
        log_level: the least level that is logged.
    """

    socket: Path
    socket_mode: int = 0o600
    listen: ListenAddress | None = None
    http: ListenAddress | None = None
    stores: tuple[Target, ...] = ()
    releases: tuple[str, ...] = ()
    backend: str | None = None
    workers: int = 1
    tokens: Path | None = None
    anonymous: bool = False
    wait: bool = False
    poll_seconds: float = 5.0
    hang_seconds: float = 30.0
    limits: Limits = field(default_factory=Limits)
    log_format: str = "text"
    log_level: str = "info"

    @property
    def names(self) -> tuple[str, ...]:
        """Names that were asked for, of stores and of releases."""
        return (*(target.name for target in self.stores), *self.releases)

    @property
    def uses_catalogue(self) -> bool:
        """Whether releases of the catalogue are served: named ones, or all where no directory is named."""
        return bool(self.releases) or not self.stores

    def check(self) -> None:
        """Refuse what would let strangers in.

        Raises:
            LookupServiceError: other machines could ask without a token, and nobody said that this is meant.
        """
        if self.tokens and self.anonymous:
            raise LookupServiceError("--tokens and --anonymous contradict each other: leave one of them out")
        if self.tokens or self.anonymous:
            return
        for option, endpoint in (("--listen", self.listen), ("--http", self.http)):
            if endpoint and not endpoint.is_loopback():
                raise LookupServiceError(
                    f"{option} {endpoint} can be reached from other machines, where anybody could ask: name a file of "
                    "--tokens (see `draftstore tokens`), or say --anonymous if that is meant"
                )
