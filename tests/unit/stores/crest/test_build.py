import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest

from draftstore.errors import BuildError, StoreError
from draftstore.storage.manifest import load_manifest, manifest_digest
from draftstore.storage.staging import BuildResult
from draftstore.stores.crest import build as crest_module
from draftstore.stores.crest import packing
from draftstore.stores.crest.build import RULES, CrestOptions, build_crest
from draftstore.stores.crest.entries import LMDB_FILE, LmdbEntries, entries_digest, key_dtype
from draftstore.stores.crest.envelope import Entry, Envelope, entry_bytes
from draftstore.stores.crest.selection import GAIN_NODES, POOL_FACTOR, SELECTIONS
from draftstore.stores.crest.store import DICTIONARY_FILE, KEPT_FILE, STRATEGIES, CrestStore
from draftstore.stores.registry import verify_store
from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.stores.rest.store import RestDrafter, RestStore
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from tests import reference
from tests.conftest import write_texts
from tests.fakes import killed
from tests.fakes.progress import Steps
from tests.reference import Documents, Ngram, UnclearError, nodes_of
from tests.unit.stores.crest.test_counts import documents_of
from tests.unit.stores.crest.test_selection import ORACLES, assert_ranked_by
from tests.unit.stores.rest.test_build import DISK, contents, names, no_space

pytestmark = pytest.mark.usefixtures("no_fsync")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "stores").mkdir()
    return tmp_path / "stores" / "crest"


def build(rest: Path, out: Path, **changes: Any) -> BuildResult:
    """Build a small store; fields of the options, `overwrite` and `workers` may differ."""
    arguments = {name: changes.pop(name) for name in ("overwrite", "workers", "progress") if name in changes}
    limit = {} if "max_bytes" in changes else {"ngrams": 150}
    fields = {"max_n": 3, "rule": "longest", **limit, **changes}
    return build_crest(CrestOptions(name="test", **fields), rest, out, **arguments)


def require_whole(store: Path) -> None:
    manifest = load_manifest(store)
    assert verify_store(store, manifest) == []
    assert set(contents(store)) == set(manifest.files)
    CrestStore.open(store).close()


def kept(store: Path) -> list[Ngram]:
    return [tuple(tokens) for tokens in pl.read_parquet(store / KEPT_FILE)["tokens"].to_list()]


# --- what is built ---


def require_exact(store: Path, documents: Documents, expected: list[Ngram], nodes: int, depth: int) -> None:
    """Compare every file with what the texts say: what is kept, its counts, its trees, its bytes."""
    manifest = load_manifest(store)
    opened = CrestStore.open(store)
    dtype = key_dtype(manifest.vocab_size)
    packer = Envelope((store / DICTIONARY_FILE).read_bytes())
    rows = pl.read_parquet(store / KEPT_FILE).to_dicts()
    assert [tuple(row["tokens"]) for row in rows] == expected
    values = dict(opened.entries.items())
    assert list(values) == sorted(np.array(ngram, dtype).tobytes() for ngram in expected)
    for rank, row in enumerate(rows, 1):
        value = values[np.array(row["tokens"], dtype).tobytes()]
        entry = opened.envelope.open(value)
        entry.tree.validate()
        assert nodes_of(entry.tree) == reference.ngram_tree(documents, row["tokens"], nodes, depth)
        assert (row["rank"], row["n"], row["nodes"]) == (rank, len(row["tokens"]), len(entry.tree))
        assert row["count"] == entry.occurrences == len(reference.continuations(documents, row["tokens"]))
        assert row["distinct"] == entry.distinct == reference.followers(documents, row["tokens"])
        raw = entry_bytes(Entry(entry.tree, row["count"], row["distinct"]))
        assert value == packer.pack([raw])[0]
        assert (row["raw_bytes"], row["bytes"]) == (len(raw), len(value))
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


@pytest.mark.parametrize(
    ("selection", "max_n", "nodes", "depth"),
    [("single", 2, 64, 10), ("combined", 4, 7, 3), ("global", 8, 256, 2), ("global", 1, 1, 1)],
)
def test_selections_on_disk(
    small_store: Path, out: Path, selection: str, max_n: int, nodes: int, depth: int
) -> None:
    result = build(small_store, out, select=selection, max_n=max_n, nodes=nodes, depth=depth)
    documents = documents_of(small_store)
    expected = [
        ngram
        for ngram in ORACLES[selection](documents, max_n, 150)
        if any(reference.continuations(documents, ngram))
    ]
    require_exact(out, documents, expected, nodes, depth)
    require_whole(out)
    assert (result.path, result.reused, result.manifest) == (out, False, load_manifest(out))
    assert names(out.parent) == ["crest"]


