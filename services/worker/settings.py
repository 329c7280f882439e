"""Settings of one run of the worker, except for its model and drafters."""

import dataclasses
from pathlib import Path

from services.common.addresses import ListenAddress, check_access

PORT = 8000
BATCH = 8
"""Answers that are decoded together, by default."""
BODY = 4 << 20
"""Maximum bytes of a body."""


@dataclasses.dataclass(frozen=True)
class WorkerSettings:
    """Settings of one run.

    Attributes:
        endpoint: HTTP address.
        queue: maximum waiting requests beside those being decoded.
        max_tokens: maximum tokens of an answer.
        max_choices: maximum answers to one request: `n` times its prompts.
        body: maximum bytes of a request.
        tokens: token file.
        anonymous: whether clients, also on other machines, need no token.
        allow_hosts: further host names that requests may use, besides localhost and addresses.
        grace_seconds: time for the requests that have begun when the worker is told to stop.
        response_log: file for finished answers; None disables it.
        response_log_bytes: maximum size of the response log.
        log_format: `text` or `json`.
        log_level: minimum level that is logged.
    """

    endpoint: ListenAddress
    queue: int = 16
    max_tokens: int = 2048
    max_choices: int = 32
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
        """Refuse to serve other machines without tokens, unless the user asked for it.

        Raises:
            LookupServiceError: other machines could connect without a token.
        """
        place = (f"--host {self.endpoint.host}", self.endpoint)
        check_access(self.tokens, anonymous=self.anonymous, places=[place])
