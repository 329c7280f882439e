"""DReSD stores: hidden states of one model and the tokens that followed; drafts come from the nearest entries.

    manifest.json      see draftstore.storage.manifest; target_model is the model that computed the states
    projection.bin     f32, from hidden states to vectors: weights [dims, hidden_size], then bias [dims]
    tokens.bin         u16 or u32, all documents concatenated, each ended by the sentinel
    documents.bin      u8 [documents, 16], their digests, in the order of tokens.bin; read only by proofs of removal
    vectors.bin        f16 [entries, dims], of unit length, sorted by first token, then list
    positions.bin      u32 or u64 [entries], start of the continuation in tokens.bin, right after the first token
    groups.bin         i64 [vocab_size + 1], first entry of each group: the entries of one first token
    group_lists.bin    i32 [vocab_size + 1], first list of each group; small groups have none
    lists.bin          i64 [lists + 1], first entry of each list
    centroids.bin      f32 [lists, dims], of unit length
    tokenizer/         the tokenizer

All numbers are little-endian. An entry is a position in a document: its vector is the state there, its first token the
next token, its continuation what came after that. A text that was just extended by a token queries with the state that
predicted it, and gets continuations of entries with that first token.

"DReSD: Dense Retrieval for Speculative Decoding", ACL Findings 2025.
"""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.drafting.contexts import ContextDrafter
from draftstore.drafting.drafter import check_request, check_states
from draftstore.errors import DraftstoreError, StoreError, require_limits, type_name
from draftstore.jit import as_input, read_only
from draftstore.storage.files import map_or_empty
from draftstore.storage.manifest import Manifest, TokenizerIdentity, load_manifest
from draftstore.stores.dresd.kernels.dense_tree import CALIBRATION, draft_trees
from draftstore.stores.dresd.kernels.nearest import ALL, PROBING, DenseIndex, project
from draftstore.stores.dresd.projection import Projection
from draftstore.stores.kind import CONTEXT_TOKENS, Kind, Samples, sample_contexts, strategy_named
from draftstore.text.tokens import sentinel, token_dtype
from draftstore.trees.batch import DraftBatch
from draftstore.trees.frontier import BUDGET, MAX_DEPTH

KIND = "dresd"
LAYER = "last"
"""The layer of the states: the last one, after the final norm."""
PROJECTION_FILE = "projection.bin"
FILES: dict[str, Callable[[Manifest], np.dtype[Any]]] = {
    "tokens.bin": lambda manifest: np.dtype(manifest.token_dtype).newbyteorder("<"),
    "vectors.bin": lambda _: np.dtype("<u2"),  # the bits of float16
    "positions.bin": lambda manifest: _position_dtype(manifest),
    "groups.bin": lambda _: np.dtype("<i8"),
    "group_lists.bin": lambda _: np.dtype("<i4"),
    "lists.bin": lambda _: np.dtype("<i8"),
    "centroids.bin": lambda _: np.dtype("<f4"),
}
"""Element type of each file."""
MAX_DRAFTS = 1024
"""Maximum neighbours of a draft."""


class Shape(NamedTuple):
    """Parameters of drafts.

    Attributes:
        drafts: maximum neighbours.
        length: maximum tokens of a continuation.
        probing: share of a large group that is visited, see `kernels.nearest`; the store's, if that has one.
    """

    drafts: int
    length: int
    probing: float = PROBING

    def check(self) -> None:
        """Raise a DraftstoreError if the kernels do not support a value."""
        limits = {"drafts": (self.drafts, 1, MAX_DRAFTS), "length": (self.length, 1, MAX_DEPTH)}
        require_limits("a draft", limits)
        if not 0.0 < self.probing <= ALL:
            raise DraftstoreError(f"a probing of {self.probing}: expected a share above 0 and at most 1")


STRATEGIES: dict[str, Shape] = {
    # With 64 nodes, acceptance is a fifth higher than with "wide": agreement of many neighbours is a better estimate.
    # Even more neighbours do not improve it.
    "many": Shape(drafts=64, length=10),
    # The best parameters in the paper, with nucleus sampling and with greedy decoding.
    "wide": Shape(drafts=10, length=10),
    "deep": Shape(drafts=3, length=20),
}
DEFAULT_STRATEGY = "many"


