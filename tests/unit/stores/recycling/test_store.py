import json
import shutil
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftstore.assembly import Sources, assemble
from draftstore.drafting.rank_matrix import best_successors
from draftstore.drafting.rank_tree import RankTree
from draftstore.drafting.recycling import RecyclingDrafter
from draftstore.errors import BuildError, DraftstoreError, StoreError, TokenizerError
from draftstore.storage.files import hash_file
from draftstore.storage.manifest import (
    FileEntry,
    Manifest,
    TokenizerIdentity,
    load_manifest,
    save_manifest,
    verify_files,
)
from draftstore.stores.crest.entries import key_dtype
from draftstore.stores.crest.store import CrestStore
from draftstore.stores.recycling import build as recycling_build
from draftstore.stores.recycling.build import save_recycling, seed_from
from draftstore.stores.recycling.store import RecyclingStore
from draftstore.stores.registry import open_store
from draftstore.stores.rest.store import RestStore
from draftstore.text.tokenizer import TextTokenizer
from draftstore.trees.tree import DraftTree
from tests.examples import examples
from tests.reference import Documents, make_index
from tests.unit.cli.test_commands import Runner, run
from tests.unit.stores.rest.test_build import names

__all__ = ["run"]  # a fixture

MODEL = "org/model"
TOKENIZER = TokenizerIdentity("words", "ab" * 32)
TREE = RankTree(["0", "1", "00"], [9, 5, 2], [3, 1, 2])
MATRIX = np.array([[2, 1, -1, -1, -1, -1, -1, -1], [-1] * 8, [0, -1, 1, -1, -1, -1, -1, -1]], np.int32)


@pytest.fixture(autouse=True)
def quick(no_fsync: None) -> None:
    """Do not wait for the disk."""


def drafter(vocab_size: int = 3, matrix: NDArray[np.int32] = MATRIX) -> RecyclingDrafter:
    tree = RankTree(TREE.paths, TREE.tries.tolist(), TREE.hits.tolist())
    return RecyclingDrafter(vocab_size, matrix=matrix, tree=tree)


def save(out: Path, source: RecyclingDrafter | None = None, **more: Any) -> Path:
    arguments = {"target_model": MODEL, "tokenizer": TOKENIZER, **more}
    return save_recycling(source or drafter(), out, **arguments).path


