"""Stores in SQL: n-gram statistics from a store's Parquet files, and draft trees as rows.

For counts (kind `ngrams`): the most common n-grams of each n with their text, and the whole spectrum, the number of
n-grams with each count. For a CREST store: all its n-grams and, in its PostgreSQL backend, its trees.
"""

import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import psycopg
from sqlalchemy import NullPool, select
from sqlalchemy.orm import Session

from draftstore.errors import StoreError, TokenRangeError
from draftstore.storage.manifest import TOKENIZER_FOLDER, Manifest, load_manifest, manifest_digest
from draftstore.storage.report import OnProgress, ignore
from draftstore.stores.crest.counts import KIND as NGRAMS
from draftstore.stores.crest.entries import Entries, entries_digest
from draftstore.stores.crest.store import KEPT_FILE
from draftstore.stores.crest.store import KIND as CREST
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from schema.catalogue.builds import add_build, fail_cut_off
from schema.db.database import connect, make_engine
from schema.db.errors import database_errors
from schema.db.partitions import copy_statement, filling, loading, partition_name
from schema.models import Build

HEAD = 1_000_000
BATCH_ROWS = 1 << 16
MAX_TEXT_BYTES = 2_500
"""Longer texts end in `…`: an index entry of PostgreSQL has room for 2,704 bytes."""

NGRAM_COLUMNS = ("build_id", "n", "rank", "tokens", "text", "count")
SPECTRUM_COLUMNS = ("build_id", "n", "count", "ngrams")
KEPT_NUMBERS = ("n", "rank", "count", "nodes", "raw_bytes", "bytes")
KEPT_COLUMNS = ("build_id", "tokens", "text", *KEPT_NUMBERS)
TABLES = {NGRAMS: "ngrams", CREST: "kept_ngrams"}
TREE_COLUMNS = ("build_id", "key", "value")
TREE_TYPES = ("int8", "bytea", "bytea")
PROGRESS_ROWS = 1 << 14

Entry = tuple[bytes, bytes]


def load_store(path: Path, out: Path, manifest: Manifest, source: Entries, progress: OnProgress) -> None:
    """Implement `schema.trees.load_store`."""
    entries, expected = manifest.counts["entries"], manifest.parameters["entries_sha256"]
    tokenizer = store_tokenizer(path, manifest)

    def after(loaded: int) -> OnProgress:
        return lambda done, _total, _detail="": progress(loaded + done, 2 * entries)

    with database_errors(), Session(make_engine(poolclass=NullPool)) as session, session.begin():
        build_id = _build_to_fill(session, path, out)
        connection = session.connection().connection.driver_connection
        assert isinstance(connection, psycopg.Connection)
        with loading(connection, build_id):
            fill_trees(connection, build_id, source.items(), expected, after(0))
            fill_kept(connection, build_id, path, tokenizer, progress=after(entries))


def _build_to_fill(session: Session, path: Path, out: Path) -> int:
    place = str(out.parent.resolve() / out.name)
    fail_cut_off(session)
    same_place = select(Build).filter_by(kind="crest", path=place).order_by(Build.id.desc()).limit(1)
    build = (
        session.scalars(same_place.filter_by(state="running")).first()
        or session.scalars(same_place.filter_by(state="finished", digest=manifest_digest(path))).first()
    )
    if build is None:
        build = add_build(session, path)
        build.path = place
        session.flush()
    return build.id


def fill_trees(
    connection: psycopg.Connection[Any],
    build_id: int,
    entries: Iterable[Entry],
    expected: str,
    progress: OnProgress = ignore,
) -> None:
    """Replace the tree entries of a build, inside `loading`; raise StoreError unless their digest is `expected`."""
    done = 0

    def sent(copy: psycopg.Copy) -> Iterator[Entry]:
        nonlocal done
        copy.set_types(TREE_TYPES)  # row by row: entries arrive so, and frames would be slower
        for done, (key, value) in enumerate(entries, start=1):
            copy.write_row((build_id, key, value))
            yield key, value
            if done % PROGRESS_ROWS == 0:
                progress(done, None)

    with filling(connection, "trees", build_id) as table:
        statement = copy_statement(table, TREE_COLUMNS, "binary", freeze=True)
        with connection.cursor() as cursor, cursor.copy(statement) as copy:
            found = entries_digest(sent(copy))
        if found != expected:
            raise StoreError(
                f"the {done:,} entries have SHA-256 {found}, the manifest says {expected}: the store is damaged, "
                "build it again"
            )
    progress(done, None)


