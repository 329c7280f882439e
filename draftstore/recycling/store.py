"""Recycling stores: the most common successors of each token in a corpus, so that Token Recycling does not start empty.

    manifest.json      see storage.manifest; target_model is the model, counts.entries the tokens with candidates
    matrix.bin         u16 or u32 [vocab_size, 8], little-endian, candidates of each token, best first; the type's
                       largest value is an empty cell

Below 1 MiB for fewer than 65,536 ids. A store belongs to a model and its tokenizer: others are refused.
"""

from pathlib import Path
from typing import NoReturn

import numpy as np

from draftstore.errors import StoreError
from draftstore.recycling.drafter import RecyclingDrafter
from draftstore.recycling.kernels import WIDTH
from draftstore.storage.manifest import TokenizerIdentity, load_manifest
from draftstore.stores.kind import Kind

KIND = "recycling"
MATRIX_FILE = "matrix.bin"


class RecyclingKind(Kind):
    """A model's candidates, usable only for decoding with that model."""

    title = "Token Recycling"
    builder = "draftstore.recycling.build"

    def open_files(self, path: Path) -> NoReturn:
        """Refuse to draft without a model."""
        raise StoreError(
            f"{path} is a store of kind {self.name!r}, which drafts only while its model decodes: use it with "
            "`draftstore generate --store` or `draftstore worker --store`"
        )


STORE_KIND = RecyclingKind(KIND)


def open_drafter(
    path: Path, *, vocab_size: int, tokenizer: TokenizerIdentity, target_model: str | None = None
) -> RecyclingDrafter:
    """Return a drafter for a model that starts from a store; the store itself never changes.

    `vocab_size` may be larger than the store's because of padding; `target_model` None accepts any.

    Raises StoreError (not a recycling store, damaged, for another model or a larger vocabulary) or TokenizerError.
    """
    manifest = load_manifest(path, KIND)
    advice = "start without them, or use this model's store"
    manifest.require_model(target_model, path, "candidates", advice)
    manifest.require_tokenizer(tokenizer, path)
    size, dtype = manifest.vocab_size, np.dtype(manifest.token_dtype)
    if size > vocab_size:
        raise StoreError(
            f"{path} holds candidates for a vocabulary of {size:,} ids, the model has only {vocab_size:,}: {advice}"
        )
    data = (path / MATRIX_FILE).read_bytes()
    if len(data) != size * WIDTH * dtype.itemsize:
        raise StoreError(
            f"{path}: {MATRIX_FILE} has {len(data):,} bytes, which does not match {size:,} ids: the store is "
            "damaged, build it again"
        )
    cells = np.frombuffer(data, dtype).reshape(size, WIDTH)
    return RecyclingDrafter(vocab_size, matrix=np.where(cells < size, cells, -1).astype(np.int32))
