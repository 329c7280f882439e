"""Drafts from the lookup service, with the interface of a local store.

    from draftstore.remote.client import RemoteStore

    store = RemoteStore(name="chat-vicuna")              # or RemoteStore("draft-host:7781", name=..., token=...)
    store.check()                                        # at startup: reachable, permitted, compatible?

    drafter = store.drafter()                            # or "longest", as with a local store
    session = drafter.session(prompt_ids)
    while decoding:
        tree = session.propose(budget=64)                # empty if the service cannot answer in time
        accepted = model.verify(tree)                    # your forward pass
        session.observe(accepted)

    drafts = drafter.draft(contexts, budget=32)          # or one call for all sequences of an engine step
    print(store.counters)                                # Counters(answered=812, timeout=3, skipped=40, ...)

**The service never blocks decoding.** Without an answer within the deadline, a call returns empty drafts, whatever
happens to the service; `draft` and `propose` raise only for arguments that a local store also refuses. Every tree is
validated: a malicious service can slow decoding down, but cannot change the model's output. After failures, requests
pause for a while (`draftstore.remote.counters`); the logger `draftstore.remote.client` warns of each kind of problem at
most once every five minutes. Drafts from a tokenizer other than `tokenizer=` (or that of the first answer) are refused.
A dense release needs hidden states of the model: `check()` reads their size; without it, there are no drafts.

Each thread and each forked process has its own connection. A thread that runs Python code may hold the GIL for 5 ms,
longer than the deadline: see `sys.setswitchinterval`. From asyncio, use `asyncio.to_thread`.
"""

import itertools
import logging
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftstore.drafting.contexts import ContextDrafter
from draftstore.drafting.drafter import NO_MATCH, check_request, check_states
from draftstore.errors import DraftstoreError, LookupServiceError, require_vocabulary
from draftstore.live.directory import Changes, Cursor
from draftstore.live.log import MAX_DOCUMENT, LiveDocument, answers_of
from draftstore.remote import wire
from draftstore.remote.addresses import Address, default_socket
from draftstore.remote.connection import (
    Connections,
    RequestFailed,
    Tls,
    check_answer,
    client_context,
    read_drafts,
    read_recalled,
    read_releases,
)
from draftstore.remote.counters import Counters, Outcome, Pauses
from draftstore.remote.wire import AppendRequest, Operation
from draftstore.storage.manifest import TokenizerIdentity
from draftstore.trees import batch as batches
from draftstore.trees.batch import DraftBatch
from draftstore.trees.frontier import BUDGET
from draftstore.trees.tree import LEVEL_PROBS, LOWEST_LEVEL

__all__ = ["DEADLINE", "LookupServiceError", "RemoteDrafter", "RemoteStore"]

logger = logging.getLogger("draftstore.remote.client")
Result = TypeVar("Result")

CONTEXT_SIZE = 16
"""Number of tokens that a session sends; REST uses as many, CREST fewer."""
DEADLINE = 0.002
APPEND_SECONDS = 0.05
"""Minimum time limit in seconds for an append, sent once per answer: it may wait for a disk."""
TOKEN_SECONDS = 2e-6
"""Additional seconds for each token of the answer."""
CHECK_SECONDS = 5.0
"""Time limit in seconds for each answer in `check`."""
MAX_BATCH, MAX_BYTES = 512, 1 << 19
"""Maximum contexts of a request, and bytes of contexts and hidden states; larger batches are split."""
MAX_LIST = 1 << 20
"""Maximum bytes of a list of releases."""
MAX_CONTEXT = 4096
"""Maximum tokens sent of a context, the last ones; no store uses more."""
MAX_HIDDEN = 1 << 16
ANY_TOKEN = 1 << 31
"""Vocabulary size while unknown: all token ids are below it."""
REFUSAL_SECONDS, LONGEST_PAUSE = 5.0, 30.0
"""Seconds of pause after a refusal, and the maximum that the service can request."""
WARN_SECONDS = 300.0
"""Minimum seconds between two warnings of the same kind."""
_REFUSALS = {Outcome.UNAUTHORIZED, Outcome.FORBIDDEN, Outcome.NOT_FOUND, Outcome.OTHER_TOKENIZER}
_OURS = {Outcome.BAD_REQUEST, Outcome.TOO_LARGE}


