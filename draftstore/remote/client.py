"""Drafts from the lookup service, through the same interface as those of a local store.

    from draftstore.remote.client import RemoteStore

    store = RemoteStore(name="chat-vicuna")              # or RemoteStore("draft-host:7781", name=..., token=...)
    store.check()                                        # at the start: is it there, may we, does it fit the model?

    drafter = store.drafter()                            # or "longest", as with a local store
    session = drafter.session(prompt_ids)
    while decoding:
        tree = session.propose(budget=64)                # empty if the service cannot answer in time
        accepted = model.verify(tree)                    # your forward pass
        session.observe(accepted)

    drafts = drafter.draft(contexts, budget=32)          # or one call for all sequences of an engine step
    print(store.counters)                                # Counters(answered=812, timeout=3, skipped=40, ...)

**The service is never in the way.** After the deadline (2 ms unless told otherwise; `deadline=`, in seconds) a call
returns empty drafts, and the model decodes one token as it would without drafting. The same happens when the service
is away, restarts, hangs, refuses, closes the connection or answers nonsense: `draft` and `propose` raise only for
arguments that a local store refuses too. Every tree that they return was checked as it came in, so a broken or even a
hostile service can cost speed, but cannot change what the model says. Large batches need a longer deadline: measure
yours with `python -m benchmarks.lookup_load`.

**What is broken is left alone.** After three failures in a row nothing is asked for 50 ms, then one call tries again,
and each further failure doubles the pause, to 5 s. A service that says it is busy is left alone for as long as it
asks. What a pause cannot mend (unknown release, wrong token, another tokenizer) is tried every five seconds. The logger
`draftstore.remote.client` gets one warning for each kind of trouble, at most every five minutes. `check()` raises
`LookupServiceError` with a sentence that says what is wrong; call it when you start, not between passes.

**The drafts are those of the store**, byte for byte. Give the identity of your model's tokenizer
(`tokenizer=load_tokenizer(...).identity`) and `vocab_size`, and drafts of another tokenizer are refused; otherwise the
tokenizer of the first answer is kept to, and `check()` takes over the size of the vocabulary. With `target_model`,
`check()` refuses a release that is bound to another model.

**Dense releases** (kind `dresd`) are asked with hidden states of the model. `check()` fetches their projection, and
`drafter()` then returns a `RemoteDenseDrafter`, whose `projection` says what becomes of a hidden state before a session
gets it, see `draftstore.drafting.drafter`; without `check()` there are no drafts of a dense release. When the
release moves to a store of another projection, the texts that are being decoded go on without drafts
(`other_projection` in the counters), a thread fetches the new projection, and sessions that begin after that have it
as their `projection`.

**Threads, processes, event loops.** One `RemoteStore` serves any number of threads and sessions: each call takes a
connection that is idle, or makes one. A forked process uses connections of its own. A thread that computes in Python
may keep the interpreter's lock for 5 ms, more than the deadline: see `sys.setswitchinterval`. For asyncio there is
`draftstore.remote.async_client.AsyncRemoteStore`, the same with `await`.

What ended how is in `store.counters`, see `draftstore.remote.counters`. How frames look is in docs/frames.md.
"""

import threading
import weakref
from time import monotonic
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftstore.drafting.drafter import ContextSession, DenseSession
from draftstore.drafting.projection import Projection
from draftstore.errors import LookupServiceError
from draftstore.remote.addresses import Endpoint
from draftstore.remote.connection import Connection
from draftstore.remote.counters import Counters
from draftstore.remote.drafters import BUDGET, CHECK_SECONDS, DEADLINE, Following, Remote, Talk, read_releases
from draftstore.remote.judging import Request, Trouble, misses
from draftstore.remote.queries import Queries
from draftstore.remote.wire import Frame
from draftstore.trees.batch import Draft

__all__ = ["BUDGET", "DEADLINE", "LookupServiceError", "RemoteDenseDrafter", "RemoteDrafter", "RemoteStore"]

MOST_IDLE = 64
"""Connections that are kept."""


