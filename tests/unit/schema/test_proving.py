"""The proof that removed documents are gone, on real stores of every kind, and the check of releases for them."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from sqlalchemy import select

from draftstore.hf.loading import load_model
from draftstore.hf.states import ModelStates
from draftstore.recycling.build import RecyclingOptions, build_recycling
from draftstore.storage.manifest import load_manifest, save_manifest
from draftstore.stores.crest.build import CrestOptions, build_crest
from draftstore.stores.crest.counts import CountOptions, build_counts
from draftstore.stores.dresd.build import DresdOptions, build_dresd
from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.stores.rest.joining import join_rest
from draftstore.text.scans import documents_of
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from schema.cli.common import catalogue_session
from schema.cli.corpora import corpus
from schema.cli.releases import releases
from schema.collections import collecting
from schema.collections.removal_files import scan_path
from schema.models import Build
from tests.fakes.dense_stores import make_dense_store
from tests.unit.hf.test_loading import model_folder
from tests.unit.schema.test_collecting import ask, home
from tests.unit.schema.test_sql import run as draftstore

__all__ = ["home", "model_folder"]

SECRET = "jane lives at the end of the lane and her number is 0117 496 0000"
pytestmark = pytest.mark.usefixtures("database", "no_fsync")
GATES = "corpus,tokens,strategy,tokenizer,kind,removed"
SIZES = "corpus,tokens"


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(json.dumps({"id": str(i), "text": line}) + "\n" for i, line in enumerate(lines)))
    return path


def lines_of(name: str) -> list[str]:
    return [f"{name} {i}: the quick brown fox jumps over the lazy dog" for i in range(40)]


@pytest.fixture
def texts(tmp_path: Path, small_tokenizer: TextTokenizer) -> Path:
    """Make a collection of documents, one of which is to be forgotten."""
    path = write(tmp_path / "texts.jsonl", [*lines_of("chat"), f"hello {SECRET} goodbye", SECRET])
    (tmp_path / "small-bpe").mkdir()
    small_tokenizer.save(tmp_path / "small-bpe")
    ask("add", "chat", path, "--tokenizer", tmp_path / "small-bpe")
    return path


Make = Callable[..., Path]


@pytest.fixture
def make(small_tokenizer: TextTokenizer, tmp_path: Path) -> Make:
    """Return a function that builds a REST store of some files, publishes it, and returns its directory."""

    def made(release: str, *files: Path) -> Path:
        store = tmp_path / f"store-{len(list(tmp_path.glob('store-*')))}"
        build_rest(RestOptions(corpus=files, name=release), small_tokenizer, store, workers=1)
        publish(release, store)
        return store

    return made


@pytest.fixture
def wanted(texts: Path, small_tokenizer: TextTokenizer) -> Callable[[], Path]:
    """Return a function that writes the wanted documents to the source, as their owner would."""

    def rewritten() -> Path:
        with catalogue_session() as session:
            collection = collecting.get_collection(session, "chat")
        scan = collecting.scan_collection(collection, small_tokenizer)
        found = documents_of(scan, collecting.wanted_of(collection, scan))
        return write(texts, [document.text for document in found])

    return rewritten


def publish(release: str, store: Path) -> None:
    draftstore("catalogue", "add", str(store))
    draftstore("releases", "publish", release, str(store), "--force", GATES)


def prove(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
    result = CliRunner().invoke(
        corpus, ["prove-removed", "chat", *arguments, "--json"], catch_exceptions=False
    )
    report = json.loads(result.stdout)
    assert report["proven"] == (result.exit_code == 0)
    return result.exit_code, report["checked"]


def guilty(rows: list[dict[str, Any]]) -> dict[str, tuple[int, int]]:
    return {
        ",".join(row["releases"]): (row["removed"], row["unwanted"])
        for row in rows
        if row["removed"] or row["unwanted"] or row["problem"]
    }


def mark(**changes: Any) -> None:
    """Change the newest build, as another command or version would have registered it."""
    with catalogue_session() as session:
        build = session.scalars(select(Build).order_by(Build.id.desc())).first()
        assert build is not None
        for name, value in changes.items():
            setattr(build, name, value)


def test_removed_documents_are_proven_gone_only_after_the_rebuild(
    texts: Path, make: Make, wanted: Callable[[], Path], tmp_path: Path
) -> None:
    make("chat", texts)
    make("other", write(tmp_path / "other.jsonl", lines_of("other")))
    status, rows = prove()
    assert (status, [row["releases"] for row in rows]) == (0, [["chat"], ["other"]])
    assert ask("remove", "chat", "--containing", "0117 496 0000", "--yes")["documents"] == 2
    status, rows = prove()
    assert (status, guilty(rows), rows[0]["documents"]) == (5, {"chat": (2, 0)}, 42)
    told = CliRunner().invoke(corpus, ["prove-removed", "chat"])
    assert "NOT proven for chat: 2 removed documents" in told.stderr
    make("chat", wanted())
    status, rows = prove()
    assert (status, [row["documents"] for row in rows], guilty(rows)) == (0, [40, 40], {})
    told = CliRunner().invoke(corpus, ["prove-removed", "chat"])
    assert "\nproven for chat" in told.stdout
    assert "not checked: the sources themselves" in told.stderr


def test_rollouts_are_proven_gone(make: Make, small_tokenizer: TextTokenizer, tmp_path: Path) -> None:
    """A build of the same files holds a removed rollout until a condition leaves it out."""
    rollouts = tmp_path / "1.jsonl"
    records = [{"id": str(n), "input": "where? ", "output": f"{n} {SECRET}", "score": n} for n in range(20)]
    rollouts.write_text("".join(json.dumps(record) + "\n" for record in records))
    pair = "prompt=input,output=output"
    ask("add", "chat", rollouts, "--fields", pair)
    assert ask("remove", "chat", "--document", "0", "--yes")["documents"] == 1
    for where, found in (("score >= 0", (5, {"chat": (1, 0)})), ("score > 0", (0, {}))):
        store = tmp_path / f"rollouts {where[6:]}"
        options = RestOptions(corpus=(rollouts,), name="chat", fields=pair, where=where)
        build_rest(options, small_tokenizer, store, workers=1)
        publish("chat", store)
        status, rows = prove()
        assert (status, guilty(rows)) == found


def test_only_builds_made_from_the_collection_may_hold_no_inactive_documents(
    texts: Path, make: Make, tmp_path: Path
) -> None:
    ask("remove", "chat", "--containing", SECRET, "--yes")
    make("other", texts)
    make("third", write(tmp_path / "copy.jsonl", [SECRET]))
    assert guilty(prove()[1]) == {"other": (2, 0), "third": (1, 0)}  # whatever their sources
    clean = write(tmp_path / "lines.jsonl", lines_of("more"))
    make("other", clean)
    rest = make("third", clean)
    assert prove()[0] == 0
    mark(parameters={"collection": "chat"})
    build_crest(CrestOptions(name="chat", max_n=2, ngrams=50), rest, tmp_path / "crest")
    publish("chat-crest", tmp_path / "crest")
    assert guilty(prove()[1]) == {"third": (0, 40), "chat-crest": (0, 40)}


def test_derived_stores_have_the_documents_of_their_source(
    texts: Path, make: Make, wanted: Callable[[], Path], tmp_path: Path, small_tokenizer: TextTokenizer
) -> None:
    def derive(rest: Path, number: int) -> None:
        stores = [tmp_path / f"{kind}-{number}" for kind in ("crest", "recycling", "counts")]
        build_crest(CrestOptions(name="chat", max_n=2, ngrams=50), rest, stores[0])
        build_recycling(RecyclingOptions(model_id="model"), rest, stores[1])
        build_counts(rest, stores[2], CountOptions(max_n=2), name="counts")
        publish("chat-crest", stores[0])
        publish("start", stores[1])
        draftstore("catalogue", "add", str(stores[2]))

    # The commands alone: nobody registered the store that these were made from.
    rest = tmp_path / "unknown"
    build_rest(RestOptions(corpus=(texts,), name="chat"), small_tokenizer, rest, workers=1)
    derive(rest, 1)
    ask("remove", "chat", "--containing", SECRET, "--yes")
    assert guilty(prove()[1]) == {"chat-crest": (2, 0), "start": (2, 0), "": (2, 0)}
    new = make("chat", wanted())
    derive(new, 2)
    assert guilty(prove()[1]) == {}
    new.rename(tmp_path / "moved")
    status, rows = prove()
    assert status == 5
    assert all(f"`draftstore catalogue add {new}`" in row["problem"] for row in rows[1:])
    draftstore("catalogue", "add", str(tmp_path / "moved"))
    assert prove()[0] == 0


def test_a_store_of_several_has_the_documents_of_each(
    texts: Path, build: Make, tmp_path: Path, small_tokenizer: TextTokenizer
) -> None:
    stores = [build("other", write(tmp_path / "other.jsonl", lines_of("other"))), build("own", texts)]
    joined = join_rest(stores, tmp_path / "joined").path
    build_crest(CrestOptions(name="both", max_n=2, ngrams=50), joined, tmp_path / "crest")
    publish("both", tmp_path / "crest")
    assert [row["documents"] for row in prove()[1]] == [82]
    ask("remove", "chat", "--containing", SECRET, "--yes")
    assert guilty(prove()[1]) == {"both": (2, 0)}
    status, error, _ = move("publish", "again", tmp_path / "crest")
    assert (status, "removed: 2 documents removed from the collection chat" in error) == (3, True)


def test_dense_stores_record_their_documents(texts: Path, tmp_path: Path, model_folder: Path) -> None:
    text, states = load_tokenizer(str(model_folder)), ModelStates(load_model(str(model_folder)))
    build_dresd(DresdOptions(corpus=(texts,), name="dense", dims=8), text, states, tmp_path / "dense")
    publish("dense", tmp_path / "dense")
    assert prove()[0] == 0
    ask("remove", "chat", "--containing", SECRET, "--yes")
    assert guilty(prove()[1]) == {"dense": (2, 0)}


def test_builds_that_cannot_be_checked_must_be_vouched_for(
    texts: Path, make: Make, small_tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    ids = [small_tokenizer.encode(line, bos=False).tolist() for line in lines_of("chat")]
    publish("dense", make_dense_store(tmp_path / "dense", ids, tokenizer=small_tokenizer))
    clean = write(tmp_path / "other.jsonl", lines_of("other"))
    file = make("damaged", clean) / "documents.bin"
    file.write_bytes(file.read_bytes()[:-16] + bytes(16))
    earlier = load_manifest(make("earlier", clean))
    del earlier.parameters["plan"]["identity"]
    mark(manifest=json.loads(json.dumps(dataclasses.asdict(earlier))))
    status, rows = prove()
    dense, damaged, old = rows
    assert status == 5
    assert dense["problem"].startswith("its documents are not recorded; build it again")
    assert "documents.bin is damaged" in damaged["problem"]
    assert "is of an earlier version" in old["problem"]
    assert all(f"--vouch {row['build']}`" in row["problem"] for row in rows)
    options = [part for row in rows[1:] for part in ("--vouch", str(row["build"]))]
    status, rows = prove(*options)
    assert (status, [row["vouched"] is not None for row in rows]) == (5, [False, True, True])
    assert prove("--vouch", str(dense["build"]))[0] == prove()[0] == 0  # it is recorded
    ask("remove", "chat", "--containing", "chat 7:", "--yes")
    assert prove()[0] == 5  # it must be said again
    with catalogue_session() as session:
        assert len(collecting.get_collection(session, "chat").vouched) == 3
    result = CliRunner().invoke(corpus, ["prove-removed", "chat", "--vouch", "12345"])
    assert "12345 is neither the id of a live build nor a live log of chat" in str(result.exception)


def test_vouching_does_not_cover_removed_documents(texts: Path, make: Make) -> None:
    make("chat", texts)
    ask("remove", "chat", "--containing", SECRET, "--yes")
    [row] = prove()[1]
    assert prove("--vouch", str(row["build"]))[0] == 5


# The check `removed` of releases


@pytest.fixture
def build(small_tokenizer: TextTokenizer, tmp_path: Path) -> Make:
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
    texts: Path, build: Make
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


def test_removals_of_other_collections_are_warnings(texts: Path, build: Make) -> None:
    copied = [json.loads(line)["text"] for line in texts.read_text().splitlines()]
    copy = build("copy", write(texts.parent / "copy.jsonl", copied))
    ask("remove", "chat", "--document", "3", "--yes")
    status, _, printed = move("publish", "copy", copy)
    assert (status, printed["warned"]) == (0, {"removed": "1 document removed from the collection chat"})
    assert gates(copy)["copy"] == {"warned": printed["warned"]}
    assert prove()[0] == 5


def test_failed_comparisons_refuse_only_for_the_own_collection(
    texts: Path, build: Make, tmp_path: Path
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
    texts: Path, build: Make, tmp_path: Path
) -> None:
    with catalogue_session() as session:
        collecting.find_collection(session, "chat").identity = 1
    other = build("other", write(tmp_path / "other.jsonl", lines_of("other")))
    status, _, printed = move("publish", "other", other)
    assert (status, "made by an earlier version" in printed["warned"]["removed"]) == (0, True)
    own = build("own", texts)
    status, error, _ = move("publish", "own", own)
    assert (status, "made by an earlier version" in error) == (3, True)
    assert move("publish", "own", own, "--force", "removed")[0] == 0


def test_overlapping_sources_are_compared(texts: Path, build: Make) -> None:
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


def test_without_a_scan_the_removals_themselves_are_compared(texts: Path, build: Make) -> None:
    ask("remove", "chat", "--document", "3", "--yes")
    scan_path("chat").unlink()
    assert move("publish", "chat", build("chat", texts))[0] == 3
