"""CREST stores: precomputed draft trees of the most useful n-grams; a draft takes a few exact lookups.

    manifest.json      see draftstore.storage.manifest
    trees.lmdb         entries by n-gram (draftstore.stores.crest.entries); absent if only PostgreSQL holds them
    dictionary.zst     the codes of the entries (draftstore.stores.crest.codes)
    kept.parquet       the n-grams of the store, one row each, for people and for SQL
    tokenizer/         the tokenizer

"CREST: Effectively Compacting a Datastore for Retrieval-Based Speculative Decoding", 2024.
"""

import dataclasses
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from draftstore.drafting.contexts import ContextDrafter
from draftstore.drafting.drafter import check_request
from draftstore.errors import StoreError
from draftstore.storage.manifest import Manifest, TokenizerIdentity, load_manifest
from draftstore.stores.crest.codes import ENTRIES_VERSION, UNFITTED, EntryCodec
from draftstore.stores.crest.entries import (
    LMDB,
    Entries,
    entries_digest,
    first_backend,
    key_dtype,
    open_entries,
)
from draftstore.stores.kind import Kind, Samples, sample_contexts, strategy_named
from draftstore.trees.batch import DraftBatch
from draftstore.trees.frontier import BUDGET, MAX_DEPTH
from draftstore.trees.tree import LOWEST_LEVEL

KIND = "crest"
DICTIONARY_FILE = "dictionary.zst"
KEPT_FILE = "kept.parquet"
STRATEGIES: tuple[str, ...] = ("backoff",)
"""The rule by which the trees were drawn; the tree of the longest stored n-gram answers."""


class CrestDrafter(ContextDrafter):
    """Drafts from the entries of one store."""

    def __init__(self, entries: Entries, codec: EntryCodec, max_n: int, vocab_size: int) -> None:
        self._entries = entries
        self._codec = codec
        self._key = key_dtype(vocab_size)
        self.vocab_size = vocab_size
        self.context_size = max_n

    def draft_batch(
        self,
        contexts: NDArray[np.int32],
        budget: int = BUDGET,
        min_prob: float = 0.0,
        hidden: NDArray[np.float16] | None = None,  # noqa: ARG002
    ) -> DraftBatch:
        """Draft for a batch of contexts into arrays; see `ContextDrafter.draft_batch`.

        All n-grams of all contexts are looked up in one read transaction; the longest one found answers. A damaged
        entry raises a StoreError.
        """
        contexts, level = check_request(contexts, budget, min_prob)
        if budget == 0 or level < 0:
            return DraftBatch.empty(len(contexts))
        found = self._entries.get(self._keys(contexts))
        values, rows, matches = [], [], np.zeros(len(contexts), np.int32)
        for row in range(len(contexts)):
            for n in range(self.context_size, 0, -1):
                value = found[(row + 1) * self.context_size - n]
                if value is not None:
                    values.append(value)
                    rows.append(row)
                    matches[row] = n
                    break
        tokens, parents, levels, sizes, occurrences, _ = self._codec.decode(
            values, np.array(rows, np.int64), len(contexts), budget, level
        )
        return DraftBatch(tokens, parents, levels, sizes, matches, occurrences)

    def _keys(self, contexts: NDArray[np.int32]) -> list[bytes]:
        """Return the keys of every context, longest first; ids that do not fit become a value that no key contains."""
        size, width = self.context_size, self._key.itemsize
        if contexts.shape[1] < size:
            contexts = np.pad(contexts, ((0, 0), (size - contexts.shape[1], 0)), constant_values=-1)
        ids = np.ascontiguousarray(contexts[:, -size:]).view(np.uint32)
        encoded = np.minimum(ids, np.iinfo(self._key).max).astype(self._key).tobytes()
        return [
            encoded[stop - n * width : stop]
            for stop in range(size * width, len(encoded) + 1, size * width)
            for n in range(size, 0, -1)
        ]

    def warm_up(self) -> None:
        """Compile the kernels, or load them from numba's cache, before the first draft."""
        self._codec.decode([], np.empty(0, np.int64), 1, 1, LOWEST_LEVEL)


