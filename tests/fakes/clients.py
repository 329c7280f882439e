"""Clients of the lookup service, and a decoder that needs no model."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftstore.drafting.drafter import ContextDrafter, Drafter
from draftstore.remote.client import RemoteStore

Client = RemoteStore


def connected(address: object, name: str = "chat", **settings: Any) -> RemoteStore:
    """Make a client."""
    return RemoteStore(str(address), name, **settings)


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
