"""Draft calls for a batch of contexts, and the common base of both clients' drafters."""

from collections.abc import Hashable
from time import monotonic
from typing import Self

import numpy as np
from numpy.typing import NDArray

from draftstore.drafting.projection import Projection
from draftstore.remote.counters import Outcome
from draftstore.remote.protocol import RequestFailed
from draftstore.remote.queries import Queries
from draftstore.remote.release import ReleaseClient
from draftstore.remote.requests import PreparedRequest, prepare_drafts
from draftstore.remote.wire import Frame
from draftstore.trees.batch import Draft
from draftstore.trees.tree import DraftTree


class DraftCall:
    """One call of `draft`, a context manager around its requests: service failures end it with empty drafts.

    Attributes:
        requests: requests to send; none if nothing can be drafted, or the breaker is open.
        end: deadline for all answers.
        drafts: one for each context, at the end.
    """

    __slots__ = ("_batch", "_client", "_queries", "_ticket", "drafts", "end", "requests")

    def __init__(
        self,
        client: ReleaseClient,
        contexts: NDArray[np.int32],
        budget: int,
        min_prob: float,
        strategy: str,
        queries: Queries | None,
    ) -> None:
        """Prepare the requests; see `ContextDrafter.draft`.

        Raises:
            DraftstoreError: arguments that a local store refuses too.
        """
        self.end = monotonic() + client.deadline
        self.requests = prepare_drafts(
            client._ids, client.name, contexts, budget, min_prob, strategy, queries
        )
        self.drafts: list[Draft] = []
        self._client = client
        self._batch = len(contexts)
        self._queries = queries
        if self.requests:
            self._ticket = -1 if client._closed else client._breaker.enter()
            if self._ticket < 0:
                client.counters.failed(Outcome.SKIPPED, self._batch)
                self.requests = []

    def take(self, request: PreparedRequest, answer: Frame) -> None:
        """Process the answer to a request.

        Raises:
            RequestFailed: it is unusable.
        """
        self.drafts += self._client._drafts(request, answer)

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        client = self._client
        if error is None and self.requests:
            client._breaker.succeed(self._ticket)
            client.counters.answered([len(draft.tree.tokens) for draft in self.drafts])
            return False
        self.drafts = _misses(self._batch)
        if isinstance(error, RequestFailed):
            client._fail(self._ticket, error, self._batch, self._queries)
            return True
        if error is not None:
            self.abandon()
        return False

    def abandon(self) -> None:
        """Learn nothing about the service."""
        if self.requests:
            self._client._breaker.abandon(self._ticket)


def _misses(batch: int) -> list[Draft]:
    """Return empty drafts."""
    return [Draft(DraftTree.empty(), 0, 0) for _ in range(batch)]


class ReleaseDrafter:
    """Drafts of one release with one strategy; base of both clients' drafters.

    Attributes:
        strategy: drafting strategy; empty for the store's default.
        context_size: tokens of a context; one for a dense release.
        vocab_size: size of the vocabulary.
        projection: maps hidden states to queries of a dense release, else None. It changes only when a text begins.
    """

    def __init__(self, store: ReleaseClient, strategy: str, projection: Projection | None) -> None:
        """Draft from `store`, with `projection` for hidden states."""
        self._store = store
        self._moved = False
        self.strategy = strategy
        self.projection = projection
        self.context_size = store.context_size if projection is None else 1
        self.vocab_size = store.vocab_size

    @property
    def source(self) -> Hashable:
        """What drafters with the same drafts have in common; see `draftstore.drafting.together`."""
        return id(self._store), self.strategy, self.projection and self.projection.digest

    def _call(
        self,
        contexts: NDArray[np.int32],
        budget: int,
        min_prob: float,
        queries: NDArray[np.float32] | None,
    ) -> DraftCall:
        """Return the call for a batch of contexts; a dense release gives no drafts without queries."""
        asked, projection = None, self.projection
        if projection is not None:
            if queries is None:
                queries = np.full((len(contexts), projection.dims), np.nan, np.float32)
            asked = Queries(np.ascontiguousarray(queries, np.float32), projection)
        return DraftCall(self._store, contexts, budget, min_prob, self.strategy, asked)

    def _for_text(self, hidden: NDArray[np.float32] | None) -> tuple[Self, NDArray[np.float32] | None]:
        """Update to the release's present projection, and return a drafter that keeps it for one text."""
        # The state, float32 [d], is None if it was projected with an outdated projection.
        known, latest = self.projection, self._store.projection
        if known is None:
            return self, None
        if latest is not None and latest is not known:
            self._moved = True
            self.projection = known = latest
            hidden = None
        elif self._moved and hidden is not None and hidden.shape != (known.dims,):
            hidden = None  # another thread's text began meanwhile
        return type(self)(self._store, self.strategy, known), hidden
