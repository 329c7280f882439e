"""Listening addresses of a service, and access to them."""

import ipaddress
import socket
from pathlib import Path
from typing import Annotated, NamedTuple, Self

from pydantic import BeforeValidator, Field

from draftstore.errors import LookupServiceError
from draftstore.options import Options, Shown, parsed

LOOPBACK = "127.0.0.1"
_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - to recognize them


class ListenAddress(NamedTuple):
    """A TCP address to listen on: a host name or an IP address, and a port; 0 picks a free one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, port: int) -> Self:
        """Read `HOST:PORT`, `HOST` with a default port, `:PORT` (every address) or `[ADDRESS]:PORT`."""
        host, colon, digits = text.strip().rpartition(":")
        if not colon or text.rstrip().endswith("]") or (":" in host and not host.startswith("[")):
            host, digits = text.strip(), str(port)  # no port, or a bare IPv6 address
        host = host.removeprefix("[").removesuffix("]")
        bare = host.isdecimal()  # a port alone: getaddrinfo would take it for the address 0.0.30.100
        if bare or not (digits.isascii() and digits.isdecimal() and int(digits) < 1 << 16) or "/" in host:
            raise LookupServiceError(
                f"{text!r} is not an address to listen at: expected HOST:PORT, such as {LOOPBACK}:{port}"
            )
        return cls(host or "0.0.0.0", int(digits))  # noqa: S104 - the user wrote `:PORT`; needs tokens

    @classmethod
    def reader(cls, port: int) -> BeforeValidator:
        """Return the validator that parses such an address in options."""
        return parsed(lambda text: cls.parse(text, port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def reached_as(self) -> "ListenAddress":
        """The address under which a program on this machine reaches it."""
        return self._replace(host=LOOPBACK) if self.host in _EVERYWHERE else self

    def addresses(self) -> list[str]:
        """Return the addresses that the host resolves to, IPv4 first; LookupServiceError if the name is unknown."""
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except OSError as error:
            raise LookupServiceError(
                f"the host of {self} is unknown here ({error.strerror}): name an address of this machine"
            ) from None
        return list(dict.fromkeys(str(entry[4][0]) for entry in sorted(found, key=lambda entry: entry[0])))

    def is_loopback(self) -> bool:
        """Return True if only this machine can reach it."""
        return all(
            ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in self.addresses()
        )


class Access(Options):
    """Access to a service."""

    tokens: Path | None = Field(
        None,
        description="Require bearer tokens from this file, see `draftstore tokens`; a worker accepts those for a "
        "release named like its model.",
    )
    anonymous: bool = Field(
        False,
        description="Answer other machines without a token; listening beyond loopback needs this or --tokens.",
    )
    allow_hosts: Annotated[tuple[str, ...], Shown(flags=("--allow-host",), metavar="NAME")] = Field(
        (),
        description="Host name accepted in HTTP requests besides localhost and IP addresses, such as a proxy's or "
        "container's. May be repeated. Others are refused to prevent DNS rebinding; beyond loopback with --tokens, "
        "all names are accepted unless one is given.",
    )

    def check_access(self, **places: ListenAddress | None) -> None:
        """Refuse to serve other machines without tokens unless the user asked for it; `places` are named by option."""
        if self.tokens and self.anonymous:
            raise LookupServiceError("--tokens and --anonymous exclude each other: omit one of them")
        for option, address in places.items():
            if address and not (self.tokens or self.anonymous or address.is_loopback()):
                raise LookupServiceError(
                    f"--{option} {address} can be reached from other machines, by anybody: give --tokens "
                    "FILE (see `draftstore tokens`), or --anonymous to allow that"
                )
