"""The asyncio client of the lookup service (uvloop too): `draftstore.remote.client` with `await`.

    store = AsyncRemoteStore(name="chat-vicuna")
    await store.check()
    drafter = store.drafter()
    session = drafter.session(prompt_ids)
    tree = await session.propose(budget=64)
    await store.close()

All tasks of an event loop share one connection with any number of concurrent requests. Otherwise it behaves like
`draftstore.remote.client`.
"""

import asyncio
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftstore.drafting.drafter import ContextSession
from draftstore.errors import LookupServiceError
from draftstore.remote.async_connection import SharedConnection
from draftstore.remote.drafters import DraftCall, ReleaseDrafter
from draftstore.remote.following import CHECK_SECONDS, Dialogue, Result
from draftstore.remote.release import BUDGET, ReleaseClient
from draftstore.trees.batch import Draft
from draftstore.trees.tree import DraftTree

__all__ = ["AsyncRemoteDrafter", "AsyncRemoteSession", "AsyncRemoteStore", "LookupServiceError"]


class AsyncRemoteSession(ContextSession):
    """The drafts for one text during decoding; see `Session`."""

    async def propose(self, budget: int = BUDGET, min_prob: float = 0.0) -> DraftTree:  # type: ignore[override]
        """Return a draft of at most `budget` nodes, each of at least `min_prob`; empty if there is none."""
        drafter: Any = self.drafter  # an `AsyncRemoteDrafter`
        drafts: list[Draft] = await drafter.draft(self.context, budget, min_prob, self.query)
        return drafts[0].tree


class AsyncRemoteDrafter(ReleaseDrafter):
    """Drafts of one release with one strategy, for all tasks of all event loops."""

    _store: "AsyncRemoteStore"

    async def draft(
        self,
        contexts: NDArray[np.int32],
        budget: int = BUDGET,
        min_prob: float = 0.0,
        queries: NDArray[np.float32] | None = None,
    ) -> list[Draft]:
        """Draft for a batch of contexts; see `RemoteDrafter.draft`.

        Raises:
            DraftstoreError: see `RemoteDrafter.draft`.
        """
        return await self._store._draft(self._call(contexts, budget, min_prob, queries))

    def session(
        self, prompt_ids: ArrayLike, *, hidden: NDArray[np.float32] | None = None, **_prefill: Any
    ) -> AsyncRemoteSession:
        """Start the drafts of one text; see `RemoteDrafter.session`.

        Raises:
            TokenRangeError: an id of the prompt lies outside the vocabulary.
            DraftstoreError: a hidden state of the wrong size.
        """
        drafter, hidden = self._for_text(hidden)
        return AsyncRemoteSession(drafter, prompt_ids, hidden)  # type: ignore[arg-type]  # `propose` awaits it


class AsyncRemoteStore(ReleaseClient):
    """A release or store of the lookup service, for event loops; see `draftstore.remote.client`."""

    def drafter(self, strategy: str = "") -> AsyncRemoteDrafter:
        """Return a drafter with a strategy of the store; see `RemoteStore.drafter`."""
        return AsyncRemoteDrafter(self, strategy, self.projection)

    async def check(self, strategy: str = "", seconds: float = CHECK_SECONDS) -> dict[str, Any]:
        """Check that drafts are available; see `RemoteStore.check`.

        Raises:
            LookupServiceError: the service is down or refuses, or its drafts do not fit this tokenizer or model.
        """
        await self._resolved(seconds)
        return await self._carry(self._checking(strategy, seconds))

    async def releases(self, seconds: float = CHECK_SECONDS) -> list[dict[str, Any]]:
        """Return the releases visible to this client; see `RemoteStore.releases`.

        Raises:
            LookupServiceError: the service is down or refuses.
        """
        await self._resolved(seconds)
        return await self._carry(self._listing(seconds))

    async def close(self) -> None:
        """Close the connection of this event loop; from now on every draft is empty."""
        self._closed = True
        loop = asyncio.get_running_loop()
        if self._refresh is not None and self._refresh.get_loop() is loop:
            self._refresh.cancel()
        connection = self._connections.pop(loop, None)
        if connection is not None:
            await connection.close()

    async def __aenter__(self) -> "AsyncRemoteStore":
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def _draft(self, call: DraftCall) -> list[Draft]:
        """Send the requests of a call of `draft`."""
        with call:
            for request in call.requests:
                call.take(request, await self._connection().ask(request, call.end))
        return call.drafts

    async def _carry(self, dialogue: Dialogue[Result]) -> Result:
        """Run a dialogue with the service to its end and return its result."""
        try:
            question = next(dialogue)
            while True:
                try:
                    answer = await self._connection().ask(*question)
                except BaseException as error:  # noqa: BLE001 - the dialogue decides
                    question = dialogue.throw(error)
                else:
                    question = dialogue.send(answer)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    async def _resolved(self, seconds: float) -> None:
        """Wait until the host name is resolved or resolution fails."""
        if not len(self._endpoint):
            await asyncio.to_thread(self._endpoint.wait, seconds)

    def _start(self) -> None:
        """Prepare one connection per loop."""
        self._connections: dict[asyncio.AbstractEventLoop, SharedConnection] = {}
        self._refresh: asyncio.Task[None] | None = None

    def _start_refresh(self) -> None:
        """Fetch the release's new projection, in a background task."""
        self._refresh = asyncio.create_task(self._carry(self._refreshing()))

    def _connection(self) -> SharedConnection:
        """Return this event loop's connection; creating one drops those of closed loops."""
        loop = asyncio.get_running_loop()
        connection = self._connections.get(loop)
        if connection is None:
            for other in list(self._connections):
                if other.is_closed():
                    self._connections.pop(other, None)
            connection = self._connections[loop] = SharedConnection(
                self._endpoint, self._hello, self.counters
            )
        return connection

    def _renew(self) -> None:
        """Reset the client in a forked process."""
        super()._renew()
        _of_the_parent.append(self._connections)  # kept: their finalisers would touch the parent's loop
        self._start()


_of_the_parent: list[dict[asyncio.AbstractEventLoop, SharedConnection]] = []
