"""n-gram counts of a store as Parquet files, for people and for SQL.

    manifest.json      kind `ngrams`; counts.entries are the distinct n-grams of all lengths
    n1.parquet ...     columns t1 .. tn (uint16 or uint32, as the store's tokens), ascending, and count (int64)
    tokenizer/         the store's tokenizer, for decoding the tokens

The counts are exact: every occurrence inside a document counts, over all segments.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from draftstore.errors import BuildError, needs_extra
from draftstore.mapping import Pool, attempt
from draftstore.search.ngrams import MAX_N, PART_ROWS, NgramTable, count_ngrams, running_total, token_ranges
from draftstore.search.suffix import SuffixIndex
from draftstore.storage.files import remove
from draftstore.storage.manifest import (
    MANIFEST_NAME,
    TOKENIZER_FOLDER,
    Manifest,
    manifest_digest,
    save_manifest,
)
from draftstore.storage.report import ReadReport
from draftstore.storage.staging import STORE, BuildResult, build_store, build_time, hash_files
from draftstore.stores.rest.store import RestStore

KIND = "ngrams"
PARTS = "parts"
"""On a pool: the counts of ranges of first tokens, in the working directory; no n-gram lies in two of them."""
DEFAULT_MAX_N = 5


def parquet_name(n: int) -> str:
    """Return the file name for n-grams of one length."""
    return f"n{n}.parquet"


def build_counts(
    rest: Path,
    out: Path,
    *,
    name: str | None = None,
    max_n: int = DEFAULT_MAX_N,
    overwrite: bool = False,
    pool: Pool | None = None,
    progress: Callable[[int, int], None] = lambda _rows, _all: None,
) -> BuildResult:
    """Count all n-grams of a REST store into Parquet files.

    Args:
        rest: directory of the store.
        out: directory of the counts.
        name: display name of the counts; default: the store's.
        max_n: maximum tokens of an n-gram.
        overwrite: whether to replace existing counts.
        pool: processes that count; None: this one, on all cores.
        progress: called with the rows counted and the total.

    Raises:
        BuildError: max_n is not within 1 .. 8, or see `draftstore.storage.staging.build_store`.
        StoreError: the store cannot be opened.
    """
    if not 1 <= max_n <= MAX_N:
        raise BuildError(f"n-grams of up to {max_n} tokens: expected 1 to {MAX_N}")
    with needs_extra("pyarrow"):
        import pyarrow  # noqa: F401 (before any work)
    store = RestStore.open(rest)
    plan = {"kind": KIND, "source": manifest_digest(rest), "max_n": max_n}
    title = name or store.manifest.name

    def fill(partial: Path) -> ReadReport:
        directory = new_store(partial, rest)
        on_rows = running_total(progress, len(store.index.suffixes))
        if pool is None:
            tables = count_ngrams(store.index, max_n, on_rows=on_rows)
        else:
            tables = _count_apart(pool, store, partial / PARTS, max_n, on_rows)
        sizes = _write(tables, directory, store.manifest.token_dtype, max_n)
        manifest = derive_manifest(store, KIND, title, plan, {"source": str(rest), "max_n": max_n})
        manifest.counts["entries"] = sum(sizes)
        manifest.counts.update({f"n{n}": size for n, size in enumerate(sizes, 1)})
        manifest.files.update(hash_files(directory))
        save_manifest(directory, manifest)
        return ReadReport(manifest.counts["documents"])

    return build_store(out, plan, title, overwrite, fill, sources=lambda: [rest / MANIFEST_NAME])


def new_store(partial: Path, source: Path) -> Path:
    """Return an empty directory for a store derived from another one, with a copy of its tokenizer."""
    directory = partial / STORE
    remove(directory)
    directory.mkdir()
    shutil.copytree(source / TOKENIZER_FOLDER, directory / TOKENIZER_FOLDER)
    return directory


def derive_manifest(
    source: RestStore, kind: str, name: str, plan: dict[str, Any], parameters: dict[str, Any]
) -> Manifest:
    """Return the manifest of a store derived from a REST store: same corpus and tokenizer; no entries or files yet."""
    origin = source.manifest
    return Manifest(
        kind=kind,
        name=name,
        created=build_time(),
        vocab_size=origin.vocab_size,
        token_dtype=origin.token_dtype,
        tokenizer=origin.tokenizer,
        parameters={"plan": plan, **parameters},
        corpus=origin.corpus,
        counts={"documents": origin.counts["documents"], "tokens": origin.counts["tokens"], "entries": 0},
        files={},
    )


def _write(tables: Iterable[Sequence[NgramTable]], directory: Path, dtype: str, max_n: int) -> list[int]:
    """Write the files; return the number of distinct n-grams of each length."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sizes = [0] * max_n
    with ExitStack() as stack:
        writers = []
        for n in range(1, max_n + 1):
            columns = [(f"t{j + 1}", pa.type_for_alias(dtype)) for j in range(n)]
            schema = pa.schema([*columns, ("count", pa.int64())])
            writer = pq.ParquetWriter(
                directory / parquet_name(n), schema, compression="zstd", compression_level=1
            )
            writers.append(stack.enter_context(writer))
        for lengths in tables:
            for n, (table, writer) in enumerate(zip(lengths, writers, strict=True), 1):
                if len(table.counts):
                    tokens = [pa.array(table.tokens[:, j].copy()) for j in range(n)]
                    writer.write_table(pa.table([*tokens, pa.array(table.counts)], schema=writer.schema))
                    sizes[n - 1] += len(table.counts)
    return sizes


def _count_apart(
    pool: Pool, store: RestStore, parts: Path, max_n: int, on_rows: Callable[[int], None]
) -> Iterator[tuple[NgramTable, ...]]:
    """Count ranges of first tokens on a pool; yield the tables of each range, in order."""
    pool.require(parts.parent)
    folder = parts / uuid4().hex  # a process that was taken for dead may still write to an earlier one
    folder.mkdir(parents=True)
    ranges = {folder / f"{first:010d}": (first, stop) for first, stop in token_ranges(store.index, PART_ROWS)}
    jobs = {bounds: (store.path.absolute(), bounds, target, max_n) for target, bounds in ranges.items()}
    for bounds, _ in pool.results(count_range, jobs):
        on_rows(_rows(store.index, *bounds))
    for part in ranges:
        yield tuple(
            NgramTable(*(np.load(part / f"{name}{n}.npy") for name in ("tokens", "counts")))
            for n in range(1, max_n + 1)
        )
    with suppress(OSError):
        remove(parts)


def _rows(index: SuffixIndex, first: int, stop: int) -> int:
    return int((index.first_rows[:, stop] - index.first_rows[:, first]).sum())


def count_range(rest: Path, bounds: tuple[int, int], target: Path, max_n: int) -> None:
    """Count the n-grams of a store that begin with a token in [first, stop), into a folder of plain arrays."""
    first, stop = bounds
    store = RestStore.open(rest)
    every = store.index.first_rows
    within = np.clip(every, every[:, first, None], every[:, stop, None])  # no other token has rows
    counted = list(count_ngrams(store.index._replace(first_rows=within), max_n, workers=1))
    with attempt(target) as folder:
        for n, tables in enumerate(zip(*counted, strict=True), 1):
            np.save(folder / f"tokens{n}.npy", np.concatenate([table.tokens for table in tables]))
            np.save(folder / f"counts{n}.npy", np.concatenate([table.counts for table in tables]))