class RemoteDrafter(ContextDrafter):
    """Drafts of one release with one strategy; threads may share it.

    Attributes:
        store: client of the release.
        strategy: drafting strategy; empty for the store's default.
        context_size: tokens of a context; one for a dense release.
        hidden_size: size of a hidden state; 0 if the release is not dense or `RemoteStore.check` has not been called.
    """

    def __init__(self, store: "RemoteStore", strategy: str) -> None:
        self.store = store
        self.strategy = strategy
        self.hidden_size = store.hidden_size
        self.context_size = 1 if self.hidden_size else store.context_size
        self.vocab_size = store.vocab_size

    @property
    def source(self) -> Hashable:
        """Key shared by drafters with the same drafts."""
        return id(self.store), self.strategy, self.hidden_size

    def warm_up(self) -> None:
        """Do nothing: the client has loaded its kernels, and requests count."""

    def draft_batch(
        self,
        contexts: NDArray[np.int32],
        budget: int = BUDGET,
        min_prob: float = 0.0,
        hidden: NDArray[np.float16] | None = None,
    ) -> DraftBatch:
        """Draft for a batch of contexts; without an answer in time, all are empty. See `ContextDrafter.draft_batch`."""
        contexts, level = check_request(contexts, budget, min_prob)
        batch, reason = len(contexts), NO_MATCH
        if self.hidden_size and hidden is not None:
            hidden = check_states(hidden, batch, self.hidden_size)
        elif self.hidden_size:
            level = -1
        if batch and budget and level >= 0:
            # Rounding to float32 may cross a level's boundary, so the level's own probability is sent.
            least = 0.0 if level == LOWEST_LEVEL else float(LEVEL_PROBS[level])
            drafts = self.store.ask(
                contexts[:, -MAX_CONTEXT:], budget, least, self.strategy, hidden if self.hidden_size else None
            )
            if isinstance(drafts, DraftBatch):
                return drafts
            reason = str(drafts)
        return DraftBatch.empty(batch, reason)


