import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftstore.errors import StoreError, TokenizerError
from draftstore.recycling.build import RecyclingOptions, build_recycling, successors
from draftstore.recycling.store import open_drafter
from draftstore.storage.files import hash_file
from draftstore.storage.manifest import (
    FileEntry,
    Manifest,
    TokenizerIdentity,
    load_manifest,
    verify_files,
)
from draftstore.stores.registry import open_store
from draftstore.stores.rest.store import RestStore
from tests.reference import Documents, make_index
from tests.unit.cli.test_commands import Runner, run
from tests.unit.stores.rest.test_build import names

__all__ = ["run"]  # a fixture

MODEL = "org/model"
TOKENIZER = TokenizerIdentity("words", "ab" * 32)


@pytest.fixture(autouse=True)
def quick(no_fsync: None) -> None:
    """Do not wait for the disk."""


@pytest.fixture
def seeded(small_store: Path, tmp_path: Path) -> Path:
    """Return a store built from the small corpus."""
    return build_recycling(RecyclingOptions(model_id=MODEL), small_store, tmp_path / "hot").path


# --- the most common successors ---


def expected_successors(documents: Documents, vocab_size: int) -> list[list[int]]:
    """Return the most common successors of every token, equally common ones by id."""
    pairs = Counter(pair for document in documents for pair in pairwise(document))
    rows = []
    for token in range(vocab_size):
        counts = {second: count for (first, second), count in pairs.items() if first == token}
        best = sorted(counts, key=lambda second: (-counts[second], second))[:8]
        rows.append([*best, *[-1] * (8 - len(best))])
    return rows


texts = st.lists(st.lists(st.integers(0, 11), max_size=30), min_size=1, max_size=6)


@given(st.lists(texts, min_size=1, max_size=3))
def test_seeds_are_the_most_common_successors(segments: list[Documents]) -> None:
    manifest = Manifest(
        "rest", "", "", 12, "uint16", TOKENIZER, {}, {}, {"documents": 1, "tokens": 1, "entries": 1}, {}
    )
    store = RestStore(Path(), manifest, make_index(segments, 12))
    wanted = expected_successors([document for documents in segments for document in documents], 12)
    assert successors(store).tolist() == wanted


# --- the store ---


def test_the_files_of_a_store(small_store: Path, seeded: Path) -> None:
    corpus = load_manifest(small_store)
    matrix = successors(RestStore.open(small_store))
    cells = np.where(matrix < 0, 65_535, matrix).astype("<u2")
    assert names(seeded) == ["manifest.json", "matrix.bin"]
    assert (seeded / "matrix.bin").read_bytes() == cells.tobytes()
    manifest = load_manifest(seeded, "recycling")
    assert verify_files(seeded, manifest) == []
    assert (manifest.name, manifest.target_model) == ("hot", MODEL)
    assert (manifest.corpus, manifest.tokenizer) == (corpus.corpus, corpus.tokenizer)
    assert manifest.parameters["plan"]["content"] == hash_file(seeded / "matrix.bin")
    assert manifest.counts == {
        "documents": corpus.counts["documents"],
        "tokens": corpus.counts["tokens"],
        "entries": np.count_nonzero(matrix[:, 0] >= 0),
        "candidates": np.count_nonzero(matrix >= 0),
    }


@pytest.mark.parametrize("name", ["small_store", "wide_store"])
def test_a_drafter_starts_from_a_copy(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(name)
    matrix, corpus = successors(RestStore.open(path)), load_manifest(path)
    out = build_recycling(RecyclingOptions(model_id=MODEL), path, tmp_path / "hot").path
    size = corpus.vocab_size + 3
    drafter = open_drafter(out, vocab_size=size, tokenizer=corpus.tokenizer, target_model=MODEL)
    assert np.array_equal(drafter.matrix[:-3], matrix)
    assert drafter.matrix[-3:].max() == -1
    last = int(np.argmax(np.count_nonzero(matrix >= 0, axis=1)))
    session = drafter.session([last])
    assert len(session.propose(80)) > 20
    session.observe([0], candidates=np.array([[size - 1]], np.int32))
    again = open_drafter(out, vocab_size=size, tokenizer=corpus.tokenizer)
    assert np.array_equal(again.matrix[:-3], matrix)


def test_another_model_tokenizer_or_vocabulary_is_refused(small_store: Path, seeded: Path) -> None:
    corpus = load_manifest(small_store)
    size, tokenizer = corpus.vocab_size, corpus.tokenizer
    with pytest.raises(StoreError, match=r"of the model 'org/model', found 'org/other'.*start without them"):
        open_drafter(seeded, vocab_size=size, tokenizer=tokenizer, target_model="org/other")
    with pytest.raises(TokenizerError, match="found 'words'"):
        open_drafter(seeded, vocab_size=size, tokenizer=TOKENIZER)
    with pytest.raises(StoreError, match=f"a vocabulary of {size:,} ids, the model has only {size - 1:,}"):
        open_drafter(seeded, vocab_size=size - 1, tokenizer=tokenizer)
    with pytest.raises(StoreError, match=r"of kind 'rest'"):
        open_drafter(small_store, vocab_size=size, tokenizer=tokenizer)
    with pytest.raises(StoreError, match="drafts only while its model decodes"):
        open_store(seeded)


def test_a_matrix_of_another_size_is_refused(small_store: Path, seeded: Path) -> None:
    matrix, corpus = seeded / "matrix.bin", load_manifest(small_store)
    matrix.write_bytes(matrix.read_bytes()[:-16])
    with pytest.raises(StoreError, match=r"matrix\.bin has"):
        open_drafter(seeded, vocab_size=corpus.vocab_size, tokenizer=corpus.tokenizer)
    fields = json.loads((seeded / "manifest.json").read_text())
    fields["files"]["matrix.bin"] = FileEntry.of(matrix).__dict__
    (seeded / "manifest.json").write_text(json.dumps(fields))
    with pytest.raises(StoreError, match="the store is damaged"):
        open_drafter(seeded, vocab_size=corpus.vocab_size, tokenizer=corpus.tokenizer)


# --- the command ---


def test_the_command_builds_a_store(
    run: Runner, small_store: Path, small_crest: Path, tmp_path: Path
) -> None:
    out = tmp_path / "stores" / "hot"
    arguments = ["build", "recycling", "--model-id", MODEL, "--rest", small_store, "--out", out]
    report = run(*arguments, "--json").json()
    assert (report["name"], report["reused"]) == ("hot", False)
    assert report["counts"] == load_manifest(out, "recycling").counts
    assert run(*arguments, "--json").json()["reused"]
    assert f"model       {MODEL}" in run("info", out).out
    assert run("query", out, "--text", "x").error().startswith(f"error: {out} is a store of kind 'recycling'")
    other = ["build", "recycling", "--model-id", MODEL, "--out", tmp_path / "other", "--rest"]
    assert "is not a store" in run(*other, tmp_path / "none").error()
    assert "is a store of kind 'crest'" in run(*other, small_crest).error()
