"""Building a recycling store from the bigrams of a REST store."""

import dataclasses
import hashlib
from contextlib import closing
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field

from draftstore.options import Shown
from draftstore.recycling.kernels import WIDTH
from draftstore.recycling.store import KIND, MATRIX_FILE
from draftstore.search.ngrams import count_ngrams
from draftstore.storage.files import remove
from draftstore.storage.manifest import MANIFEST_NAME, manifest_digest, model_name, save_manifest
from draftstore.storage.report import Progress, ReadReport, silent
from draftstore.storage.staging import STORE, BuildResult, build_store, hash_files
from draftstore.stores.kind import Builder
from draftstore.stores.rest.build import RestSources
from draftstore.stores.rest.store import RestStore, derive_manifest
from draftstore.text.tokenizing import Named
from draftstore.text.tokens import sentinel, token_dtype


class RecyclingOptions(Named):
    """The model of a recycling store, and the store's name."""

    model_id: Annotated[str, AfterValidator(model_name), Shown(metavar="M")] = Field(
        min_length=1, description="The model, as given to `generate --model`.", examples=["/models/chat"]
    )


def build_recycling(
    options: RecyclingOptions,
    rest: Path,
    out: Path,
    *,
    overwrite: bool = False,
    workers: int | None = None,
    progress: Progress = silent,
) -> BuildResult:
    """Build a recycling store from a REST store with the model's tokenizer; its default name is the directory's.

    `workers` threads count, by default one per core. Raises BuildError (see `build_store`) or StoreError.
    """
    with closing(RestStore.open(rest)) as source:
        matrix = successors(source, workers, progress)
    dtype = token_dtype(len(matrix))
    data = np.where(matrix < 0, sentinel(dtype), matrix).astype(dtype).tobytes()
    plan = {
        "kind": KIND,
        "source": manifest_digest(rest),
        "target_model": options.model_id,
        "tokenizer": source.manifest.tokenizer.fingerprint,
        "vocab_size": len(matrix),
        "content": hashlib.sha256(data).hexdigest(),
    }
    name = options.name or out.name

    def fill(partial: Path) -> ReadReport:
        store = partial / STORE
        remove(store)
        store.mkdir()
        (store / MATRIX_FILE).write_bytes(data)
        derived = derive_manifest(source, KIND, name, plan, {})
        known = matrix >= 0
        derived.counts.update(entries=int(known.any(axis=1).sum()), candidates=int(known.sum()))
        manifest = dataclasses.replace(derived, files=hash_files(store), target_model=options.model_id)
        save_manifest(store, manifest)
        return ReadReport(manifest.counts["documents"])

    return build_store(out, plan, name, overwrite, fill, sources=lambda: [rest / MANIFEST_NAME])


def successors(
    store: RestStore, workers: int | None = None, progress: Progress = silent
) -> NDArray[np.int32]:
    """Return the most common successors of each token, ties by id, int32 [vocab_size, 8], padded with -1."""
    matrix = np.full((store.manifest.vocab_size, WIDTH), -1, np.int32)
    for _, bigrams in count_ngrams(store.index, 2, workers=workers, on_rows=progress("counting", "tokens")):
        first, second = bigrams.tokens[:, 0], bigrams.tokens[:, 1]
        order = np.lexsort((second, -bigrams.counts, first))
        first, second = first[order], second[order]
        rank = np.arange(len(first)) - np.searchsorted(first, first)
        best = rank < WIDTH
        matrix[first[best], rank[best]] = second[best]
    return matrix


HELP = """Build a recycling store: a model's initial candidates, from the bigrams of a corpus.

Use a REST store built with the model's tokenizer. The new store belongs to one model. `generate --store` and
`worker --store` start from a copy of it, and update that copy.

\b
Example:
  draftstore build recycling --model-id ./model --rest stores/chat --out stores/chat-recycling
"""
BUILDER = Builder(RecyclingOptions, RestSources, build_recycling, HELP)