class RemoteStore(AbstractContextManager["RemoteStore"]):
    """A release or store of the lookup service, used like a local store; see the module docstring.

    Attributes:
        name: name of the release or store.
        address: address of the service.
        counters: counters of requests and outcomes.
        vocab_size: size of the vocabulary, as given or as reported to `check`; 2 ** 31 while unknown.
        hidden_size: size of a hidden state of a dense release, as reported to `check`; otherwise 0.
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
    ) -> None:
        """Prepare a client without connecting: the service may be started later.

        Args:
            address: `unix:/path`, `/path`, `tcp://host:port`, `tls://host:port` or `host:port`; by default the socket
                that `draftstore serve` opens on this machine for this user.
            name: name of the release or store.
            token: bearer token, if the service needs one.
            tls: True encrypts and trusts the system's certificates; or a file of trusted certificates, or a context.
                By default, only `tls://` encrypts.
            tokenizer: tokenizer of the model; drafts of another one are refused. Default: that of the first answer.
            vocab_size: size of the model's vocabulary; drafts with other ids are refused.
            target_model: the model; `check` refuses a release bound to another one. None accepts any.
            context_size: maximum tokens of a text that sessions send.
            deadline: maximum seconds of a call, for the drafts of all its contexts.

        Raises:
            DraftstoreError: invalid settings.
        """
        if not name:
            raise DraftstoreError("a client needs the name of a release or store: RemoteStore(name=...)")
        if not 1 <= context_size <= MAX_CONTEXT:
            raise DraftstoreError(f"a context of {context_size} tokens: expected 1 to {MAX_CONTEXT:,}")
        if not (math.isfinite(deadline) and deadline > 0):
            raise DraftstoreError(f"a deadline of {deadline} seconds: expected a positive number")
        if vocab_size is not None:
            require_vocabulary(vocab_size)
        self.name = name
        self.address = Address.parse(default_socket() if address is None else address)
        self.context_size = context_size
        self.deadline = deadline
        self.vocab_size = vocab_size or ANY_TOKEN
        self.hidden_size = 0
        self.counters = Counters()
        self._ids = itertools.count(1)
        hello = b"" if token is None else wire.frame(Operation.HELLO, 0, token.encode())
        self._connections = Connections(self.address, client_context(tls, self.address), hello, self.counters)
        self._vocabulary_given = vocab_size is not None
        self._tokenizer = None if tokenizer is None else wire.short_hash(tokenizer.fingerprint)
        self._fingerprint = None if tokenizer is None else tokenizer.fingerprint
        self._target_model = target_model
        self._pauses, self._append_pauses = Pauses(), Pauses()
        self._changes, self._forgets = Changes(), 0
        self._warned: dict[tuple[str, Outcome], float] = {}
        self._closed = False
        _warm_up(name)

    def drafter(self, strategy: str = "") -> RemoteDrafter:
        """Return a drafter with a strategy of the store; empty means its default."""
        return RemoteDrafter(self, strategy)

    def check(self, strategy: str = "", seconds: float = CHECK_SECONDS) -> dict[str, Any]:
        """Check that drafts with a strategy are available, waiting up to `seconds` for each of two answers.

        Returns:
            The service's description of the release: `kind`, `build`, `tokenizer`, `vocab_size`, `strategies`, ...

        Raises:
            LookupServiceError: the service is down or refuses, or its drafts do not fit this tokenizer or model.
        """
        number, nothing = next(self._ids), np.full((1, self.context_size), -1, np.int32)
        data = wire.encode_request(number, self.name, nothing, 1, 0.0, strategy)
        self._ask(Operation.DRAFT, number, data, seconds, lambda payload: self._read(payload, 1, 1))
        self._pauses.succeed()
        found = next((release for release in self.releases(seconds) if release.get("name") == self.name), {})
        model, size, hidden = (found.get(key) for key in ("target_model", "vocab_size", "hidden_size"))
        if model is not None and self._target_model not in (None, model):
            raise LookupServiceError(
                f"{self.name!r} at {self.address} is made for the model {str(model)[:100]!r}, expected "
                f"{self._target_model!r}: publish a build for this model, or use another release"
            )
        if isinstance(size, int) and not self._vocabulary_given and 0 < size <= ANY_TOKEN:
            self.vocab_size = size
        self.hidden_size = hidden if isinstance(hidden, int) and 0 < hidden <= MAX_HIDDEN else 0
        return found

    def releases(self, seconds: float = CHECK_SECONDS) -> list[dict[str, Any]]:
        """Return the releases visible to this client; LookupServiceError if that fails or exceeds `seconds`."""
        number = next(self._ids)
        data = wire.frame(Operation.RELEASES, number)
        return self._ask(Operation.RELEASES, number, data, seconds, read_releases)

    def ask(
        self,
        contexts: NDArray[np.int32],
        budget: int,
        min_prob: float,
        strategy: str,
        hidden: NDArray[np.float16] | None,
    ) -> DraftBatch | Outcome:
        """Return drafts for all contexts, in as many requests as they need, or why there are none. Never raises."""
        self._connections.renew()
        batch, end, parts = len(contexts), monotonic() + self.deadline, list[DraftBatch]()
        if self._closed or self._pauses.holds:
            self.counters.failed(Outcome.SKIPPED, batch)
            return Outcome.SKIPPED
        row = 4 * contexts.shape[1] + (0 if hidden is None else 2 * hidden.shape[1])
        step = max(1, min(MAX_BATCH, MAX_BYTES // max(row, 1)))
        try:
            for first in range(0, batch, step):
                part, number = slice(first, first + step), next(self._ids)
                states = None if hidden is None else hidden[part]
                data = wire.encode_request(
                    number, self.name, contexts[part], budget, min_prob, strategy, states
                )
                asked = min(step, batch - first)
                answer = self._connections.send(data, end).receive(24 + asked * (16 + 7 * budget), end)
                parts.append(self._read(check_answer(answer, Operation.DRAFT, number), asked, budget))
        except RequestFailed as trouble:
            self.counters.failed(trouble.outcome, batch)
            self._fail(trouble, self._pauses, "no drafts of")
            return trouble.outcome
        self._pauses.succeed()
        drafts = DraftBatch.joined(parts)
        self.counters.answered(drafts.sizes.tolist())
        return drafts

    def append(self, ids: NDArray[np.int32], prompt_size: int = 0, *, digest: bytes = b"") -> bool:
        """Append a document to a live store of this name; return whether the service confirmed it.

        Never raises, and waits no longer than the client's deadline or 50 ms, whichever is longer, plus 2 µs per token.
        After failures, documents are dropped immediately for a while. `counters` has the numbers appended and lost.

        Args:
            ids: int32 [any].
            prompt_size: number of leading ids that belong to the prompt.
            digest: 16 bytes that identify the document (`draftstore.text.digests`); empty: unknown.
        """
        return self.append_documents([LiveDocument(ids, prompt_size, digest)]) > 0

    def append_many(
        self,
        prompt: NDArray[np.integer],
        answers: Iterable[ArrayLike],
        version: int = 0,
        digests: Sequence[bytes] = (),
    ) -> int:
        """Append answers to one prompt; return how many were confirmed. See `LiveStore.append_many` and `append`."""
        confirmed, part, room = 0, list[LiveDocument](), 0
        for document in answers_of(prompt, answers, version, digests):
            room -= len(document.ids)
            if part and (room < 0 or len(part) == wire.MAX_DOCUMENTS):
                confirmed += self.append_documents(part)
                part = []
            if not part:
                room = MAX_DOCUMENT - len(document.ids)
            part.append(document)
        return confirmed + (self.append_documents(part) if part else 0)

    def append_documents(self, documents: Sequence[LiveDocument]) -> int:
        """Append documents that fit in one frame; return how many were confirmed. See `append`."""
        self._connections.renew()
        if not self._closed and not self._append_pauses.holds:
            tokens = sum(len(each.ids) for each in documents)
            end = monotonic() + max(self.deadline, APPEND_SECONDS) + TOKEN_SECONDS * tokens
            number, data = self._append_frame(documents)
            try:
                check_answer(
                    self._connections.send(data, end).receive(MAX_LIST, end), Operation.APPEND, number
                )
            except RequestFailed as trouble:
                self._fail(trouble, self._append_pauses, "no answers are remembered by")
            else:
                self._append_pauses.succeed()
                self.counters.add("appended", len(documents))
                for each in documents:
                    self._changes.add(each.prompt)
                return len(documents)
        self.counters.add("lost", len(documents))
        return 0

    def forget(self, *, before: int, seconds: float = CHECK_SECONDS) -> None:
        """Forget documents of versions before one in a live store, now and later; LookupServiceError if that fails."""
        number = next(self._ids)
        data = wire.encode_forget(number, self.name, max(0, before))
        self._ask(Operation.FORGET, number, data, seconds, lambda payload: payload)
        self._forgets += 1

    def recall(self, prompt: int, count: int) -> list[NDArray[np.int32]] | None:
        """Return the latest answers to a prompt in a live store, by its hash, newest version last, int32 [any] each.

        None if the service misses the client's deadline or fails; then drafts of a running text stay as they are.
        """
        self._connections.renew()
        if self._closed or self._pauses.holds:
            return None
        end, number = monotonic() + self.deadline, next(self._ids)
        data = wire.encode_recall(number, self.name, prompt, count)
        try:
            answer = self._connections.send(data, end).receive(4 * (1 + count * (1 + MAX_DOCUMENT)), end)
            return read_recalled(check_answer(answer, Operation.RECALL, number), self.vocab_size)
        except RequestFailed as trouble:
            self._fail(trouble, self._pauses, "no answers are recalled from")
            return None

    def changed(self, since: Cursor) -> tuple[Cursor, set[int] | None]:
        """Return a cursor, and the prompts this client has appended to since another; None: it made some forget."""
        number, prompts = self._changes.since(since[1])
        return (self._forgets, number), prompts if since[0] == self._forgets else None

    def check_append(self, seconds: float = CHECK_SECONDS) -> None:
        """Check that a live store of this name accepts this model's documents; LookupServiceError if it does not."""
        number, data = self._append_frame([])
        self._ask(Operation.APPEND, number, data, seconds, lambda payload: payload)

    def _append_frame(self, documents: Sequence[LiveDocument]) -> tuple[int, bytes]:
        if self._fingerprint is None or not self._vocabulary_given:
            raise DraftstoreError("appending requires the tokenizer= and vocab_size= of the model")
        number = next(self._ids)
        request = AppendRequest(self.name, self.vocab_size, self._fingerprint, [*map(_shortened, documents)])
        return number, wire.encode_append(number, request)

    def close(self) -> None:
        """Close all connections; from now on every draft is empty."""
        self._closed = True
        self._connections.shut_down()

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _read(self, payload: bytes, batch: int, budget: int) -> DraftBatch:
        """Return the drafts of an answer; all answers must have the tokenizer of the first, or none."""
        _, tokenizer, _, drafts = read_drafts(payload, batch, budget, self.vocab_size)
        if self._tokenizer is None:
            self._tokenizer = tokenizer or None
        elif tokenizer and tokenizer != self._tokenizer:
            raise RequestFailed(
                Outcome.OTHER_TOKENIZER,
                f"its drafts come from the tokenizer {tokenizer:016x}, expected {self._tokenizer:016x}: "
                "publish a build for this model's tokenizer, or use another release",
            )
        return drafts

    def _fail(self, trouble: RequestFailed, pauses: Pauses, effect: str) -> None:
        """Pause requests after a failed call if that helps, and warn."""
        outcome = trouble.outcome
        self._connections.drop(failed=True)
        wait = min(trouble.failure.retry_after, LONGEST_PAUSE) if trouble.failure else 0.0
        if outcome in _REFUSALS:
            pauses.pause(REFUSAL_SECONDS)
        elif outcome in _OURS:
            pauses.succeed()  # the service works; another request may succeed
        elif wait > 0 and outcome in (Outcome.BUSY, Outcome.UNAVAILABLE):
            pauses.pause(wait)
            return
        elif pauses.fail(refused=outcome is Outcome.UNREACHABLE):
            self.counters.add("pauses")
        else:
            return
        now = monotonic()
        if now - self._warned.get((effect, outcome), -math.inf) >= WARN_SECONDS:
            self._warned[effect, outcome] = now
            logger.warning(
                "%s %r from %s (%s): %s; decoding continues without them",
                effect, self.name, self.address, outcome, trouble,
            )  # fmt: skip

    def _ask(
        self, operation: Operation, number: int, data: bytes, seconds: float, read: Callable[[bytes], Result]
    ) -> Result:
        """Send a request on a new connection; return the answer parsed by `read`, or raise LookupServiceError."""
        self._connections.renew()
        self._connections.drop()
        end = monotonic() + seconds
        try:
            return read(
                check_answer(self._connections.send(data, end).receive(MAX_LIST, end), operation, number)
            )
        except RequestFailed as trouble:
            raise LookupServiceError(f"no drafts of {self.name!r} from {self.address}: {trouble}") from None


def _shortened(document: LiveDocument) -> LiveDocument:
    """Return the last tokens of a document that a client may append."""
    cut = max(0, len(document.ids) - MAX_DOCUMENT)
    return document._replace(ids=document.ids[cut:], prompt_size=max(0, document.prompt_size - cut))


def _warm_up(name: str) -> None:
    """Load the kernels and validate the name, before the first draft."""
    wire.encode_request(0, name, np.zeros((1, 1), np.int32), 0)
    batches.warm_up()
    wire.decode_answer(wire.encode_answer(0, 0, 0, 0, DraftBatch.empty(1))[wire.HEADER.size :])