def _read_codec(path: Path, manifest: Manifest) -> EntryCodec:
    """Return the codec of a store's entries; StoreError if it is missing or damaged, or the entries are others."""
    version = manifest.parameters.get("entries_version")
    if version != ENTRIES_VERSION:
        raise StoreError(
            f"{path} has entries of version {version}, this draftstore reads version {ENTRIES_VERSION}: "
            "build it again"
        )
    rule = manifest.parameters.get("rule", STRATEGIES[0])
    if rule not in STRATEGIES:  # its trees expect to be blended with those of shorter n-grams
        raise StoreError(f"{path} has trees drawn by {rule!r}, expected {STRATEGIES[0]!r}: build it again")
    try:
        dictionary = (path / DICTIONARY_FILE).read_bytes()
    except OSError as error:
        raise StoreError(
            f"{path} has no dictionary ({error}): the store is damaged, build it again"
        ) from None
    return EntryCodec(dictionary)


@dataclasses.dataclass(eq=False)
class CrestStore:
    """An open CREST store."""

    strategies = STRATEGIES
    default_strategy = STRATEGIES[0]

    path: Path
    manifest: Manifest
    entries: Entries
    codec: EntryCodec

    @classmethod
    def open(
        cls, path: Path | str, tokenizer: TokenizerIdentity | None = None, backend: str | None = None
    ) -> "CrestStore":
        """Open a store; `tokenizer` is the required one, None accepts any; `backend` defaults to the store's first.

        Raises StoreError (not a CREST store, unknown version, missing or truncated files, no such backend) or
        TokenizerError.
        """
        path = Path(path)
        manifest = load_manifest(path, KIND)
        if tokenizer is not None:
            manifest.require_tokenizer(tokenizer, path)
        max_n = manifest.parameters.get("max_n")
        if not isinstance(max_n, int) or not 1 <= max_n <= MAX_DEPTH:
            raise StoreError(
                f"{path} does not record the length of its n-grams: the store is damaged, build it again"
            )
        codec = _read_codec(path, manifest)
        return cls(path, manifest, open_entries(path, manifest, backend), codec)

    def drafter(self, strategy: str = STRATEGIES[0], **_changes: Any) -> CrestDrafter:
        """Return a drafter; DraftstoreError if `strategy` is not in `STRATEGIES`."""
        strategy_named(strategy, dict.fromkeys(STRATEGIES))
        lengths = range(1, self.manifest.parameters["max_n"] + 1)
        longest = max((n for n in lengths if self.manifest.counts.get(f"n{n}")), default=1)
        return CrestDrafter(self.entries, self.codec, longest, self.manifest.vocab_size)

    def samples(self, number: int) -> Samples:
        """Return n-grams of the store; see `Store.samples`."""
        dtype = key_dtype(self.manifest.vocab_size)
        rows = [np.frombuffer(key, dtype).astype(np.int64) for key, _ in islice(self.entries.items(), number)]
        return Samples(sample_contexts(rows, self.manifest.vocab_size))

    def close(self) -> None:
        """Close the entries."""
        self.entries.close()


class CrestKind(Kind):
    """Precomputed draft trees of n-grams, in a file or in PostgreSQL."""

    title = "CREST"
    strategies = STRATEGIES
    builder = "draftstore.stores.crest.build"

    def open(self, path: Path, backend: str | None = None) -> CrestStore:
        """Open a store."""
        return CrestStore.open(path, backend=backend)

    def backend(self, manifest: Manifest, wanted: str | None) -> str:
        """Return the backend of a store's entries: `wanted`, by default the first."""
        return wanted or first_backend(manifest)

    def verify_entries(self, path: Path, manifest: Manifest) -> list[str]:
        """Compare entries outside the store's directory with their recorded hash."""
        problems = []
        for backend in manifest.parameters.get("backends", []):
            if backend == LMDB:
                continue  # verified with the other files
            with closing(open_entries(path, manifest, backend)) as entries:
                found, expected = entries_digest(entries.items()), manifest.parameters["entries_sha256"]
            if found != expected:
                problems.append(
                    f"the entries of {path} in {backend} have SHA-256 {found}, expected {expected}: build it again"
                )
        return problems

    def load_kernels(self) -> None:
        """Compile the kernels."""
        CrestDrafter(cast("Entries", None), EntryCodec(UNFITTED), 1, 1).warm_up()  # reads no entries


STORE_KIND = CrestKind(KIND)
