"""What the clients of the lookup service share: what is asked, which answers are good, and what follows from others."""

import itertools
import logging
import math
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.drafting.drafter import check_request
from draftstore.errors import DraftstoreError, WireError
from draftstore.remote.breaker import Breaker
from draftstore.remote.counters import Counters, Outcome
from draftstore.remote.queries import Queries
from draftstore.remote.wire import (
    ANSWER,
    HEADER,
    Frame,
    Operation,
    Status,
    decode_answer,
    decode_failure,
    encode_answer,
    encode_request,
    frame,
    short_hash,
)  # fmt: skip
from draftstore.storage.manifest import TokenizerIdentity
from draftstore.trees import batch as batches
from draftstore.trees.batch import Draft, DraftBatch
from draftstore.trees.tree import LEVEL_PROBS, LOWEST_LEVEL, DraftTree

logger = logging.getLogger("draftstore.remote.client")

MAX_BATCH = 512
"""Contexts of one request; more are asked in several."""
MAX_CONTEXT = 4096
"""Tokens of a context that are sent, the last ones; no store looks back as far."""
MAX_NUMBERS = 1 << 17
"""Tokens of all contexts of one request, and numbers of their queries."""
REFUSAL_SECONDS = 5.0
"""How long nothing is asked after the service has refused."""
LONGEST_PAUSE = 30.0
"""How long nothing is asked at most, whatever the service wants."""
WARN_SECONDS = 300.0
"""Least time between two warnings of one kind."""
MAX_MESSAGE = 500
"""Letters of a message of the service that are passed on."""
ANY_TOKEN = 1 << 31

_STATUS_OUTCOMES = {int(status): Outcome[status.name] for status in Status if status is not Status.OK}
_REFUSALS = {Outcome.UNAUTHORIZED, Outcome.FORBIDDEN, Outcome.NOT_FOUND, Outcome.OTHER_TOKENIZER}
_PAUSES = {Outcome.BUSY, Outcome.UNAVAILABLE}
_OURS = {Outcome.BAD_REQUEST, Outcome.TOO_LARGE, Outcome.OTHER_PROJECTION}


