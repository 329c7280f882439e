"""The two clients of the lookup service behind one face, and a decoder that needs no model."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import uvloop
from numpy.typing import ArrayLike, NDArray

from draftstore.drafting.drafter import ContextDrafter, Drafter
from draftstore.drafting.projection import Projection
from draftstore.remote.async_client import AsyncRemoteSession, AsyncRemoteStore
from draftstore.remote.client import RemoteStore
from draftstore.remote.counters import Counters
from draftstore.trees.batch import Draft
from draftstore.trees.tree import DraftTree

KINDS = ("threads", "asyncio", "uvloop")


class Client(Protocol):
    """What both clients can do, without `await`."""

    @property
    def counters(self) -> Counters: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def projection(self) -> Projection | None: ...
    def drafter(self, strategy: str = "") -> Any: ...
    def check(self, strategy: str = "", seconds: float = ...) -> dict[str, Any]: ...
    def releases(self, seconds: float = ...) -> list[dict[str, Any]]: ...
    def close(self) -> None: ...


class Awaited:
    """An `AsyncRemoteStore` and the event loop that it runs in."""

    def __init__(self, store: AsyncRemoteStore, loop: asyncio.AbstractEventLoop) -> None:
        self._store = store
        self._run = loop.run_until_complete
        self.counters = store.counters

    @property
    def vocab_size(self) -> int:
        return self._store.vocab_size

    @property
    def projection(self) -> Projection | None:
        return self._store.projection

    def drafter(self, strategy: str = "") -> "AwaitedDrafter":
        return AwaitedDrafter(self._store, strategy, self._run)

    def check(self, strategy: str = "", seconds: float = 5.0) -> dict[str, Any]:
        return self._run(self._store.check(strategy, seconds))

    def releases(self, seconds: float = 5.0) -> list[dict[str, Any]]:
        return self._run(self._store.releases(seconds))

    def close(self) -> None:
        self._run(self._store.close())


class AwaitedDrafter:
    """A drafter of an `AsyncRemoteStore`."""

    def __init__(self, store: AsyncRemoteStore, strategy: str, run: Callable[[Any], Any]) -> None:
        self._drafter = store.drafter(strategy)
        self._run = run
        self.context_size = self._drafter.context_size
        self.vocab_size = self._drafter.vocab_size

    @property
    def projection(self) -> Projection | None:
        return self._drafter.projection

    def draft(
        self,
        contexts: NDArray[np.int32],
        budget: int = 64,
        min_prob: float = 0.0,
        queries: NDArray[np.float32] | None = None,
    ) -> list[Draft]:
        return self._run(self._drafter.draft(contexts, budget, min_prob, queries))  # type: ignore[no-any-return]

    def session(self, prompt_ids: ArrayLike, **prefill: Any) -> "AwaitedSession":
        return AwaitedSession(self._drafter.session(prompt_ids, **prefill), self._run)


class AwaitedSession:
    """A session of an `AsyncRemoteStore`."""

    needs_candidates = False

    def __init__(self, session: AsyncRemoteSession, run: Callable[[Any], Any]) -> None:
        self._session = session
        self._run = run
        self.needs_hidden = session.needs_hidden
        self.projection = session.projection

    def propose(self, budget: int = 64, min_prob: float = 0.0) -> DraftTree:
        return self._run(self._session.propose(budget, min_prob))  # type: ignore[no-any-return]

    def observe(self, accepted_ids: ArrayLike, **feedback: Any) -> None:
        self._session.observe(accepted_ids, **feedback)


@contextmanager
def connected(kind: str, address: object, name: str = "chat", **settings: Any) -> Iterator[Client]:
    """Make a client of one of `KINDS`."""
    if kind == "threads":
        with RemoteStore(str(address), name, **settings) as store:
            yield store
        return
    loop = uvloop.new_event_loop() if kind == "uvloop" else asyncio.new_event_loop()
    client = Awaited(AsyncRemoteStore(str(address), name, **settings), loop)
    try:
        yield client
    finally:
        client.close()  # else the loop would wait for its connection
        loop.close()


Model = Callable[[list[int]], int]


def decode(drafter: Drafter | None, prompt: list[int], model: Model, length: int) -> tuple[list[int], int]:
    """Decode greedily, with drafts or without.

    Args:
        drafter: None for plain decoding.
        prompt: to begin with.
        model: says what follows a text.
        length: tokens to decode, and perhaps some more.

    Returns:
        The first `length` tokens, and the passes that they took.
    """
    session = drafter.session(prompt) if drafter else None
    text, passes = list(prompt), 0
    while len(text) < len(prompt) + length:
        passes += 1
        node, accepted = -1, list[int]()
        tree = session.propose() if session else None
        while True:
            token = model(text + accepted)
            accepted.append(token)
            if tree is None:
                break
            children = np.flatnonzero((tree.parents == node) & (tree.tokens == token))
            if len(children) == 0:
                break
            node = int(children[0])
        text += accepted
        if session:
            session.observe(accepted)
    return text[len(prompt) : len(prompt) + length], passes


def follows(story: list[int], vocab_size: int) -> Model:
    """Return a model that tells a story, but for every seventh token, which depends on all that came before."""

    def model(text: list[int]) -> int:
        place = len(text)
        return (sum(text) * 31 + place) % vocab_size if place % 7 == 0 else story[place % len(story)]

    return model


def contexts_of(drafter: ContextDrafter, story: list[int], batch: int, seed: int = 0) -> NDArray[np.int32]:
    """Return contexts int32 [batch, 16]: pieces of a story, some short, some with ids that follow nothing."""
    salad = np.random.default_rng(seed)
    contexts = np.full((batch, 16), -1, np.int32)
    for row in contexts:
        start, size = int(salad.integers(0, len(story) - 16)), int(salad.integers(0, 17))
        if size:
            row[-size:] = story[start : start + size]
        if salad.random() < 0.2:
            row[int(salad.integers(0, 16))] = salad.integers(0, drafter.vocab_size)
    return contexts
