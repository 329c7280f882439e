"""What one run of the worker is told, beside its model and its drafters."""

import dataclasses
from pathlib import Path

from draftstore.errors import LookupServiceError
from services.lookup.settings import ListenAddress

PORT = 8000
BODY = 4 << 20
"""Bytes of the longest body that is taken."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What one run of the worker is told.

    Attributes:
        endpoint: where HTTP is.
        queue: most requests that wait beside the one that is decoded.
        max_tokens: most tokens of an answer.
        body: bytes of the longest request.
        tokens: the file of bearer tokens.
        anonymous: whoever reaches the worker may use it, also from other machines.
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
        if self.tokens and self.anonymous:
            raise LookupServiceError("--tokens and --anonymous contradict each other: leave one of them out")
        if not self.tokens and not self.anonymous and not self.endpoint.is_loopback():
            raise LookupServiceError(
                f"--host {self.endpoint.host} can be reached from other machines, where anybody could ask: name a file "
                "of --tokens (see `draftstore tokens`), or say --anonymous if that is meant"
            )