class DresdDrafter(ContextDrafter):
    """Drafts from one store with fixed parameters."""

    context_size = 1

    def __init__(self, index: DenseIndex, tokens: NDArray[Any], projection: Projection, shape: Shape) -> None:
        shape.check()
        self.index = index
        self.tokens = tokens
        self.shape = shape
        self.hidden_size = projection.hidden_size
        self._weights, self._bias = read_only(projection.weights), read_only(projection.bias)
        self.vocab_size = len(index.groups) - 1

    def draft_batch(
        self,
        contexts: NDArray[np.int32],
        budget: int = BUDGET,
        min_prob: float = 0.0,
        hidden: NDArray[np.float16] | None = None,
    ) -> DraftBatch:
        """Draft for a batch of contexts into arrays; see `ContextDrafter.draft_batch`.

        A last token outside the vocabulary also gives an empty tree. The match length is one, the token just sampled;
        its occurrences are the entries in the searched group.
        """
        contexts, level = check_request(contexts, budget, min_prob)
        if hidden is None or budget == 0 or level < 0 or contexts.size == 0:
            return DraftBatch.empty(len(contexts))
        states = as_input(check_states(hidden, len(contexts), self.hidden_size), np.float32)
        queries = read_only(project(self._weights, self._bias, states))
        tokens, parents, levels, sizes, counts = draft_trees(
            self.index, self.tokens, CALIBRATION, contexts, queries, self.shape.drafts, self.shape.length,
            float(self.shape.probing), budget, level,
        )  # fmt: skip
        return DraftBatch(tokens, parents, levels, sizes, (counts > 0).astype(np.int32), counts)


@dataclasses.dataclass(eq=False)
class DresdStore:
    """An open DReSD store: read-only maps of its files; opening reads the manifest, the projection and the tables."""

    strategies = tuple(STRATEGIES)
    default_strategy = DEFAULT_STRATEGY

    path: Path
    manifest: Manifest
    index: DenseIndex
    tokens: NDArray[Any]
    projection: Projection

    @classmethod
    def open(
        cls,
        path: Path | str,
        *,
        target_model: str | None = None,
        tokenizer: TokenizerIdentity | None = None,
        hidden_size: int | None = None,
    ) -> "DresdStore":
        """Open a store, which must be for this model, tokenizer and size of states; None accepts any.

        Raises StoreError (not a DReSD store, unknown version, missing, truncated or inconsistent files, another
        projection than the manifest's, another model's states) or TokenizerError.
        """
        path = Path(path)
        manifest = load_manifest(path, KIND)
        advice = "use this model's store, or build one"
        manifest.require_model(target_model, path, "hidden states", advice)
        if tokenizer is not None:
            manifest.require_tokenizer(tokenizer, path)
        for problem in _parameter_problems(manifest):
            raise _damaged(path, problem)
        found = manifest.parameters["hidden_size"]
        if hidden_size is not None and found != hidden_size:
            raise StoreError(
                f"{path} holds hidden states of {found:,} numbers, the model's have {hidden_size:,}: {advice}"
            )
        projection = _read_projection(path, manifest)
        index, tokens = _map_index(path, manifest)
        return cls(path, manifest, index, tokens, projection)

    def drafter(self, strategy: str = DEFAULT_STRATEGY, **changes: Any) -> DresdDrafter:
        """Return a drafter with a strategy; `changes` are fields of its `Shape`, for experiments."""
        fields = {"probing": self.manifest.parameters.get("probing", PROBING)} | changes
        shape = strategy_named(strategy, STRATEGIES)._replace(**fields)
        return DresdDrafter(self.index, self.tokens, self.projection, shape)

    def samples(self, number: int) -> Samples:
        """Return first tokens of entries with states that project to their vectors; see `Store.samples`."""
        total = len(self.index.vectors)
        entries = np.linspace(0, max(total - 1, 0), min(number, total), dtype=np.int64)
        firsts = np.searchsorted(self.index.groups, entries, side="right") - 1
        weights, bias = self.projection.weights, self.projection.bias
        vectors = self.index.vectors[entries].view(np.float16).astype(np.float32)
        states = (vectors - bias) @ np.linalg.pinv(weights).T
        contexts = sample_contexts(list(firsts[:, None]), self.manifest.vocab_size)
        return Samples(contexts, states.astype(np.float16))

    def close(self) -> None:
        """Close the store; its files are unmapped with the last array that refers to them."""


