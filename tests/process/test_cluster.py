"""Builds on a real Dask cluster of two processes: the bytes of one machine, whoever dies in between."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from draftstore import cluster as cluster_module
from draftstore.cli import main
from draftstore.cluster import DaskPool, check_cluster, open_pool
from draftstore.errors import BuildError, ClusterError, ClusterGoneError, CorpusError
from draftstore.mapping import Pool
from draftstore.search.ngrams import count_ngrams
from draftstore.stores.crest import counts as counts_module
from draftstore.stores.crest.counts import build_counts
from draftstore.stores.rest import segments as segments_module
from draftstore.stores.rest.build import Progress, RestOptions, build_rest
from draftstore.text import parts as parts_module
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from tests import ROOT
from tests.conftest import small_tokenizer_folder, write_texts
from tests.fakes import killed

pytest.importorskip("distributed", reason="the extra `dask` is not installed")

SCHEDULER = """
import sys
from distributed import LocalCluster
if __name__ == "__main__":
    with LocalCluster(
        n_workers=2,
        threads_per_worker=1,
        memory_limit=0,
        dashboard_address=None,
        scheduler_kwargs={"dashboard_address": "127.0.0.1:0"},
    ) as cluster:
        print(cluster.scheduler_address, flush=True)
        sys.stdin.read()
"""
"""A cluster in a process of its own, which prints its address and ends with its input."""
DOCUMENTS, SEGMENT_TOKENS, PART_BYTES = 300, 1500, (5_000, 5_000)
RAN = "ran.txt"
"""Beside the store that is built: a line for every job that began."""


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with open_pool("local:2") as pool:
        assert pool is not None
        yield pool


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return load_tokenizer(small_tokenizer_folder(tmp_path_factory.mktemp("t") / "small-bpe"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("corpus") / "c.jsonl", DOCUMENTS)


@pytest.fixture(scope="module")
def whole(corpus: Path, tokenizer: TextTokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the store by this process alone."""
    out = tmp_path_factory.mktemp("whole") / "store"
    build(None, corpus, tokenizer, out)
    return out


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module, "PART_BYTES", PART_BYTES)


def build(
    pool: Pool | None,
    corpus: Path,
    tokenizer: TextTokenizer,
    out: Path,
    progress: Progress | None = None,
    **changes: Any,
) -> None:
    options = RestOptions((corpus,), "test", **{"segment_tokens": SEGMENT_TOKENS, **changes})
    build_rest(options, tokenizer, out, workers=1, pool=pool, progress=progress)


def contents(store: Path) -> dict[str, bytes]:
    """Return the bytes of every file but the manifest, which holds the time."""
    paths = [path for path in store.rglob("*") if path.is_file() and path.name != "manifest.json"]
    return {path.relative_to(store).as_posix(): path.read_bytes() for path in paths}


def ran(folder: Path) -> list[str]:
    return (folder / RAN).read_text().splitlines()


def note(folder: Path, name: object) -> bool:
    """Note that a job began, on a worker; return whether it is the first time."""
    with (folder / RAN).open("a+") as file:
        file.seek(0)
        first = f"{name}\n" not in file.readlines()
        file.write(f"{name}\n")
    return first


def sort_or_die(store: Path, segment: int, vocab_size: int) -> None:
    """Sort a segment, or die of the third one."""
    if note(store.parents[1], segment) and segment == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    sort_segment(store, segment, vocab_size)


def sort_and_die(store: Path, segment: int, vocab_size: int) -> None:
    """Die of the third segment, whoever tries it."""
    if segment == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    sort_segment(store, segment, vocab_size)


def sort_or_wait(store: Path, segment: int, vocab_size: int) -> None:
    """Sort a segment; with the third one, do not end before the cluster does."""
    if segment == 2:
        threading.Event().wait()
    sort_segment(store, segment, vocab_size)


def tokenize_or_die(reading: Any, files: Any, target: Path) -> tuple[int, int, int]:
    """Tokenize a part, or die of the second one when it is half done."""
    if note(target.parents[3], target.name) and target.name == "00001":
        target.with_name(f".{target.name}.left").mkdir()
        os.kill(os.getpid(), signal.SIGKILL)
    return tokenize_part(reading, files, target)


sort_segment, tokenize_part = segments_module.sort_segment, parts_module.tokenize_part


