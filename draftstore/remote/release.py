"""A release from the view of a client of the lookup service: requests and handling of answers, without I/O.

Clients run *dialogues*: generators that yield requests and receive the answers.
"""

import itertools
import logging
import math
import os
import weakref
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from draftstore.drafting.projection import Projection
from draftstore.errors import DraftstoreError, LookupServiceError
from draftstore.remote.addresses import Address, Endpoint, default_socket
from draftstore.remote.breaker import Breaker
from draftstore.remote.counters import Counters, Outcome
from draftstore.remote.following import Dialogue, Follower
from draftstore.remote.protocol import ANY_TOKEN, RequestFailed, greeting, read_drafts
from draftstore.remote.queries import Queries
from draftstore.remote.requests import MAX_CONTEXT, PreparedRequest, prepare_drafts
from draftstore.remote.tls import Tls, client_context
from draftstore.remote.wire import HEADER, Frame, decode_answer, encode_answer, encode_request, short_hash
from draftstore.storage.manifest import TokenizerIdentity
from draftstore.trees import batch as batches
from draftstore.trees.batch import Draft, DraftBatch

logger = logging.getLogger("draftstore.remote.client")

BUDGET = 64
CONTEXT_SIZE = 16
"""Tokens that a session sends; REST looks back as far, CREST less."""
DEADLINE = 0.002
RESOLVE_SECONDS = 0.5
"""Maximum seconds that a new client waits for a host name."""
REFUSAL_SECONDS = 5.0
"""Seconds of pause after a refusal."""
LONGEST_PAUSE = 30.0
"""Maximum seconds of pause that the service can request."""
WARN_SECONDS = 300.0
"""Minimum seconds between two warnings of one kind."""
_REFUSALS = {Outcome.UNAUTHORIZED, Outcome.FORBIDDEN, Outcome.NOT_FOUND, Outcome.OTHER_TOKENIZER}
_PAUSES = {Outcome.BUSY, Outcome.UNAVAILABLE}
_OURS = {Outcome.BAD_REQUEST, Outcome.TOO_LARGE, Outcome.OTHER_PROJECTION}
_HINTS = {
    Outcome.UNREACHABLE: "is `draftstore serve` running there?",
    Outcome.TIMEOUT: "it hangs, or is overloaded, or this is not its port for drafts",
    Outcome.CLOSED: "it is stopping, or this is not a lookup service",
    Outcome.GARBAGE: "is this the port for drafts, and a version that fits this client?",
    Outcome.INVALID: "does its version fit this client?",
    Outcome.UNAUTHORIZED: "give one with token=...; `draftstore tokens new` makes one",
    Outcome.FORBIDDEN: "the token needs a permission for this release, see `draftstore tokens`",
    Outcome.NOT_FOUND: "publish a release of that name, or start the service with it",
}


