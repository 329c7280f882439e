"""The proof that removed documents are gone, on real stores of every kind, in files and in PostgreSQL."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner

from draftstore.storage.manifest import load_manifest, save_manifest
from draftstore.stores.crest.build import CrestOptions, build_crest
from draftstore.stores.crest.counts import build_counts
from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.text.scanning import documents_of
from draftstore.text.tokenizer import TextTokenizer
from draftstore.text.tokenizing import CorpusOptions, build_tokens
from schema import collecting
from schema.cli.common import catalogue_session
from schema.cli.corpora import corpus
from tests.conftest import TRAINING_TEXT
from tests.fakes.dense_stores import make_dense_store
from tests.unit.schema.test_collecting import ask, home, run
from tests.unit.schema.test_sql import run as draftstore

__all__ = ["home"]

SECRET = "jane lives at the end of the lane and her number is 0117 496 0000"
pytestmark = pytest.mark.usefixtures("database", "no_fsync")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Write documents of shared phrases, one of which is to be forgotten."""
    salad = random.Random(1)
    words = " ".join(TRAINING_TEXT).split(" ")
    lines = [" ".join(salad.choices(words, k=salad.randint(5, 40))) for _ in range(40)]
    lines += [f"{lines[0]} {SECRET} {lines[1]}", f"{SECRET}", "tiny"]
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"id": str(i), "text": line}) + "\n" for i, line in enumerate(lines)))
    return path


@pytest.fixture
def tokenizer_path(small_tokenizer: TextTokenizer, tmp_path: Path) -> Path:
    (tmp_path / "small-bpe").mkdir()
    small_tokenizer.save(tmp_path / "small-bpe")
    return tmp_path / "small-bpe"


Build = Callable[..., Path]


@pytest.fixture
def build(texts: Path, tokenizer_path: Path, small_tokenizer: TextTokenizer, tmp_path: Path) -> Build:
    """Return a function that builds a REST store of what is wanted now, and others from it; it publishes each."""
    ask("add", "chat", texts, "--tokenizer", tokenizer_path)

    def built(number: int, *kinds: str, digests: bool = True) -> Path:
        with catalogue_session() as session:
            collection = collecting.get_collection(session, "chat")
        scan = collecting.scan_collection(collection, small_tokenizer)
        wanted = list(documents_of(scan, collecting.wanted_of(collection, scan)))
        folder = tmp_path / f"stores-{number}"
        folder.mkdir()
        file = folder / "wanted.jsonl"
        file.write_text("".join(json.dumps({"text": document.text}) + "\n" for document in wanted))
        build_rest(
            RestOptions((file,), "chat", segment_tokens=500), small_tokenizer, folder / "rest", workers=1
        )
        if not digests:  # as stores of earlier versions
            manifest = load_manifest(folder / "rest")
            (folder / "rest" / "documents.bin").unlink()
            del manifest.files["documents.bin"]
            save_manifest(folder / "rest", manifest)
        if "tokens" in kinds:
            build_tokens(CorpusOptions((file,), "chat"), small_tokenizer, folder / "tokens")
        if "ngrams" in kinds:
            build_counts(folder / "rest", folder / "ngrams", max_n=5)
        if "crest" in kinds:
            options = CrestOptions("chat", max_n=5, ngrams=3000, backends=("lmdb", "postgres"))
            build_crest(options, folder / "rest", folder / "crest")
        if "dense" in kinds:
            ids = [small_tokenizer.encode(document.text, bos=False).tolist() for document in wanted]
            make_dense_store(folder / "dense", ids, tokenizer=small_tokenizer)
        for kind in ("rest", *kinds):
            draftstore("builds", "add", str(folder / kind))
        for kind in {"rest", *kinds} & {"rest", "crest", "dense"}:
            name = "chat" if kind == "rest" else f"chat-{kind}"
            draftstore("releases", "publish", name, str(folder / kind), "--force", "corpus,tokens,strategy")
        return folder

    return built