def has_statistics(build_id: int, kind: str) -> bool:
    """Return True if the tables of a build are filled, or its kind has none."""
    if kind not in TABLES:
        return True
    partition = partition_name(TABLES[kind], build_id)
    with connect() as connection, database_errors():
        row = connection.execute("SELECT to_regclass(%s)", (partition,)).fetchone()
    return row is not None and row[0] is not None


def load_statistics(build_id: int, path: Path, *, head: int = HEAD, progress: OnProgress) -> None:
    """Load the SQL statistics of a store: the n-gram counts, or the n-grams of a CREST store; see `load_counts`."""
    manifest = load_manifest(path)
    if manifest.kind == NGRAMS:
        with connect() as connection, database_errors():
            load_counts(connection, build_id, path, head=head, progress=progress)
    elif manifest.kind == CREST:
        tokenizer = store_tokenizer(path, manifest)
        with connect() as connection, database_errors(), loading(connection, build_id):
            fill_kept(connection, build_id, path, tokenizer, progress=progress)


def load_counts(
    connection: psycopg.Connection[Any],
    build_id: int,
    counts: Path,
    *,
    head: int = HEAD,
    progress: OnProgress = ignore,
) -> None:
    """Load n-gram counts (a directory of kind `ngrams`), atomically replacing those of this build.

    `head` n-grams of each n get a row, the most common ones; ties go to lower tokens.
    """
    manifest = load_manifest(counts, "ngrams")
    tokenizer = store_tokenizer(counts, manifest)
    files = count_files(counts, manifest)
    spectra = {n: spectrum(path) for n, path in files.items()}
    total = sum(min(head, int(found["ngrams"].sum())) for found in spectra.values())
    progress(0, total)

    def rows() -> Iterator[pl.DataFrame]:
        done = 0
        for n, path in files.items():
            columns = [f"t{i + 1}" for i in range(n)]
            for batch in most_common(path, spectra[n], head).iter_slices(BATCH_ROWS):
                yield batch.with_columns(
                    build_id=pl.lit(build_id),
                    n=pl.lit(n),
                    tokens=array_text(pl.concat_str(columns, separator=",")),
                    text=ngram_texts(tokenizer, batch.select(columns).to_numpy().tolist()),
                )
                done += len(batch)
                progress(done, total)

    with loading(connection, build_id):
        _load_spectra(connection, build_id, spectra)
        with filling(connection, "ngrams", build_id) as table:
            copy_frames(connection, table, NGRAM_COLUMNS, rows(), freeze=True)


def count_files(counts: Path, manifest: Manifest) -> dict[int, Path]:
    """Return the Parquet file of each n, in ascending order."""
    names = (re.fullmatch(r"n([0-9]+)\.parquet", name) for name in manifest.files)
    found = {int(match[1]): counts / match[0] for match in names if match}
    return dict(sorted(found.items()))


def spectrum(path: Path) -> pl.DataFrame:
    """Return the number of n-grams with each count: columns `count` (ascending) and `ngrams`, int64."""
    rows = pl.scan_parquet(path).group_by("count").agg(pl.len().cast(pl.Int64).alias("ngrams"))
    return rows.sort("count").collect(engine="streaming")


def most_common(path: Path, found: pl.DataFrame, head: int) -> pl.DataFrame:
    """Return the `head` most common n-grams of a file, with their rank from 1; ties by lower tokens.

    The spectrum gives the count from which on all n-grams are included, and how many of the next count are needed, so
    that only the result is sorted.
    """
    above = found.sort("count", descending=True).with_columns(pl.col("ngrams").cum_sum().alias("top"))
    whole = above.filter(pl.col("top") <= head)
    next_count = above["count"][len(whole)] if len(whole) < len(above) else 0
    ties = head - (int(whole["top"][-1]) if len(whole) else 0)
    scan = pl.scan_parquet(path)
    # Both keep the order of the file, which is token order.
    rows = scan.filter(pl.col("count") > next_count).collect(engine="streaming")
    rest = scan.filter(pl.col("count") == next_count).head(ties).collect(engine="streaming")
    return pl.concat([rows.sort("count", descending=True, maintain_order=True), rest]).with_row_index(
        "rank", 1
    )


