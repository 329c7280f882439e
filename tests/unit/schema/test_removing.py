"""Take-down: what is found, what is recorded of it, and that it does not come back."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from sqlalchemy import text
from sqlalchemy.orm import Session

from draftstore.errors import CorpusError
from draftstore.live.log import LiveDocument
from draftstore.live.shared import Vocabulary
from draftstore.live.store import LiveStore
from draftstore.text.digests import identify, split_digests
from draftstore.text.records import content_of
from draftstore.text.scans import Scan, documents_of, open_scan
from draftstore.text.tokenizer import TextTokenizer
from draftstore.text.wanted import Removal
from schema.cli.corpora import corpus
from schema.collections import collecting
from schema.collections.collecting import NewSource
from schema.collections.models import Collection, CollectionRemoval
from schema.collections.proving import removed_keys
from schema.collections.removal_files import removed_folder, scan_path
from schema.collections.removing import restoration_of, select_documents, write_removal
from tests.conftest import small_tokenizer_folder
from tests.reference import plain_digest
from tests.unit.schema.test_collecting import ask, home, run, texts

__all__ = ["home"]

RECORDS = [
    {"id": "a", "text": "def add(left, right): return left + right"},
    {"id": "b", "text": "jane@example.com wrote this text of no importance"},
    {"text": "no id at all, but jane@example.com again"},
    {"id": "d", "text": "short"},
]


def write(path: Path, records: Sequence[Mapping[str, Any]]) -> Path:
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


def scanned(
    session: Session, now: float = LATER + 100, tokenizer: TextTokenizer | None = None
) -> tuple[Collection, Scan]:
    collection = collecting.get_collection(session, "chat")
    return collection, collecting.scan_collection(collection, tokenizer, now=now)


Remove = Callable[..., CollectionRemoval]


@pytest.fixture
def remove(session: Session, collection: Collection) -> Remove:
    def removed(**criteria: Any) -> CollectionRemoval:
        ignore_case, text = criteria.pop("ignore_case", False), criteria.pop("containing", None)
        by = Removal(**criteria) if text is None else text
        found = select_documents(*scanned(session), by, ignore_case=ignore_case)
        return write_removal(session, "chat", found.removal)

    return removed


def left(session: Session, now: float = LATER + 100) -> list[str]:
    collection, scan = scanned(session, now)
    return [found[:5] for found in texts(collection, scan, now)]


def test_a_removal_by_id_also_excludes_later_documents_with_that_id(
    session: Session, remove: Remove, file: Path
) -> None:
    row = remove(document="a")
    assert (row.documents, row.rule) == (1, {"document": "a"})
    assert left(session) == ["jane@", "no id", "short"]
    write(file, [{"id": "a", "text": "another text"}, {"id": "x", "text": RECORDS[0]["text"]}, RECORDS[3]])
    assert left(session) == ["short"]


def test_a_line_number_makes_no_lasting_rule(session: Session, remove: Remove, file: Path) -> None:
    assert remove(document="chats.jsonl#3").rule == {}
    assert left(session) == ["def a", "jane@", "short"]
    write(file, [RECORDS[0], RECORDS[2], {"text": "new here"}])
    assert left(session) == ["def a", "new h"]


def test_documents_with_a_text_are_removed_and_the_text_is_not_stored(
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


def test_documents_are_removed_by_source_and_time(
    session: Session, remove: Remove, file: Path, tmp_path: Path
) -> None:
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


def test_invalid_removals_are_refused(remove: Remove) -> None:
    with pytest.raises(CorpusError, match="has no source -1"):
        remove(source=-1)
    with pytest.raises(CorpusError, match="empty text"):
        remove(containing="")


def test_equal_texts_count_once_and_only_active_ones_are_removed(
    session: Session, collection: Collection, file: Path
) -> None:
    write(file, [*RECORDS, RECORDS[1]])
    found = scanned(session)
    assert select_documents(*found, "jane").removal.documents == 2
    write_removal(session, "chat", select_documents(*found, Removal(document="b")).removal)
    selection = select_documents(*scanned(session), "jane")
    assert (selection.removal.documents, selection.wanted) == (2, 1)


def test_a_text_is_found_and_excluded_in_any_case(
    session: Session, remove: Remove, collection: Collection, file: Path
) -> None:
    write(file, [*RECORDS, {"text": "write to JANE@Example.com"}, {"text": "STRASSE"}])
    assert select_documents(*scanned(session), "jane@example.com").other_case == 1
    assert select_documents(*scanned(session), "Jane@", ignore_case=True).other_case == 0
    assert remove(containing="jane@EXAMPLE.com", ignore_case=True).documents == 3
    assert remove(containing="stra\N{LATIN SMALL LETTER SHARP S}e", ignore_case=True).documents == 1
    write(file, [*RECORDS, {"text": "later from jANE@example.com"}])
    assert left(session) == ["def a", "short"]


def turns(*said: str, first: str = "user") -> list[dict[str, str]]:
    roles = ("user", "assistant") if first == "user" else ("assistant", "user")
    return [{"role": roles[place % 2], "content": each} for place, each in enumerate(said)]


def test_a_removed_conversation_is_excluded_under_other_roles_as_text_and_as_a_beginning(
    session: Session, collection: Collection, file: Path, small_tokenizer: TextTokenizer
) -> None:
    def active() -> list[str]:
        collection, scan = scanned(session, tokenizer=small_tokenizer)
        wanted = collecting.wanted_of(collection, scan, now=LATER + 100)
        return [each.id for each in documents_of(scan, wanted)]

    said = "where is Jane?", "in the garden"
    records: list[dict[str, Any]] = [
        {"id": "first", "messages": turns(*said)},
        {"id": "goes on", "messages": turns(*said, "and Tom?", "with her")},
        {"id": "is asked", "messages": turns(*said, "and Tom?")},
        {"id": "roles", "messages": turns(*said, first="assistant")},
        {"id": "plain", "text": "\n".join(said)},
        {"id": "other", "messages": turns("where is Tom?", "in the garden")},
    ]
    write(file, records)
    found = select_documents(*scanned(session, tokenizer=small_tokenizer), Removal(document="first"))
    assert (found.removal.documents, found.wanted, found.contained) == (1, 1, 4)
    row = write_removal(session, "chat", found.removal)
    digests = identify(records[0]["messages"])
    assert (row.texts, row.answers) == (plain_digest("\n".join(said)), digests.answer)
    assert plain_digest("\n".join(said)) in removed_keys(collecting.get_collection(session, "chat"), None)
    known = [identify(content_of(record)[1]).document for record in records[:5]]
    assert sorted(split_digests(row.digests)) == sorted(known), (
        "with those that repeat it, as live builds hold them"
    )
    assert active() == ["other"]
    for record in records:
        record["id"] = f"{record['id']} again"
    write(file, records[1:])
    assert active() == ["other again"]


def test_a_removal_taken_back_stays_taken_back_in_older_databases_and_without_files(
    session: Session, remove: Remove, file: Path
) -> None:
    first = remove(document="a")
    remove(containing="no id")
    collection = collecting.get_collection(session, "chat")
    row = write_removal(session, "chat", restoration_of(collection, first.id), "a mistake")
    assert (row.restores, row.documents, row.reason) == (first.key, 1, "a mistake")
    expected = ["def a", "jane@", "short"]
    assert left(session) == expected
    for lost in ("restores IS NOT NULL", "restores IS NULL", "true"):  # as in dumps from before them
        session.execute(text(f"DELETE FROM collection_removals WHERE {lost}"))
        session.expire_all()
        assert left(session) == expected
    kept = {path: path.read_bytes() for path in removed_folder("chat").iterdir()}
    assert len(kept) == 3
    for path in kept:
        assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        path.unlink()  # is written again from the database
    assert left(session) == expected
    assert {path: path.read_bytes() for path in removed_folder("chat").iterdir()} == kept


def test_restoring_an_older_database_restores_no_removed_document(
    session: Session, remove: Remove, file: Path
) -> None:
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


@pytest.mark.parametrize("content", [b'{"identity": 2}', None])
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
class TestCommands:
    def test_the_command_asks_for_confirmation_and_shows_the_removal(self, file: Path) -> None:
        ask("add", "chat", file)
        runner, command = CliRunner(), ["remove", "chat", "--document", "a"]
        assert runner.invoke(corpus, command, input="n\n").exit_code == 1
        assert ask("show", "chat")["removals"] == []
        done = runner.invoke(corpus, command, input="y\n")
        assert "1 document matched (1 active): remove them from chat?" in done.stderr
        assert done.stdout.startswith("removal 1: 1 document matched (1 active)")
        removed = ask("remove", "chat", "--containing", "jane@", "--reason", "asked", "--yes")
        assert removed == {
            "removal": 2, "documents": 2, "active": 2, "contained": 0, "other_case": 0, "force_needed": False,
            "later": True,
        }  # fmt: skip
        where = ("--where", f"source={file}", "--where", "before=2999-01-01T00:00+01:00")
        assert ask("remove", "chat", *where, "--yes")["documents"] == 4
        shown = ask("show", "chat")
        assert (shown["documents"], shown["active"], shown["removed"]) == (4, 0, 4)
        assert (shown["removals"][1]["reason"], shown["removals"][1]["containing"]) == ("asked", True)
        assert shown["removals"][2]["rule"]["place"] == str(file)
        for wrong in (
            ("--where", "source=/nowhere"),
            ("--where", "before=soon"),
            ("--document", "a", "--ignore-case"),
            ("--document", "a", "--containing", "x"),
        ):
            asked = runner.invoke(corpus, ["remove", "chat", *wrong])
            assert (asked.exit_code, "Error" in asked.stderr) == (2, True)

    def test_a_dry_run_removes_nothing(self, file: Path) -> None:
        run("add", "chat", file)
        said = run("remove", "chat", "--containing", "jane@", "--dry-run")
        assert said == "would be removed from chat: 2 documents matched (2 active)\n"
        found = ask("remove", "chat", "--document", "a", "--dry-run")
        assert (found["removal"], found["documents"], found["force_needed"]) == (None, 1, False)
        assert ask("show", "chat")["removals"] == []
        refused("no document of chat matches", "--containing", "Tom", "--dry-run")

    def test_matches_in_other_case_are_reported(self, file: Path) -> None:
        write(file, [*RECORDS, {"text": "JANE@EXAMPLE.COM"}])
        run("add", "chat", file)
        command = ["remove", "chat", "--containing", "jane@example.com", "--dry-run"]
        said = CliRunner().invoke(corpus, command).stderr
        assert "1 further document with the text in other case: --ignore-case includes them" in said
        removed = CliRunner().invoke(corpus, [*command[:-1], "--ignore-case", "--yes", "--json"])
        assert ("in other case" in removed.stderr, json.loads(removed.stdout)["documents"]) == (False, 3)

    def test_a_removal_without_matches_is_written_only_with_later(self, file: Path) -> None:
        run("add", "chat", file)
        for criterion in (("--document", "zz"), ("--containing", "Tom"), ("--where", "before=2020-01-31")):
            refused("no document of chat matches, nothing is written: --later writes", *criterion, "--yes")
        refused("a line number makes no rule", "--document", "chats.jsonl#99", "--later", "--yes")
        assert ask("show", "chat")["removals"] == []
        written = ask("remove", "chat", "--containing", "Tom", "--later", "--yes")
        assert (written["documents"], written["later"]) == (0, True)
        write(file, [{"text": "Tom is here"}, RECORDS[3]])
        assert (ask("scan", "chat")["active"], ask("show", "chat")["removed"]) == (1, 1)

    def test_removing_much_of_a_collection_needs_force(self, file: Path) -> None:
        write(file, [{"id": str(number), "text": f"the text {number}"} for number in range(110)])
        run("add", "chat", file)
        assert ask("remove", "chat", "--containing", "text 10", "--dry-run")["documents"] == 11
        refused(r"110 documents matched \(110 active\): more than a tenth of chat; .* without --force",
                "--containing", "e", "--yes")  # fmt: skip
        refused("without --force", "--where", "before=2999-01-01", "--yes")
        assert ask("show", "chat")["removals"] == []
        said = run("remove", "chat", "--containing", "e", "--dry-run")
        assert said.endswith("110 documents matched (110 active); --force would be needed\n")
        assert ask("remove", "chat", "--containing", "text 10", "--yes")["active"] == 11  # a tenth, not more
        write(file, [{"id": "all", "text": f"the text {number}"} for number in range(110)])
        assert ask("remove", "chat", "--document", "all", "--yes")["documents"] == 110
        assert ask("remove", "chat", "--containing", "e", "--force", "--yes")["active"] == 0

    def test_a_removal_can_be_taken_back_and_repeated(self, file: Path) -> None:
        run("add", "chat", file)
        run("remove", "chat", "--document", "b", "--yes")
        run("remove", "chat", "--containing", "jane@", "--yes")
        runner = CliRunner()
        assert runner.invoke(corpus, ["restore", "chat", "2"], input="n\n").exit_code == 1
        assert ask("show", "chat")["active"] == 2
        done = runner.invoke(corpus, ["restore", "chat", "2", "--reason", "another Jane"], input="y\n")
        assert done.stdout.startswith(
            "removal 2 is taken back: the next rebuild includes its 2 documents again"
        )
        assert "do not come back" in done.stdout
        assert ask("scan", "chat")["active"] == 3  # the other removal is in force
        assert ask("restore", "chat", "1", "--yes") == {"removal": 4, "restores": 1, "documents": 1}
        shown = ask("show", "chat")
        assert (shown["active"], shown["removed"]) == (4, 0)
        assert [row["restored"] for row in shown["removals"]] == [True, True, False, False]
        assert [row["restores"] for row in shown["removals"]] == [None, None, 2, 1]
        assert "takes back removal 2 (reason: another Jane)" in run("show", "chat")
        for number, reason in (
            (9, "does not exist"),
            (2, "was taken back before"),
            (3, "takes another one back"),
        ):
            with pytest.raises(CorpusError, match=f"removal {number} of chat {reason}"):
                run("restore", "chat", number, "--yes")
        assert ask("remove", "chat", "--document", "b", "--yes")["removal"] == 5
        assert (ask("show", "chat")["active"], ask("show", "chat")["removals"][4]["restored"]) == (3, False)


@pytest.mark.usefixtures("database")
def test_live_logs_follow_a_removal_and_its_end(tmp_path: Path, small_tokenizer: TextTokenizer) -> None:
    folder, model = tmp_path / "live", small_tokenizer_folder(tmp_path / "model")
    run("add", "chat", "--live", folder, "--tokenizer", model)
    live = LiveStore(10_000, folder)
    live.agree(Vocabulary(small_tokenizer.vocab_size, small_tokenizer.fingerprint))

    def answer(question: str, said: str) -> LiveDocument:
        digest = identify(
            [{"role": "user", "content": question}, {"role": "assistant", "content": said}]
        ).document
        prompt, output = (small_tokenizer.encode(each, bos=False) for each in (question, said))
        return LiveDocument.of(prompt, output, digest)

    jane, tom = answer("where is Jane?", "in the garden"), answer("where is Tom?", "in the garden")
    live.append([jane, tom, answer("and Ann?", "at SEA")])
    assert ask("remove", "chat", "--containing", "sea", "--ignore-case", "--yes")["overwritten"] == 1
    scan = open_scan(scan_path("chat"))
    assert scan is not None
    removed = ask("remove", "chat", "--document", scan.frame["id"][0], "--yes")
    assert (removed["documents"], removed["contained"], removed["overwritten"]) == (1, 0, 1)
    live.append([jane, tom])
    assert (live.refused, ask("scan", "chat")["active"]) == (1, 1)
    run("restore", "chat", removed["removal"], "--yes")
    live.append([jane])
    assert (live.refused, ask("scan", "chat")["active"]) == (1, 2)
    live.close()


def refused(reason: str, *criteria: str) -> None:
    with pytest.raises(CorpusError, match=reason):
        run("remove", "chat", *criteria)
