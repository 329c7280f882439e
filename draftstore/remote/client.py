"""Drafts from the lookup service, with the interface of a local store.

    from draftstore.remote.client import RemoteStore

    store = RemoteStore(name="chat-vicuna")              # or RemoteStore("draft-host:7781", name=..., token=...)
    store.check()                                        # at startup: reachable, permitted, fits the model?

    drafter = store.drafter()                            # or "longest", as with a local store
    session = drafter.session(prompt_ids)
    while decoding:
        tree = session.propose(budget=64)                # empty if the service cannot answer in time
        accepted = model.verify(tree)                    # your forward pass
        session.observe(accepted)

    drafts = drafter.draft(contexts, budget=32)          # or one call for all sequences of an engine step
    print(store.counters)                                # Counters(answered=812, timeout=3, skipped=40, ...)

**The service never blocks decoding.** After the deadline (2 ms by default; `deadline=`, in seconds) a call returns
empty drafts, and the model decodes one token as without drafting. The same happens if the service is down, restarts,
hangs, refuses, closes the connection or sends invalid answers: `draft` and `propose` raise only for arguments that a
local store refuses too. Every received tree is validated, so that a broken or even hostile service can cost speed, but
cannot change the model's output. Large batches need a longer deadline: measure yours with `python -m
benchmarks.service`.

**Failures trip a circuit breaker.** After three failures in a row no requests are sent for 50 ms, then one call tries
again, and each further failure doubles the pause, up to 5 s. A busy service is left alone for as long as it asks.
Problems that a pause cannot fix (unknown release, wrong token, another tokenizer) are retried every five seconds. The
logger `draftstore.remote.client` gets one warning per kind of problem, at most every five minutes. `check()` raises
`LookupServiceError` with a sentence about the problem; call it at startup, not between passes.

**Drafts are the store's**, byte for byte. Pass the identity of your model's tokenizer
(`tokenizer=load_tokenizer(...).identity`) and `vocab_size`, and drafts of another tokenizer are refused; by default the
tokenizer of the first answer is required from then on, and `check()` reads the vocabulary size. With `target_model`,
`check()` refuses a release bound to another model.

**Dense releases** (kind `dresd`) need hidden states of the model. `check()` fetches their projection, and `drafter()`
then returns a drafter whose `projection` must be applied to a session's hidden states, see
`draftstore.drafting.drafter`; without `check()` a dense release gives no drafts. When the release moves to a store with
another projection, current texts continue without drafts (`other_projection` in the counters), a thread fetches the new
projection, and later sessions have it as their `projection`.

**Threads, processes, event loops.** One `RemoteStore` serves any number of threads and sessions: each call takes an
idle connection or opens one. A forked process uses its own connections. A thread that runs Python code may hold the GIL
for 5 ms, longer than the deadline: see `sys.setswitchinterval`. From asyncio call it through
`asyncio.to_thread`.

Outcomes are counted in `store.counters`, see `draftstore.remote.counters`. The frame format is in docs/frames.md.
"""

import threading
import weakref
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftstore.drafting.drafter import ContextSession
from draftstore.errors import LookupServiceError
from draftstore.remote.connection import Connection
from draftstore.remote.drafters import DraftCall, ReleaseDrafter
from draftstore.remote.following import CHECK_SECONDS, Dialogue, Result
from draftstore.remote.pool import ConnectionPool
from draftstore.remote.release import BUDGET, DEADLINE, ReleaseClient
from draftstore.trees.batch import Draft

__all__ = ["BUDGET", "DEADLINE", "LookupServiceError", "RemoteDrafter", "RemoteStore"]


class BegunCall:
    """A call of `draft` whose answer nobody has waited for yet: other services can be asked meanwhile."""

    def __init__(self, store: "RemoteStore", call: DraftCall) -> None:
        """Send the first request as far as that needs no waiting; few batches have a second one."""
        self._store = store
        self._call = call
        self._begun = store._pool.begin(call.requests[0]) if call.requests else None

    def finish(self) -> list[Draft]:
        """Return the drafts; see `RemoteDrafter.draft`."""
        return self._store._draft(self._call, self._begun)

    def give_up(self) -> None:
        """Wait for nothing: the caller was interrupted."""
        if self._begun is not None:
            self._store._pool.give_up(self._begun)
        self._call.abandon()


