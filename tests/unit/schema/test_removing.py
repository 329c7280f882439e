"""Take-down: what is found, what is recorded of it, and that it does not come back."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from sqlalchemy import text
from sqlalchemy.orm import Session

from draftstore.errors import CorpusError
from draftstore.text.scans import Scan
from draftstore.text.tokenizer import TextTokenizer
from schema.cli.corpora import corpus
from schema.collections import collecting
from schema.collections.collecting import NewSource
from schema.collections.models import Collection, CollectionRemoval
from schema.collections.removal_files import removed_folder
from schema.collections.removing import select_documents, write_removal
from tests.unit.schema.test_collecting import ask, home, texts

__all__ = ["home"]

RECORDS = [
    {"id": "a", "text": "def add(left, right): return left + right"},
    {"id": "b", "text": "jane@example.com wrote this text of no importance"},
    {"text": "no id at all, but jane@example.com again"},
    {"id": "d", "text": "short"},
]


def write(path: Path, records: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "chats.jsonl", RECORDS)


@pytest.fixture
def collection(session: Session, file: Path) -> Collection:
    return collecting.add_sources(session, "chat", [NewSource(place=str(file))])


LATER = int(time.time()) + 1_000
"""A time after the adding of every source."""


def scanned(session: Session, now: float = LATER + 100) -> tuple[Collection, Scan]:
    collection = collecting.get_collection(session, "chat")
    return collection, collecting.scan_collection(collection, None, now=now)


Remove = Callable[..., CollectionRemoval]


@pytest.fixture
def remove(session: Session, collection: Collection, small_tokenizer: TextTokenizer) -> Remove:
    def removed(**criteria: Any) -> CollectionRemoval:
        found = scanned(session)
        return write_removal(session, "chat", select_documents(*found, **criteria))

    return removed


def left(session: Session, now: float = LATER + 100) -> list[str]:
    collection, scan = scanned(session, now)
    return [found[:5] for found in texts(collection, scan, now)]


def test_a_document_by_its_id_goes_with_later_ones_of_that_id(
    session: Session, remove: Remove, file: Path
) -> None:
    row = remove(document="a")
    assert (row.documents, row.rule) == (1, {"document": "a"})
    assert left(session) == ["jane@", "no id", "short"]
    write(file, [{"id": "a", "text": "another text"}, {"id": "x", "text": RECORDS[0]["text"]}, RECORDS[3]])
    assert left(session) == ["short"]


def test_a_line_of_a_file_is_no_rule_for_what_comes_there_later(
    session: Session, remove: Remove, file: Path
) -> None:
    assert remove(document="chats.jsonl#3").rule == {}
    assert left(session) == ["def a", "jane@", "short"]
    write(file, [RECORDS[0], RECORDS[2], {"text": "new here"}])
    assert left(session) == ["def a", "new h"]


def test_what_contains_a_text_goes_and_the_text_is_not_kept(
    session: Session, remove: Remove, file: Path, home: Path
) -> None:
    row = remove(containing="jane@example.com")
    assert row.documents == 2
    assert left(session) == ["def a", "short"]
    write(file, [{"text": "mail jane@example.com"}, {"text": "Jane@example.com is spelled otherwise"}])
    assert left(session) == ["Jane@"]
    kept = session.execute(text("SELECT * FROM collection_removals")).all()
    assert "jane" not in str(kept)
    assert all(b"jane" not in path.read_bytes() for path in home.rglob("*") if path.is_file())


def test_by_source_and_time(session: Session, remove: Remove, file: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other.jsonl", [{"text": "other"}])
    source = collecting.add_sources(session, "chat", [NewSource(place=str(other))]).sources[1].id
    scanned(session, LATER)
    write(other, [{"text": "other"}, {"text": "later"}])
    row = remove(source=source, before=LATER + 50)
    assert (row.documents, row.rule) == (1, {"place": str(other), "before": LATER + 50})
    assert left(session) == ["def a", "jane@", "no id", "short", "later"]
    remove(before=LATER + 50)
    assert left(session) == ["later"]
    remove(source=source)
    write(other, [{"text": "still later"}])
    assert left(session, LATER + 200) == []


@pytest.mark.parametrize(
    ("criteria", "reason"),
    [
        ({"document": "a", "containing": "x"}, "say what to remove"),
        ({"document": "zz"}, "no document 'zz'"),
        ({"source": -1}, "has no source -1"),
        ({"containing": ""}, "empty text"),
    ],
)
def test_what_is_refused(remove: Remove, criteria: dict[str, Any], reason: str) -> None:
    with pytest.raises(CorpusError, match=reason):
        remove(**criteria)


def test_equal_texts_count_once_and_only_those_wanted_go(
    session: Session, collection: Collection, file: Path
) -> None:
    write(file, [*RECORDS, RECORDS[1]])
    found = scanned(session)
    assert len(select_documents(*found, containing="jane").digests) == 2
    write_removal(session, "chat", select_documents(*found, document="b"))
    selection = select_documents(*scanned(session), containing="jane")
    assert (len(selection.digests), selection.wanted) == (2, 1)


def test_an_older_database_brings_no_document_back(session: Session, remove: Remove, file: Path) -> None:
    remove(document="a")
    remove(containing="jane@example.com")
    assert left(session) == ["short"]
    session.execute(text("DELETE FROM collection_removals"))  # as a dump from before them
    session.expire_all()
    assert left(session) == ["short"]
    write(file, [{"id": "a", "text": "under the same id"}, {"text": "jane@example.com later"}, RECORDS[3]])
    assert left(session) == ["short"]
    rules = [row.rule for row in collecting.get_collection(session, "chat").removals]
    assert [sorted(rule) for rule in rules] == [["document"], ["containing"]]


def test_lost_files_are_written_again_from_the_database(session: Session, remove: Remove) -> None:
    remove(document="a")
    (kept,) = removed_folder("chat").glob("*.json")
    content = kept.read_bytes()
    assert (kept.stat().st_mode & 0o777, kept.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    kept.unlink()
    assert left(session) == ["jane@", "no id", "short"]
    assert kept.read_bytes() == content


@pytest.mark.parametrize("content", [b"{}", None])
def test_a_damaged_file_stops_every_reading(session: Session, remove: Remove, content: bytes | None) -> None:
    remove(document="a")
    (kept,) = removed_folder("chat").glob("*.json")
    if content is None:
        kept.rename(kept.with_name("20260101T000000000000-01234567.json"))
    else:
        kept.write_bytes(content)
    with pytest.raises(CorpusError, match=r"the removal .* cannot be read .*: restore it"):
        scanned(session)


def test_a_rule_for_a_source_follows_its_place(session: Session, remove: Remove, tmp_path: Path) -> None:
    other = write(tmp_path / "other.jsonl", [{"text": "other"}])
    source = collecting.add_sources(session, "chat", [NewSource(place=str(other))]).sources[1]
    remove(source=source.id)
    session.delete(source)  # as in a dump from before the source
    session.flush()
    assert left(session) == ["def a", "jane@", "no id", "short"]
    third = write(tmp_path / "third.jsonl", [{"text": "third"}])
    collecting.add_sources(session, "chat", [NewSource(place=str(third)), NewSource(place=str(other))])
    write(other, [{"text": "still of the removed source"}])
    assert left(session) == ["def a", "jane@", "no id", "short", "third"]


@pytest.mark.usefixtures("database")
def test_the_command_asks_says_what_goes_and_shows_it(file: Path) -> None:
    ask("add", "chat", file)
    runner, command = CliRunner(), ["remove", "chat", "--document", "a"]
    assert runner.invoke(corpus, command, input="n\n").exit_code == 1
    assert ask("show", "chat")["removals"] == []
    done = runner.invoke(corpus, command, input="y\n")
    assert "1 document matched (1 active): remove them from chat permanently?" in done.stderr
    assert done.stdout.startswith("removal 1: 1 document matched (1 active)")
    removed = ask("remove", "chat", "--containing", "jane@", "--reason", "asked", "--yes")
    assert removed == {"removal": 2, "documents": 2, "active": 2, "later": True}
    assert ask("remove", "chat", "--where", "before=2020-01-31", "--yes")["documents"] == 0
    where = ("--where", f"source={file}", "--where", "before=2999-01-01T00:00+01:00")
    assert ask("remove", "chat", *where, "--yes")["documents"] == 4
    shown = ask("show", "chat")
    assert (shown["documents"], shown["active"], shown["removed"]) == (4, 0, 4)
    assert (shown["removals"][1]["reason"], shown["removals"][1]["containing"]) == ("asked", True)
    assert shown["removals"][3]["rule"]["place"] == str(file)
    for wrong in ("source=/nowhere", "before=soon"):
        asked = runner.invoke(corpus, ["remove", "chat", "--where", wrong])
        assert (asked.exit_code, "Error" in asked.stderr) == (2, True)
