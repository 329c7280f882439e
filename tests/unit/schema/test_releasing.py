"""The gate `removed`: no build that holds removed documents goes live without a word."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from draftstore.storage.manifest import load_manifest, save_manifest
from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.text.tokenizer import TextTokenizer
from schema.cli.common import catalogue_session
from schema.cli.releases import releases
from schema.collections.collecting import find_collection
from schema.collections.removal_files import scan_path
from tests.unit.schema.test_collecting import ask, home
from tests.unit.schema.test_proving import lines_of, prove, texts, write
from tests.unit.schema.test_sql import run as draftstore

__all__ = ["home", "texts"]

pytestmark = pytest.mark.usefixtures("database", "no_fsync")
SIZES = "corpus,tokens"
Build = Callable[[str, Path], Path]


@pytest.fixture
def build(small_tokenizer: TextTokenizer, tmp_path: Path) -> Build:
    """Return a function that builds a REST store, which is not live."""

    def built(name: str, file: Path) -> Path:
        build_rest(RestOptions(corpus=(file,), name=name), small_tokenizer, tmp_path / name, workers=1)
        return tmp_path / name

    return built


def move(*arguments: object) -> tuple[int, str, dict[str, Any]]:
    """Publish or roll back; return the exit status, the error, and what is printed."""
    result = CliRunner().invoke(releases, [*map(str, arguments), "--json"])
    error = result.exception
    code = getattr(error, "exit_code", result.exit_code)
    return code, str(error or ""), json.loads(result.stdout) if result.stdout else {}


def gates(store: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(draftstore("catalogue", "show", str(store), "--json").stdout)["gates"]
    return found


def test_builds_with_removed_documents_are_refused_unless_the_check_is_named(
    texts: Path, build: Build
) -> None:
    old, new = build("old", texts), build("new", write(texts.parent / "new.jsonl", lines_of("chat")))
    assert move("publish", "chat", old)[0] == move("publish", "chat", new, "--force", SIZES)[0] == 0
    assert ask("remove", "chat", "--containing", "0117 496 0000", "--yes")["documents"] == 2
    for command in (("rollback", "chat"), ("publish", "chat", old)):
        status, error, _ = move(*command)
        assert (status, prove()[0]) == (3, 0)
        assert "removed: 2 documents removed from the collection chat" in error
        assert error.endswith("override removed (force)")
        assert list(gates(old)["chat"]["refused"]) == ["removed"]
        status, _, printed = move(*command, "--force", "removed")
        assert (status, list(printed["forced"]), prove()[0]) == (0, ["removed"], 5)
        assert list(gates(old)["chat"]["forced"]) == ["removed"]
        assert move("publish", "chat", new, "--force", SIZES)[0] == 0
    assert "not a check: tokens; expected removed" in move("rollback", "chat", "--force", "tokens")[1]


def test_removals_of_other_collections_are_warnings(texts: Path, build: Build) -> None:
    copied = [json.loads(line)["text"] for line in texts.read_text().splitlines()]
    copy = build("copy", write(texts.parent / "copy.jsonl", copied))
    ask("remove", "chat", "--document", "3", "--yes")
    status, _, printed = move("publish", "copy", copy)
    assert (status, printed["warned"]) == (0, {"removed": "1 document removed from the collection chat"})
    assert gates(copy)["copy"] == {"warned": printed["warned"]}
    assert prove()[0] == 5


def test_failed_comparisons_refuse_only_for_the_own_collection(
    texts: Path, build: Build, tmp_path: Path
) -> None:
    own, other = build("own", texts), build("other", write(tmp_path / "other.jsonl", lines_of("other")))
    for store in (own, other):
        manifest = load_manifest(store)
        del manifest.files["documents.bin"]
        save_manifest(store, manifest)
    assert move("publish", "before", own)[2]["warned"] == {}  # nothing was removed yet
    ask("remove", "chat", "--document", "3", "--yes")
    status, error, _ = move("publish", "own", own)
    assert (status, "its documents are not recorded" in error) == (3, True)
    status, _, printed = move("publish", "other", other)
    assert (status, "its documents are not recorded" in printed["warned"]["removed"]) == (0, True)
    live = json.loads(draftstore("catalogue", "show", str(own), "--json").stdout)["id"]
    prove("--vouch", str(live))
    assert move("publish", "own", own)[0] == 0


def test_a_collection_of_an_earlier_version_holds_up_only_its_own_builds(
    texts: Path, build: Build, tmp_path: Path
) -> None:
    with catalogue_session() as session:
        find_collection(session, "chat").identity = 1
    other = build("other", write(tmp_path / "other.jsonl", lines_of("other")))
    status, _, printed = move("publish", "other", other)
    assert (status, "made by an earlier version" in printed["warned"]["removed"]) == (0, True)
    own = build("own", texts)
    status, error, _ = move("publish", "own", own)
    assert (status, "made by an earlier version" in error) == (3, True)
    assert move("publish", "own", own, "--force", "removed")[0] == 0


def test_places_that_hold_a_source(texts: Path, build: Build) -> None:
    folder = texts.parent
    (folder / "link.jsonl").symlink_to(texts)
    build("other", texts)
    ask("remove", "chat", "--document", "3", "--yes")
    for place, ours in {
        "texts.jsonl": True,
        "somewhere/../texts.jsonl": True,
        f"{folder}": True,
        f"{folder}/*.jsonl": True,
        f"{folder}/link.jsonl": True,
        f"{folder}/texts.jsonl.old": False,
        f"{folder}/other.jsonl": False,
        "s3://bucket/texts.jsonl": False,
    }.items():
        manifest = load_manifest(folder / "other")
        manifest.corpus["sources"] = [place]
        save_manifest(folder / "other", manifest)
        assert move("publish", "other", folder / "other")[0] == (3 if ours else 0), place
        if not ours:
            draftstore("releases", "remove", "other")


def test_without_a_scan_the_removals_themselves_are_compared(texts: Path, build: Build) -> None:
    ask("remove", "chat", "--document", "3", "--yes")
    scan_path("chat").unlink()
    assert move("publish", "chat", build("chat", texts))[0] == 3