class RemoteDrafter(ReleaseDrafter):
    """Drafts of one release with one strategy, a `ContextDrafter`; threads may share it."""

    _store: "RemoteStore"

    def draft(
        self,
        contexts: NDArray[np.int32],
        budget: int = BUDGET,
        min_prob: float = 0.0,
        queries: NDArray[np.float32] | None = None,
    ) -> list[Draft]:
        """Draft for a batch of contexts; see `ContextDrafter.draft`.

        All drafts are empty without an answer in time, and if a dense release has another projection by now.

        Raises:
            DraftstoreError: the budget is outside 0 .. 4,096, contexts is not a matrix of integers, or the queries of a
                dense release have the wrong shape.
        """
        return self._store._draft(self._call(contexts, budget, min_prob, queries))

    def begin(self, contexts: NDArray[np.int32], budget: int = BUDGET) -> BegunCall:
        """Begin a call of `draft` for nodes of any probability, without waiting for the answer.

        Raises:
            DraftstoreError: see `draft`.
        """
        return BegunCall(self._store, self._call(contexts, budget, 0.0, None))

    def session(
        self, prompt_ids: ArrayLike, *, hidden: NDArray[np.float32] | None = None, **_prefill: Any
    ) -> ContextSession:
        """Start the drafts of one text; see `Drafter.session`.

        The drafter of a dense release now takes the release's present projection. If that has changed, the first draft
        is empty: `hidden` was projected with the old one.

        Raises:
            TokenRangeError: an id of the prompt lies outside the vocabulary.
            DraftstoreError: a hidden state of the wrong size.
        """
        drafter, hidden = self._for_text(hidden)
        return ContextSession(drafter, prompt_ids, hidden)


class RemoteStore(ReleaseClient):
    """A release or store of the lookup service, used like a local store; see the module's description."""

    def drafter(self, strategy: str = "") -> RemoteDrafter:
        """Return a drafter with a strategy of the store; empty is its default.

        The drafter has a projection if `check` has found a dense release.
        """
        return RemoteDrafter(self, strategy, self.projection)

    def check(self, strategy: str = "", seconds: float = CHECK_SECONDS) -> dict[str, Any]:
        """Check that drafts are available; meant for startup, since it waits.

        Args:
            strategy: the strategy to be used.
            seconds: maximum wait for each of two or three requests.

        Returns:
            The service's description of the release: `kind`, `build`, `tokenizer`, `vocab_size`, `strategies`, ...

        Raises:
            LookupServiceError: the service is down or refuses, or its drafts do not fit this tokenizer or model.
        """
        self._endpoint.wait(seconds)
        return self._carry(self._checking(strategy, seconds))

    def releases(self, seconds: float = CHECK_SECONDS) -> list[dict[str, Any]]:
        """Return the releases visible to this client.

        Args:
            seconds: maximum wait.

        Raises:
            LookupServiceError: the service is down or refuses.
        """
        self._endpoint.wait(seconds)
        return self._carry(self._listing(seconds))

    def close(self) -> None:
        """Close all connections; from now on every draft is empty."""
        self._closed = True
        self._pool.close()

    def __enter__(self) -> "RemoteStore":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _draft(self, call: DraftCall, begun: Connection | None = None) -> list[Draft]:
        """Send the requests of a call of `draft`, the first one unless it was `begun`, and take the answers."""
        with call:
            for request in call.requests:
                call.take(request, self._pool.ask(request, call.end, begun))
                begun = None
        return call.drafts

    def _carry(self, dialogue: Dialogue[Result]) -> Result:
        """Run a dialogue with the service to its end and return its result."""
        try:
            question = next(dialogue)
            while True:
                try:
                    answer = self._pool.ask(*question)
                except BaseException as error:  # noqa: BLE001 - the dialogue decides
                    question = dialogue.throw(error)
                else:
                    question = dialogue.send(answer)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    def _start(self) -> None:
        """Prepare the connection pool."""
        self._pool = ConnectionPool(self._endpoint, self._hello, self.counters)
        weakref.finalize(self, self._pool.close)

    def _start_refresh(self) -> None:
        """Fetch the release's new projection, in a background thread."""
        threading.Thread(
            target=self._carry, args=(self._refreshing(),), name="draftstore-projection", daemon=True
        ).start()

    def _renew(self) -> None:
        """Reset the client in a forked process."""
        super()._renew()
        self._pool.abandon()