def rewrite(store: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    """Change a file of a store, and the manifest so that it fits."""
    (store / name).write_bytes(change((store / name).read_bytes()))
    manifest = load_manifest_anyhow(store)
    manifest.files[name] = FileEntry.of(store / name)
    save_manifest(store, manifest)


def load_manifest_anyhow(store: Path) -> Manifest:
    return Manifest.from_json((store / "manifest.json").read_text(), store)


# --- the format ---


def test_the_files_of_a_store_to_the_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    out = save(tmp_path / "hot", name="Hot")
    assert names(out) == ["manifest.json", "matrix.bin", "tree.json"]
    assert (out / "matrix.bin").read_bytes() == (
        b"\x02\0\x01\0" + b"\xff\xff" * 6 + b"\xff\xff" * 8 + b"\0\0\xff\xff\x01\0" + b"\xff\xff" * 5
    )
    fields = {"paths": ["0", "1", "00"], "tries": [9, 5, 2], "hits": [3, 1, 2]}
    assert json.loads((out / "tree.json").read_text()) == fields
    content = {name: hash_file(out / name) for name in ("matrix.bin", "tree.json")}
    assert json.loads((out / "manifest.json").read_text()) == {
        "kind": "recycling",
        "name": "Hot",
        "created": "1970-01-01T00:00:00+00:00",
        "vocab_size": 3,
        "token_dtype": "uint16",
        "tokenizer": {"name": "words", "fingerprint": "ab" * 32},
        "parameters": {
            "nodes": 3,
            "plan": {
                "kind": "recycling", "target_model": MODEL, "tokenizer": "ab" * 32, "vocab_size": 3,
                "content": content,
            },
        },
        "corpus": {"sources": [], "bad_records": 0, "empty_documents": 0},
        "counts": {"documents": 0, "tokens": 0, "entries": 2, "candidates": 4},
        "files": {
            name: {"size": (out / name).stat().st_size, "sha256": digest} for name, digest in content.items()
        },
        "target_model": MODEL,
        "format_version": 1,
    }  # fmt: skip


@pytest.mark.parametrize("vocab_size", [1, 8, 65_535, 65_536, 70_000])
def test_what_is_saved_is_opened(tmp_path: Path, vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    matrix = rng.integers(-1, vocab_size, (vocab_size, 8)).astype(np.int32)
    matrix[-1, 0] = vocab_size - 1
    source = RecyclingDrafter(vocab_size, matrix=matrix)
    source.session([0]).observe([0], tree=DraftTree.empty())
    out = save(tmp_path / "hot", source)
    store = RecyclingStore.open(out, target_model=MODEL, tokenizer=TOKENIZER, vocab_size=vocab_size)
    again = store.drafter()
    assert np.array_equal(again.matrix, source.matrix)
    assert again.tree.paths == source.tree.paths
    for name in ("tries", "hits"):
        assert np.array_equal(getattr(again.tree, name), getattr(source.tree, name))
    assert again.session([0]).propose(80) == source.session([0]).propose(80)
    width = 2 if vocab_size < 65_536 else 4
    assert (out / "matrix.bin").stat().st_size == vocab_size * 8 * width
    assert store.manifest.token_dtype == f"uint{8 * width}"
    assert verify_files(out, store.manifest) == []
    store.close()


def test_a_store_of_49152_ids_is_small(tmp_path: Path) -> None:
    source = RecyclingDrafter(49_152, matrix=np.tile(np.arange(8, dtype=np.int32), (49_152, 1)))
    store = RecyclingStore.open(save(tmp_path / "hot", source))
    assert store.manifest.size < 1_000_000
    assert source.matrix.nbytes < 2_000_000


def test_drafters_of_a_store_are_their_own(tmp_path: Path) -> None:
    store = RecyclingStore.open(save(tmp_path / "hot"))
    first = store.drafter()
    first.session([1]).observe([0], candidates=np.array([[2]], np.int32))
    assert first.matrix[1, 0] == 2
    assert np.array_equal(store.drafter().matrix, MATRIX)
    assert store.drafter().tree.tries.tolist() == [9, 5, 2]
    wider = store.drafter(vocab_size=5)
    assert wider.vocab_size == 5
    assert wider.matrix[3:].max() == -1
    wider.session([4])
    with pytest.raises(DraftstoreError, match="at most 2 tokens by 8"):
        store.drafter(vocab_size=2)


# --- saving ---


def test_saving_again_replaces_a_store(tmp_path: Path) -> None:
    out = save(tmp_path / "hot")
    assert save_recycling(drafter(), out, target_model=MODEL, tokenizer=TOKENIZER).reused
    changed = drafter()
    changed.session([1]).observe([0], candidates=np.array([[2]], np.int32))
    with pytest.raises(BuildError, match="exists and is another build"):
        save(out, changed)
    with pytest.raises(BuildError, match="exists and is another build"):
        save(out, target_model="org/other")
    save(out, changed, overwrite=True)
    assert RecyclingStore.open(out).matrix[1, 0] == 2
    assert names(tmp_path) == ["hot"]
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    with pytest.raises(BuildError, match="is not a store"):
        save(tmp_path / "notes", overwrite=True)
    with pytest.raises(BuildError, match="name it"):
        save(tmp_path / "other", target_model="")


@pytest.mark.parametrize("step", ["hash_files", "save_manifest", "_describe"])
def test_a_save_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("the disk is full")

    out, fresh = save(tmp_path / "hot"), tmp_path / "fresh"
    changed = drafter()
    changed.session([1]).observe([0], candidates=np.array([[2]], np.int32))
    with monkeypatch.context() as patch:
        patch.setattr(recycling_build, step, fail)
        for path in (out, fresh):
            with pytest.raises(OSError, match="the disk is full"):
                save(path, changed, overwrite=True)
    assert np.array_equal(RecyclingStore.open(out).matrix, MATRIX)
    assert not fresh.exists()
    for path in (out, fresh):
        assert RecyclingStore.open(save(path, changed, overwrite=True)).matrix[1, 0] == 2
    assert names(tmp_path) == ["fresh", "hot"]


# --- what is refused ---


def test_another_model_tokenizer_or_vocabulary_is_refused(tmp_path: Path) -> None:
    out = save(tmp_path / "hot")
    with pytest.raises(StoreError, match="of the model 'org/model', found 'org/other'"):
        RecyclingStore.open(out, target_model="org/other")
    other = TokenizerIdentity("letters", "cd" * 32)
    with pytest.raises(TokenizerError, match=r"with tokenizer 'words' .*, found 'letters'"):
        RecyclingStore.open(out, tokenizer=other)
    with pytest.raises(StoreError, match="a vocabulary of 3 ids, the model knows 2"):
        RecyclingStore.open(out, vocab_size=2)
    assert RecyclingStore.open(out, vocab_size=4).manifest.vocab_size == 3
    with pytest.raises(StoreError, match=r"of kind 'recycling'"):
        RestStore.open(out)
    with pytest.raises(StoreError, match=r"of kind 'recycling'"):
        open_store(out)


def test_an_assembly_starts_from_a_store(tmp_path: Path) -> None:
    out = save(tmp_path / "hot")

    def open_it(**changes: Any) -> DraftTree:
        known = {"vocab_size": 4, "tokenizer": TOKENIZER, "model": MODEL, **changes}
        with assemble(Sources(stores=(out,)), **known) as assembly:
            return assembly.session([1, 0]).propose(1)

    assert open_it().tokens.tolist() == [2]
    for wrong in ({"vocab_size": 2}, {"model": "org/other"}):
        with pytest.raises(StoreError, match="start without them"):
            open_it(**wrong)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-2] + b"\x03\0", r"matrix.bin holds id 3, expected ids below 3"),
        (lambda data: data[:-2] + b"\xfe\xff", r"matrix.bin holds id 65,534, expected ids below 3"),
        (lambda data: data[:-2] + b"\x01\0", r"the row of id 2 in matrix.bin holds an id twice"),
        (lambda data: data[:-16], r"matrix.bin has 32 bytes, expected 48 for 3 ids"),
        (lambda data: data + b"\0", r"matrix.bin has 49 bytes, expected 48 for 3 ids"),
        (lambda data: b"", r"matrix.bin has 0 bytes"),
    ],
)
def test_a_damaged_matrix_is_refused(tmp_path: Path, change: Callable[[bytes], bytes], message: str) -> None:
    out = save(tmp_path / "hot")
    rewrite(out, "matrix.bin", change)
    with pytest.raises(StoreError, match=message + r".*: the store is damaged"):
        RecyclingStore.open(out)


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", "nul", "[" * 100_000, '"0"', '{"paths": ["0"], "tries": [1]}',
        '{"paths": "0", "tries": [1], "hits": [1]}',
        '{"paths": ["0"], "tries": [true], "hits": [0]}',
        '{"paths": ["0"], "tries": [1.5], "hits": [0]}',
        '{"paths": ["0"], "tries": [1], "hits": [2]}',
        '{"paths": ["0"], "tries": [1, 2], "hits": [0]}',
        '{"paths": ["00"], "tries": [1], "hits": [0]}',
        '{"paths": ["9"], "tries": [1], "hits": [0]}',
        '{"paths": [0], "tries": [1], "hits": [0]}',
        '{"paths": [["0"]], "tries": [1], "hits": [0]}',
        f'{{"paths": ["0"], "tries": [{10**30}], "hits": [0]}}',
    ],
)  # fmt: skip
def test_a_damaged_tree_is_refused(tmp_path: Path, text: str) -> None:
    out = save(tmp_path / "hot")
    rewrite(out, "tree.json", lambda _: text.encode())
    with pytest.raises(StoreError, match=r"tree.json does not hold a static tree .* the store is damaged"):
        RecyclingStore.open(out)