def _parameter_problems(manifest: Manifest) -> Iterator[str]:
    kinds: dict[str, type] = {"dims": int, "hidden_size": int, "layer": str, "projection": str}
    values = manifest.parameters
    for name, kind in kinds.items():
        if not isinstance(values.get(name), kind) or isinstance(values[name], bool):
            yield f"its manifest has {type_name(values.get(name))} as parameter {name!r}"
    if values["dims"] < 1 or values["hidden_size"] < 1:
        yield f"vectors of {values['dims']} numbers from states of {values['hidden_size']}"
    if values["layer"] != LAYER:
        yield f"states of layer {values['layer']!r}, expected {LAYER!r}"
    probing = values.get("probing", PROBING)
    if not isinstance(probing, float) or not 0.0 < probing <= ALL:
        yield f"a probing of {probing!r}, expected a share above 0 and at most 1"
    for name in sorted({*FILES, PROJECTION_FILE} - manifest.files.keys()):
        yield f"its manifest does not list {name}"


def _read_projection(path: Path, manifest: Manifest) -> Projection:
    dims, hidden_size = manifest.parameters["dims"], manifest.parameters["hidden_size"]
    try:
        projection = Projection.from_bytes((path / PROJECTION_FILE).read_bytes(), dims)
    except (OSError, DraftstoreError) as error:
        raise _damaged(path, f"{PROJECTION_FILE}: {error}") from None
    if projection.hidden_size != hidden_size:
        raise _damaged(
            path,
            f"{PROJECTION_FILE} projects states of {projection.hidden_size:,} numbers, expected {hidden_size:,}",
        )
    expected = manifest.parameters["projection"]
    if projection.digest != expected:
        raise StoreError(
            f"{path} was built with the projection {expected[:12]}, found {projection.digest[:12]} in "
            f"{PROJECTION_FILE}: restore the original file, or build the store again"
        )
    return projection


def _map_index(path: Path, manifest: Manifest) -> tuple[DenseIndex, NDArray[Any]]:
    dims = manifest.parameters["dims"]
    arrays = {name: map_or_empty(path / name, dtype(manifest)) for name, dtype in FILES.items()}
    for name in ("vectors.bin", "centroids.bin"):
        if len(arrays[name]) % dims:
            raise _damaged(path, f"{name} holds {len(arrays[name]):,} numbers, not rows of {dims:,}")
        arrays[name] = arrays[name].reshape(-1, dims)
    index = DenseIndex(
        arrays["vectors.bin"], arrays["positions.bin"], arrays["groups.bin"], arrays["group_lists.bin"],
        arrays["lists.bin"], arrays["centroids.bin"],
    )  # fmt: skip
    for problem in _index_problems(index, manifest):
        raise _damaged(path, problem)
    return index, arrays["tokens.bin"]