class RemoteDrafter:
    """Drafts of one release by one strategy, a `ContextDrafter`; threads may share it."""

    def __init__(self, store: "RemoteStore", strategy: str) -> None:
        """Draft from `store`."""
        self._store = store
        self.strategy = strategy
        self.context_size = store.context_size
        self.vocab_size = store.vocab_size

    def draft(self, contexts: NDArray[np.int32], budget: int = BUDGET, min_prob: float = 0.0) -> list[Draft]:
        """Draft for a batch of contexts; see `ContextDrafter.draft`.

        Without an answer in time all drafts are empty.

        Raises:
            DraftstoreError: the budget is not within 0 .. 4,096, or contexts is not a matrix of integers.
        """
        return self._store._draft(contexts, budget, min_prob, self.strategy)

    def session(self, prompt_ids: ArrayLike, **_prefill: Any) -> ContextSession:
        """Start the drafts of one text; see `Drafter.session`.

        Raises:
            TokenRangeError: an id of the prompt lies outside the vocabulary.
        """
        return ContextSession(self, prompt_ids)


class RemoteDenseDrafter(Following, RemoteDrafter):
    """Drafts of a dense release by one strategy, a `DenseDrafter`; threads may share it."""

    def __init__(self, store: "RemoteStore", strategy: str, projection: Projection) -> None:
        """Draft from `store` with what `projection` makes of hidden states."""
        super().__init__(store, strategy)
        self.context_size = 1
        self.projection = projection

    def draft(
        self,
        contexts: NDArray[np.int32],
        budget: int = BUDGET,
        min_prob: float = 0.0,
        *,
        queries: NDArray[np.float32] | None = None,
    ) -> list[Draft]:
        """Draft for a batch of contexts; see `DenseDrafter.draft`.

        Without an answer in time all drafts are empty, and also once the release has another projection.

        Raises:
            DraftstoreError: as of `RemoteDrafter.draft`, or queries of another shape.
        """
        asked = self._asked(len(contexts), queries)
        return self._store._draft(contexts, budget, min_prob, self.strategy, asked)

    def session(
        self, prompt_ids: ArrayLike, *, hidden: NDArray[np.float32] | None = None, **_prefill: Any
    ) -> DenseSession:
        """Start the drafts of one text; see `Drafter.session`.

        From here on the drafter has the projection that the release has by now. If that is another one, the first
        draft is empty: `hidden` was projected with the one before.

        Raises:
            TokenRangeError: an id of the prompt lies outside the vocabulary.
            DraftstoreError: a hidden state of another size.
        """
        projection, hidden = self._follow(self._store.projection, hidden)
        fixed = RemoteDenseDrafter(self._store, self.strategy, projection)
        return DenseSession(fixed, prompt_ids, hidden)