def test_files_that_are_no_store(tmp_path: Path) -> None:
    out = save(tmp_path / "hot")
    for name in ("matrix.bin", "tree.json"):
        shutil.copytree(out, tmp_path / "bad")
        (tmp_path / "bad" / name).write_bytes(b"x")
        with pytest.raises(StoreError, match=f"{name} has 1 bytes, expected"):
            RecyclingStore.open(tmp_path / "bad")
        (tmp_path / "bad" / name).unlink()
        with pytest.raises(StoreError, match=f"{name} is missing"):
            RecyclingStore.open(tmp_path / "bad")
        shutil.rmtree(tmp_path / "bad")
    manifest = load_manifest_anyhow(out)
    del manifest.files["matrix.bin"]
    save_manifest(out, manifest)
    (out / "matrix.bin").unlink()
    with pytest.raises(StoreError, match="the store is damaged"):
        RecyclingStore.open(out)


def test_a_huge_vocabulary_allocates_nothing(tmp_path: Path) -> None:
    out = save(tmp_path / "hot")
    path = out / "manifest.json"
    for size in (2**31 - 1, 2**40):
        path.write_text(path.read_text().replace('"vocab_size": 3,\n  "', f'"vocab_size": {size},\n  "'))
        path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": size}))
        with pytest.raises(StoreError, match="the store is damaged"):
            RecyclingStore.open(out)


