"""`draftstore catalogue list --check`, in a separate catalogue."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from sqlalchemy.orm import sessionmaker

from draftstore.cli import cli
from schema import catalogue
from schema.catalogue.publishing import Transaction, verify_present
from schema.cli.findings import Finding, examine
from schema.collections.collecting import NewSource, add_sources
from schema.db.database import make_engine
from schema.db.home import HOME_VARIABLE


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
        build = catalogue.add_build(session, store).id
    catalogue.publish(transaction, "live", build)
    return store


def found_in(transaction: Transaction, home: Path) -> list[Finding]:
    return list(examine(transaction, home, verify_present))


def test_a_live_store_that_is_whole_or_damaged(transaction: Transaction, released: Path, home: Path) -> None:
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


def test_leftovers_are_found(transaction: Transaction, released: Path, home: Path, small_store: Path) -> None:
    other = home / "stores" / "small" / "rest-fedcba9876543210"
    shutil.copytree(small_store, other)
    with transaction() as session:
        gone = catalogue.add_build(session, other).id
    shutil.rmtree(other)
    (home / "stores" / "small" / ".rest-0000000000000000.partial").mkdir()
    (home / "stores" / "small" / "rest-1111111111111111").mkdir()
    found = found_in(transaction, home)
    assert [finding.problem for finding in found] == [False, False, False]
    assert f"draftstore catalogue drop {gone}" in found[0].advice
    assert "rest-1111111111111111 belongs to no build" in found[1].what
    assert ".rest-0000000000000000.partial is left over" in found[2].what


def test_a_source_that_is_gone(transaction: Transaction, tmp_path: Path, home: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "one"}\n')
    with transaction() as session:
        add_sources(session, "chat", [NewSource(place=str(texts))])
    assert found_in(transaction, home) == []
    texts.unlink()
    (found,) = found_in(transaction, home)
    assert (found.problem, f"{texts} is missing" in found.what) == (True, True)
