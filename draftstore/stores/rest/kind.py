"""The kind `rest`."""

from pathlib import Path

import numpy as np

from draftstore.jit import read_only
from draftstore.search.suffix import SuffixIndex, key_layout, segment_table
from draftstore.stores.kind import CONTEXT_TOKENS, Kind
from draftstore.stores.rest.store import KIND, STRATEGIES, RestDrafter, RestStore
from draftstore.text.tokens import sentinel, token_dtype


class RestKind(Kind):
    """Token corpora with suffix arrays."""

    title = "REST"
    strategies = tuple(STRATEGIES)
    builder = "draftstore.stores.rest.build"

    def open_files(self, path: Path) -> RestStore:
        """Open a store."""
        return RestStore.open(path)

    def load_kernels(self) -> None:
        """Compile the kernels for both widths of ids, for single contexts and batches."""
        contexts = np.full((2, CONTEXT_TOKENS), -1, np.int32)
        for vocab_size in (1, 1 << 16):
            for rule in STRATEGIES.values():
                drafter = RestDrafter(_smallest_index(vocab_size), rule)
                drafter.warm_up()
                for count in (1, 2):
                    drafter.draft_batch(contexts[:count]).encode_trees()


def _smallest_index(vocab_size: int) -> SuffixIndex:
    dtype = token_dtype(vocab_size)
    return SuffixIndex(
        read_only(np.full(1, sentinel(dtype), dtype)),
        read_only(np.zeros(1, np.int32)),
        read_only(np.zeros(1, np.int64)),
        read_only(np.zeros((1, vocab_size + 1), np.int32)),
        read_only(segment_table(np.ones(1, np.int64))[:-1]),
        vocab_size,
        *key_layout(vocab_size),
    )


STORE_KIND = RestKind(KIND)
