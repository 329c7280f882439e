"""Building a DReSD store from text: tokenize, run the model, project, group; resumable after every step.

The working directory (draftstore.storage.staging) contains the token shards (draftstore.text.tokenizing), the files of
`draftstore.stores.dresd.embedding`, and the final `tokens.bin`. Tokens, model and options determine the bytes of a
store, except for rounding: the choice of entries, and of the blocks in which the model reads them, depends on tokens
alone (draftstore.stores.dresd.kernels.passages).
"""

from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from draftstore.errors import BuildError
from draftstore.options import EXPERT, Options
from draftstore.storage.files import link_or_copy, map_file, remove
from draftstore.storage.manifest import save_manifest
from draftstore.storage.report import Progress, ReadReport, silent
from draftstore.storage.staging import STORE, BuildResult, build_store
from draftstore.stores.dresd.embedding import Embedding, StateSource, sampled_blocks
from draftstore.stores.dresd.grouping import group_entries
from draftstore.stores.dresd.kernels.nearest import ALL, PROBING, DenseIndex, search
from draftstore.stores.dresd.kernels.passages import Passages, find_passages
from draftstore.stores.dresd.projection import Projection, unit
from draftstore.stores.dresd.store import KIND, LAYER, PROJECTION_FILE, DresdStore
from draftstore.stores.kind import Builder, ModelSources
from draftstore.stores.rest.store import DOCUMENTS_FILE
from draftstore.text.tokenizer import TextTokenizer
from draftstore.text.tokenizing import BuildTexts, CorpusOptions, TextBuild
from draftstore.text.tokens import TokenShards, document_starts, write_closed

QUERIES = 512
"""Number of states that a finished store is queried with, to measure its retrieval quality."""
NEIGHBOURS = 10
TIE = 1e-6
"""Tolerance for equal cosines: rounding of a float32 sum depends on its position in a block."""
RANKED_ROWS = 4096
"""Entries compared with all queries at a time."""

TOKENS = "tokens.bin"
REVISION = 1
"""Revision of the rules for entries, windows, blocks and lists: different rules give a different store."""


class VectorOptions(Options):
    """Which hidden states a DReSD store holds, and in what form."""

    dims: int = Field(
        64,
        ge=1,
        le=65_536,
        description="Dimensions of a stored vector, to which hidden states are projected.",
        examples=[64],
    )
    max_length: Annotated[int, EXPERT] = Field(
        1024,
        ge=2,
        description="Tokens in a window; longer documents are read in several windows, which overlap by a quarter.",
        examples=[1024],
    )
    sample: Annotated[int, EXPERT] = Field(
        1_000_000,
        ge=2,
        description="Number of hidden states that the projection is fitted to; they take disk space during the build.",
        examples=[1_000_000],
    )


class DresdOptions(VectorOptions, CorpusOptions):
    """Options and corpus of a DReSD build."""


