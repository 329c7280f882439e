"""CREST stores: precomputed draft trees of the most useful n-grams; a draft takes a few exact lookups.

    manifest.json      see draftstore.storage.manifest
    trees.lmdb         entries by n-gram (draftstore.stores.crest.entries); absent if only PostgreSQL holds them
    dictionary.zst     the codes of the entries (draftstore.stores.crest.codes)
    kept.parquet       the n-grams of the store, one row each, for people and for SQL
    tokenizer/         the tokenizer

"CREST: Effectively Compacting a Datastore for Retrieval-Based Speculative Decoding", 2024.
"""

import dataclasses
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftstore.drafting.drafter import ContextSession, check_request
from draftstore.errors import StoreError
from draftstore.storage.manifest import Manifest, TokenizerIdentity, load_manifest
from draftstore.stores.crest.coding import blend_values
from draftstore.stores.crest.entries import Entries, context_bytes, key_dtype, open_entries
from draftstore.stores.crest.envelope import ENTRIES_VERSION, Envelope, damaged
from draftstore.stores.kind import Samples, sample_contexts, strategy_named
from draftstore.trees.batch import Draft, DraftBatch
from draftstore.trees.frontier import MAX_DEPTH
from draftstore.trees.tree import LOWEST_LEVEL

KIND = "crest"
DICTIONARY_FILE = "dictionary.zst"
KEPT_FILE = "kept.parquet"
BUDGET = 64


class Blending(NamedTuple):
    """How the trees of a context's n-grams share the probability, longest first; see `draftstore.search.expand.Rule`.

    With alpha = beta = 0 the longest n-gram gets everything.
    """

    alpha: float
    beta: float

    @property
    def longest_takes_all(self) -> bool:
        """True if shorter n-grams get nothing."""
        return self.alpha + self.beta == 0.0


LONGEST, BACKOFF = "longest", "backoff"
STRATEGIES: dict[str, Blending] = {
    # CREST, section 3.3: the longest stored n-gram.
    LONGEST: Blending(0.0, 0.0),
    # The constants of REST's strategy: values from (5, 2) to (100, 20) have equal acceptance.
    BACKOFF: Blending(12.0, 6.0),
}
DEFAULT_STRATEGY = BACKOFF


class CrestDrafter:
    """Drafts from the entries of one store; has no per-text state, so threads may share it."""

    hidden_size = 0

    def __init__(
        self, entries: Entries, envelope: Envelope, max_n: int, vocab_size: int, blending: Blending
    ) -> None:
        self._entries = entries
        self._envelope = envelope
        self._shares = blending.alpha, blending.beta
        self._longest_takes_all = blending.longest_takes_all
        self._lengths = range(max_n, 0, -1)
        self._key = key_dtype(vocab_size)
        self.vocab_size = vocab_size
        self.context_size = max_n

    def draft(
        self,
        contexts: NDArray[np.int32],
        budget: int = BUDGET,
        min_prob: float = 0.0,
        hidden: NDArray[np.float16] | None = None,  # noqa: ARG002
    ) -> list[Draft]:
        """Draft for a batch of contexts; see `ContextDrafter.draft` and `draft_batch`."""
        return self.draft_batch(contexts, budget, min_prob).drafts()

    def draft_batch(
        self,
        contexts: NDArray[np.int32],
        budget: int = BUDGET,
        min_prob: float = 0.0,
        hidden: NDArray[np.float16] | None = None,  # noqa: ARG002
    ) -> DraftBatch:
        """Draft for a batch of contexts into arrays; see `ContextDrafter.draft`.

        All n-grams of all contexts are looked up in one read transaction. A damaged entry raises a StoreError.
        """
        contexts, level = check_request(contexts, budget, min_prob)
        if budget == 0 or level < 0:
            return DraftBatch.empty(len(contexts))
        found, lasts, matches = self._choose(self._entries.get(self._keys(contexts)))
        problem, tokens, parents, levels, sizes, occurrences = blend_values(
            *self._envelope.arguments(found), np.array(lasts, np.int64), *self._shares, budget, MAX_DEPTH, level
        )  # fmt: skip
        if problem:
            raise damaged(f"error code {problem} of the tree codec")
        return DraftBatch(tokens, parents, levels, sizes, np.array(matches, np.int32), occurrences)

    def _choose(self, values: Sequence[bytes | None]) -> tuple[list[bytes], list[int], list[int]]:
        """Choose the relevant values; return them, the end of each context's, and the length of its longest n-gram."""
        chosen: list[bytes] = []
        lasts, matches = [], []
        for start in range(0, len(values), self.context_size):
            match = 0
            for n, value in zip(self._lengths, values[start : start + self.context_size], strict=True):
                if value is not None:
                    match = match or n
                    chosen.append(value)
                    if self._longest_takes_all:
                        break
            lasts.append(len(chosen))
            matches.append(match)
        return chosen, lasts, matches

    def _keys(self, contexts: NDArray[np.int32]) -> list[bytes]:
        """Return the keys of every context, longest first."""
        size, width = self.context_size, self._key.itemsize
        if contexts.shape[1] < size:
            contexts = np.pad(contexts, ((0, 0), (size - contexts.shape[1], 0)), constant_values=-1)
        encoded = context_bytes(np.ascontiguousarray(contexts[:, -size:]), self._key).tobytes()
        return [
            encoded[stop - n * width : stop]
            for stop in range(size * width, len(encoded) + 1, size * width)
            for n in range(size, 0, -1)
        ]

    def session(self, prompt_ids: ArrayLike, **_prefill: Any) -> ContextSession:
        """Start the drafts of one text; see `Drafter.session`."""
        return ContextSession(self, prompt_ids)

    def warm_up(self) -> None:
        """Compile the kernels, or load them from numba's cache, before the first draft."""
        nothing = self._envelope.arguments([])
        blend_values(*nothing, np.zeros(1, np.int64), *self._shares, 1, MAX_DEPTH, LOWEST_LEVEL)


