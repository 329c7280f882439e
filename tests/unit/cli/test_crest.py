import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from draftstore.storage.manifest import load_manifest
from draftstore.stores.crest.store import CrestStore
from draftstore.text.tokenizer import TextTokenizer
from tests.unit.cli.test_commands import Runner, replays, run, store, tokenizer
from tests.unit.stores.rest.test_build import contents, names
from tests.unit.stores.rest.test_joining import sealed, sorted_again, store_of

__all__ = ["replays", "run", "store", "tokenizer"]  # fixtures


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "stores").mkdir()
    return tmp_path / "stores" / "crest"


def build(run: Runner, rest: Path, out: Path, *more: object) -> Any:
    return run("build", "crest", "--rest", rest, "--out", out, "--max-n", 3, "--ngrams", 80, *more)


def test_a_corpus_instead_of_a_store(run: Runner, small_corpus: Path, tokenizer: Path, out: Path) -> None:
    """The REST store is built beside, and is there for the next build."""
    arguments = ["build", "crest", "--corpus", small_corpus, "--tokenizer", tokenizer, "--out", out, "--json"]
    found = run(*arguments, "--ngrams", "50", "--max-n", "2").json()
    assert found["counts"]["entries"] == len(list(CrestStore.open(out).entries.items())) <= 50
    assert names(out.parent) == ["crest", "crest-rest"]
    built = (out.parent / "crest-rest").stat().st_ino
    run(*arguments, "--ngrams", "60", "--max-n", "2", "--overwrite").json()
    assert (out.parent / "crest-rest").stat().st_ino == built
    other = out.with_name("other")
    build(run, out.parent / "crest-rest", other, "--json").json()
    assert CrestStore.open(other).manifest.tokenizer == load_manifest(out).tokenizer


def test_several_stores_give_the_trees_of_all_their_segments(
    run: Runner, small_store: Path, small_tokenizer: TextTokenizer, tmp_path: Path, out: Path
) -> None:
    """The joined REST store is built beside, and is there for the next build."""
    stores = [small_store, store_of(small_tokenizer, tmp_path, 40, 7, 1 << 20)]
    build(run, stores[0], out, "--rest", stores[1], "--json").json()
    assert names(out.parent) == ["crest", "crest-rest"]
    again = sealed(sorted_again(stores, tmp_path / "again"), *stores)
    build(run, again, tmp_path / "expected", "--json").json()
    assert contents(out) == contents(tmp_path / "expected")
    joined = (out.parent / "crest-rest").stat().st_ino
    build(run, stores[0], out, "--rest", stores[1], "--nodes", 8, "--overwrite", "--json").json()
    assert (out.parent / "crest-rest").stat().st_ino == joined
    refused = build(run, stores[0], tmp_path / "twice", "--rest", stores[0]).error()
    assert refused.endswith("are the same store: name it once (--rest)")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "Give either --rest with a REST store, or --corpus with --tokenizer"),
        (["--corpus", "{rest}"], "--corpus needs --tokenizer: that of the model that will decode"),
        (["--rest", "{rest}", "--max-bytes", "ten"], "'ten': expected a size in bytes"),
    ],
)
def test_usage(run: Runner, small_store: Path, out: Path, arguments: list[str], reason: str) -> None:
    ran = run("build", "crest", "--out", out, *[part.format(rest=small_store) for part in arguments])
    assert (ran.status, ran.out) == (2, "")
    assert reason in re.sub(r"\s+", " ", ran.err)
    assert names(out.parent) == []


def test_count_writes_its_report(run: Runner, small_store: Path, small_crest: Path, out: Path) -> None:
    found = run("count", small_store, "--out", out, "--max-n", "2", "--json").json()
    tables = [pl.read_parquet(out / f"n{n}.parquet") for n in (1, 2)]
    assert found["counts"]["entries"] == sum(table.height for table in tables)
    assert tables[0]["count"].sum() == found["counts"]["tokens"]
    again = run("count", small_store, "--out", out, "--max-n", "2")
    assert (again.status, again.out) == (0, f"{out}\n")
    assert "exists and is another build" in run("count", small_store, "--out", out).error()
    assert run("count", small_store, "--out", out, "--overwrite", "--json").json()["counts"]["n5"] > 0
    assert "is a store of kind 'crest', expected 'rest'" in run("count", small_crest, "--out", out).error()


def test_a_backend_without_the_store_is_refused(
    run: Runner, small_crest: Path, store: Path, replays: Path
) -> None:
    for command in (["query", small_crest, "--text", "a"], ["replay", small_crest, "--replays", replays]):
        error = run(*command, "--backend", "postgres").error()
        assert "is not in postgres, only in lmdb: build it with both (--backend)" in error
    assert "which has no backends: omit it (--backend)" in (
        run("query", store, "--text", "a", "--backend", "lmdb").error()
    )


FULL = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
from draftstore.cli import main
main()
"""


@pytest.mark.slow
def test_a_disk_that_is_full_is_one_sentence(small_store: Path, out: Path) -> None:
    arguments = ["build", "crest", "--rest", small_store, "--out", out, "--ngrams", "150"]
    done = subprocess.run(
        [sys.executable, "-c", FULL, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert not out.exists()