def _load_spectra(
    connection: psycopg.Connection[Any], build_id: int, spectra: Mapping[int, pl.DataFrame]
) -> None:
    connection.execute("DELETE FROM ngram_spectrum WHERE build_id = %s", (build_id,))
    frames = (rows.with_columns(build_id=pl.lit(build_id), n=pl.lit(n)) for n, rows in spectra.items())
    copy_frames(connection, "ngram_spectrum", SPECTRUM_COLUMNS, frames)
    connection.execute("ANALYZE ngram_spectrum")  # queried right after the load


def fill_kept(
    connection: psycopg.Connection[Any],
    build_id: int,
    store: Path,
    tokenizer: TextTokenizer,
    *,
    progress: OnProgress = ignore,
) -> None:
    """Replace the n-grams of a CREST build, inside `loading`; `store` may be unfinished."""
    kept = pl.read_parquet(store / KEPT_FILE)

    def rows() -> Iterator[pl.DataFrame]:
        done = 0
        for batch in kept.iter_slices(BATCH_ROWS):
            yield batch.with_columns(
                build_id=pl.lit(build_id),
                tokens=array_text(pl.col("tokens").cast(pl.List(pl.String)).list.join(",")),
                text=ngram_texts(tokenizer, batch["tokens"].to_list()),
            )
            done += len(batch)
            progress(done, len(kept))

    with filling(connection, "kept_ngrams", build_id) as table:
        copy_frames(connection, table, KEPT_COLUMNS, rows(), freeze=True)


def copy_frames(
    connection: psycopg.Connection[Any],
    table: str,
    names: Sequence[str],
    frames: Iterable[pl.DataFrame],
    *,
    freeze: bool = False,
) -> None:
    """Copy frames into a table as CSV, whose values the server converts and checks; on an exception, none are copied.

    NULL and empty text stay distinct. A list must be text in PostgreSQL's array syntax: see `array_text`. With `freeze`
    rows are written as already vacuumed; PostgreSQL allows this for tables created in the same transaction.
    """
    statement = copy_statement(table, names, "csv", freeze=freeze)
    with connection.cursor() as cursor, cursor.copy(statement) as copy:
        for frame in frames:
            buffer = io.BytesIO()
            frame.select(names).write_csv(buffer, include_header=False, quote_style="non_numeric")
            copy.write(buffer.getbuffer())


def array_text(items: pl.Expr) -> pl.Expr:
    """Return PostgreSQL's array syntax, `{1,2}`, from comma-separated items."""
    return pl.lit("{") + items + pl.lit("}")


def store_tokenizer(directory: Path, manifest: Manifest) -> TextTokenizer:
    """Return a store's tokenizer."""
    tokenizer = load_tokenizer(directory / TOKENIZER_FOLDER, name=manifest.tokenizer.name)
    manifest.require_tokenizer(tokenizer.identity, directory)
    return tokenizer


def ngram_texts(tokenizer: TextTokenizer, ngrams: Sequence[Sequence[int]]) -> pl.Series:
    r"""Return the texts of n-grams of token ids, String [n-grams]; TokenRangeError if an id is not of the vocabulary.

    The tokenizer gives `�` for parts of characters. Line breaks, control characters and backslashes appear as in
    Python's `repr` (`\n`, `\\`), and NUL, which PostgreSQL's text cannot hold, is `\x00`. Spaces stay spaces, so that
    users can search for what they would type.
    """
    highest = max(map(max, filter(None, ngrams)), default=0)
    if highest >= tokenizer.vocab_size:
        raise TokenRangeError(
            f"token id {highest}, but the tokenizer has {tokenizer.vocab_size:,}: the n-grams were not counted with "
            "the tokenizer beside them, count them again"
        )
    return pl.Series(map(_shown, tokenizer.decode_within(ngrams)), dtype=pl.String)


def _shown(text: str) -> str:
    """Return a text with escapes for invisible characters and backslashes, truncated if it is too long."""
    text = text.replace("\\", r"\\")
    if not text.isprintable():
        text = "".join(
            each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
        )
    if len(text) > MAX_TEXT_BYTES // 4 and len(encoded := text.encode()) > MAX_TEXT_BYTES:
        text = encoded[: MAX_TEXT_BYTES - 3].decode(errors="ignore") + "…"
    return text