# --- seeds ---


def successors(documents: Documents, vocab_size: int) -> list[list[int]]:
    """Return the most common successors of every token, equally common ones by id."""
    pairs = Counter(pair for document in documents for pair in pairwise(document))
    rows = []
    for token in range(vocab_size):
        counts = {second: count for (first, second), count in pairs.items() if first == token}
        best = sorted(counts, key=lambda second: (-counts[second], second))[:8]
        rows.append([*best, *[-1] * (8 - len(best))])
    return rows


texts = st.lists(st.lists(st.integers(0, 11), max_size=30), min_size=1, max_size=6)


@examples(60)
@given(st.lists(texts, min_size=1, max_size=3))
def test_seeds_are_the_most_common_successors(segments: list[Documents]) -> None:
    manifest = Manifest(
        "rest", "", "", 12, "uint16", TOKENIZER, {}, {}, {"documents": 1, "tokens": 1, "entries": 1}, {}
    )
    store = RestStore(Path(), manifest, make_index(segments, 12))
    wanted = successors([document for documents in segments for document in documents], 12)
    assert seed_from(store).tolist() == wanted


def test_equally_common_successors_come_by_id() -> None:
    matrix = np.full((4, 8), -1, np.int32)
    bigrams = np.array([[0, second] for second in range(12)] + [[3, 1], [3, 2]], np.uint16)
    counts = np.array([1, 1, 5, 1, 5, 1, 1, 1, 1, 9, 1, 1, 1, 1], np.int64)
    best_successors(bigrams, counts, matrix)
    assert matrix.tolist() == [[9, 2, 4, 0, 1, 3, 5, 6], [-1] * 8, [-1] * 8, [1, 2, *[-1] * 6]]


def documents_of(store: RestStore) -> Documents:
    """Return the runs of tokens between sentinels, in which nothing is continued across."""
    documents: Documents = [[]]
    for token in store.index.tokens.tolist():
        if token < store.manifest.vocab_size:
            documents[-1].append(token)
        else:
            documents.append([])
    return documents


@pytest.mark.parametrize("name", ["small_store", "wide_store"])
def test_seeds_from_a_real_store(name: str, request: pytest.FixtureRequest) -> None:
    store = RestStore.open(request.getfixturevalue(name))
    matrix = seed_from(store)
    assert matrix.shape == (store.manifest.vocab_size, 8)
    documents = documents_of(store)
    tokens = sorted({token for document in documents for token in document})
    rows = dict(enumerate(matrix.tolist()))
    remap = {token: place for place, token in enumerate(tokens)}
    wanted = successors([[remap[token] for token in document] for document in documents], len(tokens))
    for token in tokens:
        assert [remap.get(second, -1) for second in rows[token]] == wanted[remap[token]]
    assert np.count_nonzero(matrix[:, 0] >= 0) <= len(tokens)


@pytest.mark.parametrize("name", ["small_crest", "wide_crest"])
def test_seeds_from_a_crest_store(name: str, request: pytest.FixtureRequest) -> None:
    store = CrestStore.open(request.getfixturevalue(name))
    matrix = seed_from(store)
    width = key_dtype(store.manifest.vocab_size)
    found = 0
    for key, value in store.entries.items():
        tokens = np.frombuffer(key, width).tolist()
        if len(tokens) == 1:
            tree = store.envelope.open(value).tree
            wanted = tree.tokens[tree.parents == -1].tolist()[:8]
            assert matrix[tokens[0]].tolist() == [*wanted, *[-1] * (8 - len(wanted))]
            found += 1
    assert found > 5
    assert np.count_nonzero(matrix[:, 0] >= 0) <= found
    store.close()


