import shutil
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest

from draftstore.errors import BuildError
from draftstore.storage.manifest import load_manifest, manifest_digest
from draftstore.storage.staging import BuildResult
from draftstore.stores.crest import build as crest_module
from draftstore.stores.crest import packing
from draftstore.stores.crest.build import RULE, CrestOptions, build_crest
from draftstore.stores.crest.codes import EntryCodec
from draftstore.stores.crest.entries import LMDB_FILE, entries_digest, key_dtype
from draftstore.stores.crest.store import DICTIONARY_FILE, KEPT_FILE, CrestStore
from draftstore.stores.registry import verify_store
from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.stores.rest.store import RestDrafter, RestStore
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from tests import reference
from tests.conftest import write_texts
from tests.fakes import killed
from tests.reference import Ngram, Stored, nodes_of
from tests.unit.stores.crest.test_codes import decoded, trees_of
from tests.unit.stores.crest.test_counts import documents_of
from tests.unit.stores.rest.test_build import contents, names

pytestmark = pytest.mark.usefixtures("no_fsync")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "stores").mkdir()
    return tmp_path / "stores" / "crest"


def build(rest: Path, out: Path, **changes: Any) -> BuildResult:
    """Build a small store; fields of the options, `overwrite` and `workers` may differ."""
    arguments = {name: changes.pop(name) for name in ("overwrite", "workers", "progress") if name in changes}
    limit = {} if "max_bytes" in changes else {"ngrams": 150}
    fields = {"max_n": 3, **limit, **changes}
    return build_crest(CrestOptions(name="test", **fields), rest, out, **arguments)


def require_whole(store: Path) -> None:
    manifest = load_manifest(store)
    assert verify_store(store, manifest) == []
    assert set(contents(store)) == set(manifest.files)
    CrestStore.open(store).close()


def kept(store: Path) -> list[Ngram]:
    return [tuple(tokens) for tokens in pl.read_parquet(store / KEPT_FILE)["tokens"].to_list()]


# --- what is built ---


def require_exact(store: Path, rest: Path, nodes: int) -> None:
    """Compare every file with what the texts say, counts and bytes, and with what the REST store drafts, trees."""
    documents, expected = documents_of(rest), kept(store)  # by gain, see the tests of selections
    drafter = RestDrafter(RestStore.open(rest).index, RULE)
    manifest = load_manifest(store)
    opened = CrestStore.open(store)
    dtype = key_dtype(manifest.vocab_size)
    codec = EntryCodec((store / DICTIONARY_FILE).read_bytes())
    rows = pl.read_parquet(store / KEPT_FILE).to_dicts()
    assert [tuple(row["tokens"]) for row in rows] == expected
    values = dict(opened.entries.items())
    assert list(values) == sorted(np.array(ngram, dtype).tobytes() for ngram in expected)
    for rank, row in enumerate(rows, 1):
        value = values[np.array(row["tokens"], dtype).tobytes()]
        tree, count, distinct = decoded(codec, value)
        tree.validate()
        assert tree == drafter.draft(np.array([row["tokens"]], np.int32), nodes)[0].tree
        assert (row["rank"], row["n"], row["nodes"]) == (rank, len(row["tokens"]), len(tree))
        assert row["count"] == count == len(reference.continuations(documents, row["tokens"]))
        assert row["distinct"] == distinct == reference.followers(documents, row["tokens"])
        assert [value] == codec.encode(trees_of([Stored(nodes_of(tree), count, distinct)]))
        assert (row["raw_bytes"], row["bytes"]) == (8 + len(tree.to_bytes()), len(value))
    lengths = {f"n{n}": sum(len(ngram) == n for ngram in expected) for n in range(1, 9)}
    found = manifest.counts
    assert found["entries"] == len(expected) == sum(lengths.values())
    assert {key: value for key, value in lengths.items() if value} == {
        key: value for key, value in found.items() if key in lengths and value
    }
    parameters = manifest.parameters
    assert parameters["entries_sha256"] == entries_digest(sorted(values.items()))
    assert parameters["raw_bytes"] == sum(row["raw_bytes"] for row in rows)
    assert parameters["value_bytes"] == sum(row["bytes"] for row in rows)
    assert parameters["lmdb_bytes"] == (store / LMDB_FILE).stat().st_size


@pytest.mark.parametrize(("max_n", "nodes"), [(3, 64), (2, 7), (8, 256), (1, 1)])
def test_a_store_on_disk(small_store: Path, out: Path, max_n: int, nodes: int) -> None:
    result = build(small_store, out, max_n=max_n, nodes=nodes)
    require_exact(out, small_store, nodes)
    require_whole(out)
    assert (result.path, result.reused, result.manifest) == (out, False, load_manifest(out))
    assert names(out.parent) == ["crest"]


def test_the_manifest_and_the_table(small_store: Path, out: Path) -> None:
    manifest = build(small_store, out).manifest
    source = load_manifest(small_store)
    for field in ("vocab_size", "token_dtype", "tokenizer", "corpus"):
        assert getattr(manifest, field) == getattr(source, field)
    for field in ("documents", "tokens"):
        assert manifest.counts[field] == source.counts[field]
    assert manifest.parameters["plan"]["source"] == manifest_digest(small_store)
    assert load_tokenizer(out / "tokenizer").fingerprint == source.tokenizer.fingerprint
    schema = pq.read_schema(out / KEPT_FILE)
    assert dict(zip(schema.names, map(str, schema.types), strict=True)) == {
        "rank": "int32", "n": "uint8", "tokens": "list<element: uint32>", "count": "int64",
        "distinct": "int64", "nodes": "int16", "raw_bytes": "int32", "bytes": "int32",
    }  # fmt: skip