class ReleaseClient:
    """One release or store of a lookup service; base of both clients. Threads may share it.

    Attributes:
        name: name of the release or store.
        address: address of the service.
        counters: counters of requests and outcomes.
    """

    def __init__(
        self,
        address: str | Path | Address | None = None,
        name: str = "",
        *,
        token: str | None = None,
        tls: Tls | None = None,
        tokenizer: TokenizerIdentity | None = None,
        vocab_size: int | None = None,
        target_model: str | None = None,
        context_size: int = CONTEXT_SIZE,
        deadline: float = DEADLINE,
        breaker: Breaker | None = None,
    ) -> None:
        """Prepare a client without connecting: the service may be started later.

        Args:
            address: `unix:/path`, `/path`, `tcp://host:port`, `tls://host:port` or `host:port`; by default the socket
                that `draftstore serve` opens on this machine for this user.
            name: name of the release or store.
            token: bearer token, if the service needs one.
            tls: True encrypts, and trusts the system's certificates; or a file of certificates to trust, or a context.
                By default only `tls://` encrypts.
            tokenizer: tokenizer of the model; drafts of another one are refused. Default: that of the first answer.
            vocab_size: size of the model's vocabulary; drafts with other ids are refused.
            target_model: the model; `check` refuses a release bound to another one. None accepts any.
            context_size: tokens of a text that sessions send.
            deadline: maximum seconds of a call, up to the drafts of all its contexts.
            breaker: circuit breaker; default: opens after three failures in a row, for 50 ms to 5 s.

        Raises:
            DraftstoreError: invalid settings.
        """
        if not name:
            raise DraftstoreError("a client needs the name of a release or a store: RemoteStore(name=...)")
        if not 1 <= context_size <= MAX_CONTEXT:
            raise DraftstoreError(f"a context of {context_size} tokens: expected 1 to {MAX_CONTEXT:,}")
        self.name = name
        self.address = Address.parse(default_socket() if address is None else address)
        if not (math.isfinite(deadline) and deadline > 0):
            raise DraftstoreError(f"a deadline of {deadline} seconds: expected a positive number")
        if vocab_size is not None and not 0 < vocab_size <= ANY_TOKEN:
            raise DraftstoreError(f"a vocabulary of {vocab_size} ids: expected 1 to {ANY_TOKEN:,}")
        self.context_size = context_size
        self.deadline = deadline
        self.counters = Counters()
        self._tokenizer = None if tokenizer is None else _tokenizer_hash(tokenizer)
        self._breaker = breaker or Breaker()
        self._closed = False
        self._warned: dict[str, float] = {}
        self._ids = itertools.count(1)  # id 0 is for the whole connection
        self._follower = Follower(name, self._ids, vocab_size, target_model)
        _warm_up(name)
        self._hello = greeting(token)
        self._endpoint = Endpoint(self.address, tls=client_context(tls, self.address))
        self._endpoint.wait(RESOLVE_SECONDS)
        self._start()
        _everyone.add(self)

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary: as given, or as found by `check`; 2 ** 31 while unknown."""
        return self._follower.vocab_size

    @property
    def projection(self) -> Projection | None:
        """Projection to queries of a dense release, as found by `check` and updated since."""
        return self._follower.projection

    def _start(self) -> None:
        """Prepare connections."""

    def _start_refresh(self) -> None:
        """Run `_refreshing` in the background."""

    def _renew(self) -> None:
        """Reset a client in a forked process."""
        self._breaker.renew()
        self.counters.renew()
        self._endpoint.renew()
        self._follower.renew()

    def _drafts(self, request: PreparedRequest, answer: Frame) -> list[Draft]:
        """Return the drafts of an answer; fixes the tokenizer at the first answer, unless one was given."""
        _, tokenizer, _, drafts = read_drafts(request, answer, self._follower.vocab_size)
        if self._tokenizer is None:
            self._tokenizer = tokenizer
        elif tokenizer != self._tokenizer:
            raise RequestFailed(
                Outcome.OTHER_TOKENIZER,
                f"its drafts come from the tokenizer {tokenizer:016x}, expected {self._tokenizer:016x}: "
                "publish a build for this model's tokenizer, or ask for another release",
            )
        return drafts

    def _fail(self, ticket: int, trouble: RequestFailed, batch: int, queries: Queries | None) -> None:
        """Record a failed call and update the breaker."""
        outcome, opened = trouble.outcome, False
        retry_after = trouble.failure.retry_after if trouble.failure else 0.0
        self.counters.failed(outcome, batch)
        if outcome in _REFUSALS:
            self._breaker.pause(ticket, REFUSAL_SECONDS)
        elif outcome in _PAUSES and retry_after > 0:
            self._breaker.pause(ticket, min(retry_after, LONGEST_PAUSE))
        elif outcome in _OURS:
            self._breaker.succeed(ticket)  # the service works; another request may succeed
        else:
            opened = self._breaker.fail(ticket)
            self.counters.add("opened", opened)
        if opened or outcome in _REFUSALS or outcome in _OURS:
            self._warn(trouble, outcome)
        if self._follower.must_refresh(trouble, queries):
            self._start_refresh()

    def _warn(self, trouble: RequestFailed, kind: str) -> None:
        """Log a warning, unless one of its kind was logged recently."""
        now = monotonic()
        if now - self._warned.get(kind, -math.inf) < WARN_SECONDS:
            return
        self._warned[kind] = now
        logger.warning(
            "no drafts of %r from %s (%s): %s; decoding goes on without them",
            self.name, self.address, trouble.outcome, trouble,
        )  # fmt: skip

    def _checking(self, strategy: str, seconds: float) -> Dialogue[dict[str, Any]]:
        """Check that drafts are available, and fetch what drafting needs."""
        nothing = np.full((1, self.context_size), -1, np.int32)
        (request,) = prepare_drafts(self._ids, self.name, nothing, 1, 0.0, strategy)
        try:
            self._drafts(request, (yield request, monotonic() + seconds))
            found = yield from self._follower.learning(seconds)
        except RequestFailed as trouble:
            raise self._error(trouble) from None
        self._breaker.reset()
        return found

    def _listing(self, seconds: float) -> Dialogue[list[dict[str, Any]]]:
        """Ask for the served releases."""
        try:
            return (yield from self._follower.listing(seconds))
        except RequestFailed as trouble:
            raise self._error(trouble) from None

    def _refreshing(self) -> Dialogue[None]:
        """Fetch the release's new projection, or log the failure."""
        try:
            yield from self._follower.refreshing()
        except RequestFailed as trouble:
            self._warn(trouble, "refresh")

    def _error(self, trouble: RequestFailed) -> LookupServiceError:
        """Return the exception for `check` and `releases`."""
        text = f"no drafts of {self.name!r} from {self.address}: {str(trouble).rstrip('.')}"
        hint = _HINTS.get(trouble.outcome)
        return LookupServiceError(f"{text}; {hint}" if hint else text)


def _tokenizer_hash(tokenizer: TokenizerIdentity) -> int:
    """Return the hash of a tokenizer in answers."""
    try:
        return short_hash(tokenizer.fingerprint)
    except ValueError:
        raise DraftstoreError(
            f"the tokenizer {tokenizer.name!r} has the fingerprint {tokenizer.fingerprint!r}, expected a SHA-256"
        ) from None


def _warm_up(name: str) -> None:
    """Load the kernels and validate the name before the first draft."""
    encode_request(0, name, np.zeros((1, 1), np.int32), 0)
    batches.warm_up()
    decode_answer(encode_answer(0, 0, 0, 0, DraftBatch.empty(1))[HEADER.size :])


_everyone: weakref.WeakSet[ReleaseClient] = weakref.WeakSet()


def _after_fork() -> None:
    """Reset every client: connections belong to the parent, locks may be held by threads that do not exist here."""
    for client in list(_everyone):
        client._renew()


os.register_at_fork(after_in_child=_after_fork)
