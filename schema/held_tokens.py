"""What a build holds as token ids: the arrays of stores, n-gram tables, and draft trees, in files and in PostgreSQL.

Every place is read whole, as it lies there: no index is asked, and no manifest believed.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.storage.files import map_or_empty
from draftstore.storage.manifest import Manifest, load_manifest
from draftstore.stores.crest.counts import KIND as NGRAMS
from draftstore.stores.crest.counts import parquet_name
from draftstore.stores.crest.entries import LMDB_FILE, Entries, LmdbEntries, key_dtype
from draftstore.stores.crest.store import KEPT_FILE, open_envelope
from draftstore.stores.crest.store import KIND as CREST
from draftstore.stores.dresd.store import KIND as DENSE
from draftstore.stores.rest.store import KIND as REST
from draftstore.stores.rest.store import read_digests
from draftstore.text.digests import DIGEST_BYTES
from draftstore.text.shingles import LENGTHS
from draftstore.text.tokenizing import KIND as TOKENS
from draftstore.text.tokens import open_shards, sentinel
from draftstore.trees.tree import DraftTree
from schema.database import connect
from schema.failures import database_errors
from schema.models import Build
from schema.partitions import partition_name
from schema.trees import PostgresEntries

CHUNK = 1 << 22
"""Tokens at a time."""
ROWS = 1 << 16
TREES = 1 << 12

Ids = NDArray[np.unsignedinteger[Any]]


class Place(NamedTuple):
    """One file or table of a build.

    Attributes:
        name: for people.
        parts: returns its token ids part by part; ids from the vocabulary's size on end a sequence. Parts overlap
            by a shingle less a token.
        in_documents: whether it has whole documents in the order of `documents.bin`.
        entries: opens the entries of a place with draft trees.
    """

    name: str
    parts: Callable[[], Iterator[Ids]]
    in_documents: bool = False
    entries: Callable[[], Entries] | None = None


class Told(NamedTuple):
    """An entry of a CREST store.

    Attributes:
        ngram: its key.
        tree: its draft tree.
        sequences: what it spells: the key with every path of the tree.
    """

    ngram: list[int]
    tree: DraftTree
    sequences: list[list[int]]


def places_of(build: Build) -> Iterator[Place]:
    """Yield the places where a build holds tokens.

    Raises:
        StoreError: there is no store at its path.
        DatabaseError: the database is down.
    """
    path = Path(build.path)
    manifest = load_manifest(path)
    if manifest.kind in (REST, DENSE):
        yield Place("tokens.bin", partial(_array, path / "tokens.bin", manifest), manifest.kind == REST)
    elif manifest.kind == TOKENS:
        yield Place("shards", partial(_shards, path))
    elif manifest.kind == NGRAMS:
        for n in LENGTHS:
            if (path / parquet_name(n)).exists():
                yield Place(parquet_name(n), partial(_parquet, path / parquet_name(n), manifest, n))
        yield from _tables(build, manifest, "ngrams")
    elif manifest.kind == CREST:
        yield Place(KEPT_FILE, partial(_kept, path / KEPT_FILE, manifest))
        if (path / LMDB_FILE).exists():
            yield _tree_place(LMDB_FILE, path, manifest, partial(LmdbEntries, path / LMDB_FILE))
        yield from _tables(build, manifest, "kept_ngrams")
        if _exists("trees", build):
            name = f"table {partition_name('trees', build.id)}"
            yield _tree_place(name, path, manifest, partial(PostgresEntries, build.id))


def held_digests(path: Path) -> NDArray[np.uint8] | None:
    """Return the digests of a store's documents, uint8 [n, 16], in its order; None: it does not tell them.

    Raises:
        StoreError: there is no store, or it is damaged.
    """
    manifest = load_manifest(path)
    if manifest.kind == TOKENS:
        none = np.empty((0, DIGEST_BYTES), np.uint8)
        return np.concatenate([none, *open_shards(path).digests()])
    return read_digests(path, manifest)


def _array(path: Path, manifest: Manifest) -> Iterator[Ids]:
    tokens = map_or_empty(path, np.dtype(manifest.token_dtype).newbyteorder("<"))
    for begin in range(0, len(tokens), CHUNK):
        yield tokens[begin : begin + CHUNK + LENGTHS[-1] - 1]


def _shards(path: Path) -> Iterator[Ids]:
    shards = open_shards(path)
    for tokens, offsets in shards.arrays():
        yield np.insert(tokens, offsets[1:], sentinel(shards.dtype))


def _parquet(path: Path, manifest: Manifest, n: int) -> Iterator[Ids]:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=ROWS, columns=[f"t{i + 1}" for i in range(n)]):
            columns = [batch.column(i).to_numpy(zero_copy_only=False) for i in range(n)]
            yield (
                np.column_stack([*columns, np.full(batch.num_rows, manifest.vocab_size)])
                .ravel()
                .astype(np.uint32)
            )


def _kept(path: Path, manifest: Manifest) -> Iterator[Ids]:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=ROWS, columns=["tokens"]):
            yield joined(batch.column(0).to_pylist(), manifest.vocab_size)


def _tables(build: Build, manifest: Manifest, table: str) -> Iterator[Place]:
    if _exists(table, build):
        yield Place(f"table {partition_name(table, build.id)}", partial(_rows, build.id, manifest, table))


def _exists(table: str, build: Build) -> bool:
    with connect() as connection, database_errors():
        row = connection.execute("SELECT to_regclass(%s)", (partition_name(table, build.id),)).fetchone()
    return row is not None and row[0] is not None


def _rows(build_id: int, manifest: Manifest, table: str) -> Iterator[Ids]:
    query = f"SELECT tokens FROM {partition_name(table, build_id)} WHERE n >= {LENGTHS[0]:d}"  # noqa: S608 (a number)
    with connect() as connection, database_errors(), connection.cursor(name="held") as cursor:
        cursor.execute(query.encode())
        while rows := cursor.fetchmany(ROWS):
            yield joined([tokens for (tokens,) in rows], manifest.vocab_size)


def _tree_place(name: str, path: Path, manifest: Manifest, entries: Callable[[], Entries]) -> Place:
    def parts() -> Iterator[Ids]:
        told = told_by(path, manifest, entries)
        while some := list(islice(told, TREES)):
            yield joined((ids for entry in some for ids in entry.sequences), manifest.vocab_size)

    return Place(name, parts, entries=entries)


def told_by(path: Path, manifest: Manifest, open_entries: Callable[[], Entries]) -> Iterator[Told]:
    """Yield what the entries of a CREST store tell.

    Raises:
        StoreError: an entry is damaged.
    """
    envelope, dtype = open_envelope(path, manifest), key_dtype(manifest.vocab_size)
    entries = open_entries()
    try:
        for key, value in entries.items():
            ngram = np.frombuffer(key, dtype).tolist()
            tree = envelope.open(value).tree
            tokens = tree.tokens.tolist()
            paths = [[tokens[node] for node in nodes.tolist()] for nodes in tree.paths()]
            yield Told(ngram, tree, [ngram + path for path in paths] or [ngram])
    finally:
        entries.close()


def joined(sequences: Iterable[list[int]], end: int) -> Ids:
    """Return sequences one after the other, each ended by `end`."""
    return np.fromiter((token for ids in sequences for token in (*ids, end)), np.uint32)