def open_envelope(path: Path, manifest: Manifest) -> Envelope:
    """Return the envelope that reads the entries of a store.

    Raises:
        StoreError: the entries have another version, or the codes are missing or damaged.
    """
    version = manifest.parameters.get("entries_version")
    if version != ENTRIES_VERSION:
        raise StoreError(
            f"{path} has entries of version {version}, this draftstore reads version {ENTRIES_VERSION}: "
            "build it again"
        )
    try:
        dictionary = (path / DICTIONARY_FILE).read_bytes()
    except OSError as error:
        raise StoreError(
            f"{path} has no dictionary ({error}): the store is damaged, build it again"
        ) from None
    return Envelope(dictionary)


@dataclasses.dataclass(eq=False)
class CrestStore:
    """An open CREST store."""

    strategies = tuple(STRATEGIES)
    default_strategy = DEFAULT_STRATEGY

    path: Path
    manifest: Manifest
    entries: Entries
    envelope: Envelope

    @classmethod
    def open(
        cls, path: Path | str, tokenizer: TokenizerIdentity | None = None, backend: str | None = None
    ) -> "CrestStore":
        """Open a store.

        Args:
            tokenizer: required tokenizer; None accepts any.
            backend: `lmdb` or `postgres`; default: the first one that it was built for.

        Raises:
            StoreError: not a CREST store, unknown version, missing or truncated files, or no such backend.
            TokenizerError: built with another tokenizer.
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
        envelope = open_envelope(path, manifest)
        return cls(path, manifest, open_entries(path, manifest, backend), envelope)

    def drafter(self, strategy: str = DEFAULT_STRATEGY, **changes: Any) -> CrestDrafter:
        """Return a drafter.

        Trees drawn by `backoff` already include the share of shorter n-grams: only the longest one answers.

        Args:
            strategy: one of `STRATEGIES`.
            changes: fields of its `Blending` to override, for experiments.

        Raises:
            DraftstoreError: no such strategy.
        """
        blending = strategy_named(strategy, STRATEGIES)
        if self.manifest.parameters.get("rule", LONGEST) == BACKOFF:
            blending = STRATEGIES[LONGEST]
        blending = blending._replace(**changes)
        max_n = self.manifest.parameters["max_n"]
        return CrestDrafter(self.entries, self.envelope, max_n, self.manifest.vocab_size, blending)

    def samples(self, number: int) -> Samples:
        """Return n-grams of the store; see `Store.samples`."""
        dtype = key_dtype(self.manifest.vocab_size)
        rows = [np.frombuffer(key, dtype).astype(np.int64) for key, _ in islice(self.entries.items(), number)]
        return Samples(sample_contexts(rows, self.manifest.vocab_size))

    def close(self) -> None:
        """Close the entries."""
        self.entries.close()
