"""Files for llama.cpp: read by another parser, compared with a plain count, and used for drafts by llama.cpp's rule."""

import shutil
import struct
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftstore.engines import llama_cpp
from draftstore.engines.llama_cpp import ExportOptions, export_cache
from draftstore.errors import BuildError, StoreError
from draftstore.search.ngrams import NgramTable
from draftstore.stores.crest.counts import CountOptions, build_counts
from tests import reference
from tests.fakes.llama_cpp import from_static, read_cache
from tests.fakes.progress import calling
from tests.reference import Documents
from tests.unit.stores.crest.test_counts import documents_of
from tests.unit.stores.rest.test_build import names

pytestmark = pytest.mark.usefixtures("no_fsync")

Table = dict[tuple[int, ...], dict[int, int]]


def followers_of(documents: Documents) -> Table:
    """Count what follows two tokens, the plain way."""
    found: Table = defaultdict(dict)
    for (first, second, third), count in reference.ngram_counts(documents, 3).items():
        found[first, second, -1, -1][third] = count
    return dict(found)


def written(table: Table) -> Table:
    """Return a table where what occurs once, alone, occurs twice."""
    return {k: dict.fromkeys(part, 2) if sum(part.values()) == 1 else part for k, part in table.items()}


def drafting(table: Table, least: int = 1) -> Table:
    """Return what the default file holds of a table."""
    kept = {}
    for ngram, part in table.items():
        best = min(part, key=lambda token: (-part[token], token))
        if part[best] >= least and 2 * part[best] >= sum(part.values()):
            kept[ngram] = {best: max(part[best], 2)}
    return kept


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "files" / "cache.bin"


@pytest.fixture(params=["small_store", "wide_store"])
def store(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


def test_the_usual_file_drafts_as_the_whole_table(store: Path, out: Path) -> None:
    made = export_cache(store, out)
    table, kept = followers_of(documents_of(store)), read_cache(out)
    assert kept == drafting(table)
    assert (made.path, made.ngrams, made.omitted, made.size) == (out, len(kept), 0, out.stat().st_size)
    assert names(out.parent) == ["cache.bin"]
    assert kept
    for ngram, part in written(table).items():
        ties = sum(count == max(part.values()) for count in part.values())
        assert from_static(kept, ngram[:2]) == from_static({ngram: part}, ngram[:2]) or ties > 1


def test_the_bytes(small_store: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.array([[1, 2, 3], [1, 2, 70_000], [1, 5, 6], [4, 2, 9]], np.uint32)
    table = NgramTable(tokens, np.array([1, 3, 1, 12_345]))
    monkeypatch.setattr(llama_cpp, "_tables", lambda *_: iter([table]))
    export_cache(small_store, out)
    first, once = struct.pack("<7i", 1, 2, -1, -1, 1, 70_000, 3), struct.pack("<7i", 1, 5, -1, -1, 1, 6, 2)
    assert out.read_bytes() == first + once + struct.pack("<7i", 4, 2, -1, -1, 1, 9, 10_000)


def test_counts_give_the_same_file(
    store: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_counts(store, tmp_path / "counts", CountOptions(max_n=3))
    done: list[tuple[int, int]] = []
    export_cache(store, out)
    for rows in (7, 1 << 20):
        monkeypatch.setattr(llama_cpp, "PART_ROWS", rows)
        again, progress = out.with_name("again.bin"), calling(counting=lambda *step: done.append(step))
        export_cache(tmp_path / "counts", again, overwrite=True, progress=progress)
        assert again.read_bytes() == out.read_bytes()
    assert done[-1][0] == done[-1][1] > 0


def test_the_best_come_first(small_store: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_cpp, "CUT_NGRAMS", 5)
    table = drafting(followers_of(documents_of(small_store)))
    ranked = sorted(table, key=lambda ngram: (-max(table[ngram].values()), ngram))
    for size in (28, 28 * 10 + 27, 28 * len(table) - 1, 28 * len(table)):
        made = export_cache(small_store, out, ExportOptions(max_bytes=size), overwrite=True)
        assert read_cache(out) == {ngram: table[ngram] for ngram in ranked[: size // 28]}
        assert list(read_cache(out)) == sorted(ranked[: size // 28])
        assert (made.ngrams, made.omitted) == (size // 28, len(table) - size // 28)
        assert made.size == out.stat().st_size <= size


def test_rare_pairs_are_omitted(store: Path, out: Path) -> None:
    table = followers_of(documents_of(store))
    export_cache(store, out, ExportOptions(min_count=4))
    assert read_cache(out) == drafting(table, 4)


def test_what_is_refused(
    small_store: Path, small_crest: Path, small_dense: Path, out: Path, tmp_path: Path
) -> None:
    for other in (small_crest, small_dense):
        with pytest.raises(StoreError, match="keeps drafts but no counts: export the REST store"):
            export_cache(other, out)
    build_counts(small_store, tmp_path / "pairs", CountOptions(max_n=2))
    with pytest.raises(StoreError, match="count again those of three"):
        export_cache(tmp_path / "pairs", out)
    with pytest.raises(BuildError, match="fits into 27 bytes: allow more"):
        export_cache(small_store, out, ExportOptions(max_bytes=27))
    with pytest.raises(
        BuildError, match="occurs 1,000,000 times and makes up half of all followers: allow rarer ones"
    ):
        export_cache(small_store, out, ExportOptions(min_count=10**6))
    with pytest.raises(BuildError, match="is a directory"):
        export_cache(small_store, tmp_path)
    assert names(out.parent) == []


def test_a_file_is_whole_or_the_one_before(
    small_store: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_cache(small_store, out)
    before = out.read_bytes()
    with pytest.raises(BuildError, match="exists: choose another file, or replace it"):
        export_cache(small_store, out)

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(llama_cpp, "_cut", full)
    with pytest.raises(OSError, match="No space"):
        export_cache(small_store, out, ExportOptions(max_bytes=10**6), overwrite=True)
    assert out.read_bytes() == before
    assert names(out.parent) == ["cache.bin"]


def test_who_may_not_read_the_store_may_not_read_the_file(
    small_store: Path, out: Path, tmp_path: Path
) -> None:
    private = shutil.copytree(small_store, tmp_path / "private")
    (private / "manifest.json").chmod(0o600)
    export_cache(private, out)
    assert out.stat().st_mode & 0o077 == 0
