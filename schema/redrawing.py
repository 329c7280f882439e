"""Draft trees drawn again: what a tree spells, though no text does, is not held against it.

A tree of the rule `backoff` joins what several texts said: a path may spell words of a removed document that no text
has in this order. Whether it was drawn from the removed document, the tree drawn again from the REST store tells, which
holds it no longer: an equal one owes nothing to it.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from draftstore.storage.manifest import load_manifest
from draftstore.stores.crest.build import RULES
from draftstore.stores.crest.packing import Cutter
from draftstore.stores.crest.store import LONGEST
from draftstore.stores.rest.store import RestStore
from draftstore.text.shingles import Finder, Hashes
from schema.held_tokens import Place, Told, joined, told_by

DRAWN = 4096
"""Trees drawn at a time."""


def differing_hits(path: Path, place: Place, rest: Path, finder: Finder) -> dict[int, list[Hashes]]:
    """Return the hits in trees that are others than those that a REST store gives, by length.

    Args:
        path: a CREST store.
        place: its entries.
        rest: the REST store that it was built from, without what was removed.
        finder: finds the hits.

    Raises:
        StoreError: a store cannot be read.
    """
    assert place.entries is not None
    manifest, store = load_manifest(path), RestStore.open(rest)
    known = manifest.parameters
    cutter = Cutter(store.index, known["nodes"], known["depth"], None, RULES[known.get("rule", LONGEST)])
    entries = told_by(path, manifest, place.entries)
    hits: dict[int, list[Hashes]] = {}
    while some := list(islice(entries, DRAWN)):
        if not _hits(finder, some, manifest.vocab_size):
            continue
        guilty = [(entry, told) for entry in some if (told := _hits(finder, [entry], manifest.vocab_size))]
        for told in _not_drawn(cutter, guilty):
            for length, hashes in told.items():
                hits.setdefault(length, []).append(hashes)
    return hits


def _hits(finder: Finder, entries: list[Told], vocab_size: int) -> dict[int, Hashes]:
    """Return the hits in what entries spell."""
    ids = joined((ids for entry in entries for ids in entry.sequences), vocab_size)
    return {length: hashes for length, hashes, _ in finder.find(ids, vocab_size)}


def _not_drawn(cutter: Cutter, entries: list[tuple[Told, dict[int, Hashes]]]) -> Iterator[dict[int, Hashes]]:
    """Yield the hits of entries whose tree is another than the one that the store gives for the n-gram."""
    for n in {len(entry.ngram) for entry, _ in entries}:
        some = [item for item in entries if len(item[0].ngram) == n]
        trees = cutter.trees(np.array([entry.ngram for entry, _ in some], np.int32))
        yield from (told for place, (entry, told) in enumerate(some) if trees.tree(place) != entry.tree)
