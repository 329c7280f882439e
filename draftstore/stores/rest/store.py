"""REST stores: the token corpus with memory-mapped suffix arrays.

    manifest.json      see draftstore.storage.manifest
    tokens.bin         u16 or u32, all segments concatenated, every document ended by the sentinel
    suffixes.bin       i32, the suffix array of every segment, positions relative to the segment
    keys.bin           i64, packed leading tokens of every 16th suffix
    first_rows.bin     i32 [segments, vocab_size + 1], rows of every first token
    segments.bin       i64 [segments, 3]: first token, tokens, first key
    documents.bin      u8 [documents, 16], their digests, in the order of tokens.bin; read only by updates
    tokenizer/         the tokenizer, for text queries and readable drafts

All numbers are little-endian. Size: 6.5 bytes per token (8.5 above 65,535 ids), plus 4 bytes per segment and id.
"""

import dataclasses
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftstore.drafting.contexts import ContextDrafter
from draftstore.drafting.drafter import check_request
from draftstore.errors import StoreError, require_limits
from draftstore.jit import read_only
from draftstore.search.expand import Rule, draft_batch
from draftstore.search.suffix import SuffixIndex, key_layout, segment_table
from draftstore.storage.files import map_file, remove
from draftstore.storage.manifest import TOKENIZER_FOLDER, Manifest, TokenizerIdentity, load_manifest
from draftstore.storage.staging import STORE, build_time
from draftstore.stores.kind import CONTEXT_TOKENS, Kind, Samples, sample_contexts, strategy_named
from draftstore.text.digests import DIGEST_BYTES
from draftstore.text.tokens import sentinel, token_dtype
from draftstore.trees.batch import DraftBatch
from draftstore.trees.frontier import BUDGET

KIND = "rest"
MAX_MATCH = 16
CONTINUATION = 10
MAX_THREADS = 256
CONTEXTS_A_THREAD = 4
"""Minimum contexts per thread: waking one takes as long as a draft or two."""

STRATEGIES: dict[str, Rule] = {
    # REST, section 3.2: the longest match of at least two tokens gets everything. The paper reads the first 5,000
    # occurrences; 1,024 evenly spaced ones have equal acceptance.
    "longest": Rule(MAX_MATCH, 2, CONTINUATION, rows=1024, floor=0.0, alpha=0.0, beta=0.0, gamma=0.0),
    # docs/team/findings.md describes how the constants were tuned, on recorded outputs other than the reported ones.
    "backoff": Rule(MAX_MATCH, 1, CONTINUATION, rows=600, floor=0.01, alpha=12.0, beta=6.0, gamma=0.75),
}
DEFAULT_STRATEGY = "backoff"

DTYPES: dict[str, Callable[[Manifest], np.dtype[Any]]] = {
    "tokens.bin": lambda manifest: np.dtype(manifest.token_dtype).newbyteorder("<"),
    "suffixes.bin": lambda _: np.dtype("<i4"),
    "keys.bin": lambda _: np.dtype("<i8"),
    "first_rows.bin": lambda _: np.dtype("<i4"),
    "segments.bin": lambda _: np.dtype("<i8"),
}
DOCUMENTS_FILE = "documents.bin"


def read_digests(path: Path) -> NDArray[np.uint8]:
    """Return the digests of a store's documents, uint8 [documents, 16], in the order of its tokens."""
    digests: NDArray[np.uint8] = map_file(path / DOCUMENTS_FILE, np.dtype((np.uint8, DIGEST_BYTES)))
    return digests.reshape(-1, DIGEST_BYTES)