def prove(*options: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(corpus, ["prove-removed", "chat", "--json", *options], catch_exceptions=False)
    return result.exit_code, json.loads(result.stdout)


def found(report: dict[str, Any]) -> set[str]:
    return {row["place"].rstrip("0123456789") for row in report["checked"] if row["found"]}


KINDS = ("tokens", "ngrams", "crest", "dense")
RELEASES = ("--release", "chat", "--release", "chat-crest", "--release", "chat-dense")
EVERYWHERE = {
    "tokens.bin", "documents.bin", "shards", "digests", "n4.parquet", "n5.parquet", "kept.parquet", "trees.lmdb",
    "table ngrams_", "table kept_ngrams_", "table trees_",
}  # fmt: skip


@pytest.mark.slow
def test_all_stores_are_found_guilty_before_the_rebuild_and_none_after(build: Build) -> None:
    build(1, *KINDS)
    removed = ask("remove", "chat", "--containing", "0117 496 0000", "--yes")
    assert (removed["documents"], removed["provable"]) == (2, True)
    status, report = prove(*RELEASES)
    assert (status, report["proven"], report["documents"]) == (5, False, 2)
    assert found(report) == EVERYWHERE
    assert {row["kind"] for row in report["checked"] if row["found"]} == {
        "tokens",
        "rest",
        "ngrams",
        "crest",
        "dresd",
    }
    build(2, *KINDS)
    status, report = prove(*RELEASES)
    assert (status, report["proven"], found(report)) == (0, True, set())
    assert {row["place"].rstrip("0123456789") for row in report["checked"]} == EVERYWHERE
    shared = {row["place"]: row["shared"] for row in report["checked"]}
    assert shared["tokens.bin"] > 0  # what it shares with others stays
    assert report["builds_left_out"] > 0
    status, report = prove("--old", *RELEASES)
    assert status == 5
    assert all(row["releases"] == [] for row in report["checked"] if row["found"])


def test_without_digests_all_wanted_texts_are_read(build: Build) -> None:
    build(1, digests=False)
    ask("remove", "chat", "--document", "41", "--yes")  # its text is a part of another document
    status, report = prove("--release", "chat")
    assert (status, found(report)) == (0, set())
    ask("remove", "chat", "--document", "40", "--yes")
    assert "tokens.bin" in found(prove("--release", "chat")[1])
    build(2, digests=False)
    assert prove("--release", "chat")[0] == 0


def test_a_store_that_says_it_holds_other_documents_is_not_believed(build: Build) -> None:
    folder = build(1)
    data = (folder / "rest" / "documents.bin").read_bytes()
    ask("remove", "chat", "--containing", SECRET, "--yes")
    (folder / "rest" / "documents.bin").write_bytes(data[: 16 * 40] + data[:32] + data[16 * 42 :])
    status, report = prove("--release", "chat")
    assert status == 5
    assert "tokens.bin" in found(report)
    assert "documents.bin" not in found(report)


def test_documents_too_short_for_shingles_are_known_by_digest(build: Build) -> None:
    build(1)
    ask("remove", "chat", "--document", "42", "--yes")
    status, report = prove("--release", "chat")
    assert status == 5
    assert "documents.bin" in found(report)


def test_what_is_left_in_one_place_alone_is_found(build: Build, database: str) -> None:
    build(1, "ngrams")
    ask("remove", "chat", "--containing", SECRET, "--yes")
    with psycopg.connect(database) as connection:
        rows = connection.execute("SELECT id FROM builds WHERE kind = 'ngrams'").fetchone()
        assert rows is not None
        old = connection.execute(f"SELECT n, rank, tokens, text, count FROM ngrams_{rows[0]}").fetchall()
    build(2, "ngrams")
    (new,) = [
        row["build"] for row in prove("--release", "chat")[1]["checked"] if row["place"] == "n5.parquet"
    ]
    with psycopg.connect(database) as connection:
        connection.execute(f"DELETE FROM ngrams_{new}")
        query = f"INSERT INTO ngrams_{new} VALUES ({new}, %s, %s, %s, %s, %s)"
        connection.cursor().executemany(query, old)
    assert found(prove("--release", "chat")[1]) == {"table ngrams_"}


def test_what_cannot_be_compared_is_not_proven(
    build: Build, tokenizer_path: Path, wide_tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    folder = build(1)
    ask("remove", "chat", "--document", "3", "--yes")
    (tmp_path / "wide").mkdir()
    wide_tokenizer.save(tmp_path / "wide")
    ask("add", "chat", "--tokenizer", tmp_path / "wide")
    status, report = prove()
    assert status == 5
    assert "is not the collection's" in report["checked"][0]["problem"]
    ask("add", "chat", "--tokenizer", tokenizer_path)
    (folder / "rest" / "documents.bin").write_bytes(b"x")
    status, report = prove()
    assert status == 5
    assert "the store is damaged" in report["checked"][0]["problem"]
    (folder / "rest" / "manifest.json").unlink()
    status, report = prove()
    assert status == 5
    assert "is not a store" in report["checked"][0]["problem"]


def test_removals_before_the_tokenizer_was_named(texts: Path, build: Build, home: Path) -> None:
    build(1)
    status, report = prove()
    assert (status, report["proven"], report["documents"]) == (0, True, 0)  # nothing was removed yet
    ask("remove", "chat", "--document", "3", "--yes")
    (home / "collections" / "chat" / "removed" / "1.npz").unlink()
    build(2)
    status, report = prove("--release", "chat")
    assert (status, report["removals_without_hashes"]) == (5, [1])
    assert found(report) == set()


def test_it_is_told_to_people(build: Build) -> None:
    build(1)
    ask("remove", "chat", "--containing", SECRET, "--yes")
    result = CliRunner().invoke(corpus, ["prove-removed", "chat"])
    assert result.exit_code == 5
    assert "NOT proven for chat: 2 removed documents" in result.stderr
    build(2)
    result = CliRunner().invoke(corpus, ["prove-removed", "chat"])
    assert result.exit_code == 0
    assert "proven for chat" in result.stdout
    assert "not looked at: the sources themselves, backups" in result.stderr


def test_releases_that_are_unknown(texts: Path) -> None:
    run("add", "chat", texts)
    with pytest.raises(Exception, match="no release of chat is known"):
        prove()
    with pytest.raises(Exception, match="no release 'x'"):
        prove("--release", "x")