def build_dresd(
    options: DresdOptions,
    tokenizer: TextTokenizer,
    source: StateSource,
    out: Path,
    *,
    texts: BuildTexts | None = None,
    overwrite: bool = False,
    progress: Progress = silent,
) -> BuildResult:
    """Build a DReSD store at `out`, or resume an interrupted build of it.

    `texts` is the corpus, by default that of the options. Raises BuildError (see `build_store`; no space; nothing to
    build from) or CorpusError.
    """
    if options.dims > source.hidden_size:
        raise BuildError(
            f"vectors of {options.dims:,} dimensions from hidden states of {source.hidden_size:,}: choose fewer",
            "dims",
        )
    texts = texts or options.texts()
    plan, on_tokens = _plan(options, tokenizer, source), progress("tokenizing", "tokens")
    build = TextBuild(texts, options.name, tokenizer, plan, on_progress=on_tokens)
    window = build.plan["max_length"] - len(tokenizer.bos_ids)
    if window < 1:
        raise BuildError(
            f"windows of {build.plan['max_length']} tokens have no room after BOS: use longer ones",
            "max_length",
        )

    def fill(partial: Path) -> ReadReport:
        shards, dims = build.fill(partial), options.dims
        _require_ids(shards, source)
        closed, passages = _find_passages(partial, shards, dims, window)
        sampled = sampled_blocks(passages, options.sample)
        embedding = Embedding(partial, source, passages, closed, tokenizer.bos_ids, dims, sampled)
        embedding.sample(progress("sampling", "tokens"))
        projection, explained = embedding.fit(progress("fitting", "states"))
        vectors = embedding.embed(projection, progress("embedding", "tokens"))
        store = _new_store(partial, projection, shards)
        entries, lists = group_entries(
            store, closed, passages, vectors, shards.vocab_size, progress("grouping", "entries")
        )
        parameters = {
            "dims": dims,
            "hidden_size": source.hidden_size,
            "layer": LAYER,
            "probing": PROBING,
            "projection": projection.digest,
            "explained_variance": explained,
        }
        counts = {
            "entries": entries,
            "lists": lists,
            "skipped": passages.total - entries,
            "repeated": passages.repeated,
        }
        manifest = build.seal(
            store, parameters, counts, target_model=source.name, on_bytes=progress("hashing", "bytes")
        )
        places = np.concatenate([passages.places(block) for block in sampled])
        manifest.parameters["quality"] = _measure(store, places, embedding.states(), projection)
        save_manifest(store, manifest)
        return build.report

    return build_store(out, build.plan, options.name, overwrite, fill, sources=texts.files)


def _plan(options: DresdOptions, tokenizer: TextTokenizer, source: StateSource) -> dict[str, Any]:
    return {
        "kind": KIND,
        "revision": REVISION,
        "bos": list(tokenizer.bos_ids),
        "model": {"name": source.name, **source.identity()},
        "dims": options.dims,
        "max_length": min(options.max_length, source.positions or options.max_length),
        "sample": options.sample,
    }


def _require_ids(shards: TokenShards, source: StateSource) -> None:
    if shards.vocab_size <= source.vocab_size:
        return
    for tokens, _ in shards.arrays():
        largest = int(tokens.max(initial=0))
        if largest >= source.vocab_size:
            raise BuildError(
                f"the corpus holds id {largest:,}, but the model {source.name} has only ids below "
                f"{source.vocab_size:,}: use the model's own tokenizer"
            )


def _find_passages(
    partial: Path, shards: TokenShards, dims: int, window: int
) -> tuple[NDArray[Any], Passages]:
    """Write and map tokens.bin, and choose the passages that the model reads in windows of `window` tokens."""
    path = partial / TOKENS
    if not path.exists():
        write_closed(shards, path)
    tokens = map_file(path, shards.dtype)
    passages = find_passages(tokens, document_starts(shards), window)
    if passages.total <= dims:
        raise BuildError(
            f"the corpus yields {passages.total:,} hidden states followed by two tokens, too few for vectors of "
            f"{dims:,} dimensions: give more text, or fewer dimensions",
            "dims",
        )
    return tokens, passages


def _new_store(partial: Path, projection: Projection, shards: TokenShards) -> Path:
    store = partial / STORE
    remove(store)
    store.mkdir()
    link_or_copy(partial / TOKENS, store / TOKENS)
    (store / PROJECTION_FILE).write_bytes(projection.to_bytes())
    (store / DOCUMENTS_FILE).write_bytes(b"".join(digests.tobytes() for digests in shards.digests()))
    return store


def _measure(
    path: Path, places: NDArray[np.int64], states: NDArray[np.float16], projection: Projection
) -> dict[str, int | float]:
    """Measure a store's retrieval quality with some of the states, those of the entries at `places`."""
    store = DresdStore.open(path)
    rows = np.unique(np.linspace(0, len(places) - 1, QUERIES).astype(np.int64))
    with np.errstate(invalid="ignore"):  # non-finite states are not entries and are skipped
        queries = projection.apply(states[rows])
    return figures(store.index, store.tokens, places[rows], queries)


