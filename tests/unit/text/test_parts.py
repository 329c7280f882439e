"""Corpora that are tokenized in parts: the same documents, reports and shards as read at once."""

import dataclasses
import gzip
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from draftstore.errors import CorpusError
from draftstore.mapping import ExecutorPool, Pool, attempt
from draftstore.storage.report import ReadReport
from draftstore.text.corpus import find_files, read_corpus, read_files
from draftstore.text.encoding import tokenize_corpus, write_shards
from draftstore.text.parts import Reading, plan_parts, tokenize_parts
from draftstore.text.records import Document
from draftstore.text.tokenizer import TextTokenizer
from tests.conftest import write_texts
from tests.examples import examples

pytestmark = pytest.mark.usefixtures("no_fsync")

HOW: dict[str, Any] = {"render": str, "column": "text", "strict": False, "allow_truncated": True}
LINES = st.one_of(
    st.text("abc ü\n", max_size=30).map(lambda text: json.dumps({"text": text}).encode()),
    st.sampled_from(
        [b"", b"  ", b"bad", b'{"other": 1}', b'{"text": "\xff"}', b'{"id": "x", "text": "named"}']
    ),
)


class ThreadPool(ExecutorPool):
    """A pool without processes; it counts its jobs."""

    def __init__(self) -> None:
        super().__init__(ThreadPoolExecutor(2))
        self.jobs = 0

    def results(self, function: Any, jobs: Any) -> Any:
        self.jobs += len(jobs)
        return super().results(function, jobs)


def pack(path: Path, data: bytes) -> Path:
    packers: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".zst": zstandard.compress}
    path.write_bytes(packers.get(path.suffix, bytes)(data))
    return path


def read_at_once(corpus: list[Path]) -> tuple[list[Document], ReadReport]:
    report = ReadReport()
    return list(read_corpus(corpus, report=report, **HOW)), report


@examples(60)
@given(
    lines=st.lists(LINES, max_size=20),
    end=st.sampled_from([b"\n", b"", b'\n{"text": "cut o']),
    suffix=st.sampled_from(["", ".gz", ".zst"]),
    lost=st.integers(0, 3),
    size=st.integers(1, 200),
)
def test_stretches_of_a_file_are_the_file(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[bytes],
    end: bytes,
    suffix: str,
    lost: int,
    size: int,
) -> None:
    path = pack(tmp_path_factory.mktemp("f") / f"c.jsonl{suffix}", b"\n".join(lines) + end)
    if suffix and lost:
        path.write_bytes(path.read_bytes()[:-lost])
    documents, report = read_at_once([path])
    found, reports = [], []
    for part in plan_parts(find_files([path], (), ReadReport()), size):
        reports.append(ReadReport())
        found += list(read_files(part, report=reports[-1], **HOW))
    assert found == documents
    problems = [problem for one in reports for problem in one.problems]
    assert problems == report.problems
    for key in ("documents", "bad_records", "empty_documents", "truncated"):
        assert sum(getattr(one, key) for one in reports) == getattr(report, key)
    assert all(one.unread for one in reports) == bool(report.unread)


@pytest.mark.parametrize("group", [1, 7, 100])
@pytest.mark.parametrize("size", [1, 1000, 10**6])
def test_stretches_of_a_parquet_file_are_the_file(tmp_path: Path, group: int, size: int) -> None:
    path = tmp_path / "c.parquet"
    texts = [f"text {number} " * 5 for number in range(40)]
    parquet.write_table(pa.table({"text": texts}), path, row_group_size=group)
    parts = plan_parts(find_files([path], (), ReadReport()), size)
    found = [document for part in parts for document in read_files(part, report=ReadReport(), **HOW)]
    assert found == read_at_once([path])[0]
    assert len(parts) > 1 or group == 100 or size == 10**6


def test_small_files_share_a_part(tmp_path: Path) -> None:
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text("x" * 100)
    files = find_files([tmp_path], "*.txt", ReadReport())
    assert [len(part) for part in plan_parts(files, 400)] == [4, 4, 2]
    assert [file for part in plan_parts(files, 400) for file in part] == files


def test_large_corpora_have_large_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(100):
        (tmp_path / f"{number:02d}.txt").write_text("x" * 100)
    files = find_files([tmp_path], "*.txt", ReadReport())
    monkeypatch.setattr("draftstore.text.parts.WANTED_PARTS", 10)
    for limits, parts in (((1, 10**6), 10), ((5_000, 10**6), 2), ((1, 500), 20)):
        monkeypatch.setattr("draftstore.text.parts.PART_BYTES", limits)
        assert len(plan_parts(files)) == parts


@pytest.fixture
def corpus(tmp_path: Path) -> list[Path]:
    """Return a corpus of every kind of file, some of it bad."""
    folder = tmp_path / "corpus"
    (folder / "source").mkdir(parents=True)
    for number in range(5):
        (folder / "source" / f"{number}.py").write_text(f"x = {number}\n" * 30)
    lines = write_texts(folder / "a.jsonl", 40)
    with lines.open("a") as file:
        file.write('bad\n{"text": ""}\n\n{"other": 1}\n{"messages": [{"role": "user", "content": "hi"}]}\n')
    texts = write_texts(folder / "b.jsonl", 50, seed=1).read_bytes()
    (folder / "b.jsonl").unlink()
    (folder / "unread.jsonl").write_text('{"other": "x"}\n' * 30)
    parquet.write_table(pa.table({"text": ["one", "two", None]}), folder / "c.parquet", row_group_size=1)
    packed = pack(folder / "b.jsonl.zst", texts)
    return [lines, packed, folder / "unread.jsonl", folder / "c.parquet", folder / "source"]


