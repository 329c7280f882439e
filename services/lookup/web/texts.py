"""Conversion of questions to contexts of token ids, and of drafts to readable text."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from draftstore.text.tokenizer import TextTokenizer
from draftstore.trees.batch import Draft
from services.lookup.web.messages import DraftedContext, Node, Token

LAST = 256
"""Maximum tokens of a context to send: drafters use 16, with room to grow."""
SHOWN = 32
"""Maximum tokens of the context in an answer."""


def encode_text(tokenizer: TextTokenizer, text: str) -> NDArray[np.int32]:
    """Return the last ids of a text, as a batch of one: int32 [1, 1 to LAST]."""
    return pack_contexts([tokenizer.encode(text, bos=False)[-LAST:].tolist()])


def pack_contexts(contexts: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """Return the last ids of each context, right-aligned and padded with -1: int32 [batch, 1 to LAST]."""
    width = min(max(1, *map(len, contexts)), LAST)
    packed = np.full((len(contexts), width), -1, np.int32)
    for row, ids in zip(packed, contexts, strict=True):
        last = ids[-width:]
        row[width - len(last) :] = last
    return packed


def show_draft(draft: Draft, context: NDArray[np.int32], tokenizer: TextTokenizer | None) -> DraftedContext:
    """Return a draft in readable form."""
    ids: list[int] = context[context >= 0].tolist()
    tree = draft.tree
    rows = zip(tree.tokens.tolist(), tree.parents.tolist(), tree.probs.tolist(), strict=True)
    return DraftedContext(
        match_length=draft.match_length,
        match_count=draft.match_count,
        matched_text=_matched_text(ids, draft.match_length, tokenizer),
        context=[
            Token(token=i, text=text, shown=shown) for i, text, shown in _spelled(ids[-SHOWN:], tokenizer)
        ],
        nodes=[
            Node(token=i, text=text, shown=shown, parent=parent, prob=round(prob, 6))
            for (_, parent, prob), (i, text, shown) in zip(
                rows, _spelled(tree.tokens.tolist(), tokenizer), strict=True
            )
        ],
    )


def _spelled(ids: Iterable[int], tokenizer: TextTokenizer | None) -> Iterable[tuple[int, str | None, str]]:
    """Yield each id with its exact text and its visible form."""
    for token in ids:
        if tokenizer is None:
            yield token, None, f"<id {token}>"
        else:
            yield token, tokenizer.exact_text(token), tokenizer.token_text(token)


def _matched_text(ids: list[int], length: int, tokenizer: TextTokenizer | None) -> str | None:
    """Return the text of the last `length` ids; None if it begins or ends inside a character."""
    if tokenizer is None:
        return None
    pieces = [tokenizer.exact_text(token) for token in ids[len(ids) - length :]]
    if None in pieces:  # tokens that share a character decode only together
        text = tokenizer.decode(ids[len(ids) - length :])
        return None if "\ufffd" in text else text
    return "".join(piece for piece in pieces if piece is not None)
