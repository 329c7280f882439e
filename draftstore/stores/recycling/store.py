"""Recycling stores: the candidates of one model, persisted so that its next process starts warm.

    manifest.json      see storage.manifest; target_model is the model, counts.entries the tokens with candidates
    matrix.bin         u16 or u32 [vocab_size, 8], little-endian, candidates of each token, best first; the type's
                       largest value is an empty cell
    tree.json          the static tree: its rank paths, with tries and hits of each

Below 2 MB for less than 65,536 ids. The candidates belong to a model and its tokenizer: others are refused.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftstore.drafting.rank_tree import WIDTH, RankTree
from draftstore.drafting.recycling import RecyclingDrafter
from draftstore.errors import DraftstoreError, StoreError
from draftstore.storage.manifest import Manifest, TokenizerIdentity, load_manifest
from draftstore.text.tokens import sentinel, token_dtype

KIND = "recycling"
MATRIX_FILE = "matrix.bin"
TREE_FILE = "tree.json"


@dataclasses.dataclass(eq=False)
class RecyclingStore:
    """An open store: candidates int32 [vocab_size, 8], -1 for empty cells, which drafters copy."""

    path: Path
    manifest: Manifest
    matrix: NDArray[np.int32]
    tree: RankTree

    @classmethod
    def open(
        cls,
        path: Path | str,
        *,
        target_model: str | None = None,
        tokenizer: TokenizerIdentity | None = None,
        vocab_size: int | None = None,
    ) -> "RecyclingStore":
        """Open a store.

        Args:
            path: its directory.
            target_model: required model; None accepts any.
            tokenizer: required tokenizer; None accepts any.
            vocab_size: upper limit of the store's vocabulary size; None accepts any. A model's vocabulary may be larger
                than its tokenizer's because of padding.

        Raises:
            StoreError: not a recycling store, unknown version, missing or truncated files, ids out of range, another
                model, or a larger vocabulary.
            TokenizerError: built with another tokenizer.
        """
        path = Path(path)
        manifest = load_manifest(path, KIND)
        manifest.require_model(
            target_model, path, "candidates", "start without them, or name the store of this model"
        )
        if tokenizer is not None:
            manifest.require_tokenizer(tokenizer, path)
        if vocab_size is not None and manifest.vocab_size > vocab_size:
            raise StoreError(
                f"{path} holds candidates for a vocabulary of {manifest.vocab_size:,} ids, the model knows "
                f"{vocab_size:,}: start without them, or name the store of this model"
            )
        return cls(path, manifest, _read_matrix(path, manifest), _read_tree(path))

    def drafter(self, *, vocab_size: int | None = None) -> RecyclingDrafter:
        """Return a drafter that starts from a copy of the store's state; the store itself never changes.

        Args:
            vocab_size: vocabulary size of the model, at least the store's; None: the store's.

        Raises:
            DraftstoreError: a vocabulary smaller than the store's.
        """
        tree = RankTree(self.tree.paths, self.tree.tries.tolist(), self.tree.hits.tolist())
        return RecyclingDrafter(
            self.manifest.vocab_size if vocab_size is None else vocab_size,
            matrix=self.matrix,
            tree=tree,
        )

    def close(self) -> None:
        """Do nothing: a store holds no file open."""


def matrix_bytes(matrix: NDArray[np.int32]) -> bytes:
    """Return the bytes of `matrix.bin`."""
    dtype = token_dtype(len(matrix))
    cells = matrix.astype(dtype)
    cells[matrix < 0] = sentinel(dtype)
    return cells.tobytes()


def tree_fields(tree: RankTree) -> dict[str, Any]:
    """Return the content of `tree.json`."""
    return {"paths": list(tree.paths), "tries": tree.tries.tolist(), "hits": tree.hits.tolist()}


def _read_matrix(path: Path, manifest: Manifest) -> NDArray[np.int32]:
    """Read the candidates of a store; refuse a wrong size, and ids out of range or twice in a row."""
    vocab_size = manifest.vocab_size
    try:
        dtype = token_dtype(vocab_size)
        data = (path / MATRIX_FILE).read_bytes()
    except (DraftstoreError, OSError) as error:
        raise _damaged(path, str(error)) from None
    if len(data) != vocab_size * WIDTH * dtype.itemsize:
        raise _damaged(
            path,
            f"{MATRIX_FILE} has {len(data):,} bytes, expected {vocab_size * WIDTH * dtype.itemsize:,} for "
            f"{vocab_size:,} ids",
        )
    cells = np.frombuffer(data, dtype).reshape(vocab_size, WIDTH)
    empty = cells == sentinel(dtype)
    wrong = ~empty & (cells >= vocab_size)
    if wrong.any():
        raise _damaged(path, f"{MATRIX_FILE} holds id {cells[wrong][0]:,}, expected ids below {vocab_size:,}")
    matrix = cells.astype(np.int32)
    matrix[empty] = -1
    ordered = np.sort(matrix, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if twice.any():
        token = int(np.flatnonzero(twice.any(axis=1))[0])
        raise _damaged(path, f"the row of id {token:,} in {MATRIX_FILE} holds an id twice")
    return matrix


def _read_tree(path: Path) -> RankTree:
    try:
        fields = json.loads((path / TREE_FILE).read_text(encoding="utf-8"))
        paths, tries, hits = (fields[key] for key in ("paths", "tries", "hits"))
        for values, kind in ((paths, str), (tries, int), (hits, int)):
            _require_list(values, kind)
        return RankTree(paths, tries, hits)
    except (ValueError, TypeError, KeyError, RecursionError, OSError, DraftstoreError) as error:
        raise _damaged(path, f"{TREE_FILE} does not hold a static tree ({error})") from None


def _require_list(values: Any, kind: type) -> None:
    if not isinstance(values, list) or any(
        type(value) is not kind for value in values
    ):  # bool is not a count
        raise TypeError(f"expected a list of {kind.__name__}")


def _damaged(path: Path, problem: str) -> StoreError:
    return StoreError(f"{path}: {problem}: the store is damaged, save or build it again")
