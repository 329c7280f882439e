"""Settings of one run of the lookup service."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

from draftstore.errors import LookupServiceError
from draftstore.stores.partition import Partition
from draftstore.trees.frontier import MAX_BUDGET
from services.common.addresses import ListenAddress, check_access
from services.lookup.limits import SHARED_BUDGET, Limits
from services.lookup.stores.targets import Target

DRAFT_PORT = 7781
HTTP_PORT = 7780


@dataclass(frozen=True)
class LookupSettings:
    """Settings of one run.

    Attributes:
        socket: Unix socket of the binary protocol.
        socket_mode: permissions of the Unix sockets.
        listen: TCP addresses of the binary protocol.
        tls_cert: file of the certificate for `listen`, with those that lead to a trusted one; None: not encrypted.
        tls_key: file of its private key; None: in the same file.
        http: address of JSON, health, metrics and the page.
        http_socket: Unix socket of the same; without both there is no HTTP.
        stores: directories to serve.
        releases: releases to serve; if both this and `stores` are empty, all that can draft.
        backend: backend of the entries of CREST stores; None: the one that each was built for.
        partition: which part of each store is served, where its kind has parts; None: all.
        workers: number of worker processes.
        tokens: token file.
        anonymous: whether clients, also on other machines, need no token.
        allow_hosts: further host names that requests may use, besides localhost and addresses.
        wait: whether to start even if nothing can be served yet.
        poll_seconds: interval between reads of the catalogue.
        hang_seconds: silence after which a worker or the HTTP process is killed and restarted.
        notice_seconds: time between the first `/readyz` that answers 503 and the start of the drain.
        max_budget: maximum nodes of a draft; None: `MAX_BUDGET` for clients of a Unix socket that no other user may
            open, `SHARED_BUDGET` for all others.
        limits: other limits on requests.
        log_format: `text` or `json`.
        log_level: the least level that is logged.
    """

    socket: Path
    socket_mode: int = 0o600
    listen: ListenAddress | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    http: ListenAddress | None = None
    http_socket: Path | None = None
    stores: tuple[Target, ...] = ()
    releases: tuple[str, ...] = ()
    backend: str | None = None
    partition: Partition | None = None
    workers: int = 1
    tokens: Path | None = None
    anonymous: bool = False
    allow_hosts: tuple[str, ...] = ()
    wait: bool = False
    poll_seconds: float = 2.0
    hang_seconds: float = 30.0
    notice_seconds: float = 1.0
    max_budget: int | None = None
    limits: Limits = field(default_factory=Limits)
    log_format: str = "text"
    log_level: str = "info"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the stores and releases that were asked for."""
        return (*(target.name for target in self.stores), *self.releases)

    @property
    def uses_catalogue(self) -> bool:
        """Whether releases are served: named ones, or all if no directory is named."""
        return bool(self.releases) or not self.stores

    @property
    def all_limits(self) -> Limits:
        """The limits, with those of the budget."""
        shared = self.max_budget or SHARED_BUDGET
        private = self.max_budget or (SHARED_BUDGET if self.socket_mode & 0o077 else MAX_BUDGET)
        return dataclasses.replace(self.limits, budget=private, shared_budget=shared)

    def check(self) -> None:
        """Refuse to serve other machines without tokens, unless the user asked for it.

        Raises:
            LookupServiceError: other machines could connect without a token, or nothing is there to encrypt.
        """
        if (self.tls_cert or self.tls_key) and not (self.tls_cert and self.listen):
            raise LookupServiceError(
                "--tls-cert and --tls-key encrypt --listen: give --listen and --tls-cert, or leave them out (HTTP is "
                "encrypted by a reverse proxy)"
            )
        places = [("--listen", self.listen), ("--http", self.http)]
        check_access(
            self.tokens,
            anonymous=self.anonymous,
            places=[(f"{option} {address}", address) for option, address in places if address],
        )