def tokenize(
    pool: Pool, corpus: list[Path], tokenizer: TextTokenizer, folder: Path, report: ReadReport
) -> Any:
    """Tokenize a corpus in parts, into shards of 500 tokens."""
    (folder / "t").mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder / "t")
    reading = Reading("text", False, False, folder / "t", tokenizer.name, tokenizer.fingerprint)
    files = find_files(corpus, "*.py", report)
    documents = tokenize_parts(pool, reading, files, folder / "parts", report)
    return write_shards(
        documents, lambda left: ([one] for one in left), tokenizer, folder / "shards",
        corpus_fingerprint="f", source="s", shard_tokens=500,
    )  # fmt: skip


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("size", [1, 700, 10**6])
def test_shards_and_report_are_those_of_one_process(
    small_tokenizer: TextTokenizer,
    corpus: list[Path],
    tmp_path: Path,
    size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("draftstore.text.parts.PART_BYTES", (size, size))
    expected = ReadReport()
    documents = read_corpus(
        corpus,
        render=lambda messages: small_tokenizer.render_chat(messages, add_generation_prompt=False),
        report=expected,
        glob="*.py",
    )
    tokenize_corpus(documents, small_tokenizer, tmp_path / "whole", corpus_fingerprint="f", shard_tokens=500)
    pool, report = ThreadPool(), ReadReport()
    tokenize(pool, corpus, small_tokenizer, tmp_path / "apart", report)
    assert contents(tmp_path / "apart" / "shards") == contents(tmp_path / "whole")
    assert dataclasses.asdict(report) == dataclasses.asdict(expected)
    assert report.unread == [str(corpus[2])]
    assert len(list((tmp_path / "whole").glob("*.tokens"))) > 3
    assert pool.jobs > 3 or size > 1000


def test_a_part_may_be_without_tokens(
    wordy_tokenizer: TextTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftstore.text.parts.PART_BYTES", (1, 1))
    path = tmp_path / "c.jsonl"
    path.write_text('{"text": "one two"}\n{"text": "..."}\n{"text": "two"}\n')
    documents = read_corpus([path], report=ReadReport(), **HOW)
    tokenize_corpus(documents, wordy_tokenizer, tmp_path / "whole", corpus_fingerprint="f", shard_tokens=500)
    tokenize(ThreadPool(), [path], wordy_tokenizer, tmp_path / "apart", ReadReport())
    assert contents(tmp_path / "apart" / "shards") == contents(tmp_path / "whole")


def test_parts_that_are_there_are_not_made_again(
    small_tokenizer: TextTokenizer, corpus: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftstore.text.parts.PART_BYTES", (700, 700))
    first = ThreadPool()
    tokenize(first, corpus, small_tokenizer, tmp_path, ReadReport())
    parts = sorted((tmp_path / "parts").iterdir())
    before = contents(tmp_path / "shards")
    for path in (tmp_path / "shards").iterdir():
        path.unlink()
    parts[1].rename(tmp_path / "parts" / f".{parts[1].name}.died")
    again, report = ThreadPool(), ReadReport()
    tokenize(again, corpus, small_tokenizer, tmp_path, report)
    assert (first.jobs, again.jobs) == (len(parts), 1)
    assert contents(tmp_path / "shards") == before
    assert report.documents > 0


def test_a_bad_record_stops_a_strict_reading(
    small_tokenizer: TextTokenizer, corpus: list[Path], tmp_path: Path
) -> None:
    small_tokenizer.save(tmp_path)
    reading = Reading("text", True, False, tmp_path, small_tokenizer.name, small_tokenizer.fingerprint)
    files = find_files(corpus, "*.py", ReadReport())
    with pytest.raises(CorpusError, match="line 41: not JSON"):
        list(tokenize_parts(ThreadPool(), reading, files, tmp_path / "parts", ReadReport()))


class TestAttempt:
    def test_the_first_one_stays(self, tmp_path: Path) -> None:
        target = tmp_path / "part"
        with attempt(target) as slow:
            (slow / "x").write_text("slow")
            with attempt(target) as fast:
                (fast / "x").write_text("fast")
        assert (target / "x").read_text() == "fast"
        assert list(tmp_path.iterdir()) == [target]

    def test_a_failed_one_leaves_nothing(self, tmp_path: Path) -> None:
        with pytest.raises(ZeroDivisionError), attempt(tmp_path / "part"):
            raise ZeroDivisionError
        assert list(tmp_path.iterdir()) == []

    def test_that_of_a_build_that_was_given_up_fails(self, tmp_path: Path) -> None:
        (tmp_path / "build").mkdir()
        with pytest.raises(FileNotFoundError), attempt(tmp_path / "build" / "part"):
            (tmp_path / "build").rename(tmp_path / "gone")
