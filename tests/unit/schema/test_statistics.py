"""n-gram counts and kept n-grams in SQL, against plain Python, and the state after a failed load."""

import dataclasses
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import psycopg
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from draftstore.errors import BuildError, TokenRangeError
from draftstore.storage.manifest import FileEntry, load_manifest, save_manifest
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from schema.db.partitions import loading
from schema.statistics import (
    MAX_TEXT_BYTES,
    array_text,
    copy_frames,
    fill_kept,
    load_counts,
    most_common,
    ngram_texts,
    spectrum,
    store_tokenizer,
)

Connection = psycopg.Connection[Any]
Ngram = tuple[int, ...]
Counts = dict[int, dict[Ngram, int]]
"""By n."""


@pytest.fixture
def connection(database: str) -> Iterator[Connection]:
    with psycopg.connect(database, autocommit=True) as connection:
        yield connection


def some_counts(seed: int = 0, tokens: int = 3_000, vocab_size: int = 40, max_n: int = 3) -> Counts:
    """Count the n-grams of random tokens."""
    text = [min(int(random.Random(seed + i).expovariate(0.2)), vocab_size - 1) for i in range(tokens)]
    return {n: Counter(tuple(text[i : i + n]) for i in range(tokens - n)) for n in range(1, max_n + 1)}


def write_ngrams(path: Path, counts: dict[Ngram, int], n: int, row_group: int = 500) -> None:
    """Write the n-grams of one length as a store of counts does."""
    rows = sorted(counts)
    columns = {f"t{i + 1}": np.array([row[i] for row in rows], np.uint16) for i in range(n)}
    numbers = {"count": np.array([counts[row] for row in rows], np.int64)}
    pl.DataFrame(columns | numbers).write_parquet(path, row_group_size=row_group)


def finish_store(folder: Path, kind: str, like: Path) -> Path:
    """Write a manifest around the files of a folder, with the tokenizer of another store."""
    shutil.copytree(like / "tokenizer", folder / "tokenizer")
    files = {
        str(path.relative_to(folder)): FileEntry.of(path) for path in folder.rglob("*") if path.is_file()
    }
    save_manifest(folder, dataclasses.replace(load_manifest(like), kind=kind, files=files))
    return folder


def write_counts(folder: Path, counts: Counts, like: Path) -> Path:
    folder.mkdir()
    for n, of_one_length in counts.items():
        write_ngrams(folder / f"n{n}.parquet", of_one_length, n)
    return finish_store(folder, "ngrams", like)


@pytest.fixture(scope="module")
def counts_of(small_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Counts], Path]:
    """Return a function that writes a store of counts."""
    return lambda counts: write_counts(tmp_path_factory.mktemp("counts") / "ngrams", counts, small_store)


@pytest.fixture(scope="module")
def small_counts(counts_of: Callable[[Counts], Path]) -> Path:
    return counts_of(some_counts())


def new_build(connection: Connection, kind: str = "ngrams") -> int:
    """Register a build and commit it."""
    with connection.transaction():
        row = connection.execute(
            "INSERT INTO builds (kind, name, path) VALUES (%s, 'test', '/nowhere') RETURNING id", (kind,)
        ).fetchone()
    assert row is not None
    return int(row[0])


def head_in_sql(connection: Connection, build_id: int) -> list[tuple[Any, ...]]:
    query = "SELECT n, rank, tokens, text, count FROM ngrams WHERE build_id = %s ORDER BY n, rank"
    return connection.execute(query, (build_id,)).fetchall()


def spectrum_in_sql(connection: Connection, build_id: int) -> list[tuple[Any, ...]]:
    query = "SELECT n, count, ngrams FROM ngram_spectrum WHERE build_id = %s ORDER BY n, count"
    return connection.execute(query, (build_id,)).fetchall()


def expected_head(counts: Counts, head: int, tokenizer: TextTokenizer) -> list[tuple[Any, ...]]:
    return [
        (n, rank, list(ngram), shown(ngram, tokenizer), count)
        for n, of_one_length in counts.items()
        for rank, (ngram, count) in enumerate(ranked(of_one_length)[:head], start=1)
    ]


def load_kept(connection: Connection, build_id: int, store: Path, **options: Any) -> None:
    tokenizer = store_tokenizer(store, load_manifest(store))
    with loading(connection, build_id):
        fill_kept(connection, build_id, store, tokenizer, **options)


