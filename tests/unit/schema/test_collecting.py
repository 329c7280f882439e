"""Collections in the catalogue: what is defined, scanned and wanted, and the commands that show it."""

import gzip
import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import zstandard
from click.testing import CliRunner
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from draftstore.errors import CorpusError, DraftstoreError
from draftstore.text.scans import documents_of
from schema.catalogue.builds import CatalogueError, add_build
from schema.cli.corpora import corpus
from schema.collections import collecting
from schema.collections.collecting import NewSource
from schema.collections.models import Collection, CollectionRemoval
from schema.collections.removal_files import collection_folder
from schema.models import Release
from tests.conftest import small_tokenizer_folder
from tests.reference import plain_digest


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTSTORE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    return write(tmp_path / "chats.jsonl", "one", "two", "one")


def write(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def run(*arguments: object) -> str:
    result = CliRunner().invoke(corpus, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def refusal(*arguments: object) -> str:
    result = CliRunner().invoke(corpus, [str(argument) for argument in arguments])
    assert isinstance(result.exception, DraftstoreError)
    assert result.exception.exit_code
    return str(result.exception)


def ask(*arguments: object) -> Any:
    return json.loads(run(*arguments, "--json"))


def texts(collection: Collection, scan: Any, now: float | None = None) -> list[str]:
    return [document.text for document in documents_of(scan, collecting.wanted_of(collection, scan, now=now))]


class TestDefinitions:
    def test_sources_are_added_and_settings_replaced(
        self, session: Session, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "model").mkdir()
        log = NewSource(place="answers.jsonl", log=True, retention=timedelta(days=90), max_bytes=10)
        mine = NewSource(place=str(chats), licence="mine")
        made = collecting.add_sources(session, "chat", [mine, log], "model")
        assert made.tokenizer == str(tmp_path / "model")
        assert [(row.kind, row.place) for row in made.sources] == [
            ("files", str(chats)), ("log", str(tmp_path / "answers.jsonl"))
        ]  # fmt: skip
        ids = [row.id for row in made.sources]
        again = collecting.add_sources(session, "chat", [NewSource(place=str(chats), column="content")])
        assert [row.id for row in again.sources] == ids
        assert (again.sources[0].column_name, again.sources[0].licence) == ("content", None)
        assert (again.sources[1].retention, again.tokenizer) == (timedelta(days=90), made.tokenizer)

    def test_missing_sources_and_invalid_names_are_refused(self, session: Session) -> None:
        for source, reason in (
            (NewSource(place="/nowhere.jsonl"), "no such file or folder"),
            (NewSource(place="s3://bucket/log", log=True), "is not a response log"),
        ):
            with pytest.raises(CorpusError, match=reason):
                collecting.add_sources(session, "chat", [source])
        for name in ("my chats", "..", "a/b", "x\n", "", "a" * 201):
            with pytest.raises(CatalogueError, match="cannot be the name of a collection"):
                collecting.add_sources(session, name, [])

    def test_dropping_a_collection_deletes_its_removals(self, session: Session, chats: Path) -> None:
        collection = collecting.add_sources(session, "chat", [NewSource(place=str(chats))])
        session.add(CollectionRemoval(collection_id=collection.id, rule={}, digests=b"", documents=0))
        session.flush()
        collecting.get_collection(session, "chat")  # writes it to a file, too
        collecting.drop_collection(session, "chat")
        with pytest.raises(CatalogueError, match="no collection 'chat'"):
            collecting.get_collection(session, "chat")
        collecting.add_sources(session, "chat", [])
        assert collecting.get_collection(session, "chat").removals == []

    @pytest.mark.parametrize("release", ["chat", "chat-crest"])
    def test_a_new_collection_may_not_use_the_release_of_other_stores(
        self, session: Session, small_store: Path, release: str
    ) -> None:
        build = add_build(session, small_store)
        session.add(Release(name=release, build_id=build.id))
        session.flush()
        with pytest.raises(CatalogueError, match=f"the release {release} holds build {build.id}, a rest"):
            collecting.add_sources(session, "chat", [])
        build.parameters = build.parameters | {"collection": "chat"}  # as rebuild says
        collecting.add_sources(session, "chat", [])
        build.parameters = {}  # a release that takes the name later
        collecting.add_sources(session, "chat", [])

    @pytest.mark.parametrize("names", [("chat", "chat-crest"), ("chat-dense", "chat")])
    def test_two_collections_do_not_publish_one_release(
        self, session: Session, names: tuple[str, str]
    ) -> None:
        collecting.add_sources(session, names[0], [])
        with pytest.raises(CatalogueError, match=f"would publish the same release, {max(names, key=len)}"):
            collecting.add_sources(session, names[1], [])
        collecting.add_sources(session, f"{names[1]}-2", [])


def test_settings_decide_which_documents_are_wanted(session: Session, chats: Path, tmp_path: Path) -> None:
    collection = collecting.add_sources(session, "chat", [])
    with pytest.raises(CorpusError, match="corpus add chat PATH"):
        collecting.scan_collection(collection, None)
    log = str(write(tmp_path / "answers.jsonl", "three", "two"))
    short_lived = NewSource(place=log, log=True, retention=timedelta(seconds=5))
    sources = [NewSource(place=str(chats), max_bytes=3), short_lived]
    collection = collecting.add_sources(session, "chat", sources)
    now = int(time.time()) + 100
    scan = collecting.scan_collection(collection, None, now=now)
    assert collection_folder("chat").stat().st_mode & 0o777 == 0o700
    assert texts(collection, scan, now + 4) == ["two", "three"]
    assert texts(collection, scan, now + 5) == ["two"]
    digest = plain_digest("two")
    session.add(CollectionRemoval(collection_id=collection.id, rule={}, digests=digest, documents=1))
    session.flush()
    collection = collecting.get_collection(session, "chat")
    assert texts(collection, scan, now + 4) == ["one", "three"]


@pytest.mark.usefixtures("database")
class TestCommands:
    def test_commands_add_list_show_scan_and_drop_a_collection(self, chats: Path, tmp_path: Path) -> None:
        assert run("list").startswith("no collections")
        added = ask("add", "chat", chats, "--licence", "mine", "--max-bytes", "1KB", "--first-out", "largest")
        assert added["sources"][0] == {
            "id": 1, "kind": "files", "place": str(chats), "column": "text", "glob": [], "licence": "mine",
            "fields": None, "where": None,
            "retention_seconds": None, "max_bytes": 1000, "first_out": "largest",
        }  # fmt: skip
        run("add", "chat", "--response-log", tmp_path / "log.jsonl", "--retention", "2d")
        assert run("scan", "chat") == "chat: 1 file, 1 read; 2 documents, 2 active\n"
        assert ask("scan", "chat")["files_read"] == 0
        shown = ask("show", "chat")
        assert (shown["documents"], shown["active"], shown["bytes"], shown["removed"]) == (2, 2, 6, 0)
        assert shown["sources"][1]["retention_seconds"] == 2 * 86400
        assert ask("list") == [shown]
        assert "chat" in run("list")
        assert "2 days" in run("show", "chat")
        assert ask("drop", "chat") == {"name": "chat", "removals": 0}
        assert CliRunner().invoke(corpus, ["add", "chat"]).exit_code == 2  # nothing to add

    def test_a_folder_of_conversations_is_read_with_a_tokenizer(self, tmp_path: Path) -> None:
        folder = tmp_path / "chats"
        folder.mkdir()
        chats = [[{"role": "user", "content": str(n)}] for n in range(4)]
        lines = [json.dumps({"messages": chat}).encode() + b"\n" for chat in chats]
        (folder / "a.jsonl").write_bytes(lines[0])
        (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines[1]))
        (folder / "c.ndjson.zst").write_bytes(zstandard.compress(lines[2]))
        (folder / "settings.json").write_text("{\n}\n")
        (folder / "README.md").write_text("A data set.")
        assert "conversations, whose text depends on the model's chat template" in refusal(
            "add", "chat", folder
        )
        assert run("list").startswith("no collections")
        tokenizer = small_tokenizer_folder(tmp_path / "tokenizer")
        run("add", "chat", folder, "--tokenizer", tokenizer)
        (folder / "LICENSE.md").write_text("It came later, and changes nothing. " * 99)
        assert run("scan", "chat") == "chat: 3 files, 3 read; 3 documents, 3 active\n"
        (folder / "d.jsonl").write_bytes(lines[3])
        assert ask("scan", "chat")["documents"] == 4

    def test_a_folder_of_source_code_and_data_is_read(self, tmp_path: Path) -> None:
        folder = tmp_path / "repo"
        (folder / "tests").mkdir(parents=True)
        (folder / "one.py").write_text("print(1)")
        (folder / "tests" / "fixture.jsonl").write_text('{"text": "a record"}\n' * 99)
        run("add", "code", folder)
        assert run("scan", "code").startswith("code: 1 file, 1 read; 1 document")
        (folder / "loop").symlink_to(folder / "loop")
        (folder / "again").symlink_to(folder)
        assert ask("scan", "code")["documents"] == 1

    def test_files_that_are_not_named_in_utf_8_are_found_by_a_pattern(self, tmp_path: Path) -> None:
        file = tmp_path / os.fsdecode(b"caf\xe9.jsonl")
        file.write_text('{"text": "hello"}\n')
        assert "is not named in UTF-8: add it by a pattern" in refusal("add", "one", file)
        run("add", "one", tmp_path / "caf*.jsonl")
        run("add", "two", tmp_path)
        assert ask("scan", "one")["documents"] == ask("scan", "two")["documents"] == 1

    def test_a_log_of_conversations_that_begins_later_is_not_read_without_a_tokenizer(
        self, tmp_path: Path
    ) -> None:
        log = tmp_path / "answers.jsonl"
        run("add", "chat", "--response-log", log)
        assert run("scan", "chat") == "chat: 0 files, 0 read; 0 documents, 0 active\n"
        log.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}) + "\n")
        for command in (("scan", "chat"), ("add", "chat", "--response-log", log)):
            assert "corpus add NAME --tokenizer T" in refusal(*command)

    def test_a_scan_of_nothing_but_bad_records_fails(self, chats: Path) -> None:
        run("add", "chat", chats, "--column", "content")
        reason = refusal("scan", "chat")
        assert "no document of chat can be read: 3 bad records, the first " in reason
        assert "has neither 'content' nor 'messages'" in reason
        assert "`draftstore corpus add chat PLACE --column KEY`" in reason

    def test_rollouts_are_scanned_with_a_condition(self, tmp_path: Path) -> None:
        file = tmp_path / "1.jsonl"
        records = [{"input": "2+2?", "output": str(n), "score": n % 2, "id": f"r{n}"} for n in range(30)]
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
        options = ("--fields", "prompt=input,output=output", "--where", "score > 0")
        added = ask("add", "rl", file, *options)["sources"][0]
        assert (added["fields"], added["where"]) == (options[1], options[3])
        assert run("scan", "rl") == "rl: 1 file, 1 read; 15 documents, 15 active; 15 records filtered out\n"
        assert ask("scan", "rl")["filtered"] == 15
        assert "score > 0" in run("show", "rl")
        assert ask("remove", "rl", "--document", "r7", "--yes")["documents"] == 1
        assert ask("remove", "rl", "--containing", "2+2?29", "--yes")["documents"] == 1
        run("add", "rl", file, *options[:2])  # without the condition
        shown = ask("scan", "rl")
        assert (shown["documents"], shown["active"], shown["filtered"]) == (30, 28, 0)
        run("add", "rl", file, *options[:2], "--where", "score > 9")
        reason = refusal("scan", "rl")
        assert "no document of rl can be read: 30 records did not match `where`" in reason
        assert "`draftstore corpus add rl PLACE --where SQL`" in reason
        for option in (options[:2], options[2:]):
            assert "the live log" in refusal("add", "rl", "--live", tmp_path / "live", *option)

    def test_dropping_removals_needs_confirmation(self, engine: Engine, chats: Path) -> None:
        run("add", "chat", chats)
        with Session(engine) as session, session.begin():
            session.add(CollectionRemoval(collection_id=1, rule={}, digests=b"", documents=7, reason="asked"))
        assert "7 documents, by digest (reason: asked)" in run("show", "chat")
        assert CliRunner().invoke(corpus, ["drop", "chat"]).exit_code == 1
        assert ask("drop", "chat", "--yes")["removals"] == 1
