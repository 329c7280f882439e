"""Settings of one run of the lookup service: the stores to serve, addresses, limits."""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple, Self

from pydantic import AfterValidator, Field, model_validator

from draftstore.errors import LookupServiceError
from draftstore.live.store import LiveTarget
from draftstore.options import EXPERT, Shown, parsed, require_name
from draftstore.remote.addresses import default_socket
from draftstore.stores.crest.entries import Backend
from draftstore.trees.frontier import MAX_BUDGET
from services.common.addresses import LOOPBACK, Access, ListenAddress

DRAFT_PORT = 7781
HTTP_PORT = 7780
SHARED_BUDGET = 256
"""Default maximum nodes of a tree if others can reach the service."""
_BUDGETS = f"{MAX_BUDGET:,} on a Unix socket for this user alone, {SHARED_BUDGET} over TCP and HTTP"


class Target(NamedTuple):
    """A name and the directory of the store to serve under it."""

    name: str
    path: Path
    digest: str | None = None  # SHA-256 of the expected manifest; None if it cannot be read
    backend: str | None = None  # for the entries of a CREST store; None: the first that it was built for


def parse_store(argument: str) -> Target:
    """Return the target of `--store [NAME=]DIR`, with its name or the folder's; DraftstoreError if that is invalid."""
    name, separator, folder = argument.partition("=")
    if not separator or "/" in name:
        name, folder = "", argument
    path = Path(folder).expanduser().resolve()
    name = name or path.name
    require_name(name, f"a store (give it one with --store NAME={folder})")
    return Target(name, path)


@dataclass(frozen=True)
class Limits:
    """Limits of a service. Requests beyond a limit are refused; other requests are unaffected.

    Trees of thousands of nodes delay everyone behind them: where others may reach the service, over TCP and HTTP, they
    have at most `shared_budget` nodes. A token may set another limit.
    """

    payload: int = 1 << 20  # bytes of a request
    greeting: int = 4096  # the same before the client has presented its token, if tokens are in use
    batch: int = 512  # contexts per request
    context: int = 4096  # tokens per context
    budget: int = MAX_BUDGET  # nodes per tree, for a client on the Unix socket
    shared_budget: int = SHARED_BUDGET
    connections: int = 1024  # of known clients; and as many whose client is not known yet
    peer_connections: int | None = None  # of clients at one address over TCP; None: no limit
    waiting: int = (
        4096  # contexts that threads look up or that wait for one; beyond that the answer is `BUSY`
    )
    patience: float = (
        10.0  # seconds for a client to send its first request or the rest of one, and to read answers
    )
    threads: int = 8  # concurrent lookups beside those of the event loop

    def public(self, budget: int) -> dict[str, int]:
        """Return the limits that a client should know: those of one request, with its own node limit."""
        return {"payload": self.payload, "batch": self.batch, "context": self.context, "budget": budget}


def _http(given: str) -> ListenAddress | Path | None:
    if given.startswith("unix:"):
        return Path(given.removeprefix("unix:"))
    return None if given == "none" else ListenAddress.parse(given, HTTP_PORT)


def _mode(text: str) -> str:
    if not re.fullmatch("0?[67][0-7]{2}", text):
        raise ValueError("expected an octal number from 600 to 777, such as 660")
    return text


