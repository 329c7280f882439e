"""The kind `dresd`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftstore.jit import read_only
from draftstore.storage.manifest import Manifest
from draftstore.stores.dresd.kernels.nearest import DenseIndex
from draftstore.stores.dresd.projection import Projection
from draftstore.stores.dresd.store import KIND, STRATEGIES, DresdDrafter, DresdStore
from draftstore.stores.kind import CONTEXT_TOKENS, Kind
from draftstore.text.tokens import sentinel, token_dtype


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
            drafter.warm_up()
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
