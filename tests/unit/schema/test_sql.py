"""`draftstore sql`, `catalogue` and `releases`: what users type, on the test's own database."""

import csv
import io
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from sqlalchemy.orm import sessionmaker

from draftstore.cli import cli, main
from draftstore.errors import DraftstoreError
from draftstore.storage.locks import lease
from schema.catalogue.builds import add_build
from schema.catalogue.publishing import Transaction, publish, verify_present
from schema.cli.builds import Finding, examine
from schema.collections.collecting import NewSource, add_sources
from schema.db.database import make_engine
from schema.db.embedded import HOME_VARIABLE
from tests.fakes.databases import reader_of, write_store


def run(*arguments: str, stdin: str | None = None) -> Result:
    """Run a command that works."""
    result = CliRunner().invoke(cli, arguments, input=stdin, catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    return result


def refuse(*arguments: str) -> str:
    """Run a command that is refused, and return why."""
    with pytest.raises(DraftstoreError) as caught:
        CliRunner().invoke(cli, arguments, catch_exceptions=False)
    return str(caught.value)


def as_json(*arguments: str) -> Any:
    return json.loads(run(*arguments, "--json").stdout)


class TestSql:
    @pytest.fixture(autouse=True)
    def _only_ask(self, shared_database: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DRAFTSTORE_DATABASE_URL", shared_database)
        monkeypatch.setenv("DRAFTSTORE_READER_URL", reader_of(shared_database))

    def test_a_table(self) -> None:
        query = (
            "SELECT n, n / 3.0::float8 AS third, NULL AS none, chr(27) || '[31m' FROM generate_series(1, 2) n"
        )
        result = run("sql", query)
        lines = [line for line in result.stdout.splitlines() if "│" in line]
        assert [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines] == [
            ["1", "0.333333", "", "␛[31m"], ["2", "0.666667", "", "␛[31m"],
        ]  # fmt: skip
        assert result.stderr == "2 rows\n"
        assert "[bold]" in run("sql", "SELECT '[bold]x' AS \"[b]\"").stdout

    def test_json(self) -> None:
        query = (
            "SELECT 2.0 AS two, 2.5 AS half, 'NaN'::float8 AS nan, DATE '2026-01-02' AS day, ARRAY[1, 2] AS list, "
            """'{"a": [1.5]}'::jsonb AS object, '\\x0aff'::bytea AS bytes, NULL AS none"""
        )
        [row] = as_json("sql", query)
        assert list(row.values()) == [2, 2.5, "nan", "2026-01-02", [1, 2], {"a": [1.5]}, "0aff", None]
        assert "two columns are called 'a'" in refuse("sql", "--json", "SELECT 1 AS a, 2 AS a")

    def test_csv(self) -> None:
        query = """SELECT 'a"b,' || chr(10) AS text, 1.50 AS number, ARRAY[1, 2] AS list, NULL AS none"""
        assert list(csv.reader(io.StringIO(run("sql", "--csv", query).stdout))) == [
            ["text", "number", "list", "none"],
            ['a"b,\n', "1.50", "[1, 2]", ""],
        ]
        assert run("sql", "--csv", "SELECT 1 AS a WHERE false").stdout == "a\n"

    def test_a_file_and_standard_input(self, tmp_path: Path) -> None:
        file = tmp_path / "my question.sql"
        file.write_text("-- one\nSELECT 1 AS a;\n-- two\nSELECT 'ü%s' AS b;\n", encoding="utf-8")
        assert "several statements" in refuse("sql", str(file))
        found = [json.loads(line) for line in run("sql", str(file), "--json", "--write").stdout.splitlines()]
        assert found == [[{"a": 1}], [{"b": "ü%s"}]]
        assert json.loads(run("sql", "-", "--json", stdin="SELECT 3 AS c").stdout) == [{"c": 3}]
        assert "does not exist" in refuse("sql", str(tmp_path / "none.sql"))
        assert "is empty" in refuse("sql", " \n")

    @pytest.mark.usefixtures("database", "reader")
    def test_nothing_is_changed_unless_allowed(self) -> None:
        assert "--write allows changes" in refuse("sql", "DELETE FROM corpora")
        assert "--write runs several" in refuse("sql", "COMMIT; DROP TABLE replays")
        insert = "INSERT INTO builds (kind, name, path) VALUES ('rest', 'x', '/x')"
        assert run("sql", "--write", insert).stdout == "INSERT 0 1\n"
        assert "violates check constraint" in refuse(
            "sql", "--write", f"{insert}; UPDATE builds SET kind = 'magic'"
        )
        assert as_json("sql", "SELECT count(*) AS builds FROM builds") == [{"builds": 1}]

    def test_errors_show_their_position(self) -> None:
        assert refuse("sql", "SELECT id,\n       nam FROM builds") == (
            'column "nam" does not exist (line 2, column 8)\n         nam FROM builds\n         ^\n'
            'hint: Perhaps you meant to reference the column "builds.name".'
        )
        assert "(line 2, column 8)" in refuse("sql", "SELECT 1;\nSELECT x", "--write")
        assert "psql can do it" in refuse("sql", "COPY builds TO STDOUT")
        assert refuse("sql", "SELECT 1 / 0") == "division by zero"


@pytest.mark.usefixtures("database")
class TestBuilds:
    def test_add_list_show_drop(self, tmp_path: Path) -> None:
        store = write_store(tmp_path / "chat", name="chat [bold]", segment_tokens=7)
        added = as_json("catalogue", "add", str(store))
        assert (added["kind"], added["state"], added["counts"]["entries"]) == ("rest", "finished", 3)
        assert "build 1: chat [bold] (rest)" in run("catalogue", "add", str(store)).stdout
        (listed,) = as_json("catalogue", "list", "--kind", "rest", "--state", "finished")
        assert listed == added | {"releases": []}
        assert as_json("catalogue", "list", "--kind", "crest") == []
        assert "chat [bold]" in run("catalogue", "list").stdout
        shown = as_json("catalogue", "show", str(store))
        assert shown == as_json("catalogue", "show", "1")
        assert (shown["corpus"]["tokens"], shown["parameters"]) == (10, {"segment_tokens": 7})
        for words in ("finished", "2 documents, 10 tokens of small-bpe", "entries", str(store)):
            assert words in run("catalogue", "show", "1").stdout
        assert as_json("catalogue", "drop", "1") == {
            "id": 1, "path": str(store), "files_removed": False, "left": []
        }  # fmt: skip
        assert store.exists()
        assert as_json("catalogue", "list") == []

    def test_dropping_files_too(self, tmp_path: Path) -> None:
        store, other = write_store(tmp_path / "a"), write_store(tmp_path / "b")
        run("catalogue", "add", str(store))
        (store / "notes.txt").write_text("mine")
        with lease(store):
            assert "open in another process" in refuse("catalogue", "drop", str(store), "--files")
        assert as_json("catalogue", "list")
        assert "notes.txt" in run("catalogue", "drop", str(store), "--files").stdout
        assert [path.name for path in store.iterdir()] == ["notes.txt"]
        run("catalogue", "add", str(other))
        shutil.rmtree(other)
        write_store(other, entries=5)  # another store at its place
        assert "no longer belongs to the build" in run("catalogue", "drop", "2", "--files").stdout
        assert other.exists()

    def test_pruning(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DRAFTSTORE_HOME", str(tmp_path))
        stores = [write_store(tmp_path / "stores" / "small" / f"rest-{i:016}") for i in range(2)]
        for store in stores:
            run("catalogue", "add", str(store))
        assert as_json("catalogue", "prune", "--keep", "1", "--older-than", "2w")["removed"] == []
        listed = run("catalogue", "prune", "--keep", "1", "--dry-run")
        assert f"store, build 1: {stores[0]}, 3 bytes\nwould be removed: 1 folder" in listed.stdout
        [removed] = as_json("catalogue", "prune", "--keep", "1")["removed"]
        assert removed == {"what": "store", "build_id": 1, "path": str(stores[0]), "bytes": 3}
        assert [store.exists() for store in stores] == [False, True]


@pytest.mark.usefixtures("database")
class TestReleases:
    def test_publish_rollback_history(self, tmp_path: Path) -> None:
        stores = [write_store(tmp_path / str(i)) for i in range(2)]
        first = as_json("releases", "publish", "chat", str(stores[0]))  # is registered by that
        assert (first["build"], first["before"]) == (1, None)
        assert run("releases", "publish", "chat", "1").stdout == "chat points at build 1 already\n"
        run("catalogue", "add", str(stores[1]))
        assert run("releases", "publish", "chat", "2").stdout == "chat points at build 2 (before: build 1)\n"
        (listed,) = as_json("releases", "list")
        assert (listed["release"], listed["build"], listed["path"]) == ("chat", 2, str(stores[1]))
        assert "chat" in run("releases", "list").stdout
        assert run("releases", "rollback", "chat").stdout == "chat points at build 1 (before: build 2)\n"
        moves = as_json("releases", "history", "chat")
        assert [(move["action"], move["from"], move["to"]) for move in moves] == [
            ("rollback", 2, 1), ("publish", 1, 2), ("publish", None, 1)
        ]  # fmt: skip
        assert "rollback" in run("releases", "history", "chat").stdout

    def test_gates_refuse(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run("releases", "publish", "chat", str(write_store(tmp_path / "live")))
        crest = str(write_store(tmp_path / "new", kind="crest"))
        monkeypatch.setattr(sys, "argv", ["draftstore", "releases", "publish", "chat", crest])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 3
        assert "kind: a crest store, and the live build 1 is a rest store" in capsys.readouterr().err
        assert "kind refused: a crest store" in " ".join(run("catalogue", "show", crest).stdout.split())
        assert list(as_json("catalogue", "show", crest)["gates"]["chat"]["refused"]) == ["kind", "strategy"]
        forced = run("releases", "publish", "chat", crest, "--force", "kind,strategy,tokens")
        assert forced.stdout == "chat points at build 2 (before: build 1)\n"
        assert "kind overridden: a crest store" in forced.stderr
        assert "bad-records not checked: " in forced.stderr


# `draftstore catalogue list --check`


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def transaction(database: str, home: Path) -> Iterator[Transaction]:
    engine = make_engine()
    yield sessionmaker(engine, expire_on_commit=False).begin
    engine.dispose()


@pytest.fixture
def released(transaction: Transaction, small_store: Path, home: Path) -> Path:
    """Return a copy of a store that a release points at."""
    store = home / "stores" / "small" / "rest-0123456789abcdef"
    shutil.copytree(small_store, store)
    with transaction() as session:
        build = add_build(session, store).id
    publish(transaction, "live", build)
    return store


def found_in(transaction: Transaction, home: Path) -> list[Finding]:
    return list(examine(transaction, home, verify_present))


def test_damaged_live_stores_are_reported(transaction: Transaction, released: Path, home: Path) -> None:
    result = CliRunner().invoke(cli, ["catalogue", "list", "--check", "full"])
    assert (result.exit_code, "problem" in result.output, "note" in result.output) == (0, False, False)
    with (released / "tokens.bin").open("r+b") as file:
        file.write(b"\x01\x02\x03")
    assert found_in(transaction, home) == []
    command = ["catalogue", "list", "--check", "full"]
    result = CliRunner().invoke(cli, [*command, "--json"])
    found = json.loads(result.stdout)
    assert (result.exit_code, [build["releases"] for build in found["builds"]]) == (1, [["live"]])
    assert "tokens.bin has SHA-256" in found["findings"][0]["what"]
    assert "draftstore releases rollback live" in found["findings"][0]["advice"]
    assert "problem: release live, build" in CliRunner().invoke(cli, command).output


def test_leftovers_are_reported(
    transaction: Transaction, released: Path, home: Path, small_store: Path
) -> None:
    other = home / "stores" / "small" / "rest-fedcba9876543210"
    shutil.copytree(small_store, other)
    with transaction() as session:
        gone = add_build(session, other).id
    shutil.rmtree(other)
    (home / "stores" / "small" / ".rest-0000000000000000.partial").mkdir()
    (home / "stores" / "small" / "rest-1111111111111111").mkdir()
    found = found_in(transaction, home)
    assert [finding.problem for finding in found] == [False, False, False]
    assert f"draftstore catalogue drop {gone}" in found[0].advice
    assert "rest-1111111111111111 belongs to no build" in found[1].what
    assert ".rest-0000000000000000.partial is left over" in found[2].what


def test_missing_sources_are_reported(transaction: Transaction, tmp_path: Path, home: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "one"}\n')
    with transaction() as session:
        add_sources(session, "chat", [NewSource(place=str(texts))])
    assert found_in(transaction, home) == []
    texts.unlink()
    (found,) = found_in(transaction, home)
    assert (found.problem, f"{texts} is missing" in found.what) == (True, True)