def test_the_default_selection_on_disk(small_store: Path, out: Path) -> None:
    result = build(small_store, out)
    documents = documents_of(small_store)
    found = kept(out)
    require_exact(out, documents, found, 64, 10)
    candidates = reference.gain_candidates(documents, 3, 150 * POOL_FACTOR)
    try:
        gains = reference.ngram_gains(documents, candidates, GAIN_NODES, 10, *STRATEGIES["backoff"])
    except UnclearError:
        pytest.fail("choose other texts")
    worst = gains[found[-1]]
    assert_ranked_by(
        {ngram: gain for ngram, gain in gains.items() if ngram in set(found) or gain < worst}, found
    )
    assert result.manifest.parameters["selection"] == "gain"


def test_ids_above_65_535(wide_store: Path, out: Path) -> None:
    build(wide_store, out, select="global", ngrams=60)
    documents = documents_of(wide_store)
    expected = [
        ngram
        for ngram in reference.select_global(documents, 3, 60)
        if any(reference.continuations(documents, ngram))
    ]
    require_exact(out, documents, expected, 64, 10)
    assert {len(key) % 4 for key, _ in LmdbEntries(out / LMDB_FILE).items()} == {0}


def test_the_manifest_and_the_table(small_store: Path, out: Path) -> None:
    manifest = build(small_store, out).manifest
    source = load_manifest(small_store)
    assert (manifest.kind, manifest.name) == ("crest", "test")
    for field in ("vocab_size", "token_dtype", "tokenizer", "corpus"):
        assert getattr(manifest, field) == getattr(source, field)
    for field in ("documents", "tokens"):
        assert manifest.counts[field] == source.counts[field]
    parameters = manifest.parameters
    assert parameters["plan"]["source"] == manifest_digest(small_store)
    wanted = {"backends": ["lmdb"], "max_n": 3, "selection": "gain", "ngrams": 150, "max_bytes": None}
    assert {key: parameters[key] for key in wanted} == wanted
    assert {path.name for path in out.iterdir()} == {
        "manifest.json", LMDB_FILE, DICTIONARY_FILE, KEPT_FILE, "tokenizer",
    }  # fmt: skip
    assert load_tokenizer(out / "tokenizer").fingerprint == source.tokenizer.fingerprint
    schema = pq.read_schema(out / KEPT_FILE)
    assert dict(zip(schema.names, map(str, schema.types), strict=True)) == {
        "rank": "int32", "n": "uint8", "tokens": "list<element: uint32>", "count": "int64",
        "distinct": "int64", "nodes": "int16", "raw_bytes": "int32", "bytes": "int32",
    }  # fmt: skip


def test_a_draft_of_the_smallest_text(small_tokenizer: TextTokenizer, tmp_path: Path, out: Path) -> None:
    rest = rest_of(small_tokenizer, tmp_path, "Q7")
    [documents] = documents_of(rest)
    assert len(documents) == 2
    build(rest, out, max_n=8)
    require_exact(out, [documents], [(documents[0],)], 64, 10)
    [found] = CrestStore.open(out).drafter().draft(np.array([documents[:1]], np.int32))
    assert (found.tree.tokens.tolist(), found.match_length, found.match_count) == ([documents[1]], 1, 1)


def rest_of(tokenizer: TextTokenizer, folder: Path, text: str) -> Path:
    (folder / "text.txt").write_text(text)
    return build_rest(
        RestOptions(corpus=(folder / "text.txt",), name="rest"), tokenizer, folder / "rest", workers=1
    ).path


@pytest.mark.parametrize("selection", SELECTIONS)
def test_text_that_nothing_follows(
    small_tokenizer: TextTokenizer, tmp_path: Path, out: Path, selection: str
) -> None:
    rest = rest_of(small_tokenizer, tmp_path, "a")
    for limit in ({"ngrams": 5}, {"max_bytes": 1 << 20}):
        with pytest.raises(
            BuildError, match="holds no n-gram that another token follows: nothing to build from"
        ):
            build(rest, out, select=selection, **limit)
    assert names(out.parent) == []