def ranked(counts: dict[Ngram, int]) -> list[tuple[Ngram, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def shown(ngram: Ngram, tokenizer: TextTokenizer) -> str:
    """Return the text of tokens none of which is a part of a character."""
    return "".join(tokenizer.token_text(token) for token in ngram).replace("␣", " ")


def expected_spectrum(counts: Counts) -> list[tuple[int, int, int]]:
    found = {n: Counter(of_one_length.values()) for n, of_one_length in counts.items()}
    return [(n, count, ngrams) for n in found for count, ngrams in sorted(found[n].items())]


@given(
    st.dictionaries(st.tuples(*[st.integers(0, 300)] * 2), st.integers(1, 4), max_size=60), st.integers(0, 70)
)
def test_ties_are_ordered_by_tokens(
    tmp_path_factory: pytest.TempPathFactory, counts: dict[Ngram, int], head: int
) -> None:
    path = tmp_path_factory.mktemp("ties") / "n2.parquet"
    write_ngrams(path, counts, 2, row_group=7)
    found = most_common(path, spectrum(path), head)
    expected = [(rank, *ngram, count) for rank, (ngram, count) in enumerate(ranked(counts)[:head], start=1)]
    assert found.rows() == expected


def test_a_second_load_replaces_the_first(
    connection: Connection, counts_of: Callable[[Counts], Path], small_tokenizer: TextTokenizer
) -> None:
    build_id, other = new_build(connection), new_build(connection)
    first, second = some_counts(1), some_counts(2, max_n=2)
    load_counts(connection, build_id, counts_of(first))
    load_counts(connection, other, counts_of(first), head=10)
    load_counts(connection, build_id, counts_of(second), head=50)
    assert head_in_sql(connection, build_id) == expected_head(second, 50, small_tokenizer)
    assert spectrum_in_sql(connection, build_id) == expected_spectrum(second)
    assert spectrum_in_sql(connection, other) == expected_spectrum(first)
    assert head_in_sql(connection, other) == expected_head(first, 10, small_tokenizer)


def test_a_failure_changes_nothing(
    connection: Connection, counts_of: Callable[[Counts], Path], small_counts: Path
) -> None:
    build_id = new_build(connection)
    load_counts(connection, build_id, small_counts, head=30)
    before = head_in_sql(connection, build_id), spectrum_in_sql(connection, build_id)
    foreign = some_counts(3)
    foreign[3][(1, 2, 60_000)] = 10**6
    with pytest.raises(TokenRangeError, match="count them again"):
        load_counts(connection, build_id, counts_of(foreign))
    assert (head_in_sql(connection, build_id), spectrum_in_sql(connection, build_id)) == before


def test_two_loads_of_one_build(
    connection: Connection, database: str, small_counts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("schema.db.partitions.LOAD_LOCK_TIMEOUT", "100ms")
    build_id = new_build(connection)
    with psycopg.connect(database) as other, loading(other, build_id):
        with pytest.raises(BuildError, match="another process"):
            load_counts(connection, build_id, small_counts)
        load_counts(connection, new_build(connection), small_counts)
    with pytest.raises(BuildError, match=r"no build 999999999\b"):
        load_counts(connection, 999_999_999, small_counts)


KEPT_TYPES = {
    "rank": pl.Int32(),
    "n": pl.UInt8(),
    "tokens": pl.List(pl.UInt32()),
    "count": pl.Int64(),
    "distinct": pl.Int64(),
    "nodes": pl.Int16(),
    "raw_bytes": pl.Int32(),
    "bytes": pl.Int32(),
}
KeptRow = tuple[int, int, list[int], int, int, int, int, int]


def write_kept(folder: Path, rows: list[KeptRow], like: Path) -> Path:
    folder.mkdir()
    table = pl.DataFrame(rows, schema=KEPT_TYPES, orient="row")
    table.write_parquet(folder / "kept.parquet", row_group_size=100)
    return finish_store(folder, "crest", like)


def some_kept() -> list[KeptRow]:
    counts = [item for of_one_length in some_counts().values() for item in ranked(of_one_length)[:150]]
    random.Random(0).shuffle(counts)  # not every selection goes by the count
    return [
        (rank, len(ngram), list(ngram), count, 3, rank % 64, 10 * rank, 4 * rank)
        for rank, (ngram, count) in enumerate(counts, start=1)
    ]


def test_kept_ngrams(
    connection: Connection,
    small_store: Path,
    small_tokenizer: TextTokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("schema.statistics.BATCH_ROWS", 64)
    rows, build_id, seen = some_kept(), new_build(connection, "crest"), list[tuple[int, int]]()
    store = write_kept(tmp_path / "crest", rows, small_store)
    for _ in range(2):
        load_kept(connection, build_id, store, progress=lambda *done: seen.append(done))
    query = (
        "SELECT rank, n, tokens, text, count, nodes, raw_bytes, bytes FROM kept_ngrams"
        " WHERE build_id = %s ORDER BY rank"
    )
    assert connection.execute(query, (build_id,)).fetchall() == [
        (rank, n, tokens, shown(tuple(tokens), small_tokenizer), count, *numbers)
        for rank, n, tokens, count, _distinct, *numbers in rows
    ]
    assert seen[-1] == (len(rows), len(rows))


TYPES: dict[str, Any] = dict.fromkeys(("i2", "i8"), pl.Int64) | {"l4": pl.List(pl.Int64), "t": pl.String}


@given(
    st.lists(
        st.tuples(
            st.integers(-(1 << 15), (1 << 15) - 1),
            st.integers(-(1 << 63), (1 << 63) - 1),
            st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=4),
            st.none() | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
        ),
        max_size=8,
    )
)
@example(
    [
        (0, 0, [], text)
        for text in ("\\.", "\n\\.\n", "\\N", "NULL", "", 'a"b,', "a\r\nb", "{1}", "ß" * 90_000)
    ]
)
def test_frames_are_copied_unchanged(shared_database: str, rows: list[tuple[Any, ...]]) -> None:
    frame = pl.DataFrame(rows, schema=TYPES, orient="row")
    frame = frame.with_columns(l4=array_text(pl.col("l4").cast(pl.List(pl.String)).list.join(",")))
    with psycopg.connect(shared_database) as connection:
        connection.execute(
            "CREATE TEMPORARY TABLE copied (i2 smallint, i8 bigint, l4 integer[], t text, other int)"
        )
        copy_frames(connection, "copied", list(TYPES), iter([frame, frame]))
        assert connection.execute("SELECT i2, i8, l4, t FROM copied").fetchall() == rows + rows


# Texts of n-grams, with nothing in them that PostgreSQL or a reader could trip over


def as_shown(text: str) -> str:
    """Return a text as it is to be shown, one character after the other."""
    return "".join(each if each == "'" else repr(each)[1:-1] for each in text)


@given(
    texts=st.lists(st.text() | st.text("a\0\n\t\r\\'\"\x7f\x80\xa0\u200b\ufeff\U000e0001😀é "), max_size=5)
)
def test_ngram_texts_are_the_original_texts_with_escapes(
    small_tokenizer: TextTokenizer, texts: list[str]
) -> None:
    texts = [text.encode(errors="ignore").decode() for text in texts]
    ngrams = [small_tokenizer.encode(text, bos=False).tolist() for text in texts]
    assert ngram_texts(small_tokenizer, ngrams).to_list() == list(map(as_shown, texts))


def test_long_texts_are_truncated_and_special_tokens_written_out(small_tokenizer: TextTokenizer) -> None:
    long, short = (small_tokenizer.encode(text, bos=False).tolist() for text in ("é" * 2_000, "hi"))
    text, special = ngram_texts(small_tokenizer, [long, [0, *short, 1]])
    assert text.endswith("é…")
    assert MAX_TEXT_BYTES - 20 < len(text.encode()) <= MAX_TEXT_BYTES
    assert special == "<s>hi</s>"


@pytest.mark.parametrize("name", ["llama2", "qwen2.5", "smollm2"])
def test_texts_of_real_tokenizers(data: Path, name: str) -> None:
    tokenizer = load_tokenizer(data / "tokenizers" / name)
    text = "def f(x):\n\treturn x, naïve 東京 😀 \u200b tab\tnul\\"
    whole = tokenizer.encode(f"a{text}", bos=False).tolist()
    within = tokenizer.encode("a the", bos=False).tolist()[1:]
    parts = tokenizer.encode("a🦜", bos=False).tolist()[1:]
    found = ngram_texts(tokenizer, [whole, within, parts, parts[:-1]]).to_list()
    assert found[0].removeprefix(" ") == as_shown(f"a{text}")  # SentencePiece puts a space there
    assert found[1:3] == [" the", "🦜"]
    assert set(found[3]) == {"�"}
