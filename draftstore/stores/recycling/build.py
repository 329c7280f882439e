"""Writing recycling stores: a model's saved candidates, or the bigrams of a corpus as a start."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftstore.drafting.rank_matrix import best_successors
from draftstore.drafting.rank_tree import WIDTH
from draftstore.drafting.recycling import RecyclingDrafter
from draftstore.errors import BuildError, StoreError
from draftstore.search.ngrams import count_ngrams
from draftstore.storage.files import json_text, remove
from draftstore.storage.manifest import Manifest, TokenizerIdentity, save_manifest
from draftstore.storage.report import ReadReport
from draftstore.storage.staging import STORE, BuildResult, build_store, build_time, hash_files
from draftstore.stores.crest.entries import key_dtype
from draftstore.stores.crest.store import CrestStore
from draftstore.stores.recycling.store import KIND, MATRIX_FILE, TREE_FILE, matrix_bytes, tree_fields
from draftstore.stores.rest.store import RestStore
from draftstore.text.tokens import token_dtype


def seed_from(store: RestStore | CrestStore) -> NDArray[np.int32]:
    """Return the most common successors of each token in a corpus, int32 [vocab_size, 8], filled up with -1.

    From a REST store they are exact, ties by token id, and never cross documents. A CREST store has only successors of
    its single-token n-grams, ordered by their quantised probabilities.

    Raises:
        StoreError: the store is damaged.
    """
    matrix = np.full((store.manifest.vocab_size, WIDTH), -1, np.int32)
    if isinstance(store, RestStore):
        for _, bigrams in count_ngrams(store.index, 2):
            best_successors(bigrams.tokens, bigrams.counts, matrix)
        return matrix
    key = key_dtype(store.manifest.vocab_size)
    for name, value in store.entries.items():
        if len(name) == key.itemsize:
            token, tree = int(np.frombuffer(name, key)[0]), store.envelope.open(value).tree
            likeliest = tree.tokens[tree.parents == -1][:WIDTH]
            if token >= len(matrix) or likeliest.max(initial=0) >= len(matrix):
                raise StoreError(
                    f"{store.path} holds ids outside its vocabulary: it is damaged, build it again"
                )
            matrix[token, : len(likeliest)] = likeliest
    return matrix


def save_recycling(
    drafter: RecyclingDrafter,
    out: Path,
    *,
    target_model: str,
    tokenizer: TokenizerIdentity,
    name: str | None = None,
    seed: Manifest | None = None,
    sources: Sequence[Path] = (),
    overwrite: bool = False,
) -> BuildResult:
    """Save a drafter's state as a store; other threads may go on drafting.

    Args:
        drafter: drafter to save, in its present state.
        out: directory of the store; its parent is created if missing.
        target_model: id of the model.
        tokenizer: tokenizer of the model.
        name: display name of the store; default: the directory's.
        seed: manifest of the store that the drafter started from, whose corpus the new manifest names.
        sources: files that the drafter learned from: who may not read them may not read the store.
        overwrite: whether to replace an existing store.

    Raises:
        BuildError: empty model id, `out` is something else, or another build is running there.
    """
    if not target_model:
        raise BuildError("candidates belong to a model: name it")
    matrix, tree = drafter.snapshot()
    files = {MATRIX_FILE: matrix_bytes(matrix), TREE_FILE: json_text(tree_fields(tree)).encode()}
    plan = {
        "kind": KIND,
        "target_model": target_model,
        "tokenizer": tokenizer.fingerprint,
        "vocab_size": drafter.vocab_size,
        "content": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
    }
    title = name or out.name

    def fill(partial: Path) -> ReadReport:
        store = partial / STORE
        remove(store)
        store.mkdir()
        for file, data in files.items():
            (store / file).write_bytes(data)
        manifest = _describe(matrix, plan, title, target_model, tokenizer, seed)
        manifest.parameters["nodes"] = len(tree)
        manifest.files.update(hash_files(store))
        save_manifest(store, manifest)
        return ReadReport(manifest.counts["documents"])

    return build_store(out, plan, title, overwrite, fill, sources=lambda: sources)


def _describe(
    matrix: NDArray[np.int32],
    plan: dict[str, Any],
    name: str,
    target_model: str,
    tokenizer: TokenizerIdentity,
    seed: Manifest | None,
) -> Manifest:
    filled = matrix >= 0
    nothing = {"sources": [], "bad_records": 0, "empty_documents": 0}
    return Manifest(
        kind=KIND,
        name=name,
        created=build_time(),
        vocab_size=len(matrix),
        token_dtype=token_dtype(len(matrix)).name,
        tokenizer=tokenizer,
        parameters={"plan": plan},
        corpus=nothing if seed is None else seed.corpus,
        counts={
            "documents": seed.counts["documents"] if seed else 0,
            "tokens": seed.counts["tokens"] if seed else 0,
            "entries": int(filled.any(axis=1).sum()),
            "candidates": int(filled.sum()),
        },
        files={},
        target_model=target_model,
    )