def test_a_seeded_drafter_drafts_at_once(small_store: Path) -> None:
    rest = RestStore.open(small_store)
    source = RecyclingDrafter(rest.manifest.vocab_size, matrix=seed_from(rest))
    last = int(np.argmax(np.count_nonzero(source.matrix >= 0, axis=1)))
    tree = source.session([last]).propose(80)
    tree.validate()
    assert len(tree) > 20


# --- the commands ---


def test_build_info_and_verify(run: Runner, small_store: Path, tmp_path: Path) -> None:
    out = tmp_path / "stores" / "hot"
    arguments = ["build", "recycling", "--model-id", MODEL, "--seed-from", small_store, "--out", out]
    report = run(*arguments, "--json").json()
    manifest = load_manifest(out, "recycling")
    seed = load_manifest(small_store)
    assert (report["name"], report["reused"], report["counts"]) == ("hot", False, manifest.counts)
    assert (manifest.corpus, manifest.tokenizer) == (seed.corpus, seed.tokenizer)
    assert manifest.counts["tokens"] == seed.counts["tokens"]
    assert np.array_equal(RecyclingStore.open(out).matrix, seed_from(RestStore.open(small_store)))
    assert run(*arguments, "--json").json()["reused"] is True
    shown = run("info", out).out
    assert "recycling, format version 1" in shown
    assert f"model       {MODEL}" in shown
    assert run("info", out, "--json").json()["target_model"] == MODEL
    assert "is intact: 2 files" in run("verify", out).out
    data = bytearray((out / "matrix.bin").read_bytes())
    data[0] ^= 1
    (out / "matrix.bin").write_bytes(bytes(data))
    failed = run("verify", out)
    assert failed.status == 1
    assert "matrix.bin has SHA-256" in failed.err
    error = run(*arguments, "--nodes", 20).error()
    assert "exists and is another build" in error
    assert run(*arguments, "--nodes", 20, "--overwrite", "--json").json()["reused"] is False
    assert len(RecyclingStore.open(out).tree) == 20
    assert run("query", out, "--text", "x").error().startswith(f"error: {out} is a store of kind 'recycling'")


def test_build_without_a_seed(
    run: Runner, small_tokenizer: TextTokenizer, small_crest: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "small-bpe"
    folder.mkdir()
    small_tokenizer.save(folder)
    build = ["build", "recycling", "--model-id", MODEL, "--tokenizer", folder, "--json"]
    run(*build, "--out", tmp_path / "cold").json()
    cold = RecyclingStore.open(tmp_path / "cold", tokenizer=small_tokenizer.identity)
    assert cold.manifest.vocab_size == small_tokenizer.vocab_size
    assert cold.manifest.counts["candidates"] == 0
    run(*build, "--out", tmp_path / "padded", "--vocab-size", 1000, "--seed-from", small_crest).json()
    padded = RecyclingStore.open(tmp_path / "padded")
    assert (padded.manifest.vocab_size, len(padded.matrix)) == (1000, 1000)
    assert padded.manifest.counts["candidates"] > 0
    ran = run("build", "recycling", "--model-id", MODEL, "--out", tmp_path / "other")
    assert ran.status == 2
    assert "Give --tokenizer" in ran.err


def test_build_refuses_a_seed_of_another_tokenizer(
    run: Runner, wide_tokenizer: TextTokenizer, small_store: Path, small_dense: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "wide-words"
    folder.mkdir()
    wide_tokenizer.save(folder)
    build = ["build", "recycling", "--model-id", MODEL, "--out", tmp_path / "hot"]
    error = run(*build, "--tokenizer", folder, "--seed-from", small_store).error()
    assert "small-bpe" in error
    assert "wide-words" in error
    assert "is not a store" in run(*build, "--seed-from", tmp_path / "none").error()
    run(*build, "--seed-from", small_store, "--json").json()
    assert "drafts only while its model decodes" in run(*build, "--seed-from", tmp_path / "hot").error()
    assert "is a store of kind 'dresd'" in run(*build, "--seed-from", small_dense).error()
    assert not (tmp_path / "none").exists()
