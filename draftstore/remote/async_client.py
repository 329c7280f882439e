"""Drafts from the lookup service for programs on asyncio (uvloop too): `draftstore.remote.client` with `await`.

    store = AsyncRemoteStore(name="chat-vicuna")
    await store.check()
    drafter = store.drafter()
    session = drafter.session(prompt_ids)
    tree = await session.propose(budget=64)
    await store.close()

All tasks of an event loop share one connection, on which any number of requests are under way. Deadline, breaker,
counters and judgement of answers are those of `draftstore.remote.client`.
"""

import asyncio
from time import monotonic
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftstore.drafting.drafter import ContextSession, DenseSession
from draftstore.drafting.projection import Projection
from draftstore.errors import LookupServiceError
from draftstore.remote.channel import Line
from draftstore.remote.drafters import BUDGET, CHECK_SECONDS, Following, Remote, Talk, read_releases
from draftstore.remote.judging import Request, Trouble, misses
from draftstore.remote.queries import Queries
from draftstore.remote.wire import Frame
from draftstore.trees.batch import Draft
from draftstore.trees.tree import DraftTree

__all__ = [
    "AsyncRemoteDenseDrafter", "AsyncRemoteDenseSession", "AsyncRemoteDrafter", "AsyncRemoteSession",
    "AsyncRemoteStore", "LookupServiceError",
]  # fmt: skip


class AsyncRemoteSession:
    """The drafts of one text that is being decoded; see `Session`."""

    def __init__(self, drafter: "AsyncRemoteDrafter", prompt_ids: ArrayLike) -> None:
        """Start from a prompt.

        Raises:
            TokenRangeError: an id of the prompt lies outside the vocabulary.
        """
        self._drafter = drafter
        self._text = ContextSession(drafter, prompt_ids)  # type: ignore[arg-type]  # it keeps the text, no more

    async def propose(self, budget: int = BUDGET, min_prob: float = 0.0) -> DraftTree:
        """Return a draft of at most `budget` nodes, each of at least `min_prob`; empty if there is none."""
        drafts = await self._drafter.draft(self._text.context, budget, min_prob)
        return drafts[0].tree

    def observe(self, accepted_ids: ArrayLike, **_feedback: Any) -> None:
        """Append ids to the text; see `Session.observe`.

        Raises:
            TokenRangeError: an id outside the vocabulary; nothing is appended then.
        """
        self._text.observe(accepted_ids)


class AsyncRemoteDenseSession:
    """The drafts of one text from a dense release; see `DenseSession`."""

    needs_hidden = True

    def __init__(
        self,
        drafter: "AsyncRemoteDenseDrafter",
        prompt_ids: ArrayLike,
        hidden: NDArray[np.float32] | None = None,
    ) -> None:
        """Start from a prompt.

        Raises:
            TokenRangeError: an id of the prompt lies outside the vocabulary.
            DraftstoreError: a hidden state of another size.
        """
        self.projection = drafter.projection
        self._drafter = drafter
        self._text = DenseSession(drafter, prompt_ids, hidden)  # type: ignore[arg-type]  # it keeps the text

    async def propose(self, budget: int = BUDGET, min_prob: float = 0.0) -> DraftTree:
        """Return a draft of at most `budget` nodes, each of at least `min_prob`; empty if there is none."""
        text = self._text
        drafts = await self._drafter.draft(text.context, budget, min_prob, queries=text.query)
        return drafts[0].tree

    def observe(
        self, accepted_ids: ArrayLike, *, hidden: NDArray[np.float32] | None = None, **_feedback: Any
    ) -> None:
        """Append ids to the text, and take the state that predicted the last of them; see `DenseSession.observe`.

        Raises:
            TokenRangeError: an id outside the vocabulary; nothing is appended then.
            DraftstoreError: a hidden state of another size.
        """
        self._text.observe(accepted_ids, hidden=hidden)


class AsyncRemoteDrafter:
    """Drafts of one release by one strategy, for all tasks of all event loops."""

    def __init__(self, store: "AsyncRemoteStore", strategy: str) -> None:
        """Draft from `store`."""
        self._store = store
        self.strategy = strategy
        self.context_size = store.context_size
        self.vocab_size = store.vocab_size

    async def draft(
        self, contexts: NDArray[np.int32], budget: int = BUDGET, min_prob: float = 0.0
    ) -> list[Draft]:
        """Draft for a batch of contexts; see `ContextDrafter.draft`.

        Without an answer in time all drafts are empty.

        Raises:
            DraftstoreError: the budget is not within 0 .. 4,096, or contexts is not a matrix of integers.
        """
        return await self._store._draft(contexts, budget, min_prob, self.strategy)

    def session(self, prompt_ids: ArrayLike, **_prefill: Any) -> AsyncRemoteSession:
        """Start the drafts of one text; see `Drafter.session`.

        Raises:
            TokenRangeError: an id of the prompt lies outside the vocabulary.
        """
        return AsyncRemoteSession(self, prompt_ids)