@pytest.mark.parametrize("selection", SELECTIONS)
def test_more_than_there_is(small_store: Path, out: Path, selection: str) -> None:
    """All n-grams that something follows, whatever their order."""
    build(small_store, out, select=selection, max_n=2, ngrams=1 << 40)
    documents = documents_of(small_store)
    expected = {
        ngram
        for ngram in reference.all_ngrams(documents, 2)
        if any(reference.continuations(documents, ngram)) and (selection != "single" or len(ngram) == 2)
    }
    found = kept(out)
    assert (set(found), len(found)) == (expected, len(expected))


def test_what_is_no_rest_store(small_store: Path, small_crest: Path, out: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is not a store"):
        build(tmp_path, out)
    with pytest.raises(StoreError, match="is a store of kind 'crest', expected 'rest'"):
        build(small_crest, out)
    assert names(out.parent) == []


# --- trees drawn by the rule of the REST store ---


def test_trees_drawn_by_backoff_on_disk(small_store: Path, out: Path) -> None:
    """Same n-grams, same counts; the trees are those that the REST store drafts for them."""
    exact = build(small_store, out, select="combined").path
    build(small_store, out.with_name("drawn"), select="combined", rule="backoff")
    rows = [pl.read_parquet(store / KEPT_FILE) for store in (exact, out.with_name("drawn"))]
    known = ["tokens", "count", "distinct"]
    assert rows[0].select(known).equals(rows[1].select(known))
    require_whole(out.with_name("drawn"))
    rule = RULES["backoff"]
    assert rule is not None
    store, rest = (
        CrestStore.open(out.with_name("drawn")),
        RestDrafter(RestStore.open(small_store).index, rule),
    )
    for key, value in store.entries.items():
        ngram = np.frombuffer(key, key_dtype(store.manifest.vocab_size)).astype(np.int32)
        assert store.envelope.open(value).tree == rest.draft(ngram.reshape(1, -1), 64)[0].tree


def test_a_drawn_tree_answers_alone(small_store: Path, out: Path) -> None:
    build(small_store, out, rule="backoff")
    store = CrestStore.open(out)
    backoff, longest = store.drafter("backoff"), store.drafter("longest")
    tokens = RestStore.open(small_store).index.tokens[:400].astype(np.int32)
    contexts = np.lib.stride_tricks.sliding_window_view(tokens, 3)
    drafts = backoff.draft(contexts)
    assert drafts == longest.draft(contexts)
    assert {draft.match_length for draft in drafts} >= {1, 2}
    blend = store.drafter("backoff", alpha=12.0, beta=6.0).draft(contexts)
    assert blend != drafts


# --- as many as fit ---


@pytest.mark.parametrize("selection", ["gain", "single"])
@pytest.mark.parametrize("max_bytes", [16_384, 20_000, 40_960, 65_536, 120_000, 150_000, 10_000_000])
def test_the_file_is_as_large_as_it_may_be(
    small_store: Path, out: Path, selection: str, max_bytes: int
) -> None:
    """What is left is less than two pages: one for entries, one for an index of pages."""
    manifest = build(small_store, out, select=selection, max_bytes=max_bytes).manifest
    size = (out / LMDB_FILE).stat().st_size
    assert size <= max_bytes
    require_whole(out)
    assert manifest.counts["entries"] > 25
    documents = documents_of(small_store)
    ngrams = [ngram for ngram in reference.all_ngrams(documents, 3) if selection == "gain" or len(ngram) == 3]
    every = sum(any(reference.continuations(documents, ngram)) for ngram in ngrams)
    assert size > max_bytes - 2 * 4096 or manifest.counts["entries"] == every


def test_the_file_of_real_text_is_as_large_as_it_may_be(real_store: Path, out: Path) -> None:
    for max_bytes in (100_000, 1_500_000):
        result = build(real_store, out, max_n=4, max_bytes=max_bytes, overwrite=True)
        size = (out / LMDB_FILE).stat().st_size
        assert max_bytes - 2 * 4096 < size <= max_bytes
        assert result.manifest.parameters["lmdb_bytes"] == size


# --- the same bytes ---


def test_two_builds_are_the_same_bytes(
    small_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    for name, workers in (("a", 1), ("b", 2), ("c", 7)):
        build(small_store, tmp_path / name, workers=workers)
    monkeypatch.setattr(packing, "BLOCK", 32)
    build(small_store, tmp_path / "d")
    wholes = [contents(tmp_path / name) for name in "abcd"]
    assert wholes[0] == wholes[1] == wholes[2] == wholes[3]
    assert len({manifest_digest(tmp_path / name) for name in "abcd"}) == 1


def test_progress_is_reported(small_store: Path, out: Path, tmp_path: Path) -> None:
    for target, limit in ((out, {}), (tmp_path / "bytes", {"max_bytes": 40_960})):
        calls = Steps()
        build(small_store, target, progress=calls, **limit)
        for rows in calls.values():
            assert rows == sorted(rows)
        counts = load_manifest(small_store).counts
        assert calls["ranking"][-1] == (counts["tokens"], counts["entries"])
        total = 40_960 if limit else 150
        assert calls["packing"][-1] == (total, total)
        assert calls.keys() == {"ranking", "packing"}


# --- an output that exists ---


@pytest.mark.parametrize(
    "changes",
    [
        {"max_n": 2}, {"max_bytes": 40_960},
    ],
    ids=str,
)  # fmt: skip
def test_another_build_is_refused_unless_it_may_overwrite(
    small_store: Path, out: Path, changes: dict[str, Any]
) -> None:
    build(small_store, out)
    old = contents(out)
    with pytest.raises(BuildError, match="exists and is another build: choose another --out, or pass"):
        build(small_store, out, **changes)
    assert contents(out) == old
    build(small_store, out, overwrite=True, **changes)
    require_whole(out)
    assert names(out.parent) == ["crest"]


def test_a_changed_source_is_another_build(small_tokenizer: TextTokenizer, tmp_path: Path, out: Path) -> None:
    rest = rest_of(small_tokenizer, tmp_path, "one two three")
    build(rest, out)
    shutil.rmtree(rest)
    rest_of(small_tokenizer, tmp_path, "one two four")
    with pytest.raises(BuildError, match="exists and is another build"):
        build(rest, out)


# --- other backends: their loaders are told what is to be loaded; PostgreSQL's own has tests of its own ---


class Loader:
    """Stands for the loader of a backend; fails as often as it is told."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.calls: list[tuple[str, Path, Path, list[tuple[bytes, bytes]]]] = []

    def __call__(self, backend: str, *arguments: Any) -> None:
        store, published, manifest, entries, progress = arguments
        assert load_manifest(store) == manifest
        assert not published.exists()
        progress(0, manifest.counts["entries"])
        self.calls.append((backend, store, published, list(entries.items())))
        if len(self.calls) <= self.failures:
            raise ConnectionError("the server is away")
        progress(manifest.counts["entries"], manifest.counts["entries"])


@pytest.mark.parametrize("backend", ["postgres", "both"])
def test_entries_go_to_other_backends(
    small_store: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    loader = Loader()
    monkeypatch.setattr(crest_module, "load_entries", loader)
    told = Steps()
    manifest = build(small_store, out, backend=backend, progress=told).manifest
    build(small_store, tmp_path / "plain")
    items = list(LmdbEntries(tmp_path / "plain" / LMDB_FILE).items())
    assert loader.calls == [("postgres", out.parent / ".crest.partial" / "store", out, items)]
    assert (out / LMDB_FILE).exists() == (backend == "both")
    assert manifest.parameters["backends"] == (["lmdb", "postgres"] if backend == "both" else ["postgres"])
    assert manifest.parameters["entries_sha256"] == entries_digest(items)
    assert told["loading"] == [(0, len(items)), (len(items), len(items))]
    assert names(out.parent) == ["crest"]


def test_build_resumes_after_loader_failure(
    small_store: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is published; the next attempt loads what was made, and does not make it again."""
    loader = Loader(failures=2)
    monkeypatch.setattr(crest_module, "load_entries", loader)
    made = []
    for _ in range(2):
        with pytest.raises(ConnectionError, match="away"):
            build(small_store, out, backend="both")
        assert not out.exists()
        made.append((out.parent / ".crest.partial" / "store" / "manifest.json").stat())
    monkeypatch.setattr(crest_module, "rank_ngrams", None)
    build(small_store, out, backend="both")
    made.append((out / "manifest.json").stat())
    assert len({(status.st_ino, status.st_mtime_ns) for status in made}) == 1
    assert [call[3] for call in loader.calls] == [loader.calls[0][3]] * 3
    assert names(out.parent) == ["crest"]


def test_other_options_do_not_resume(
    small_store: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crest_module, "load_entries", Loader(failures=1))
    with pytest.raises(ConnectionError, match="away"):
        build(small_store, out, backend="both")
    monkeypatch.undo()
    build(small_store, out, max_n=2)
    build(small_store, tmp_path / "fresh", max_n=2)
    assert contents(out) == contents(tmp_path / "fresh")
    assert names(out.parent) == ["crest"]


# --- builds that do not end well ---


@pytest.mark.parametrize(
    ("module", "step"),
    [
        (packing, "cut_trees"),
        (packing, "write_lmdb"),
        (crest_module, "new_store"),
        (crest_module, "write_ngrams"),
        (crest_module, "hash_files"),
        (crest_module, "save_manifest"),
    ],
)
def test_a_full_disk_leaves_no_store_and_a_rerun_finishes(
    small_store: Path, out: Path, tmp_path: Path, module: ModuleType, step: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, step, no_space)
        with pytest.raises(OSError, match="No space left"):
            build(small_store, out)
    assert not out.exists()
    build(small_store, out)
    build(small_store, tmp_path / "whole")
    assert contents(out) == contents(tmp_path / "whole")
    assert names(out.parent) == ["crest"]


def prepare(out: Path, old: Path | None) -> None:
    shutil.rmtree(out.parent)
    out.parent.mkdir()
    if old:
        shutil.copytree(old, out)


@pytest.mark.parametrize("overwrite", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_crash_at_any_change_of_the_disk(
    small_store: Path, out: Path, tmp_path: Path, overwrite: bool
) -> None:
    """LMDB's own writing is not seen here: for that, processes are killed below."""

    def work() -> None:
        build(small_store, out, ngrams=20, overwrite=overwrite)

    build(small_store, tmp_path / "whole", ngrams=20)
    build(small_store, tmp_path / "old", ngrams=30)
    whole, old = contents(tmp_path / "whole"), contents(tmp_path / "old")
    replaced = tmp_path / "old" if overwrite else None
    prepare(out, replaced)
    assert DISK.run(out.parent, work)
    total = DISK.changes
    assert total > 15
    absent = 0
    for limit in range(total):
        prepare(out, replaced)
        assert not DISK.run(out.parent, work, limit)
        if out.exists():
            require_whole(out)
            assert contents(out) in ([old, whole] if overwrite else [whole])
        else:
            absent += 1
        DISK.run(out.parent, work, limit % 5)  # the second attempt crashes as well
        work()
        require_whole(out)
        assert contents(out) == whole
        build(small_store, out, ngrams=20)
        assert names(out.parent) == ["crest"]
    assert absent == 1 if overwrite else absent > 15


@pytest.fixture(scope="module")
def larger_store(tmp_path_factory: pytest.TempPathFactory, small_tokenizer: TextTokenizer) -> Path:
    folder = tmp_path_factory.mktemp("larger")
    options = RestOptions(corpus=(write_texts(folder / "c.jsonl", 600),), name="larger", segment_tokens=9_000)
    return build_rest(options, small_tokenizer, folder / "store", workers=1).path


@pytest.fixture(scope="module")
def larger_crest(larger_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(larger_store, tmp_path_factory.mktemp("whole") / "crest", ngrams=3_000).path


def finish(arguments: Sequence[Any], out: Path, whole: Path) -> None:
    """Check that a killed build left no half store, and that the same build ends with the same bytes."""
    if out.exists():
        require_whole(out)
    else:
        with pytest.raises(StoreError):
            CrestStore.open(out)
    killed.run(killed.crest_store, arguments)
    require_whole(out)
    assert contents(out) == contents(whole)
    assert names(out.parent) == ["crest"]


def test_killed_while_the_entries_are_written(larger_store: Path, larger_crest: Path, out: Path) -> None:
    arguments = (larger_store, 3_000, out)
    killed.kill_when(
        killed.crest_store, arguments, (out.parent / ".crest.partial" / f".{LMDB_FILE}.draft").exists
    )
    finish(arguments, out, larger_crest)


def test_options_and_manifest_agree_on_json(small_store: Path, out: Path) -> None:
    """The plan is compared after a round trip through JSON; tuples must not look like another build."""
    options = CrestOptions(name="test", max_n=3, ngrams=150)
    build_crest(options, small_store, out)
    plan = json.loads((out / "manifest.json").read_text())["parameters"]["plan"]
    assert set(options.plan()) | {"kind", "source", "entries_version"} == set(plan)
    assert build_crest(options.changed(), small_store, out).reused
