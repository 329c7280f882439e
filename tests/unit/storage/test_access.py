"""Who may read a store: only those who may read its sources."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftstore.storage.files import denied_bits
from draftstore.stores.crest.build import CrestOptions, build_crest
from draftstore.stores.crest.counts import CountOptions, build_counts
from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.text.tokenizer import TextTokenizer
from draftstore.text.tokenizing import CorpusOptions, build_tokens
from tests.fakes.progress import calling


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def write_corpus(path: Path, mode: int) -> Path:
    lines = [json.dumps({"text": f"for item in range({number}): print(item)\n" * 4}) for number in range(20)]
    path.write_text("\n".join(lines))
    path.chmod(mode)
    return path


def modes(store: Path) -> set[int]:
    """Return the modes of a store and of all that is in it."""
    return {path.stat().st_mode & 0o777 for path in [store, *store.rglob("*")]}


def test_a_store_of_private_texts_is_private(tmp_path: Path, small_tokenizer: TextTokenizer) -> None:
    corpus = (write_corpus(tmp_path / "open.jsonl", 0o644), write_corpus(tmp_path / "log.jsonl", 0o600))
    during: set[int] = set()

    def look(*_: object) -> None:
        during.add((tmp_path / ".chat.partial").stat().st_mode & 0o777)

    build_tokens(CorpusOptions(corpus=corpus).texts(), "chat", small_tokenizer, tmp_path / "tokens")
    options = RestOptions(corpus=corpus, name="chat")
    build_rest(options, small_tokenizer, tmp_path / "chat", workers=1, progress=calling(hashing=look))
    assert during == {0o700}
    assert modes(tmp_path / "chat") == modes(tmp_path / "tokens") == {0o700, 0o600}
    build_counts(tmp_path / "chat", tmp_path / "counts", CountOptions(max_n=2))
    build_crest(CrestOptions(name="small", max_n=2), tmp_path / "chat", tmp_path / "small", workers=1)
    assert modes(tmp_path / "counts") == modes(tmp_path / "small") == {0o700, 0o600}


def test_a_store_of_open_texts_is_as_the_umask_says(tmp_path: Path, small_tokenizer: TextTokenizer) -> None:
    options = RestOptions(corpus=(write_corpus(tmp_path / "open.jsonl", 0o644),), name="chat")
    build_rest(options, small_tokenizer, tmp_path / "chat", workers=1)
    assert modes(tmp_path / "chat") == {0o755, 0o644}
    os.umask(0o027)
    build_rest(options, small_tokenizer, tmp_path / "chat", workers=1, overwrite=True)
    assert modes(tmp_path / "chat") == {0o750, 0o640}


@pytest.mark.parametrize(
    ("sources", "expected"),
    [([], 0), ([0o644], 0), ([0o640], 0o007), ([0o640, 0o644], 0o007), ([0o604], 0o070), ([0o600], 0o077)],
)
def test_the_strictest_source_decides(tmp_path: Path, sources: list[int], expected: int) -> None:
    assert denied_bits(write_corpus(tmp_path / str(n), mode) for n, mode in enumerate(sources)) == expected


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another group")
def test_another_group_is_not_trusted(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "team", 0o640)
    os.chown(source, -1, 65_534)
    assert denied_bits([source]) == 0o077
    source.chmod(0o644)
    assert denied_bits([source]) == 0
