"""Small handwritten DReSD stores, for tests of everything that reads, serves or decodes with one."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.storage.manifest import (
    TOKENIZER_FOLDER,
    FileEntry,
    Manifest,
    TokenizerIdentity,
    save_manifest,
)
from draftstore.stores.dresd.grouping import to_half
from draftstore.stores.dresd.projection import Projection, unit
from draftstore.stores.dresd.store import FILES, KIND, PROJECTION_FILE
from draftstore.text.tokenizer import TextTokenizer
from draftstore.text.tokens import sentinel, token_dtype

MODEL = "org/model"
TOKENIZER = TokenizerIdentity("words", "ab" * 32)
AHEAD = 20
"""Tokens of a continuation."""


class Entry(NamedTuple):
    """One entry of a store.

    Attributes:
        document: number of its document.
        place: of the hidden state in the document; its first token stands behind it, its continuation behind that.
        first: the token that it is grouped by.
        vector: float32 [dims], unit length.
    """

    document: int
    place: int
    first: int
    vector: NDArray[np.float32]


def make_projection(hidden_size: int = 16, dims: int = 8, seed: int = 0) -> Projection:
    """Return a projection of full rank, always the same for one seed."""
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal((dims, hidden_size)).astype(np.float32)
    return Projection(weights, rng.standard_normal(dims).astype(np.float32))


def make_states(
    documents: Sequence[Sequence[int]], hidden_size: int = 16, seed: int = 0
) -> list[NDArray[np.float32]]:
    """Return random hidden states, float32 [tokens, hidden_size] of each document."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((len(document), hidden_size)).astype(np.float32) for document in documents]


def entries_of(
    documents: Sequence[Sequence[int]], states: Sequence[NDArray[np.float32]], projection: Projection
) -> list[Entry]:
    """Return the entries of a corpus in its order; those of equal beginnings and continuations are one."""
    known, entries = set(), []
    for number, (document, rows) in enumerate(zip(documents, states, strict=True)):
        vectors = unit(projection.apply(rows)) if len(rows) else rows
        for place in range(len(document) - 2):
            key = tuple(document[: place + 1]), tuple(document[place + 1 : place + 2 + AHEAD])
            if key not in known:
                known.add(key)
                entries.append(Entry(number, place, document[place + 1], vectors[place]))
    return entries


def make_dense_store(
    path: Path,
    documents: Sequence[Sequence[int]],
    states: Sequence[NDArray[np.float32]] | None = None,
    *,
    vocab_size: int = 50,
    projection: Projection | None = None,
    large: int = 8,
    target_model: str = MODEL,
    tokenizer: TextTokenizer | None = None,
    wide_positions: bool = False,
    **parameters: Any,
) -> Path:
    """Write a store.

    Args:
        path: its directory, which is made.
        documents: token ids.
        states: float32 [tokens, hidden_size] of each document; random ones if None.
        vocab_size: ids lie below it; the tokenizer's if one is given.
        projection: of the states; if None a random one of their size to 8 dimensions.
        large: entries from which a group gets lists, one for every four.
        target_model: the model that the manifest names.
        tokenizer: is copied into the store; without one the manifest names `TOKENIZER`.
        wide_positions: write them as u64.
        parameters: of the manifest, that should differ.
    """
    vocab_size = vocab_size if tokenizer is None else tokenizer.vocab_size
    if states is None:
        states = make_states(documents, 16 if projection is None else projection.hidden_size)
    if projection is None:
        projection = make_projection(states[0].shape[1])
    entries = entries_of(documents, states, projection)
    arrays = _arrays(documents, entries, vocab_size, large, projection.dims)
    path.mkdir(parents=True)
    for name, array in arrays.items():
        array.tofile(path / name)
    if wide_positions:
        arrays["positions.bin"].astype("<u8").tofile(path / "positions.bin")
    (path / PROJECTION_FILE).write_bytes(projection.to_bytes())
    if tokenizer is not None:
        (path / TOKENIZER_FOLDER).mkdir()
        tokenizer.save(path / TOKENIZER_FOLDER)
    written = sorted(file for file in path.rglob("*") if file.is_file())
    save_manifest(
        path,
        Manifest(
            kind=KIND,
            name=path.name,
            created="2025-01-01T00:00:00+00:00",
            vocab_size=vocab_size,
            token_dtype=token_dtype(vocab_size).name,
            tokenizer=TOKENIZER if tokenizer is None else tokenizer.identity,
            parameters={
                "dims": projection.dims,
                "hidden_size": projection.hidden_size,
                "layer": "last",
                "projection": projection.digest,
                **parameters,
            },
            corpus={},
            counts={
                "documents": len(documents),
                "tokens": sum(map(len, documents)),
                "entries": len(entries),
                "lists": len(arrays["centroids.bin"]) // projection.dims,
                "skipped": 0,
                "repeated": 0,
            },
            files={str(file.relative_to(path)): FileEntry.of(file) for file in written},
            target_model=target_model,
        ),
    )
    return path


def rewrite(store: Path, manifest: Manifest, name: str, data: bytes) -> None:
    """Write other bytes into a file of a store, and let its manifest agree."""
    (store / name).write_bytes(data)
    files = {**manifest.files, name: FileEntry.of(store / name)}
    save_manifest(store, dataclasses.replace(manifest, files=files))


def _arrays(
    documents: Sequence[Sequence[int]],
    entries: Sequence[Entry],
    vocab_size: int,
    large: int,
    dims: int,
) -> dict[str, NDArray[Any]]:
    """Return what each file holds, flat."""
    tokens = token_dtype(vocab_size)
    starts = np.cumsum([0, *(len(document) + 1 for document in documents)])
    text = [token for document in documents for token in [*document, sentinel(tokens)]]
    groups, group_lists, lists, centroids = [0], [0], list[int](), list[NDArray[np.float32]]()
    order: list[int] = []
    for token in range(vocab_size):
        members = [number for number, entry in enumerate(entries) if entry.first == token]
        if len(members) >= large:
            vectors = np.stack([entries[number].vector for number in members])
            centres = vectors[::4]
            nearest = np.argmax(vectors @ centres.T, axis=1)
            centroids.append(centres)
            lists += (len(order) + np.searchsorted(np.sort(nearest), np.arange(len(centres)))).tolist()
            members = [members[i] for i in np.argsort(nearest, kind="stable")]
        order += members
        groups.append(len(order))
        group_lists.append(len(lists))
    vectors = np.array([entries[number].vector for number in order], np.float32).reshape(-1, dims)
    arrays: dict[str, NDArray[Any]] = {
        "tokens.bin": np.array(text, tokens),
        "vectors.bin": to_half(vectors).reshape(-1),
        "positions.bin": np.array(
            [starts[entries[number].document] + entries[number].place + 2 for number in order], "<u4"
        ),
        "groups.bin": np.array(groups, "<i8"),
        "group_lists.bin": np.array(group_lists, "<i4"),
        "lists.bin": np.array([*lists, len(order)], "<i8"),
        "centroids.bin": np.concatenate([np.empty((0, dims), "<f4"), *centroids]).astype("<f4").reshape(-1),
    }
    assert arrays.keys() == FILES.keys()
    return arrays
