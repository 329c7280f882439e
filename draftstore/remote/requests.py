"""Draft requests of a client, ready to be sent."""

from collections.abc import Iterator
from functools import lru_cache
from itertools import repeat
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.drafting.drafter import check_request
from draftstore.remote.queries import Queries
from draftstore.remote.repeats import FixedBytes
from draftstore.remote.wire import CONTEXT, encode_request
from draftstore.trees.tree import LEVEL_PROBS, LOWEST_LEVEL

MAX_BATCH = 512
"""Maximum contexts per request; larger batches are split."""
MAX_CONTEXT = 4096
"""Maximum tokens of a context that are sent, the last ones; no store looks back further."""
MAX_NUMBERS = 1 << 17
"""Maximum tokens of all contexts plus values of all queries per request; larger batches are split."""


class PreparedRequest(NamedTuple):
    """An encoded request, and limits for its answer.

    Attributes:
        id: request id, repeated in the answer.
        data: the frame.
        batch: number of drafts.
        budget: maximum nodes of each.
        longest_answer: maximum size of the answer, where that may exceed `MAX_BYTES`.
    """

    id: int
    data: bytes
    batch: int = 0
    budget: int = 0
    longest_answer: int = 0


def prepare_draft(
    request_id: int,
    name: str,
    contexts: NDArray[np.int32],
    budget: int,
    min_prob: float,
    strategy: str,
    queries: Queries | None = None,
) -> PreparedRequest:
    """Return the request for a batch of drafts; the arguments are those of `wire.DraftRequest`.

    Raises:
        WireError: the arguments do not fit the wire format.
    """
    sections = None if queries is None else queries.sections()
    data = encode_request(request_id, name, contexts, budget, min_prob, strategy, sections)
    batch = len(contexts)
    return PreparedRequest(request_id, data, batch, budget, 24 + batch * (16 + 7 * budget))


def prepare_drafts(
    ids: Iterator[int],
    name: str,
    contexts: NDArray[np.int32],
    budget: int,
    min_prob: float,
    strategy: str,
    queries: Queries | None = None,
) -> list[PreparedRequest]:
    """Return the requests for a batch of contexts: one, several, or none if nothing can be drafted.

    They take the next of `ids`; the other arguments are those of `ContextDrafter.draft` and `prepare_draft`.
    """
    if queries is None and type(contexts) is np.ndarray and contexts.dtype == CONTEXT:
        fixed = _fixed_bytes(name, contexts.shape, budget, min_prob, strategy)
        if fixed is not None:  # the usual case, in fewer steps
            number = next(ids)
            return [
                PreparedRequest(number, fixed.frame(number, contexts), len(contexts), budget, fixed.longest)
            ]
    return _prepare(ids, name, contexts, budget, min_prob, strategy, queries)


@lru_cache(64, typed=True)
def _fixed_bytes(
    name: str, shape: tuple[int, ...], budget: int, min_prob: float, strategy: str
) -> FixedBytes | None:
    """Return what requests of one kind have in common; None if a batch does not make exactly one request."""
    if len(shape) != 2 or shape[0] > MAX_BATCH or shape[1] > MAX_CONTEXT:
        return None
    nothing = np.zeros(shape, CONTEXT)
    requests = _prepare(repeat(0), name, nothing, budget, min_prob, strategy, None)
    if len(requests) != 1:
        return None
    return FixedBytes(requests[0].data, shape, requests[0].longest_answer)


def _prepare(
    ids: Iterator[int],
    name: str,
    contexts: NDArray[np.int32],
    budget: int,
    min_prob: float,
    strategy: str,
    queries: Queries | None,
) -> list[PreparedRequest]:
    """Return the requests for a batch of contexts; see `prepare_drafts`."""
    contexts, level = check_request(contexts, budget, min_prob)
    batch, width = contexts.shape
    if batch == 0 or budget == 0 or level < 0:
        return []
    if queries is not None:
        queries.check(batch)
        if not queries.any:
            return []
    # The wire format has float32 probabilities. Rounding may cross a level's bound, so send the level's own
    # probability.
    least = 0.0 if level == LOWEST_LEVEL else float(LEVEL_PROBS[level])
    if batch == 1 and width <= MAX_CONTEXT:
        return [prepare_draft(next(ids), name, contexts, budget, least, strategy, queries)]
    contexts = contexts[:, -MAX_CONTEXT:]
    numbers = contexts.shape[1] + (0 if queries is None else queries.vectors.shape[1])
    size = max(1, min(MAX_BATCH, MAX_NUMBERS // max(numbers, 1)))
    return [
        prepare_draft(
            next(ids), name, contexts[first : first + size], budget, least, strategy,
            None if queries is None else queries.part(first, first + size),
        )
        for first in range(0, batch, size)
    ]  # fmt: skip
