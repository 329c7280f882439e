import dataclasses
import json
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftstore.errors import CorpusError, StoreError, TokenRangeError
from draftstore.storage.manifest import TokenizerIdentity
from draftstore.text import sharding
from draftstore.text.records import Document
from draftstore.text.sharding import split_text, tokenize_corpus
from draftstore.text.tokens import (
    TokenShards,
    document_starts,
    open_shards,
    sentinel,
    token_dtype,
    write_closed,
)
from tests.reference import plain_digest


def documents_of(shards: TokenShards) -> Iterator[NDArray[Any]]:
    """Yield the ids of each document."""
    for tokens, offsets in shards.arrays():
        yield from np.split(tokens, offsets[1:-1])


class CharacterTokenizer:
    """A stand-in with one id a character, for vocabularies of any size."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.identity = TokenizerIdentity("characters", f"characters-{vocab_size}")

    def encode_documents(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        return [np.array([ord(character) for character in text], dtype=np.int32) for text in texts]


def corpus_of(texts: Sequence[str]) -> Iterator[Document]:
    return (Document.plain(f"d{number}", text) for number, text in enumerate(texts))


def tokenize(documents: Iterator[Document], directory: Path, **options: Any) -> TokenShards:
    tokenizer = options.pop("tokenizer", CharacterTokenizer(70_000))
    return tokenize_corpus([documents], tokenizer, directory, **{"corpus_fingerprint": "c", **options})


def as_texts(shards: TokenShards) -> list[str]:
    return ["".join(map(chr, ids)) for ids in documents_of(shards)]


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


TEXTS = [f"document {number} " + "x" * (number * 7 % 50) for number in range(40)]


@pytest.mark.parametrize(
    ("vocab_size", "name", "free"),
    [
        (1, "uint16", 2**16 - 1),
        (65_535, "uint16", 2**16 - 1),
        (65_536, "uint32", 2**32 - 1),
        (2**31 - 1, "uint32", 2**32 - 1),
    ],
)
def test_token_dtype(vocab_size: int, name: str, free: int) -> None:
    dtype = token_dtype(vocab_size)
    assert (dtype.name, dtype.newbyteorder("<")) == (name, dtype)
    assert sentinel(dtype) == free >= vocab_size
    for wrong in (0, 2**31):
        with pytest.raises(TokenRangeError, match="expected 1 to 2,147,483,647"):
            token_dtype(wrong)


@given(
    texts=st.lists(
        st.text(st.characters(max_codepoint=299), min_size=1, max_size=30), min_size=1, max_size=20
    ),
    shard_tokens=st.integers(1, 100),
    batch_chars=st.integers(1, 100),
    vocab_size=st.sampled_from([300, 70_000]),
)
def test_round_trip(
    tmp_path_factory: pytest.TempPathFactory,
    texts: list[str],
    shard_tokens: int,
    batch_chars: int,
    vocab_size: int,
) -> None:
    directory = tmp_path_factory.mktemp("tokens")
    tokenizer = CharacterTokenizer(vocab_size)
    made = tokenize(
        corpus_of(texts), directory, tokenizer=tokenizer, shard_tokens=shard_tokens, batch_chars=batch_chars
    )
    shards = open_shards(directory)
    assert shards == made
    assert as_texts(shards) == texts
    assert shards.document_count == len(texts)
    assert shards.token_count == shards.character_count == sum(map(len, texts))
    assert shards.dtype == token_dtype(vocab_size)
    assert all(shard.tokens >= shard_tokens for shard in shards.shards[:-1])
    assert all(shard.tokens < shard_tokens + 30 for shard in shards.shards)


def test_split_text_prefers_line_breaks_then_spaces() -> None:
    pieces = [piece for piece, _ in split_text("one two\nthree four five sixseveneight", 10)]
    assert pieces == ["one two\n", "three", " four", " five", " sixsevene", "ight"]


def interrupted(directory: Path, after: int) -> None:
    """Leave behind what an exception after so many documents leaves."""

    def failing() -> Iterator[Document]:
        yield from islice(corpus_of(TEXTS), after)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        tokenize(failing(), directory, shard_tokens=100, batch_chars=1)


def test_long_documents_are_encoded_in_pieces_with_one_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharding, "PIECE_CHARACTERS", 10)
    shards = tokenize(corpus_of(TEXTS), tmp_path, shard_tokens=100, batch_chars=25)
    assert as_texts(shards) == TEXTS
    assert shards.shards[0].tokens < 100 + 80
    assert [digest.tobytes() for part in shards.digests() for digest in part] == list(
        map(plain_digest, TEXTS)
    )
    (tmp_path / "shard-00000.digests").write_bytes(b"cut")
    with pytest.raises(StoreError, match=r"shard-00000.digests has 3 bytes"):
        list(shards.digests())


def tokenize_again(directory: Path) -> list[str]:
    """Return the progress that a rerun reports."""
    calls: list[str] = []
    tokenize(corpus_of(TEXTS), directory, shard_tokens=100, on_progress=lambda *now: calls.append(now[2]))
    return calls


@pytest.mark.parametrize("after", [0, 25])
def test_a_rerun_goes_on_and_gives_the_same_bytes(tmp_path: Path, after: int) -> None:
    tokenize(corpus_of(TEXTS), tmp_path / "whole", shard_tokens=100)
    interrupted(tmp_path / "cut", after)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "cut").glob("shard-*")}
    calls = tokenize_again(tmp_path / "cut")
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert (calls[0] != "0 documents") == (after > 20)


@pytest.mark.parametrize("damage", ["tokens", "gone", "json"])
def test_a_rerun_redoes_a_damaged_shard_and_all_after_it(tmp_path: Path, damage: str) -> None:
    tokenize(corpus_of(TEXTS), tmp_path, shard_tokens=100)
    whole = contents(tmp_path)
    if damage == "gone":
        (tmp_path / "shard-00002.offsets").unlink()
    else:
        (tmp_path / f"shard-00002.{damage}").write_text("{")
    calls = tokenize_again(tmp_path)
    assert contents(tmp_path) == whole
    documents = sum(json.loads(whole[f"shard-0000{n}.json"])["documents"] for n in (0, 1))
    assert calls[0] == f"{documents} documents"


def test_a_corpus_that_changed_unseen_is_refused(tmp_path: Path) -> None:
    interrupted(tmp_path, 25)
    others = (dataclasses.replace(document, id=f"new-{document.id}") for document in corpus_of(TEXTS))
    with pytest.raises(CorpusError, match=r"my corpus changed since .* \(documents 'd0' to "):
        tokenize(others, tmp_path, shard_tokens=100, source="my corpus")
    with pytest.raises(CorpusError, match="changed since"):
        tokenize(corpus_of(TEXTS[:3]), tmp_path, shard_tokens=100)


@pytest.mark.parametrize("text", ["\u012c", "a\U0001fae0"])
def test_every_id_is_checked(tmp_path: Path, text: str) -> None:
    with pytest.raises(TokenRangeError, match=r"document 'd1' has ids .* expected 0 to 299"):
        tokenize(corpus_of(["fine", text]), tmp_path, tokenizer=CharacterTokenizer(300))
    assert sorted(contents(tmp_path)) == ["tokens.json"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokens.json", b"{", "tokens.json cannot be read"),
        ("tokens.json", b'{"format_version": 9}', "format_version: Input should be 2"),
        ("shard-00001.json", b"{}", "shard-00001.json cannot be read"),
        ("shard-00001.tokens", b"cut", "shard-00001.tokens has 3 bytes, expected "),
    ],
)
def test_damaged_directories_are_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    tokenize(corpus_of(TEXTS), tmp_path, shard_tokens=100)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(StoreError, match=message):
        open_shards(tmp_path)


@pytest.mark.parametrize("name", ["tokens.json", "shard-00001.offsets"])
def test_missing_files_are_refused(tmp_path: Path, name: str) -> None:
    tokenize(corpus_of(TEXTS), tmp_path, shard_tokens=100)
    (tmp_path / name).unlink()
    with pytest.raises(StoreError, match=f"{name} is missing"):
        open_shards(tmp_path)


@pytest.mark.parametrize(
    ("suffix", "position", "value", "message"),
    [
        ("tokens", 3, 300, r"holds id 300, expected below 300"),
        ("offsets", 0, 1, "does not match its marker"),
        ("offsets", 1, 999, "does not match its marker"),
        ("offsets", -1, 1, "does not match its marker"),
    ],
)
def test_changed_contents_are_refused(
    tmp_path: Path, suffix: str, position: int, value: int, message: str
) -> None:
    shards = tokenize(corpus_of(TEXTS), tmp_path, tokenizer=CharacterTokenizer(300))
    path = tmp_path / f"shard-00000.{suffix}"
    array = np.fromfile(path, dtype=shards.dtype if suffix == "tokens" else "<i8")
    array[position] = value
    array.tofile(path)
    with pytest.raises(StoreError, match=message):
        list(documents_of(open_shards(tmp_path)))


# --- in one file ---


@given(
    texts=st.lists(st.text("ab\uffff", max_size=9), min_size=1, max_size=9), shard_tokens=st.integers(1, 20)
)
def test_all_documents_in_one_file(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], shard_tokens: int
) -> None:
    folder = tmp_path_factory.mktemp("closed")
    shards = tokenize(corpus_of([*texts, "x"]), folder / "shards", shard_tokens=shard_tokens)
    write_closed(shards, folder / "tokens.bin")
    tokens, starts = np.fromfile(folder / "tokens.bin", shards.dtype), document_starts(shards)
    assert starts[-1] == len(tokens)
    found = [tokens[start:end] for start, end in pairwise(starts.tolist())]
    assert ["".join(map(chr, ids[:-1])) for ids in found] == [*texts, "x"]
    assert all(ids[-1] == sentinel(shards.dtype) for ids in found)