class RemoteStore(Remote):
    """A release or store of the lookup service, to draft from as from a local one; see the module's description."""

    def _start(self) -> None:
        """Get ready to keep connections."""
        self._pool = Pool(self._endpoint, self._judge.hello, self.counters)
        weakref.finalize(self, self._pool.close)

    def drafter(self, strategy: str = "") -> RemoteDrafter:
        """Return a drafter that follows a strategy of the store; empty is its default.

        If `check` has found a dense release, it is a `RemoteDenseDrafter`.
        """
        if self.projection is not None:
            return RemoteDenseDrafter(self, strategy, self.projection)
        return RemoteDrafter(self, strategy)

    def check(self, strategy: str = "", seconds: float = CHECK_SECONDS) -> dict[str, Any]:
        """Find out whether drafts can be had: meant for the start, where waiting does not matter.

        Args:
            strategy: the strategy that will be asked for.
            seconds: to wait at most, for each of two or three questions.

        Returns:
            What the service says of the release: `kind`, `build`, `tokenizer`, `vocab_size`, `strategies`, ...

        Raises:
            LookupServiceError: the service is away or refuses, or its drafts are not for this tokenizer or model.
        """
        try:
            return self._talk(self._checking(strategy), seconds)
        except Trouble as trouble:
            raise self._error(trouble) from None

    def releases(self, seconds: float = CHECK_SECONDS) -> list[dict[str, Any]]:
        """Return what the service serves, as far as this client may know.

        Args:
            seconds: to wait at most.

        Raises:
            LookupServiceError: the service is away or refuses.
        """
        try:
            return read_releases(self._patiently(self._releases_request(), seconds))
        except Trouble as trouble:
            raise self._error(trouble) from None

    def close(self) -> None:
        """Close all connections; from now on every draft is empty."""
        self._judge.closed = True
        self._pool.close()

    def __enter__(self) -> "RemoteStore":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _draft(
        self,
        contexts: NDArray[np.int32],
        budget: int,
        min_prob: float,
        strategy: str,
        queries: Queries | None = None,
    ) -> list[Draft]:
        """Draft for a batch of contexts; see `RemoteDrafter.draft`."""
        judge = self._judge
        end = monotonic() + judge.deadline
        requests = judge.requests(contexts, budget, min_prob, strategy, queries)
        batch = len(contexts)
        if not requests or (ticket := judge.enter(batch)) < 0:
            return misses(batch)
        drafts: list[Draft] = []
        try:
            for request in requests:
                drafts += judge.drafts(request, self._ask(request, end))
        except Trouble as trouble:
            judge.fail(ticket, trouble, batch)
            if self._must_refresh(trouble, queries):
                threading.Thread(target=self._refresh, name="draftstore-projection", daemon=True).start()
            return misses(batch)
        except BaseException:
            judge.breaker.abandon(ticket)
            raise
        judge.succeed(ticket, drafts)
        return drafts

    def _refresh(self) -> None:
        """Learn the projection that the release has moved to; in a thread, as nobody should wait for it."""
        with self._refreshed():
            self._talk(self._learning(), CHECK_SECONDS)

    def _talk(self, talk: Talk, seconds: float) -> dict[str, Any]:
        """Ask what `talk` wants to know, and return what it makes of that.

        Raises:
            Trouble: there is no answer in so many seconds, or not a good one.
        """
        try:
            request = next(talk)
            while True:
                request = talk.send(self._patiently(request, seconds))
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    def _ask(self, request: Request, end: float) -> Frame:
        """Return the answer to a request.

        Raises:
            Trouble: there is none.
        """
        attempt = 1
        while True:
            try:
                return self._pool.ask(request, end, fresh=attempt > 1)
            except Trouble as trouble:
                if not self._again(trouble, attempt):
                    raise
            attempt += 1

    def _patiently(self, request: Request, seconds: float) -> Frame:
        """Return the answer to a request that is no draft in a hurry.

        Raises:
            Trouble: there is none.
        """
        self._endpoint.wait(seconds)
        return self._ask(request, monotonic() + seconds)

    def _renew(self) -> None:
        """Make the client anew in a forked process."""
        super()._renew()
        self._pool.abandon()


class Pool:
    """Connections that are idle; the one that was used last goes out first."""

    def __init__(self, endpoint: Endpoint, hello: bytes, counters: Counters) -> None:
        """Start with none; the arguments are those of `Connection`."""
        self._endpoint = endpoint
        self._hello = hello
        self._counters = counters
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()
        self._closed = False

    def ask(self, request: Request, end: float, *, fresh: bool) -> Frame:
        """Ask over an idle connection, or over a new one; see `Connection.ask`.

        Raises:
            Trouble: there is no answer.
        """
        connection = None if fresh else self._take()
        if connection is None:
            connection = Connection(self._endpoint, self._hello, self._counters)
            self._all.add(connection)
        try:
            return connection.ask(request, end)
        finally:
            self._give(connection)

    def close(self) -> None:
        """Close what is idle; what is in use is closed when it comes back."""
        self._closed = True
        while (connection := self._take()) is not None:
            self._drop(connection)

    def abandon(self) -> None:
        """Close all connections in a forked process; the parent's stay as they are."""
        self._idle.clear()
        for connection in list(self._all):
            self._drop(connection)

    def _take(self) -> Connection | None:
        """Return an idle connection, if there is one; of two threads only one can get it."""
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _give(self, connection: Connection) -> None:
        """Keep a connection for the next call, if it is of use."""
        if not connection.usable or self._closed or len(self._idle) >= MOST_IDLE:
            self._drop(connection)
        else:
            self._idle.append(connection)

    def _drop(self, connection: Connection) -> None:
        """Close a connection."""
        self._all.discard(connection)
        connection.close()
