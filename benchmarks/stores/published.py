"""CREST as published: as many of the most common n-grams of each length, with trees of only what followed them."""

from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from draftstore.search.cutting import draw_trees
from draftstore.search.expand import MAX_ROWS, Rule
from draftstore.search.ngrams import MAX_N
from draftstore.search.suffix import SuffixIndex
from draftstore.storage.report import ignore
from draftstore.stores.crest.codes import EntryCodec
from draftstore.stores.crest.counts import DEFAULT_MAX_N
from draftstore.stores.crest.entries import LmdbEntries, key_dtype
from draftstore.stores.crest.packing import pack_best, write_best
from draftstore.stores.crest.selection import Ranking, frequent_ngrams
from draftstore.stores.crest.store import CrestDrafter
from draftstore.stores.rest.store import CONTINUATION, RestStore
from draftstore.trees.frontier import BUDGET

RULE = Rule(MAX_N, 1, CONTINUATION, rows=MAX_ROWS, floor=0.0, alpha=0.0, beta=0.0, gamma=0.0)


class Published(NamedTuple):
    """The entries of a store, without its other files: their drafter, their number, and the bytes of their file."""

    drafter: CrestDrafter
    entries: int
    bytes: int


def build_published(store: RestStore, path: Path, *, ngrams: int, max_bytes: int | None = None) -> Published:
    """Write the trees of at most so many n-grams to an LMDB file of at most `max_bytes`; the longest n-gram answers."""
    vocab_size = store.index.vocab_size
    draw = partial(draw_trees, store.index, RULE, nodes=BUDGET)

    def rank(most: int) -> Ranking:
        return rank_combined(store.index, DEFAULT_MAX_N, most)

    codes, packed = pack_best(draw, rank, key_dtype(vocab_size), ngrams, max_bytes, ignore)
    kept = write_best(path, packed, max_bytes)
    drafter = CrestDrafter(LmdbEntries(path), EntryCodec(codes), DEFAULT_MAX_N, vocab_size)
    return Published(drafter, len(kept), path.stat().st_size)


def rank_combined(index: SuffixIndex, max_n: int, most: int) -> Ranking:
    """Rank the most common n-gram of each length, then the second of each, and so on ("CREST", 2024, figure 9)."""
    tables = frequent_ngrams(index, max_n, most)
    turns = [np.argsort(np.argsort(-table.counts, kind="stable")) for table in tables]
    lengths = np.concatenate([np.full(len(each), n, np.uint8) for n, each in enumerate(turns, 1)])
    places = np.concatenate([np.arange(len(each)) for each in turns])
    best = np.lexsort((places, lengths, np.concatenate(turns)))[:most]
    return Ranking(tables, lengths[best], places[best])
