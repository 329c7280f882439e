"""A client's knowledge of a release, and its update when the release moves to a build with another projection."""

from collections.abc import Generator, Iterator
from time import monotonic
from typing import Any, TypeVar

from draftstore.drafting.projection import Projection
from draftstore.remote.counters import Outcome
from draftstore.remote.protocol import ANY_TOKEN, RequestFailed, read_projection, read_releases
from draftstore.remote.queries import Queries
from draftstore.remote.requests import PreparedRequest
from draftstore.remote.wire import MAX_PAYLOAD, Frame, Operation, frame

CHECK_SECONDS = 5.0
"""Time limit in seconds for an answer to `check`."""
MAX_SHOWN = 100
"""Maximum characters of a name from the service."""
REFRESH_SECONDS = 1.0
"""Minimum seconds between two requests for a release's new projection."""
LONGEST_REFRESH = 4 * CHECK_SECONDS
"""Seconds after which such a request is abandoned: its event loop may have ended."""

Result = TypeVar("Result")
Dialogue = Generator[tuple[PreparedRequest, float], Frame, Result]
"""Yields a request and its deadline; receives the answer, or a `RequestFailed` as an exception."""


class Follower:
    """What a client knows about a release.

    Attributes:
        vocab_size: size of the vocabulary; 2 ** 31 while unknown.
        projection: maps hidden states to queries of a dense release; None while unknown.
    """

    def __init__(
        self, name: str, ids: Iterator[int], vocab_size: int | None, target_model: str | None
    ) -> None:
        """Start with the user's settings; see `ReleaseClient`.

        Args:
            name: name of the release.
            ids: generator of request ids.
            vocab_size: from the user, or None.
            target_model: from the user, or None.
        """
        self.vocab_size = vocab_size or ANY_TOKEN
        self.projection: Projection | None = None
        self._vocabulary_given = vocab_size is not None
        self._name = name
        self._ids = ids
        self._target_model = target_model
        self._next_refresh = 0.0

    def renew(self) -> None:
        """Drop a refresh in progress: a forked process does not have its thread."""
        self._next_refresh = 0.0

    def listing(self, seconds: float) -> Dialogue[list[dict[str, Any]]]:
        """Ask for the served releases."""
        return read_releases((yield self._request(Operation.RELEASES, seconds)))

    def learning(self, seconds: float) -> Dialogue[dict[str, Any]]:
        """Fetch the release's description, and its projection if that is new."""
        for _ in range(3):
            releases = yield from self.listing(seconds)
            found = next((release for release in releases if release.get("name") == self._name), {})
            self._take_over(found)
            digest, known = _digest_of(found), self.projection
            if digest is None:
                self.projection = None
                return found
            if known is not None and known.digest == digest:
                return found
            projection = read_projection((yield self._request(Operation.PROJECTION, seconds)))
            if projection.digest == digest:
                _check_size(projection, known)
                self.projection = projection
                return found
        raise RequestFailed(Outcome.UNAVAILABLE, "it keeps moving to another build: try again")

    def must_refresh(self, trouble: RequestFailed, queries: Queries | None) -> bool:
        """Return whether to fetch the projection: it was refused, and no refresh is running or recent."""
        known, now = self.projection, monotonic()
        if trouble.outcome is not Outcome.OTHER_PROJECTION or queries is None or now < self._next_refresh:
            return False
        if known is not None and known.digest != queries.projection.digest:
            return False  # the new one is known; only the text that asked still has the old one
        self._next_refresh = now + LONGEST_REFRESH
        return True

    def refreshing(self) -> Dialogue[None]:
        """Fetch the projection that the release has moved to."""
        try:
            yield from self.learning(CHECK_SECONDS)
        finally:
            self._next_refresh = monotonic() + REFRESH_SECONDS

    def _request(self, operation: Operation, seconds: float) -> tuple[PreparedRequest, float]:
        """Return a request other than for drafts, and its deadline."""
        number = next(self._ids)
        if operation == Operation.PROJECTION:
            data, longest = frame(operation, number, self._name.encode()), MAX_PAYLOAD
        else:
            data, longest = frame(operation, number), 0
        return PreparedRequest(number, data, longest_answer=longest), monotonic() + seconds

    def _take_over(self, described: dict[str, Any]) -> None:
        """Adopt the vocabulary size from the service, unless the user gave one."""
        model = described.get("target_model")
        if model is not None and self._target_model not in (None, model):
            raise RequestFailed(
                Outcome.OTHER_PROJECTION,
                f"its store is made for the model {repr(model)[:MAX_SHOWN]}, expected {self._target_model!r}: publish "
                "a build for this model, or ask for another release",
            )
        size = described.get("vocab_size")
        if isinstance(size, int) and not self._vocabulary_given and 0 < size <= ANY_TOKEN:
            self.vocab_size = size


def _digest_of(described: dict[str, Any]) -> str | None:
    """Return the digest of a release's projection; None if it has none."""
    projection = described.get("projection")
    digest = projection.get("digest") if isinstance(projection, dict) else None
    return digest if isinstance(digest, str) else None


def _check_size(projection: Projection, before: Projection | None) -> None:
    """Refuse a projection for another size of states than before: the decoding model stays the same."""
    if before is not None and before.hidden_size != projection.hidden_size:
        raise RequestFailed(
            Outcome.OTHER_PROJECTION,
            f"it wants hidden states of {projection.hidden_size} numbers now, expected {before.hidden_size}: "
            "its store is made for another model",
        )
