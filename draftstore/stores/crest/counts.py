"""n-gram counts of a store as Parquet files, for people and for SQL.

    manifest.json      kind `ngrams`; counts.entries are the distinct n-grams of all lengths
    n1.parquet ...     columns t1 .. tn (uint16 or uint32, as the store's tokens), ascending, and count (int64)
    tokenizer/         the store's tokenizer, for decoding the tokens

The counts are exact: every occurrence inside a document counts, over all segments.
"""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from pydantic import Field

from draftstore.errors import needs_extra
from draftstore.options import Options
from draftstore.search.ngrams import MAX_N, NgramTable, count_ngrams
from draftstore.storage.manifest import MANIFEST_NAME, manifest_digest, save_manifest
from draftstore.storage.report import Progress, ReadReport, silent
from draftstore.storage.staging import BuildResult, build_store, hash_files
from draftstore.stores.rest.store import RestStore, derive_manifest, derived_store

KIND = "ngrams"
DEFAULT_MAX_N = 5


def parquet_name(n: int) -> str:
    """Return the file name for n-grams of one length."""
    return f"n{n}.parquet"


class CountOptions(Options):
    """Options of counts."""

    max_n: int = Field(
        DEFAULT_MAX_N, ge=1, le=MAX_N, description="Length of the longest n-grams, in tokens.", examples=[5]
    )


def build_counts(
    rest: Path,
    out: Path,
    options: CountOptions = CountOptions(),  # noqa: B008 (it never changes)
    *,
    name: str | None = None,
    overwrite: bool = False,
    progress: Progress = silent,
) -> BuildResult:
    """Count all n-grams of a REST store into Parquet files; the default name is the store's.

    Raises BuildError (see `build_store`), or StoreError if the store cannot be opened.
    """
    with needs_extra("pyarrow"):
        import pyarrow  # noqa: F401 (before any work)
    store, max_n = RestStore.open(rest), options.max_n
    plan = {"kind": KIND, "source": manifest_digest(rest), "max_n": max_n}
    title = name or store.manifest.name

    def fill(partial: Path) -> ReadReport:
        directory = derived_store(partial, rest)
        tables = count_ngrams(store.index, max_n, on_rows=progress("counting", "tokens"))
        sizes = _write(tables, directory, store.manifest.token_dtype, max_n)
        manifest = derive_manifest(store, KIND, title, plan, {"max_n": max_n})
        manifest.counts["entries"] = sum(sizes)
        manifest.counts.update({f"n{n}": size for n, size in enumerate(sizes, 1)})
        manifest.files.update(hash_files(directory))
        save_manifest(directory, manifest)
        return ReadReport(manifest.counts["documents"])

    return build_store(out, plan, title, overwrite, fill, sources=lambda: [rest / MANIFEST_NAME])


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