class RestDrafter(ContextDrafter):
    """Drafts from one store by one rule, a batch on several threads."""

    def __init__(self, index: SuffixIndex, rule: Rule, threads: int = 1) -> None:
        require_limits("drafts from a store", {"threads": (threads, 1, MAX_THREADS)})
        self.index = index
        rule.check()
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None
        self._process = 0
        self._arrays = *index, rule.pack()
        self.vocab_size = index.vocab_size
        self.context_size = rule.max_match

    def draft_batch(
        self,
        contexts: NDArray[np.int32],
        budget: int = BUDGET,
        min_prob: float = 0.0,
        hidden: NDArray[np.float16] | None = None,  # noqa: ARG002
    ) -> DraftBatch:
        """Draft for a batch of contexts into arrays; see `ContextDrafter.draft_batch`.

        An id outside the vocabulary hides all ids before it; a context without a match gets an empty tree.
        """
        contexts, level = check_request(contexts, budget, min_prob)
        if budget == 0 or level < 0:
            return DraftBatch.empty(len(contexts))
        parts = max(1, min(self._threads, len(contexts) // CONTEXTS_A_THREAD))
        cuts = [len(contexts) * part // parts for part in range(1, parts)]
        own, *others = np.split(contexts, cuts) if cuts else [contexts]
        work = [self._workers().submit(self._draft, part, budget, level) for part in others]
        return DraftBatch.joined([self._draft(own, budget, level), *(part.result() for part in work)])

    def _draft(self, contexts: NDArray[np.int32], budget: int, level: int) -> DraftBatch:
        """Draft on this thread, without the GIL."""
        *arrays, _ = draft_batch(*self._arrays, contexts, budget, level)
        return DraftBatch(*arrays)

    def _workers(self) -> ThreadPoolExecutor:
        """Return the threads other than the caller's; a forked process inherits none from its parent."""
        if self._pool is None or self._process != os.getpid():
            self._pool = ThreadPoolExecutor(self._threads - 1, "draftstore-draft")
            self._process = os.getpid()
        return self._pool


@dataclasses.dataclass(eq=False)
class RestStore:
    """An open REST store: read-only maps of its files; opening reads little more than the manifest."""

    strategies = tuple(STRATEGIES)
    default_strategy = DEFAULT_STRATEGY

    path: Path
    manifest: Manifest
    index: SuffixIndex

    @classmethod
    def open(cls, path: Path | str, tokenizer: TokenizerIdentity | None = None) -> "RestStore":
        """Open a store; `tokenizer` is the required one, None accepts any.

        Raises StoreError (not a REST store, unknown version, or missing, truncated or inconsistent files) or
        TokenizerError.
        """
        path = Path(path)
        manifest = load_manifest(path, KIND)
        if tokenizer is not None:
            manifest.require_tokenizer(tokenizer, path)
        return cls(path, manifest, _map_index(path, manifest))

    def drafter(self, strategy: str = DEFAULT_STRATEGY, *, threads: int = 1, **changes: Any) -> RestDrafter:
        """Return a drafter with a strategy and a maximum of threads for a batch; `changes` are fields of its `Rule`."""
        return RestDrafter(self.index, strategy_named(strategy, STRATEGIES)._replace(**changes), threads)

    def samples(self, number: int) -> Samples:
        """Return contexts that occur in the corpus; see `Store.samples`."""
        tokens = self.index.tokens
        places = np.linspace(0, max(len(tokens) - CONTEXT_TOKENS, 0), number, dtype=np.int64)
        rows = [tokens[place : place + CONTEXT_TOKENS].astype(np.int64) for place in places.tolist()]
        return Samples(sample_contexts(rows, self.manifest.vocab_size))

    def close(self) -> None:
        """Close the store; its files are unmapped with the last array that refers to them."""


def _map_index(path: Path, manifest: Manifest) -> SuffixIndex:
    arrays = {name: map_file(path / name, dtype(manifest)) for name, dtype in DTYPES.items()}
    vocab_size = manifest.vocab_size
    try:
        segments = arrays["segments.bin"].reshape(-1, 3)
        first_rows = arrays["first_rows.bin"].reshape(-1, vocab_size + 1)
    except ValueError as error:
        raise StoreError(
            f"the tables of {path} do not match a vocabulary of {vocab_size:,} ids: {error}"
        ) from None
    index = SuffixIndex(
        arrays["tokens.bin"], arrays["suffixes.bin"], arrays["keys.bin"], first_rows, segments,
        vocab_size, *key_layout(vocab_size),
    )  # fmt: skip
    _check_index(index, path)
    return index


def _check_index(index: SuffixIndex, path: Path) -> None:
    """Check the tables against each other, and one row per segment for ids outside the vocabulary."""
    # Suffixes that start with the sentinel come last; an id between vocabulary and sentinel would sort before them.
    lengths = index.segments[:, 1]
    table = segment_table(lengths)
    total, _, keys = table[-1].tolist()
    if (
        len(index.first_rows) != len(index.segments)
        or np.any(lengths < 1)
        or not np.array_equal(index.segments, table[:-1])
        or not len(index.tokens) == len(index.suffixes) == total
        or len(index.keys) != keys
    ):
        raise StoreError(f"the files of {path} do not match each other: the store is damaged, build it again")
    for segment, (base, length, _) in enumerate(index.segments.tolist()):
        rows = index.first_rows[segment]
        if rows[0] < 0 or np.any(rows[1:] < rows[:-1]) or rows[-1] >= length:
            raise StoreError(
                f"the rows of segment {segment} of {path} do not ascend, expected 0 to {length:,}: the store is "
                "damaged, build it again"
            )
        position = int(index.suffixes[base + rows[-1]])
        found = int(index.tokens[base + position]) if 0 <= position < length else -1
        if found != sentinel(index.tokens.dtype):
            raise StoreError(
                f"segment {segment} of {path} holds id {found}, expected ids below {index.vocab_size:,}: "
                "the store is damaged, build it again"
            )


def derived_store(partial: Path, source: Path) -> Path:
    """Return an empty directory for a store derived from another one, with a copy of its tokenizer."""
    directory = partial / STORE
    remove(directory)
    directory.mkdir()
    shutil.copytree(source / TOKENIZER_FOLDER, directory / TOKENIZER_FOLDER)
    return directory


def derive_manifest(
    source: RestStore, kind: str, name: str, plan: dict[str, Any], parameters: dict[str, Any]
) -> Manifest:
    """Return the manifest of a store derived from a REST store, which it names; no entries or files yet."""
    origin = source.manifest
    return Manifest(
        kind=kind,
        name=name,
        created=build_time(),
        vocab_size=origin.vocab_size,
        token_dtype=origin.token_dtype,
        tokenizer=origin.tokenizer,
        parameters={"plan": plan, "source": str(source.path.resolve()), **parameters},
        corpus=origin.corpus,
        counts={"documents": origin.counts["documents"], "tokens": origin.counts["tokens"], "entries": 0},
        files={},
    )


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
