"""The rates of this machine for `draftstore plan --measure`: some seconds of each step, on a store's own tokens."""

from pathlib import Path
from time import process_time

import numpy as np

from draftstore.errors import StoreError
from draftstore.search.suffix import index_segment
from draftstore.storage.manifest import TOKENIZER_FOLDER
from draftstore.stores.rest.store import RestStore
from draftstore.text.tokenizer import load_tokenizer
from draftstore.text.tokens import sentinel

SORTED, ENCODED, FEWEST = 4_000_000, 1_000_000, 500
"""Tokens that are sorted and encoded again, at most, and without which there is nothing to measure."""


def measure_rates(path: Path) -> dict[str, float]:
    """Return the tokens a second and core of `tokenize` and `sort`.

    They count the processor's time, not the clock's: a machine that does other work has the same rates.

    Raises:
        StoreError: not a REST store, or too few tokens.
        TokenizerError: its tokenizer cannot be loaded.
    """
    store = RestStore.open(path)
    index = store.index
    tokenizer = load_tokenizer(path / TOKENIZER_FOLDER, name=store.manifest.tokenizer.name)
    tokens = np.array(index.tokens[: min(SORTED, int(index.segments[0, 1]))])
    if len(tokens) < FEWEST:
        raise StoreError(
            f"{path} has a first segment of {len(tokens):,} tokens: expected {FEWEST:,} to measure with"
        )
    end = sentinel(tokens.dtype)
    tokens[-1] = end
    few = tokens[:ENCODED]
    texts = [
        tokenizer.decode(part[part != end])
        for part in np.split(few, np.flatnonzero(few == end))
        if len(part) > 1
    ]
    index_segment(tokens[-1:], index.vocab_size)  # loads the kernels, or compiles them
    begin = process_time()
    encoded = sum(map(len, tokenizer.encode_documents(texts)))
    between = process_time()
    index_segment(tokens, index.vocab_size)
    after = process_time()
    return {"tokenize": encoded / (between - begin), "sort": len(tokens) / (after - between)}