class TestBytes:
    def test_of_a_store(
        self, pool: Pool, corpus: Path, tokenizer: TextTokenizer, whole: Path, tmp_path: Path
    ) -> None:
        build(pool, corpus, tokenizer, tmp_path / "store")
        assert contents(tmp_path / "store") == contents(whole)
        assert [path.name for path in tmp_path.iterdir()] == ["store"]

    def test_of_counts(
        self, pool: Pool, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(counts_module, "PART_ROWS", 700)  # of the ranges of a cluster
        monkeypatch.setattr(counts_module, "count_ngrams", count_in_ranges(count_ngrams))
        done: list[int] = []
        build_counts(whole, tmp_path / "here")
        build_counts(whole, tmp_path / "there", pool=pool, progress=lambda rows, _: done.append(rows))
        assert contents(tmp_path / "there") == contents(tmp_path / "here")
        assert len(done) > 5
        assert done == sorted(done)


def count_in_ranges(count: Callable[..., Any]) -> Callable[..., Any]:
    """Return the counting of one process, in ranges as small."""

    def counting(*arguments: Any, **options: Any) -> Any:
        return count(*arguments, **{**options, "part_rows": 700})

    return counting


class TestDeath:
    def test_of_workers_costs_their_jobs(
        self,
        pool: Pool,
        corpus: Path,
        tokenizer: TextTokenizer,
        whole: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(parts_module, "tokenize_part", tokenize_or_die)
        monkeypatch.setattr(segments_module, "sort_segment", sort_or_die)
        build(pool, corpus, tokenizer, tmp_path / "store")
        assert contents(tmp_path / "store") == contents(whole)
        jobs = ran(tmp_path)
        assert (jobs.count("00001"), jobs.count("2")) == (2, 2)
        assert len({job for job in jobs if len(job) == len("00001")}) > 5

    @pytest.mark.slow
    def test_of_every_worker_that_tries_a_job_is_said(
        self,
        corpus: Path,
        tokenizer: TextTokenizer,
        whole: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        with open_pool("local:2") as pool, monkeypatch.context() as patch:  # none of its workers may be left
            patch.setattr(segments_module, "sort_segment", sort_and_die)
            with pytest.raises(BuildError, match="no worker of local:2 stayed"):
                build(pool, corpus, tokenizer, tmp_path / "store")
        build(None, corpus, tokenizer, tmp_path / "store")
        assert contents(tmp_path / "store") == contents(whole)

    @pytest.mark.parametrize("gone", [True, False], ids=["gone", "leaving"])
    def test_of_all_workers_is_said(self, gone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cluster_module, "NO_WORKERS_SECONDS", 0.1)
        with open_pool("local:1") as pool:
            assert isinstance(pool, DaskPool)
            pool.client.retire_workers(close_workers=gone, remove=gone)
            with pytest.raises(BuildError, match="no worker of local:1 stayed"):
                list(pool.results(os.fsencode, {0: ("job",)}))

    @pytest.mark.slow
    def test_of_the_scheduler_leaves_what_is_done(
        self,
        corpus: Path,
        tokenizer: TextTokenizer,
        whole: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        (tmp_path / "scheduler.py").write_text(SCHEDULER)
        with subprocess.Popen(
            [sys.executable, tmp_path / "scheduler.py"],
            cwd=tmp_path,
            env={
                **os.environ,
                "TMPDIR": str(tmp_path),
                "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            gone = pytest.raises(ClusterGoneError, match="run the command again")
            kill = Progress(sorted=lambda done, _: process.kill() if done else None)
            with monkeypatch.context() as patch:
                patch.setattr(segments_module, "sort_segment", sort_or_wait)
                with gone, open_pool(address) as pool:
                    build(pool, corpus, tokenizer, tmp_path / "store", progress=kill)
        finish(corpus, tokenizer, whole, tmp_path / "store")

    @pytest.mark.slow
    def test_of_the_build_leaves_what_is_done(
        self, corpus: Path, tokenizer: TextTokenizer, whole: Path, tmp_path: Path
    ) -> None:
        tokenizer.save(tmp_path)
        out = tmp_path / "store"
        marker = tmp_path / ".store.partial" / "store" / "first_rows.bin"
        assert killed.kill_when(clustered_store, (corpus, tmp_path, out), marker.exists)
        finish(corpus, tokenizer, whole, out)


def clustered_store(ready: Callable[[], None], corpus: Path, tokenizer: Path, out: Path) -> None:
    parts_module.PART_BYTES = PART_BYTES
    segments_module.sort_segment = sort_or_wait  # it is killed before it ends
    tempfile.tempdir = str(out.parent)  # of what is killed nobody removes the files
    with open_pool("local:2") as pool:
        ready()
        build(pool, corpus, load_tokenizer(tokenizer, name="small-bpe"), out)


def finish(corpus: Path, tokenizer: TextTokenizer, whole: Path, out: Path) -> None:
    """Check that the next run goes on where the one before stopped, and ends with the same bytes."""
    options = RestOptions((corpus,), "test", segment_tokens=SEGMENT_TOKENS)
    build_rest(options, tokenizer, out, workers=1)
    assert contents(out) == contents(whole)
    assert not (out.parent / ".store.partial").exists()


class TestRefused:
    @pytest.mark.parametrize("name", ["local", "local:0", "scheduler:8786", "http://x", "tcp://"])
    def test_names_that_are_no_cluster(self, name: str) -> None:
        with pytest.raises(ClusterError, match="is no cluster: give the address of a Dask scheduler"):
            check_cluster(name)

    def test_an_address_where_nobody_answers(
        self,
        corpus: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr(cluster_module, "CONNECT_SECONDS", 0.2)
        small_tokenizer_folder(tmp_path / "t")
        where = ["--tokenizer", str(tmp_path / "t"), "--out", str(tmp_path / "store")]
        command = ["build", "rest", "--corpus", str(corpus), *where, "--cluster", "tcp://127.0.0.1:9"]
        monkeypatch.setattr(sys, "argv", ["draftstore", *command])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 1
        assert "no Dask scheduler answers at tcp://127.0.0.1:9" in capsys.readouterr().err

    def test_a_folder_that_workers_do_not_see(self, pool: Pool, tmp_path: Path) -> None:
        with pytest.raises(ClusterError, match="build on storage that all machines of the cluster have"):
            pool.require(tmp_path / "elsewhere")

    def test_another_version(self, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        ours = {**cluster_module.versions(), "tokenizers": "0.0.1"}
        monkeypatch.setattr(cluster_module, "versions", lambda: ours)
        with pytest.raises(
            ClusterError, match=r"has tokenizers .*, and this process 0\.0\.1: install the same"
        ):
            pool.require(tmp_path)

    def test_errors_of_a_job_are_its_own(
        self, pool: Pool, corpus: Path, tokenizer: TextTokenizer, tmp_path: Path
    ) -> None:
        bad = tmp_path / "bad.jsonl"
        bad.write_bytes(corpus.read_bytes() + b"bad\n")
        with pytest.raises(CorpusError, match=f"line {DOCUMENTS + 1}: not JSON"):
            build(pool, bad, tokenizer, tmp_path / "store", strict=True)