class AsyncRemoteDenseDrafter(Following):
    """Drafts of a dense release by one strategy; see `RemoteDenseDrafter`."""

    def __init__(self, store: "AsyncRemoteStore", strategy: str, projection: Projection) -> None:
        """Draft from `store` with what `projection` makes of hidden states."""
        self._store = store
        self.strategy = strategy
        self.context_size = 1
        self.vocab_size = store.vocab_size
        self.projection = projection

    async def draft(
        self,
        contexts: NDArray[np.int32],
        budget: int = BUDGET,
        min_prob: float = 0.0,
        *,
        queries: NDArray[np.float32] | None = None,
    ) -> list[Draft]:
        """Draft for a batch of contexts; see `RemoteDenseDrafter.draft`.

        Raises:
            DraftstoreError: as of `AsyncRemoteDrafter.draft`, or queries of another shape.
        """
        asked = self._asked(len(contexts), queries)
        return await self._store._draft(contexts, budget, min_prob, self.strategy, asked)

    def session(
        self, prompt_ids: ArrayLike, *, hidden: NDArray[np.float32] | None = None, **_prefill: Any
    ) -> AsyncRemoteDenseSession:
        """Start the drafts of one text; see `RemoteDenseDrafter.session`.

        Raises:
            TokenRangeError: an id of the prompt lies outside the vocabulary.
            DraftstoreError: a hidden state of another size.
        """
        projection, hidden = self._follow(self._store.projection, hidden)
        fixed = AsyncRemoteDenseDrafter(self._store, self.strategy, projection)
        return AsyncRemoteDenseSession(fixed, prompt_ids, hidden)


class AsyncRemoteStore(Remote):
    """A release or store of the lookup service, to draft from in event loops; see `draftstore.remote.client`."""

    def _start(self) -> None:
        """Get ready to keep a connection for each loop."""
        self._lines: dict[asyncio.AbstractEventLoop, Line] = {}
        self._looking: asyncio.Task[None] | None = None

    def drafter(self, strategy: str = "") -> "AsyncRemoteDrafter | AsyncRemoteDenseDrafter":
        """Return a drafter that follows a strategy of the store; empty is its default.

        If `check` has found a dense release, it is an `AsyncRemoteDenseDrafter`.
        """
        if self.projection is not None:
            return AsyncRemoteDenseDrafter(self, strategy, self.projection)
        return AsyncRemoteDrafter(self, strategy)

    async def check(self, strategy: str = "", seconds: float = CHECK_SECONDS) -> dict[str, Any]:
        """Find out whether drafts can be had; see `RemoteStore.check`.

        Raises:
            LookupServiceError: the service is away or refuses, or its drafts are not for this tokenizer or model.
        """
        try:
            return await self._talk(self._checking(strategy), seconds)
        except Trouble as trouble:
            raise self._error(trouble) from None

    async def releases(self, seconds: float = CHECK_SECONDS) -> list[dict[str, Any]]:
        """Return what the service serves, as far as this client may know; see `RemoteStore.releases`.

        Raises:
            LookupServiceError: the service is away or refuses.
        """
        try:
            return read_releases(await self._patiently(self._releases_request(), seconds))
        except Trouble as trouble:
            raise self._error(trouble) from None

    async def close(self) -> None:
        """Close the connection of this event loop; from now on every draft is empty."""
        self._judge.closed = True
        if self._looking is not None and self._looking.get_loop() is asyncio.get_running_loop():
            self._looking.cancel()
        line = self._lines.pop(asyncio.get_running_loop(), None)
        if line is not None:
            await line.close()

    async def __aenter__(self) -> "AsyncRemoteStore":
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def _draft(
        self,
        contexts: NDArray[np.int32],
        budget: int,
        min_prob: float,
        strategy: str,
        queries: Queries | None = None,
    ) -> list[Draft]:
        """Draft for a batch of contexts; see `AsyncRemoteDrafter.draft`."""
        judge = self._judge
        end = monotonic() + judge.deadline
        requests = judge.requests(contexts, budget, min_prob, strategy, queries)
        batch = len(contexts)
        if not requests or (ticket := judge.enter(batch)) < 0:
            return misses(batch)
        drafts: list[Draft] = []
        try:
            for request in requests:
                drafts += judge.drafts(request, await self._ask(request, end))
        except Trouble as trouble:
            judge.fail(ticket, trouble, batch)
            if self._must_refresh(trouble, queries):
                self._looking = asyncio.create_task(self._refresh())
            return misses(batch)
        except BaseException:
            judge.breaker.abandon(ticket)
            raise
        judge.succeed(ticket, drafts)
        return drafts

    async def _refresh(self) -> None:
        """Learn the projection that the release has moved to; in a task, as nobody should wait for it."""
        with self._refreshed():
            await self._talk(self._learning(), CHECK_SECONDS)

    async def _talk(self, talk: Talk, seconds: float) -> dict[str, Any]:
        """Ask what `talk` wants to know, and return what it makes of that.

        Raises:
            Trouble: there is no answer in so many seconds, or not a good one.
        """
        try:
            request = next(talk)
            while True:
                request = talk.send(await self._patiently(request, seconds))
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    async def _ask(self, request: Request, end: float) -> Frame:
        """Return the answer to a request.

        Raises:
            Trouble: there is none.
        """
        line = self._lines.get(asyncio.get_running_loop()) or self._new_line()
        attempt = 1
        while True:
            try:
                return await line.ask(request, end)
            except Trouble as trouble:
                if not self._again(trouble, attempt):
                    raise
            attempt += 1

    def _new_line(self) -> Line:
        """Return a line for this event loop, and forget those of loops that have ended."""
        for loop in list(self._lines):
            if loop.is_closed():
                self._lines.pop(loop, None)
        line = Line(self._endpoint, self._judge.hello, self.counters)
        self._lines[asyncio.get_running_loop()] = line
        return line

    async def _patiently(self, request: Request, seconds: float) -> Frame:
        """Return the answer to a request that is no draft in a hurry.

        Raises:
            Trouble: there is none.
        """
        if not len(self._endpoint):
            await asyncio.to_thread(self._endpoint.wait, seconds)
        return await self._ask(request, monotonic() + seconds)

    def _renew(self) -> None:
        """Make the client anew in a forked process."""
        super()._renew()
        _of_the_parent.append(self._lines)  # to let go of them would touch the parent's loop
        self._start()


_of_the_parent: list[dict[asyncio.AbstractEventLoop, Line]] = []
