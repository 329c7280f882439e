"""What one run of the worker is told, beside its model and its drafters."""

import dataclasses
from pathlib import Path

from services.common.addresses import ListenAddress, check_access

PORT = 8000
BODY = 4 << 20
"""Bytes of the longest body that is taken."""


@dataclasses.dataclass(frozen=True)
class WorkerSettings:
    """What one run of the worker is told.

    Attributes:
        endpoint: where HTTP is.
        queue: most requests that wait beside the one that is decoded.
        max_tokens: most tokens of an answer.
        body: bytes of the longest request.
        tokens: the file of bearer tokens.
        anonymous: whoever reaches the worker may use it, also from other machines.
        allow_hosts: names that requests may use for this machine, beside localhost and addresses.
        grace_seconds: for the request that is being decoded when the worker is told to stop.
        response_log: where finished answers are kept; None keeps none.
        response_log_bytes: most that they take.
        log_format: `text` or `json`.
        log_level: the least level that is logged.
    """

    endpoint: ListenAddress
    queue: int = 16
    max_tokens: int = 2048
    body: int = BODY
    tokens: Path | None = None
    anonymous: bool = False
    allow_hosts: tuple[str, ...] = ()
    grace_seconds: float = 30.0
    response_log: Path | None = None
    response_log_bytes: int = 10**9
    log_format: str = "text"
    log_level: str = "info"

    def check(self) -> None:
        """Refuse what would let strangers in.

        Raises:
            LookupServiceError: other machines could ask without a token, and nobody said that this is meant.
        """
        place = (f"--host {self.endpoint.host}", self.endpoint)
        check_access(self.tokens, anonymous=self.anonymous, places=[place])