class Trouble(Exception):  # noqa: N818
    """A call got no drafts. Never leaves the clients."""

    def __init__(self, outcome: Outcome, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.retry_after = retry_after


class Request(NamedTuple):
    """A frame to send, and what its answer must keep to.

    Attributes:
        id: which the answer repeats.
        data: the frame.
        batch: drafts that are asked for.
        budget: most nodes of each.
        longest_answer: bytes that the answer has at most, where that may be many.
    """

    id: int
    data: bytes
    batch: int = 0
    budget: int = 0
    longest_answer: int = 0


def misses(batch: int) -> list[Draft]:
    """Return a draft without nodes for each context."""
    return [Draft(DraftTree.empty(), 0, 0) for _ in range(batch)]


def check_answer(answer: Frame, operation: Operation) -> bytes:
    """Return the payload of an answer that is no failure.

    Raises:
        Trouble: it is one, or it answers something else.
    """
    header, payload = answer
    if header.operation != operation | ANSWER and header.request_id:
        raise Trouble(Outcome.GARBAGE, f"operation {header.operation}, expected {operation | ANSWER}")
    if header.status == Status.OK:
        return payload
    try:
        failure = decode_failure(header, payload)
    except WireError as error:
        raise Trouble(Outcome.GARBAGE, str(error)) from None
    raise Trouble(_STATUS_OUTCOMES[failure.status], _one_line(failure.message), failure.retry_after)


def _one_line(message: str) -> str:
    """Return a message of the service as it may stand in a log."""
    return "".join(letter if letter.isprintable() else " " for letter in message[:MAX_MESSAGE])


class Judge:
    """Makes requests and judges answers for one name; holds the breaker and the counters. Threads share it."""

    def __init__(
        self,
        name: str,
        *,
        where: object,
        token: str | None,
        tokenizer: TokenizerIdentity | None,
        vocab_size: int | None,
        deadline: float,
        breaker: Breaker | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Check the settings and load the kernels; see `RemoteStore`.

        Raises:
            DraftstoreError: a setting that no request can carry or no answer can meet.
        """
        if not (math.isfinite(deadline) and deadline > 0):
            raise DraftstoreError(f"a deadline of {deadline} seconds: expected a positive number")
        if vocab_size is not None and not 0 < vocab_size <= ANY_TOKEN:
            raise DraftstoreError(f"a vocabulary of {vocab_size} ids: expected 1 to {ANY_TOKEN:,}")
        self.name = name
        self.where = where
        self.deadline = deadline
        self.vocab_size = vocab_size or ANY_TOKEN
        self._vocabulary_given = vocab_size is not None
        self.counters = Counters()
        self.breaker = breaker or Breaker()
        self.closed = False
        self._clock = clock
        self._tokenizer = None if tokenizer is None else _tokenizer_hash(tokenizer)
        self._warned: dict[str, float] = {}
        self._ids = itertools.count(1)
        self.hello = b"" if token is None else frame(Operation.HELLO, 0, token.encode(errors="surrogatepass"))
        _warm_up(name)

    def renew(self) -> None:
        """Make the locks anew in a forked process."""
        self.breaker.renew()
        self.counters.renew()

    def learn_vocabulary(self, size: int) -> None:
        """Take over the size of a store's vocabulary, unless one was given."""
        if not self._vocabulary_given and 0 < size <= ANY_TOKEN:
            self.vocab_size = size

    def next_id(self) -> int:
        """Return the id of a new request; 0 is that of what concerns a whole connection."""
        return next(self._ids)

    def requests(
        self,
        contexts: NDArray[np.int32],
        budget: int,
        min_prob: float,
        strategy: str,
        queries: Queries | None = None,
    ) -> list[Request]:
        """Return the requests for a batch of contexts: one, none where nothing can be drafted, or several.

        Raises:
            DraftstoreError: the arguments are those that a local store refuses too.
        """
        contexts, level = check_request(contexts, budget, min_prob)
        batch, width = contexts.shape
        if batch == 0 or budget == 0 or level < 0:
            return []
        if queries is not None:
            queries.check(batch)
            if not queries.any:
                return []
        # The wire carries the probability as float32. Rounded, it may fall on the other side of a level, so send the
        # level's own.
        least = 0.0 if level == LOWEST_LEVEL else float(LEVEL_PROBS[level])
        if batch == 1 and width <= MAX_CONTEXT:
            return [self._request(contexts, budget, least, strategy, queries)]
        contexts = contexts[:, -MAX_CONTEXT:]
        numbers = contexts.shape[1] + (0 if queries is None else queries.vectors.shape[1])
        size = max(1, min(MAX_BATCH, MAX_NUMBERS // max(numbers, 1)))
        return [
            self._request(
                contexts[first : first + size], budget, least, strategy,
                None if queries is None else queries.part(first, first + size),
            )
            for first in range(0, batch, size)
        ]  # fmt: skip

    def _request(
        self, contexts: NDArray[np.int32], budget: int, least: float, strategy: str, queries: Queries | None
    ) -> Request:
        """Return one request."""
        number, batch = next(self._ids), len(contexts)
        sections = None if queries is None else queries.sections()
        data = encode_request(number, self.name, contexts, budget, least, strategy, sections)
        return Request(number, data, batch, budget, 24 + batch * (16 + 7 * budget))

    def drafts(self, request: Request, answer: Frame) -> list[Draft]:
        """Return the drafts of an answer that keeps every promise.

        Raises:
            Trouble: it does not, or is a failure.
        """
        payload = check_answer(answer, Operation.DRAFT)
        if not answer.header.request_id:
            raise Trouble(Outcome.GARBAGE, "an answer to a greeting where drafts were expected")
        try:
            _, tokenizer, _, drafts = decode_answer(payload, self.vocab_size, request.budget)
        except WireError as error:
            raise Trouble(Outcome.INVALID, str(error)) from None
        if tokenizer != self._tokenizer:
            self._check_tokenizer(tokenizer)
        if len(drafts) != request.batch:
            raise Trouble(Outcome.INVALID, f"{len(drafts)} drafts for {request.batch} contexts")
        return drafts

    def _check_tokenizer(self, found: int) -> None:
        """Compare the tokenizer of an answer with the one given, or with that of the first answer.

        Raises:
            Trouble: it is another.
        """
        if self._tokenizer is None:
            self._tokenizer = found
        elif found != self._tokenizer:
            raise Trouble(
                Outcome.OTHER_TOKENIZER,
                f"its drafts come from the tokenizer {found:016x}, expected {self._tokenizer:016x}: "
                "publish a build for this model's tokenizer, or ask for another release",
            )

    def enter(self, batch: int) -> int:
        """Return a ticket of the breaker; below zero, and counted, if nothing is to be asked now."""
        ticket = -1 if self.closed else self.breaker.enter()
        if ticket < 0:
            self.counters.call(Outcome.SKIPPED, batch)
        return ticket

    def succeed(self, ticket: int, drafts: list[Draft]) -> None:
        """Note a call that brought drafts."""
        self.breaker.succeed(ticket)
        sizes = [len(draft.tree.tokens) for draft in drafts]
        self.counters.call(Outcome.ANSWERED, len(sizes), len(sizes) - sizes.count(0), sum(sizes))

    def fail(self, ticket: int, trouble: Trouble, batch: int) -> None:
        """Note a call that brought none, and decide what follows."""
        outcome = trouble.outcome
        self.counters.call(outcome, batch)
        opened = False
        if outcome in _REFUSALS:
            self.breaker.pause(ticket, REFUSAL_SECONDS)
        elif outcome in _PAUSES and trouble.retry_after > 0:
            self.breaker.pause(ticket, min(trouble.retry_after, LONGEST_PAUSE))
        elif outcome in _OURS:
            self.breaker.succeed(ticket)  # it answers; the next request may be a better one
        else:
            opened = self.breaker.fail(ticket)
            self.counters.add("opened", opened)
        if opened or outcome in _REFUSALS or outcome in _OURS:
            self.warn(trouble, outcome)

    def warn(self, trouble: Trouble, kind: str) -> None:
        """Log a warning, unless one of its kind was logged lately."""
        now = self._clock()
        if now - self._warned.get(kind, -math.inf) < WARN_SECONDS:
            return
        self._warned[kind] = now
        logger.warning(
            "no drafts of %r from %s (%s): %s; decoding goes on without",
            self.name, self.where, trouble.outcome, trouble,
        )  # fmt: skip


def _tokenizer_hash(tokenizer: TokenizerIdentity) -> int:
    """Return what answers name a tokenizer by.

    Raises:
        DraftstoreError: its fingerprint is no hash.
    """
    try:
        return short_hash(tokenizer.fingerprint)
    except ValueError:
        raise DraftstoreError(
            f"the tokenizer {tokenizer.name!r} has the fingerprint {tokenizer.fingerprint!r}, expected a SHA-256"
        ) from None


def _warm_up(name: str) -> None:
    """Have the kernels loaded, and the name checked, before the first draft is waited for.

    Raises:
        WireError: no request can carry the name.
    """
    encode_request(0, name, np.zeros((1, 1), np.int32), 0)
    batches.warm_up()
    decode_answer(encode_answer(0, 0, 0, 0, DraftBatch.empty(1))[HEADER.size :])
