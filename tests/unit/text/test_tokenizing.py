"""Token shards as a store, and builds that use them instead of rereading the texts."""

import json
import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from draftstore.errors import BuildError, StoreError
from draftstore.storage.manifest import load_manifest, verify_files
from draftstore.storage.report import ReadReport
from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.text import tokenizing
from draftstore.text.corpus import find_files, read_files
from draftstore.text.records import Document
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from draftstore.text.tokenizing import BuildTexts, CorpusOptions, TextBuild, build_tokens
from draftstore.text.tokens import open_shards
from tests.conftest import write_texts
from tests.unit.stores.rest.test_build import contents, names, no_space

pytestmark = pytest.mark.usefixtures("no_fsync")


@pytest.fixture
def options(tmp_path: Path) -> RestOptions:
    corpus = write_texts(tmp_path / "c.jsonl", 30)
    with corpus.open("a", encoding="utf-8") as file:
        file.write('{"no text": 1}\n{"text": ""}\n')
    return RestOptions(corpus=(corpus,), name="small", segment_tokens=400)


def taking(options: RestOptions, shards: Path) -> BuildTexts:
    """Return the texts of options, whose token shards are in a store."""
    return options.texts()._replace(shards=shards)


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("the texts were read again")


def test_a_store_of_shards(options: RestOptions, small_tokenizer: TextTokenizer, tmp_path: Path) -> None:
    made = build_tokens(options.texts(), "small", small_tokenizer, tmp_path / "tokens")
    assert verify_files(made.path, load_manifest(made.path, "tokens")) == []
    shards = open_shards(made.path)
    assert (shards.document_count, made.manifest.counts["documents"], made.report.bad_records) == (30, 30, 1)
    assert made.manifest.counts["tokens"] == shards.token_count
    again = build_tokens(options.texts(), "small", small_tokenizer, tmp_path / "tokens")
    assert (again.reused, again.report.bad_records) == (True, 1)
    assert names(tmp_path) == ["c.jsonl", "tokens"]


def test_a_build_takes_the_shards(
    options: RestOptions, small_tokenizer: TextTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = build_rest(options, small_tokenizer, tmp_path / "whole", workers=1)
    tokens = build_tokens(options.texts(), "small", small_tokenizer, tmp_path / "tokens").path
    before = contents(tokens)
    monkeypatch.setattr(TextTokenizer, "encode_documents", never)
    monkeypatch.setattr(os, "link", no_space)  # files are copied where they cannot be linked
    texts = taking(options, tokens)
    taken = build_rest(options, small_tokenizer, tmp_path / "taken", workers=1, texts=texts)
    assert contents(taken.path) == contents(whole.path)
    assert (taken.report.bad_records, taken.report.empty_documents) == (1, 1)
    assert taken.manifest.corpus == whole.manifest.corpus
    assert contents(tokens) == before


def test_gathered_documents_give_the_shards_of_their_files(
    options: RestOptions, small_tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    read = build_tokens(options.texts(), "small", small_tokenizer, tmp_path / "read").path

    def gather(**_: object) -> Iterator[Document]:
        return read_files(find_files(options.corpus), render=never, report=ReadReport())

    facts = {"sources": ["s3://bucket/chats"], "bad_records": 7}
    texts = BuildTexts("these", lambda _: [gather], "small", lambda: options.corpus, facts, "as in the file")
    made = build_tokens(texts, "small", small_tokenizer, tmp_path / "made")
    assert {name: data for name, data in contents(made.path).items() if name.startswith("shard-")} == {
        name: data for name, data in contents(read).items() if name.startswith("shard-")
    }
    assert made.manifest.corpus.items() > facts.items()
    later = texts._replace(groups=never, order="another", shards=made.path)  # the same documents
    taken = build_rest(options, small_tokenizer, tmp_path / "taken", workers=1, texts=later)
    assert taken.manifest.counts["documents"] == 30
    assert taken.manifest.corpus.items() > facts.items()


def changed(tokenizer: TextTokenizer, change: str, folder: Path, patch: pytest.MonkeyPatch) -> TextTokenizer:
    """Return a tokenizer with another template, or change what else documents are made with."""
    if change == "identity":
        patch.setattr(tokenizing, "IDENTITY", 99)
    elif change == "date":
        patch.setattr(tokenizing, "DOCUMENT_DATE", datetime(2000, 1, 1))
    elif change == "template":
        folder.mkdir()
        tokenizer.save(folder)
        (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
        return load_tokenizer(folder)
    return tokenizer


MADE_WITH = ["template", "identity", "date"]


@pytest.mark.parametrize("change", MADE_WITH)
def test_a_build_made_with_something_else_resumes_and_reuses_nothing(
    small_tokenizer: TextTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    corpus = tmp_path / "c.jsonl"
    corpus.write_text(json.dumps({"messages": chat}) + "\n")
    options = CorpusOptions(corpus=(corpus,), name="small")
    store = build_tokens(options.texts(), "small", small_tokenizer, tmp_path / "tokens")
    TextBuild(options.texts(), "small", small_tokenizer, {"kind": "rest"}).fill(tmp_path)
    tokenizer = changed(small_tokenizer, change, tmp_path / "other", monkeypatch)
    calls: list[str] = []
    build = TextBuild(
        options.texts(), "small", tokenizer, {"kind": "rest"}, on_progress=lambda *now: calls.append(now[2])
    )
    [(tokens, _)] = build.fill(tmp_path).arrays()
    assert calls == ["0 documents", "1 document"]
    assert tokenizer.decode(tokens) == ("hi" if change == "template" else "USER: hi ASSISTANT: hello")
    with pytest.raises(BuildError, match="is another build"):
        build_tokens(options.texts(), "small", tokenizer, store.path)


@pytest.mark.parametrize("change", ["corpus", "column", "tokens", *MADE_WITH])
def test_shards_of_something_else_are_refused(
    options: RestOptions,
    small_tokenizer: TextTokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: str,
) -> None:
    tokens = build_tokens(options.texts(), "small", small_tokenizer, tmp_path / "tokens").path
    other, tokenizer = options, changed(small_tokenizer, change, tmp_path / "other", monkeypatch)
    if change == "corpus":
        other = options.changed(corpus=(write_texts(tmp_path / "d.jsonl", 3, seed=5),))
    elif change == "column":
        other = options.changed(column="body")
    elif change == "tokens":
        tokens = build_rest(options, small_tokenizer, tmp_path / "rest", workers=1).path
    expected = StoreError if change == "tokens" else BuildError
    differs = f"differ in {change if change in MADE_WITH else 'inputs'} from"
    with pytest.raises(expected, match="kind 'rest'" if change == "tokens" else differs):
        build_rest(other, tokenizer, tmp_path / "taken", workers=1, texts=taking(other, tokens))
    assert not (tmp_path / "taken").exists()
