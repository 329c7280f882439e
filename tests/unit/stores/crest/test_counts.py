from pathlib import Path

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest

from draftstore.search.ngrams import MAX_N
from draftstore.storage.manifest import load_manifest, verify_files
from draftstore.stores.crest.counts import KIND, CountOptions, build_counts, parquet_name
from draftstore.stores.rest.segments import read_segments
from draftstore.text.tokenizer import load_tokenizer
from tests import reference
from tests.reference import Documents, Ngram
from tests.unit.stores.rest.test_build import names

pytestmark = pytest.mark.usefixtures("no_fsync")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "stores").mkdir()
    return tmp_path / "stores" / "ngrams"


def documents_of(store: Path) -> Documents:
    """Return the closed documents of a REST store."""
    dtype = np.dtype(load_manifest(store).token_dtype)
    tokens = np.fromfile(store / "tokens.bin", dtype)
    ends = np.flatnonzero(tokens == np.iinfo(dtype).max)
    return [part[:-1].tolist() for part in np.split(tokens, ends + 1)[:-1]]


def read_counts(directory: Path, n: int) -> list[tuple[Ngram, int]]:
    rows = pl.read_parquet(directory / parquet_name(n)).rows()
    return [(row[:-1], row[-1]) for row in rows]


def require_exact(directory: Path, documents: Documents, max_n: int) -> None:
    """Compare all files with a plain count: rows, their order, types, and what the manifest says of them."""
    manifest = load_manifest(directory, KIND)
    assert verify_files(directory, manifest) == []
    sizes = {}
    for n in range(1, max_n + 1):
        expected = sorted(reference.ngram_counts(documents, n).items())
        assert read_counts(directory, n) == expected
        sizes[f"n{n}"] = len(expected)
        schema = pq.read_schema(directory / parquet_name(n))
        assert schema.names == [*[f"t{j + 1}" for j in range(n)], "count"]
        assert [str(kind) for kind in schema.types] == [*[manifest.token_dtype] * n, "int64"]
    assert manifest.counts == {
        "documents": manifest.counts["documents"],
        "tokens": sum(map(len, documents)),
        "entries": sum(sizes.values()),
        **sizes,
    }
    assert not (directory / parquet_name(max_n + 1)).exists()


@pytest.mark.parametrize("max_n", [1, 5, MAX_N])
def test_the_files_hold_every_ngram(small_store: Path, out: Path, max_n: int) -> None:
    result = build_counts(small_store, out, CountOptions(max_n=max_n))
    assert len(read_segments(small_store)) > 1
    require_exact(out, documents_of(small_store), max_n)
    source = load_manifest(small_store)
    assert (result.path, result.reused, result.manifest) == (out, False, load_manifest(out))
    assert (result.manifest.name, result.manifest.corpus) == (source.name, source.corpus)
    assert (result.manifest.vocab_size, result.manifest.tokenizer) == (source.vocab_size, source.tokenizer)
    assert result.manifest.parameters["max_n"] == max_n
    assert load_tokenizer(out / "tokenizer").fingerprint == source.tokenizer.fingerprint
    assert names(out.parent) == ["ngrams"]