def rest_of(tokenizer: TextTokenizer, folder: Path, text: str) -> Path:
    (folder / "text.txt").write_text(text)
    return build_rest(
        RestOptions(corpus=(folder / "text.txt",), name="rest"), tokenizer, folder / "rest", workers=1
    ).path


def test_text_without_continuations_is_refused(
    small_tokenizer: TextTokenizer, tmp_path: Path, out: Path
) -> None:
    rest = rest_of(small_tokenizer, tmp_path, "a")
    for limit in ({"ngrams": 5}, {"max_bytes": 1 << 20}):
        with pytest.raises(BuildError, match="holds no n-gram followed by another token"):
            build(rest, out, **limit)
    assert names(out.parent) == []


# --- as many as fit ---


@pytest.mark.parametrize("max_bytes", [16_384, 120_000, 10_000_000])
def test_the_file_is_as_large_as_it_may_be(small_store: Path, out: Path, max_bytes: int) -> None:
    """What is left is less than two pages: one for entries, one for an index of pages."""
    manifest = build(small_store, out, max_bytes=max_bytes).manifest
    size = (out / LMDB_FILE).stat().st_size
    assert size <= max_bytes
    require_whole(out)
    documents = documents_of(small_store)
    every = sum(
        any(reference.continuations(documents, ngram)) for ngram in reference.all_ngrams(documents, 3)
    )
    assert size > max_bytes - 2 * 4096 or manifest.counts["entries"] == every


def test_a_share_of_the_rest_store_limits_all_files_unless_a_size_is_set(
    small_tokenizer: TextTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(7)
    rest = rest_of(small_tokenizer, tmp_path, " ".join(f"w{word}" for word in rng.zipf(1.3, 20_000)))
    limit = load_manifest(rest).index_size / 5

    def size(out: str, **sizes: int) -> float:
        options = CrestOptions(name="test", share=0.2, **sizes)
        return build_crest(options, rest, tmp_path / out).manifest.index_size / limit

    assert 0.7 < size("default") <= 1
    assert size("number", ngrams=5_000) > 1
    assert size("bytes", max_bytes=int(2 * limit)) > 1
    monkeypatch.setattr(crest_module, "DEFAULT_NGRAMS", 50)
    assert size("few") < 0.4


# --- the same bytes ---


def test_two_builds_are_the_same_bytes(
    small_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    build(small_store, tmp_path / "a", workers=1)
    monkeypatch.setattr(packing, "BLOCK", 32)
    build(small_store, tmp_path / "b", workers=7)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert manifest_digest(tmp_path / "a") == manifest_digest(tmp_path / "b")


def test_another_build_is_refused(small_tokenizer: TextTokenizer, tmp_path: Path, out: Path) -> None:
    rest = rest_of(small_tokenizer, tmp_path, "one two three")
    build(rest, out)
    assert build(rest, out).reused
    for changes in ({"max_n": 2}, {"max_bytes": 40_960}):
        with pytest.raises(BuildError, match="exists and is another build: choose another folder, or"):
            build(rest, out, **changes)
    shutil.rmtree(rest)
    rest_of(small_tokenizer, tmp_path, "one two four")
    with pytest.raises(BuildError, match="exists and is another build"):
        build(rest, out)


def test_a_killed_build_ends_with_the_same_bytes(
    small_tokenizer: TextTokenizer, tmp_path: Path, out: Path
) -> None:
    """Killed while LMDB writes the entries."""
    options = RestOptions(corpus=(write_texts(tmp_path / "c.jsonl", 300),), name="rest", segment_tokens=9_000)
    rest = build_rest(options, small_tokenizer, tmp_path / "rest", workers=1).path
    reached = (out.parent / ".crest.partial" / f".{LMDB_FILE}.draft").exists
    killed.kill_when(killed.crest_store, (rest, 3_000, out), reached)
    killed.run(killed.crest_store, (rest, 3_000, out))
    require_whole(out)
    assert contents(out) == contents(build(rest, tmp_path / "whole", ngrams=3_000).path)
    assert names(out.parent) == ["crest"]


def test_a_build_with_a_failed_load_only_loads_again(
    small_store: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any) -> None:
        raise ConnectionError("the server is away")

    monkeypatch.setattr(crest_module, "load_entries", away)
    with pytest.raises(ConnectionError, match="away"):
        build(small_store, out, backend="both")
    assert not out.exists()
    made = (out.parent / ".crest.partial" / "store" / "manifest.json").stat()
    loaded: list[Any] = []
    monkeypatch.setattr(crest_module, "load_entries", lambda *arguments: loaded.append(arguments[:3]))
    monkeypatch.setattr(crest_module, "rank_ngrams", None)
    build(small_store, out, backend="both")
    assert loaded == [("postgres", out.parent / ".crest.partial" / "store", out)]
    assert (out / "manifest.json").stat().st_ino == made.st_ino
    assert names(out.parent) == ["crest"]
