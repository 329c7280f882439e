"""Building a DReSD store from text: tokenize, run the model, project, group; resumable after every block.

The working directory (draftstore.storage.staging) contains the token shards (draftstore.text.tokenizing), the files of
`draftstore.stores.dresd.embedding`, and the final `tokens.bin`.

Tokens, model and options determine the bytes of a store, except for rounding: the choice of entries, and of the blocks
in which the model reads them, depends on tokens alone (draftstore.stores.dresd.kernels.passages).
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftstore.drafting.projection import Projection
from draftstore.errors import BuildError, require_limits
from draftstore.storage.files import link_or_copy, map_file, remove
from draftstore.storage.manifest import save_manifest
from draftstore.storage.report import ReadReport
from draftstore.storage.staging import STORE, BuildResult, build_store
from draftstore.stores.dresd.embedding import (
    HALF,
    VECTORS,
    Reader,
    StateSource,
    embed,
    fit_projection,
    make_room,
    map_states,
    sample_states,
    sampled_blocks,
)
from draftstore.stores.dresd.files import LAYER, PROJECTION_FILE
from draftstore.stores.dresd.grouping import Grouped, group_entries
from draftstore.stores.dresd.kernels.nearest import PROBING
from draftstore.stores.dresd.kernels.passages import Passages, find_passages
from draftstore.stores.dresd.kernels.quantised import DTYPES
from draftstore.stores.dresd.quality import figures
from draftstore.stores.dresd.store import KIND, DresdStore
from draftstore.text.tokenizer import TextTokenizer
from draftstore.text.tokenizing import CorpusOptions, Tokenized, corpus_plan, finish_store, tokenize_into
from draftstore.text.tokens import TokenShards, document_starts, write_closed

DIMS = 64
MAX_LENGTH = 1024
SAMPLE = 1_000_000

QUERIES = 512
"""Number of states that a finished store is queried with, to measure its retrieval quality."""

TOKENS = "tokens.bin"
REVISION = 1
"""Revision of the rules for entries, windows, blocks and lists: other rules give another store."""


@dataclasses.dataclass(frozen=True)
class DresdOptions(CorpusOptions):
    """Options and corpus of a DReSD build.

    Attributes:
        dims: dimensions of a vector.
        dtype: type of the vectors, `float16` or `int8`.
        max_length: maximum tokens that the model reads at once; longer documents are read in windows that overlap by a
            quarter, while continuations may cross windows.
        sample: maximum number of entries to fit the projection to, in whole blocks
            (draftstore.stores.dresd.kernels.passages).
    """

    dims: int = DIMS
    dtype: str = "float16"
    max_length: int = MAX_LENGTH
    sample: int = SAMPLE

    def check(self) -> None:
        """Refuse invalid options.

        Raises:
            BuildError: the first problem, with what is expected.
        """
        least = {
            "dims": (self.dims, 1, None),
            "max_length": (self.max_length, 2, None),
            "sample": (self.sample, 2, None),
        }
        require_limits("a DReSD store", least, BuildError, digits=",")
        if self.dtype not in DTYPES:
            raise BuildError(f"vectors of type {self.dtype!r}: expected one of {', '.join(DTYPES)}")


@dataclasses.dataclass
class DresdProgress:
    """Progress callbacks of a build; each is called repeatedly with totals so far.

    Attributes:
        tokenized: documents, tokens, characters.
        sampled: tokens read by the model for the projection, and the total.
        fitted: states that the projection was fitted to so far, and the total.
        embedded: tokens whose states are projected, and the total.
        grouped: entries written in group order, and the total.
        hashed: bytes hashed, bytes in all.
    """

    tokenized: Callable[[int, int, int], None] = lambda _documents, _tokens, _characters: None
    sampled: Callable[[int, int], None] = lambda _tokens, _all: None
    fitted: Callable[[int, int], None] = lambda _states, _all: None
    embedded: Callable[[int, int], None] = lambda _tokens, _all: None
    grouped: Callable[[int, int], None] = lambda _entries, _all: None
    hashed: Callable[[int, int], None] = lambda _bytes, _all: None


def build_dresd(
    options: DresdOptions,
    tokenizer: TextTokenizer,
    source: StateSource,
    out: Path,
    *,
    tokens: Path | None = None,
    overwrite: bool = False,
    progress: DresdProgress | None = None,
) -> BuildResult:
    """Build a DReSD store, or resume an interrupted build of it.

    Args:
        options: what to build.
        tokenizer: the model's tokenizer; a copy goes into the store.
        source: the model.
        out: directory of the store; its parent is created if missing.
        tokens: existing token shards of the corpus (`tokenizing.build_tokens`), to skip tokenizing.
        overwrite: whether to replace an existing store, even one of the same build.
        progress: progress callbacks.

    Raises:
        BuildError: `out` is something else, another build is running there, no space, or nothing to build from.
        CorpusError: the corpus cannot be read or has no text.
    """
    options.check()
    if options.dims > source.hidden_size:
        raise BuildError(
            f"vectors of {options.dims:,} dimensions from hidden states of {source.hidden_size:,}: expected at most "
            "as many (--dims)"
        )
    plan = make_plan(options, tokenizer, source)

    def fill(partial: Path) -> ReadReport:
        told = progress or DresdProgress()
        texts = tokenize_into(partial, options, tokenizer, plan, taken=tokens, on_progress=told.tokenized)
        _Build(partial, options, texts, source, plan, told).run()
        return texts.report

    return build_store(out, plan, options.name, overwrite, fill, sources=options.files)


def make_plan(options: DresdOptions, tokenizer: TextTokenizer, source: StateSource) -> dict[str, Any]:
    """Return the inputs that determine the bytes of a store, as JSON values."""
    return {
        "kind": KIND,
        "revision": REVISION,
        **corpus_plan(options, tokenizer),
        "bos": list(tokenizer.bos_ids),
        "model": {"name": source.name, **source.identity()},
        "dims": options.dims,
        "dtype": options.dtype,
        "max_length": min(options.max_length, source.positions or options.max_length),
        "sample": options.sample,
    }


class _Build:
    """A running build."""

    def __init__(
        self,
        partial: Path,
        options: DresdOptions,
        texts: Tokenized,
        source: StateSource,
        plan: dict[str, Any],
        progress: DresdProgress,
    ) -> None:
        self._partial = partial
        self._options = options
        self._texts = texts
        self._bos = texts.tokenizer.bos_ids
        self._source = source
        self._plan = plan
        self._progress = progress

    def run(self) -> None:
        """Complete `partial/store`."""
        shards, store = self._texts.shards, self._partial / STORE
        tokens, passages = self._prepare(shards)
        reader = Reader(self._source, passages, tokens, self._bos)
        sampled = sampled_blocks(passages, self._options.sample)
        hidden_size, dims = self._source.hidden_size, self._options.dims
        make_room(self._partial, passages, sampled, hidden_size, dims)
        sample_states(self._partial, reader, sampled, self._progress.sampled)
        projection, explained = fit_projection(self._partial, hidden_size, dims, self._progress.fitted)
        embed(self._partial, reader, sampled, projection, self._progress.embedded)
        grouped = self._assemble(tokens, passages, projection, shards.vocab_size)
        manifest = finish_store(
            store,
            self._texts,
            self._plan,
            parameters={
                "dims": dims,
                "hidden_size": hidden_size,
                "layer": LAYER,
                "dtype": self._options.dtype,
                "probing": PROBING,
                "projection": projection.digest,
                "explained_variance": explained,
            },
            counts={
                "entries": grouped.entries,
                "lists": grouped.lists,
                "skipped": passages.total - grouped.entries,
                "repeated": passages.repeated,
            },
            target_model=self._source.name,
            on_bytes=self._progress.hashed,
        )
        manifest.parameters["quality"] = self._measure(passages, sampled, projection)
        save_manifest(store, manifest)

    def _prepare(self, shards: TokenShards) -> tuple[NDArray[Any], Passages]:
        """Write tokens.bin and choose the passages that the model reads.

        Raises:
            BuildError: there are no passages to read.
        """
        window = self._plan["max_length"] - len(self._bos)
        if window < 1:
            raise BuildError(
                f"the model reads {self._plan['max_length']} tokens at once: expected more (--max-length)"
            )
        starts = document_starts(shards)
        path = self._partial / TOKENS
        if not path.exists():
            write_closed(shards, path)
        tokens = map_file(path, shards.dtype)
        self._require_ids(shards)
        passages = find_passages(tokens, starts, window)
        if passages.total <= self._options.dims:
            raise BuildError(
                f"the corpus gives {passages.total:,} hidden states that two tokens follow, for vectors of "
                f"{self._options.dims:,} dimensions: give more text, or fewer dimensions (--dims)"
            )
        return tokens, passages

    def _require_ids(self, shards: TokenShards) -> None:
        """Refuse ids outside the model's vocabulary.

        Raises:
            BuildError: the first shard with one.
        """
        if shards.vocab_size <= self._source.vocab_size:
            return
        for tokens, _ in shards.arrays():
            largest = int(tokens.max(initial=0))
            if largest >= self._source.vocab_size:
                raise BuildError(
                    f"the corpus holds id {largest:,}, and the model {self._source.name} knows only ids below "
                    f"{self._source.vocab_size:,}: use the model's own tokenizer"
                )

    def _assemble(
        self, tokens: NDArray[Any], passages: Passages, projection: Projection, vocab_size: int
    ) -> Grouped:
        """Write the arrays of the store, overwriting those of an earlier attempt."""
        store = self._partial / STORE
        remove(store)
        store.mkdir()
        link_or_copy(self._partial / TOKENS, store / TOKENS)
        (store / PROJECTION_FILE).write_bytes(projection.to_bytes())
        vectors = map_file(self._partial / VECTORS, HALF).reshape(-1, projection.dims)
        return group_entries(
            store, tokens, passages, vectors, vocab_size, self._options.dtype, self._progress.grouped
        )

    def _measure(self, passages: Passages, sampled: list[int], projection: Projection) -> dict[str, Any]:
        """Measure the store's retrieval quality with some unquantised states."""
        store = DresdStore.open(self._partial / STORE)
        places = np.concatenate([passages.places(block) for block in sampled])
        rows = np.unique(np.linspace(0, len(places) - 1, QUERIES).astype(np.int64))
        with np.errstate(invalid="ignore"):  # states that are not finite are not entries, and skipped
            queries = projection.apply(map_states(self._partial, projection.hidden_size)[rows])
        return figures(store.index, store.tokens, places[rows], queries, PROBING)
