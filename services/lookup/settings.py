"""What one run of the lookup service is told."""

from dataclasses import dataclass, field
from pathlib import Path

from services.common.addresses import ListenAddress, check_access
from services.lookup.limits import Limits
from services.lookup.stores.targets import Target

DRAFT_PORT = 7781
HTTP_PORT = 7780


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
        allow_hosts: names that requests may use for this machine, beside localhost and addresses.
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
    allow_hosts: tuple[str, ...] = ()
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
        places = [("--listen", self.listen), ("--http", self.http)]
        check_access(
            self.tokens,
            anonymous=self.anonymous,
            places=[(f"{option} {address}", address) for option, address in places if address],
        )