def figures(
    index: DenseIndex, tokens: NDArray[Any], places: NDArray[np.int64], queries: NDArray[np.float32]
) -> dict[str, int | float]:
    """Return how well some entries of a store are found by their own states, to six digits.

    The rank of an entry is one plus the number of nearer entries in the whole store. Entries with equal vectors are
    ties; common prefixes of texts, such as chat templates, cause many: `mean_reciprocal_rank` does not count them,
    `mean_reciprocal_rank_ties` is the mean over all their orders. `recall_at_10` is that of `search` among the entries
    with the same first token; an entry as near as the tenth counts as found.

    `tokens` is the corpus, `places` int64 [n] are starts of some entries' continuations, of which those that are not in
    the store are skipped, and `queries` float32 [n, dims] the projected states of these entries, before rounding.
    """
    firsts = tokens[places - 1].astype(np.int32)
    found: list[tuple[int, int]] = []
    for row, token in enumerate(firsts.tolist()):
        start, stop = index.groups[token : token + 2].tolist()
        entries = start + np.flatnonzero(index.positions[start:stop] == places[row])
        found += [(row, entry) for entry in entries.tolist()]
    rows, own = np.array(found, np.int64).reshape(-1, 2).T
    nearer, last = _ranks(index, unit(queries[rows]), own)
    ties = [_mean(1.0 / np.arange(a + 1, b + 1)) for a, b in zip(nearer, last, strict=True)]
    return {
        "queries": len(rows),
        "mean_reciprocal_rank": round(_mean(1.0 / (nearer + 1)), 6),
        "mean_reciprocal_rank_ties": round(_mean(np.array(ties)), 6),
        "recall_at_10": round(_recall(index, queries[rows], firsts[rows]), 6),
    }


def _recall(index: DenseIndex, queries: NDArray[np.float32], tokens: NDArray[np.int32]) -> float:
    """Return the mean share of the nearest entries of each query's group, float32 [n, dims], that a search finds."""
    exact, nearness, _ = search(index, queries, tokens, NEIGHBOURS, ALL)
    found, similarities, _ = search(index, queries, tokens, NEIGHBOURS, PROBING)
    expected = (exact >= 0).sum(axis=1)
    least = nearness[np.arange(len(expected)), expected - 1]
    hits = ((found >= 0) & (similarities >= least[:, None] - TIE)).sum(axis=1)
    return _mean(hits / expected)


def _ranks(
    index: DenseIndex, queries: NDArray[np.float32], entries: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return how many entries are nearer to each query [n, dims] than its own, and how many at least as near."""
    own = np.einsum("ij,ij->i", queries, _vectors(index, entries))[:, None]
    nearer, last = np.zeros((2, len(entries)), np.int64)
    for first in range(0, len(index.vectors), RANKED_ROWS):
        similarities = queries @ _vectors(index, slice(first, first + RANKED_ROWS)).T
        nearer += np.count_nonzero(similarities > own + TIE, axis=1)
        last += np.count_nonzero(similarities >= own - TIE, axis=1)
    return nearer, last


def _vectors(index: DenseIndex, rows: Any) -> NDArray[np.float32]:
    vectors: NDArray[np.float32] = index.vectors[rows].view(np.float16).astype(np.float32)
    return vectors


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if len(values) else float("nan")


HELP = """Build a DReSD store: a model's hidden states over a corpus, and the tokens that followed.

The best corpus is the model's own answers, see `draftstore responses`. The model reads all of it once, which takes
long on a CPU for more than a few million tokens. Run the same command again to resume a killed build.

\b
Example:
  draftstore build dresd --model ./model --corpus answers.jsonl --out stores/chat-dresd
"""
BUILDER = Builder(DresdOptions, ModelSources, build_dresd, HELP)
