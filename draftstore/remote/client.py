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
`drafter()` then returns a drafter whose `projection` says what becomes of a hidden state before a session gets it, see
`draftstore.drafting.drafter`; without `check()` there are no drafts of a dense release. When the
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
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftstore.drafting.drafter import ContextSession
from draftstore.errors import LookupServiceError
from draftstore.remote.connection import ConnectionPool
from draftstore.remote.drafters import DraftCall, ReleaseDrafter
from draftstore.remote.following import CHECK_SECONDS, Dialogue, Result
from draftstore.remote.release import BUDGET, DEADLINE, ReleaseClient
from draftstore.trees.batch import Draft

__all__ = ["BUDGET", "DEADLINE", "LookupServiceError", "RemoteDrafter", "RemoteStore"]


class RemoteDrafter(ReleaseDrafter):
    """Drafts of one release by one strategy, a `ContextDrafter`; threads may share it."""

    _store: "RemoteStore"

    def draft(
        self,
        contexts: NDArray[np.int32],
        budget: int = BUDGET,
        min_prob: float = 0.0,
        queries: NDArray[np.float32] | None = None,
    ) -> list[Draft]:
        """Draft for a batch of contexts; see `ContextDrafter.draft`.

        Without an answer in time all drafts are empty, and also once a dense release has another projection.

        Raises:
            DraftstoreError: the budget is not within 0 .. 4,096, contexts is not a matrix of integers, or the queries
                of a dense release have another shape.
        """
        return self._store._draft(self._call(contexts, budget, min_prob, queries))

    def session(
        self, prompt_ids: ArrayLike, *, hidden: NDArray[np.float32] | None = None, **_prefill: Any
    ) -> ContextSession:
        """Start the drafts of one text; see `Drafter.session`.

        From here on the drafter of a dense release has the projection that the release has by now. If that is another
        one, the first draft is empty: `hidden` was projected with the one before.

        Raises:
            TokenRangeError: an id of the prompt lies outside the vocabulary.
            DraftstoreError: a hidden state of another size.
        """
        drafter, hidden = self._for_text(hidden)
        return ContextSession(drafter, prompt_ids, hidden)


class RemoteStore(ReleaseClient):
    """A release or store of the lookup service, to draft from as from a local one; see the module's description."""

    def drafter(self, strategy: str = "") -> RemoteDrafter:
        """Return a drafter that follows a strategy of the store; empty is its default.

        If `check` has found a dense release, the drafter has a projection.
        """
        return RemoteDrafter(self, strategy, self.projection)

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
        self._endpoint.wait(seconds)
        return self._carry(self._checking(strategy, seconds))

    def releases(self, seconds: float = CHECK_SECONDS) -> list[dict[str, Any]]:
        """Return what the service serves, as far as this client may know.

        Args:
            seconds: to wait at most.

        Raises:
            LookupServiceError: the service is away or refuses.
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

    def _draft(self, call: DraftCall) -> list[Draft]:
        """Ask what a call of `draft` wants to know."""
        with call:
            for request in call.requests:
                call.take(request, self._pool.ask(request, call.end))
        return call.drafts

    def _carry(self, dialogue: Dialogue[Result]) -> Result:
        """Carry a dialogue with the service to its end, and return what comes of it."""
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
        """Get ready to keep connections."""
        self._pool = ConnectionPool(self._endpoint, self._hello, self.counters)
        weakref.finalize(self, self._pool.close)

    def _start_refresh(self) -> None:
        """Learn the projection that the release has moved to; in a thread, as nobody should wait for it."""
        threading.Thread(
            target=self._carry, args=(self._refreshing(),), name="draftstore-projection", daemon=True
        ).start()

    def _renew(self) -> None:
        """Make the client anew in a forked process."""
        super()._renew()
        self._pool.abandon()