class LookupSettings(Access):
    """Settings of one run; `limits` are those without an option."""

    releases: Annotated[tuple[str, ...], Shown(flags=("--release",), metavar="NAME")] = Field(
        (), description="Serve a release of the catalogue. May be repeated."
    )
    stores: Annotated[
        tuple[Annotated[Target, parsed(parse_store)], ...], Shown(flags=("--store",), metavar="[NAME=]DIR")
    ] = Field((), description="Serve a directory under its own name, or NAME. May be repeated.")
    live: Annotated[
        tuple[Annotated[LiveTarget, parsed(LiveTarget.parse)], ...],
        Shown(flags=("--live",), metavar="NAME[=DIR][:TOKENS]"),
    ] = Field(
        (),
        description="Remember answers that decoders append, at most TOKENS of them (a million), and draft from them "
        "under NAME; DIR keeps them over restarts, and several services share it. May be repeated.",
        examples=[["team=live/team:1000000"]],
    )
    backend: Backend = None
    socket: Annotated[Path, Shown(unset="$DRAFTSTORE_SOCKET, else a socket of this user")] = Field(
        default_factory=default_socket, description="Unix socket of the binary protocol."
    )
    socket_mode: Annotated[str, AfterValidator(_mode), Shown(metavar="OCTAL", expert=True)] = Field(
        "600", description="Permissions of the Unix sockets: who on this machine may connect."
    )
    listen: Annotated[ListenAddress | None, ListenAddress.reader(DRAFT_PORT), Shown(metavar="HOST:PORT")] = (
        Field(
            None, description=f"Address for the binary protocol over TCP; the default port is {DRAFT_PORT}."
        )
    )
    tls_cert: Path | None = Field(
        None, description="Encrypt --listen with this certificate (PEM, with its chain); SIGHUP reloads it."
    )
    tls_key: Annotated[Path | None, Shown(unset="in the same file")] = Field(
        None, description="Its private key, without a passphrase."
    )
    http: Annotated[
        ListenAddress | Path | None,
        parsed(_http),
        Shown(metavar="HOST:PORT|unix:PATH", unset=f"{LOOPBACK}:{HTTP_PORT}"),
    ] = Field(
        ListenAddress(LOOPBACK, HTTP_PORT),
        description="Address or Unix socket for JSON, health, metrics and the page; anyone on this machine can "
        "reach an address. `none` turns them off.",
    )
    max_budget: Annotated[int | None, Shown(unset=_BUDGETS)] = Field(
        None,
        ge=1,
        le=MAX_BUDGET,
        description="Maximum nodes per draft; a bearer token can set its own limit.",
    )
    wait: bool = Field(False, description="Start even if no release can be served yet.")
    poll_seconds: Annotated[float, EXPERT] = Field(
        2.0, ge=0.05, le=3600, description="Seconds between two checks of the catalogue."
    )
    notice_seconds: Annotated[float, EXPERT] = Field(
        1.0,
        ge=0,
        le=3600,
        description="Seconds of /readyz answering 503 before the service stops, for load balancers.",
    )
    peer_connections: Annotated[int | None, Shown(unset="no limit", expert=True)] = Field(
        None, ge=1, description="Maximum TCP connections per address."
    )
    limits: Annotated[Limits, Shown(hidden=True)] = Limits()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.tls_cert or self.tls_key) and not (self.tls_cert and self.listen):
            raise LookupServiceError(
                "--tls-cert and --tls-key encrypt --listen: give --listen and --tls-cert, or leave them out (HTTP is "
                "encrypted by a reverse proxy)"
            )
        names = (*self.names, *(target.name for target in self.live))
        if len(set(names)) < len(names):
            raise LookupServiceError(
                "two stores, releases or live stores have the same name: rename one, as in --store NAME=DIR"
            )
        folders = [target.folder.absolute() for target in self.live if target.folder]
        if len(set(folders)) < len(folders):
            raise LookupServiceError("two live stores have the same folder: give each a different one")
        self.check_access(listen=self.listen, http=self.http_address)
        return self

    @property
    def http_address(self) -> ListenAddress | None:
        """TCP address of HTTP, if it has one."""
        return None if isinstance(self.http, Path) else self.http

    @property
    def mode(self) -> int:
        """Permissions of the Unix sockets."""
        return int(self.socket_mode, 8)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the requested stores and releases."""
        return (*(target.name for target in self.stores), *sorted(set(self.releases)))

    @property
    def uses_catalogue(self) -> bool:
        """Whether releases are served: named ones, or all if neither a directory nor a live store is named."""
        return bool(self.releases) or not (self.stores or self.live)

    @property
    def all_limits(self) -> Limits:
        """The limits, including those of the budget."""
        shared = self.max_budget or SHARED_BUDGET
        private = self.max_budget or (SHARED_BUDGET if self.mode & 0o077 else MAX_BUDGET)
        peers = self.peer_connections or self.limits.peer_connections
        return dataclasses.replace(self.limits, budget=private, shared_budget=shared, peer_connections=peers)
