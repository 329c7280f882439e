"""Shingles: found where a text has them, and nowhere else; a slow and obvious oracle."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftstore.errors import CorpusError
from draftstore.text import encoding, shingles
from draftstore.text.records import Document
from draftstore.text.shingles import LENGTHS, Finder, Shingles, encode_texts
from draftstore.text.tokenizer import TextTokenizer

END = 9
TOKENS = st.lists(st.integers(0, 3), max_size=30)


def grams(ids: list[int], length: int) -> set[tuple[int, ...]]:
    return {tuple(ids[i : i + length]) for i in range(len(ids) - length + 1)}


def of(*texts: list[int]) -> Shingles:
    return Shingles.of(np.array(ids, np.int32) for ids in texts)


@given(removed=st.lists(TOKENS, max_size=3), store=st.lists(TOKENS, max_size=3))
def test_shingles_of_removed_texts_are_found_in_a_store(
    removed: list[list[int]], store: list[list[int]]
) -> None:
    tokens = np.array([token for ids in store for token in [*ids, END]], np.uint16)
    made = of(*removed)
    found = {length: places for length, _, places in Finder(made).find(tokens, END)}
    for length in LENGTHS:
        known = {gram for ids in removed for gram in grams(ids, length)}
        assert len(made.hashes[length]) == len(known)
        shared = known & {gram for ids in store for gram in grams(ids, length)}
        at = {tuple(tokens[place : place + length].tolist()) for place in found.get(length, np.empty(0, int))}
        assert at == shared
    assert made.texts == len(removed)
    assert made.short == sum(len(ids) < LENGTHS[0] for ids in removed)


def test_types_of_ids_do_not_matter() -> None:
    made = of([1, 2, 3, 4, 5])
    for dtype in (np.uint16, np.uint32):
        assert [hit[0] for hit in Finder(made).find(np.array([1, 2, 3, 4, 5], dtype), 100)] == [4, 5]


def test_of_very_much_text_a_sample_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shingles, "MOST", 100)
    texts = [np.random.default_rng(seed).integers(0, 1000, 300).astype(np.int32) for seed in range(5)]
    made = Shingles.of(texts)
    for length in LENGTHS:
        assert 25 <= len(made.hashes[length]) <= 100
    found = {
        length: len(hashes)
        for length, hashes, _ in Finder(made).find(np.concatenate(texts).astype(np.uint16), 1000)
    }
    assert found == {length: len(hashes) for length, hashes in made.hashes.items()}


def test_files_of_hashes(tmp_path: Path) -> None:
    path = tmp_path / "1.npz"
    made = of([1, 2, 3, 4, 5], [1])
    made.save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    found = Shingles.load(path)
    assert (found.texts, found.short, found.size) == (2, 1, 3)
    assert all(np.array_equal(found.hashes[length], made.hashes[length]) for length in LENGTHS)
    both = found.joined(of([1, 2, 3, 4, 6]))
    assert (both.texts, both.size) == (3, 5)
    path.write_bytes(b"x")
    with pytest.raises(CorpusError, match="nothing can be proven"):
        Shingles.load(path)
    with pytest.raises(CorpusError, match="nothing can be proven"):
        Shingles.load(tmp_path / "2.npz")


def test_texts_are_cut_as_builds_cut_them(
    small_tokenizer: TextTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shingles, "BATCH", 4)
    for module in (shingles, encoding):
        monkeypatch.setattr(module, "PIECE_CHARACTERS", 30)
    documents = [Document(str(i), "the quick brown fox jumps over it " * i + "ø") for i in range(9)]
    shards = encoding.tokenize_corpus(iter(documents), small_tokenizer, tmp_path, corpus_fingerprint="f")
    encoded = list(encode_texts(documents, small_tokenizer))
    assert [ids.tolist() for ids in encoded] == [ids.tolist() for ids in shards.documents()]