def _index_problems(index: DenseIndex, manifest: Manifest) -> Iterator[str]:
    """Yield inconsistencies of the tables; positions are checked in the kernels."""
    entries, lists, vocab_size = len(index.vectors), len(index.centroids), manifest.vocab_size
    sizes = {
        "vectors.bin": (entries, manifest.counts["entries"]),
        "positions.bin": (len(index.positions), entries),
        "groups.bin": (len(index.groups), vocab_size + 1),
        "group_lists.bin": (len(index.group_lists), vocab_size + 1),
        "lists.bin": (len(index.lists), lists + 1),
    }
    for name, (found, expected) in sizes.items():
        if found != expected:
            yield f"{name} holds {found:,} rows, expected {expected:,}"
    for name, table, end in (
        ("groups.bin", index.groups, entries),
        ("group_lists.bin", index.group_lists, lists),
    ):
        if table[0] != 0 or table[-1] != end or np.any(table[1:] < table[:-1]):
            yield f"{name} does not ascend from 0 to {end:,}"
    if np.any(index.lists[1:] < index.lists[:-1]):
        yield "lists.bin does not ascend"
    large = np.flatnonzero(index.group_lists[1:] > index.group_lists[:-1])
    first, last = index.lists[index.group_lists[large]], index.lists[index.group_lists[large + 1] - 1]
    if (
        np.any(first != index.groups[large])
        or np.any(last > index.groups[large + 1])
        or index.lists[-1] > entries
    ):
        yield "lists.bin does not cover the groups that have lists"


def _damaged(path: Path, problem: str) -> StoreError:
    return StoreError(f"{path}: {problem}: the store is damaged, build it again")


def _position_dtype(manifest: Manifest) -> np.dtype[Any]:
    wide = manifest.files["positions.bin"].size == 8 * manifest.counts["entries"] > 0
    return np.dtype("<u8" if wide else "<u4")


class DresdKind(Kind):
    """Hidden states of one model, and the tokens that followed."""

    title = "DReSD"
    strategies = tuple(STRATEGIES)
    builder = "draftstore.stores.dresd.build"
    needs_states = True

    def open_files(self, path: Path) -> DresdStore:
        """Open a store."""
        return DresdStore.open(path)

    def info(self, manifest: Manifest) -> Iterator[tuple[str, str]]:
        """Yield rows about a store's vectors, for the figures that its manifest has."""
        values = manifest.parameters
        yield "vectors", f"{values.get('dims')} of {values.get('hidden_size')} dimensions"
        if "explained_variance" in values:
            yield "", f"{values['explained_variance']:.1%} of the variance explained"
        quality = values.get("quality", {})
        if quality.get("queries"):
            found = f"MRR {quality['mean_reciprocal_rank']:.3f}, recall@10 {quality['recall_at_10']:.3f}"
            yield "", f"{found}, for {quality['queries']:,} entries queried with their own states"

    def figures(self, manifest: Manifest) -> dict[str, Any]:
        """Return model, vector size and retrieval quality."""
        values = manifest.parameters
        shown = [key for key in ("dims", "explained_variance") if key in values]
        return {
            "target model": f"`{manifest.target_model}`",
            **{key.replace("_", " "): values[key] for key in shown},
            **values.get("quality", {}),
            **{f"{key} entries": manifest.counts[key] for key in ("repeated", "skipped")},
        }

    def load_kernels(self) -> None:
        """Compile the kernels for both widths of ids, for single contexts and batches."""
        contexts = np.full((2, CONTEXT_TOKENS), -1, np.int32)
        for vocab_size in (1, 1 << 16):
            drafter = DresdDrafter(*_smallest(vocab_size), next(iter(STRATEGIES.values())))
            for count in (1, 2):
                hidden = np.full((count, 1), np.nan, np.float16)
                drafter.draft_batch(contexts[:count], hidden=hidden).encode_trees()


def _smallest(vocab_size: int) -> tuple[DenseIndex, NDArray[Any], Projection]:
    tokens = token_dtype(vocab_size)
    index = DenseIndex(
        read_only(np.empty((0, 1), np.uint16)),
        read_only(np.empty(0, np.uint32)),
        read_only(np.zeros(vocab_size + 1, np.int64)),
        read_only(np.zeros(vocab_size + 1, np.int32)),
        read_only(np.zeros(1, np.int64)),
        read_only(np.empty((0, 1), np.float32)),
    )
    projection = Projection(np.zeros((1, 1), np.float32), np.zeros(1, np.float32))
    return index, read_only(np.full(1, sentinel(tokens), tokens)), projection


STORE_KIND = DresdKind(KIND)
