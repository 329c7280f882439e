"""The proof that removed documents are gone, on real stores of every kind."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from draftstore.stores.crest.build import CrestOptions, build_crest
from draftstore.stores.crest.counts import CountOptions, build_counts
from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.text.scans import documents_of
from draftstore.text.tokenizer import TextTokenizer
from schema.cli.common import catalogue_session
from schema.cli.corpora import corpus
from schema.collections import collecting
from schema.models import Build
from tests.fakes.dense_stores import make_dense_store
from tests.unit.schema.test_collecting import ask, home
from tests.unit.schema.test_sql import run as draftstore

__all__ = ["home"]

SECRET = "jane lives at the end of the lane and her number is 0117 496 0000"
pytestmark = pytest.mark.usefixtures("database", "no_fsync")
GATES = "corpus,tokens,strategy,tokenizer,kind"


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


def prove() -> tuple[int, list[dict[str, Any]]]:
    result = CliRunner().invoke(corpus, ["prove-removed", "chat", "--json"], catch_exceptions=False)
    report = json.loads(result.stdout)
    assert report["proven"] == (result.exit_code == 0)
    return result.exit_code, report["checked"]


def guilty(rows: list[dict[str, Any]]) -> dict[str, tuple[int, int]]:
    return {
        ",".join(row["releases"]): (row["removed"], row["unwanted"])
        for row in rows
        if row["removed"] or row["unwanted"] or row["problem"]
    }


def test_before_the_rebuild_and_after(
    texts: Path, make: Make, wanted: Callable[[], Path], tmp_path: Path
) -> None:
    make("chat", texts)
    make("other", write(tmp_path / "other.jsonl", lines_of("other")))
    status, rows = prove()
    assert (status, [row["releases"] for row in rows]) == (0, [["chat"]])  # the other one has other sources
    assert ask("remove", "chat", "--containing", "0117 496 0000", "--yes")["documents"] == 2
    status, rows = prove()
    assert (status, guilty(rows), rows[0]["documents"]) == (5, {"chat": (2, 0)}, 42)
    told = CliRunner().invoke(corpus, ["prove-removed", "chat"])
    assert "NOT proven for chat: 2 removed documents" in told.stderr
    make("chat", wanted())
    status, rows = prove()
    assert (status, rows[0]["documents"], guilty(rows)) == (0, 40, {})
    told = CliRunner().invoke(corpus, ["prove-removed", "chat"])
    assert "\nproven for chat" in told.stdout
    assert "not checked: the sources themselves" in told.stderr


def test_another_release_from_the_same_file_is_no_secret(
    texts: Path, make: Make, wanted: Callable[[], Path], tmp_path: Path
) -> None:
    make("other", texts)
    ask("remove", "chat", "--containing", SECRET, "--yes")
    make("chat", wanted())
    assert guilty(prove()[1]) == {"other": (2, 0)}
    copy = write(tmp_path / "copy.jsonl", [SECRET])
    make("other", copy)
    assert guilty(prove()[1]) == {"other": (1, 0)}  # not its sources: the text
    make("other", texts)
    assert prove()[0] == 0
    # The same file, read otherwise: the texts are not those that were removed, nor those that are wanted.
    write(texts, [line + "!" for line in lines_of("chat")])
    make("other", texts)
    write(texts, lines_of("chat"))
    assert guilty(prove()[1]) == {"other": (0, 40)}


def test_stores_made_from_others_have_their_documents(
    texts: Path, make: Make, wanted: Callable[[], Path], tmp_path: Path
) -> None:
    def derive(rest: Path, number: int) -> None:
        build_crest(CrestOptions(name="chat", max_n=2, ngrams=50), rest, tmp_path / f"crest-{number}")
        publish("chat-crest", tmp_path / f"crest-{number}")
        build_counts(rest, tmp_path / f"counts-{number}", CountOptions(max_n=2))
        draftstore("catalogue", "add", str(tmp_path / f"counts-{number}"))

    rest = make("chat", texts)
    derive(rest, 1)
    ask("remove", "chat", "--containing", SECRET, "--yes")
    new = make("chat", wanted())
    assert guilty(prove()[1]) == {"chat-crest": (2, 0), "": (2, 0)}
    derive(new, 2)
    assert guilty(prove()[1]) == {}
    shutil.rmtree(new)
    status, rows = prove()
    assert status == 5
    assert all("build it again from the collection" in row["problem"] for row in rows)


def test_what_cannot_be_looked_into_proves_nothing(
    texts: Path, make: Make, small_tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    ids = [small_tokenizer.encode(line, bos=False).tolist() for line in lines_of("chat")]
    publish("dense", make_dense_store(tmp_path / "dense", ids, tokenizer=small_tokenizer))
    file = make("chat", texts) / "documents.bin"
    file.write_bytes(file.read_bytes()[:-16] + bytes(16))
    status, rows = prove()
    assert status == 5
    assert rows[0]["problem"].startswith("its documents are not recorded")
    assert "documents.bin is damaged" in rows[1]["problem"]


def test_places_that_hold_a_source(texts: Path, make: Make) -> None:
    folder = texts.parent
    (folder / "link.jsonl").symlink_to(texts)
    make("other", write(folder / "another.jsonl", lines_of("other")))
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
        with catalogue_session() as session:
            build = session.query(Build).one()
            build.manifest = dict(build.manifest or {}) | {"corpus": {"sources": [place]}}
        assert guilty(prove()[1]) == ({"other": (0, 40)} if ours else {}), place
