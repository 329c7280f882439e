"""Scans: what is carried over equals what would be read, over random histories of files."""

import gzip
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftstore.errors import CorpusError, TruncatedCorpusError
from draftstore.storage.files import file_identity
from draftstore.storage.report import LINKS
from draftstore.text.corpus import Source, log_files
from draftstore.text.digests import stack_digests
from draftstore.text.fragments import Fragment
from draftstore.text.scans import COLUMNS, METADATA, Scan, documents_of, open_scan, scan_sources
from draftstore.text.selecting import RecordOptions
from draftstore.text.wanted import Removal
from tests.reference import plain_digest


def write(path: Path, *texts: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def rows(scan: Scan) -> list[tuple[Any, ...]]:
    names = ["digest", "source", "id", "characters", "bytes", "first_seen", "refused"]
    return scan.frame.select(names).rows()


def texts_of(scan: Scan, digests: Any = None) -> list[str]:
    return [document.text for document in documents_of(scan, scan.digests if digests is None else digests)]


def test_a_scan_has_a_row_for_every_document(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.jsonl", "one", "two é"), write(tmp_path / "b.jsonl", "one", " ")
    path = tmp_path / "deep" / "scan.parquet"
    scan = scan_sources([Source(3, str(a)), Source(1, str(b))], path, now=100.9)
    assert rows(scan) == [
        (plain_digest("one"), 3, "a.jsonl#1", 3, 3, 100, False),
        (plain_digest("two é"), 3, "a.jsonl#2", 5, 6, 100, False),
        (plain_digest("one"), 1, "b.jsonl#1", 3, 3, 100, False),
    ]
    assert (scan.report.documents, scan.report.empty_documents, scan.read) == (3, 1, 2)
    assert texts_of(scan) == ["one", "two é"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path]
    assert pl.read_parquet(path)["file"].to_list() == [0, 0, 1]
    found = open_scan(path)
    assert found is not None
    assert rows(found) == rows(scan)
    assert found.files == scan.files


@pytest.mark.parametrize(
    "change",
    [
        {"records": RecordOptions(column="content")},
        {"records": RecordOptions(fields="prompt=text,output=content")},
        {"strict": True},
        {"template": "t"},
        {"refused": (Fragment.of("x"),)},
    ],
)
def test_another_way_of_reading_reads_again(tmp_path: Path, change: dict[str, Any]) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "x", "content": "y"}\n')
    source, path = Source(1, str(file)), tmp_path / "scan.parquet"
    scan_sources([source], path, now=1)
    again = scan_sources([replace(source, **change)], path, now=2)
    assert again.read == 1
    assert rows(again)[0][5] == (2 if "records" in change else 1)  # another text, or the same one
    assert rows(again)[0][6] == ("refused" in change)


def test_records_that_a_condition_leaves_out_are_counted(tmp_path: Path) -> None:
    file, path = write(tmp_path / "a.jsonl", "one", "two", "three"), tmp_path / "scan.parquet"
    whole, part = (
        Source(1, str(file), records=RecordOptions(where=each)) for each in (None, "text <> 'two'")
    )
    scan_sources([whole], path, now=1)
    again = scan_sources([part], path, now=2)
    assert (again.read, again.report.filtered, texts_of(again)) == (1, 1, ["one", "three"])
    kept = open_scan(path)
    assert kept is not None
    assert (kept.report.filtered, scan_sources([part], path, now=3).read) == (1, 0)


def test_a_conversation_is_the_same_document_under_another_template(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}) + "\n")
    source, path = Source(1, str(file), render=lambda _: "short", template="a"), tmp_path / "scan"
    first = scan_sources([source], path, now=1)
    later = replace(source, render=lambda _: "another day", template="b")
    second = scan_sources([later], path, now=2)
    assert second.read == 1
    assert [(*row[:3], row[5]) for row in rows(second)] == [(*row[:3], row[5]) for row in rows(first)]
    assert texts_of(second, first.digests) == ["another day"]


STEP = st.dictionaries(
    st.sampled_from(["a.jsonl", "b.jsonl", "sub/c.jsonl", "d.txt"]),
    st.none() | st.lists(st.sampled_from(["one", "two", "three", "four\n", " "]), max_size=4),
)


@given(history=st.lists(STEP, min_size=1, max_size=5))
def test_scans_of_a_history_equal_reading_everything(
    history: Sequence[dict[str, list[str] | None]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    base = tmp_path_factory.mktemp("history")
    folder, path = base / "folder", base / "scan.parquet"
    write(folder / "always.jsonl", "always")
    sources = [Source(1, str(folder), glob=("*.jsonl", "*.txt")), Source(2, str(folder / "always.jsonl"))]
    first_seen: dict[bytes, int] = {}
    for now, step in enumerate(history):
        for name, texts in step.items():
            if texts is not None:
                write(folder / name, *texts)
            else:
                (folder / name).unlink(missing_ok=True)
        scan = scan_sources(sources, path, now=now)
        anew = scan_sources(sources, base / f"anew-{now}.parquet", now=now)
        # What this scan did not see is forgotten.
        first_seen = {digest: first_seen.get(digest, now) for digest, *_ in rows(anew)}
        assert rows(scan) == [(*row[:5], first_seen[row[0]], row[6]) for row in rows(anew)]
        assert scan.report == anew.report
        distinct = list(dict.fromkeys(row[0] for row in rows(anew)))
        assert [plain_digest(text) for text in texts_of(scan)] == distinct


def test_an_unreadable_file_leaves_the_scan_unchanged(tmp_path: Path) -> None:
    file, path = write(tmp_path / "a.jsonl", "one"), tmp_path / "scan"
    scan_sources([Source(1, str(file))], path, now=1)
    before = path.read_bytes()
    file.write_text('{"text": "whole"}\n{"text": "cu')
    with pytest.raises(TruncatedCorpusError):
        scan_sources([Source(1, str(file))], path, now=2)
    file.unlink()
    with pytest.raises(CorpusError, match="no such file"):
        scan_sources([Source(1, str(file))], path, now=2)
    assert path.read_bytes() == before
    file.write_text('{"text": "whole"}\n[]\n{"text": "cu')
    with pytest.raises(CorpusError, match="JSON array"):
        scan_sources([Source(1, str(file), strict=True)], path)
    scan = scan_sources([Source(1, str(file), allow_truncated=True)], path, now=3)
    assert (scan.report.documents, scan.report.bad_records, scan.report.truncated) == (1, 2, 1)
    assert scan_sources([Source(1, str(file), allow_truncated=True)], path).report == scan.report


def test_files_that_changed_since_the_scan_are_noticed(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", "one", "two", "three")
    scan = scan_sources([Source(1, str(file))], tmp_path / "scan")
    write(file, "three", "zero", "one")
    assert texts_of(scan, stack_digests([plain_digest("one"), plain_digest("three")])) == ["three", "one"]
    with pytest.raises(CorpusError, match="1 document of the scan could not be found"):
        texts_of(scan)


def test_links_of_a_pattern_lead_nowhere_out_of_its_folder(tmp_path: Path) -> None:
    secret = write(tmp_path / "private.jsonl", "secret")
    write(tmp_path / "texts" / "a.jsonl", "one")
    (tmp_path / "texts" / "b.jsonl").symlink_to(secret)
    scan = scan_sources([Source(1, f"{tmp_path}/texts/*.jsonl")], tmp_path / "scan")
    assert texts_of(scan) == ["one"]
    assert scan.report.passed_over == {LINKS: 1}


def test_file_names_and_ids_need_not_be_unicode(tmp_path: Path) -> None:
    write(tmp_path / "in" / os.fsdecode(b"caf\xe9.jsonl"), "one")
    (tmp_path / "in" / "a.jsonl").write_text('{"text": "two", "id": "\\ud800"}\n')
    source, path = Source(1, str(tmp_path / "in"), glob=("*.jsonl",)), tmp_path / "scan"
    scan = scan_sources([source], path)
    assert scan.frame["id"].to_list() == [r"\ud800", r"caf\udce9.jsonl#1"]
    assert texts_of(scan) == ["two", "one"]
    assert scan_sources([source], path).read == 0
    rows = Removal(document=os.fsdecode(b"caf\xe9.jsonl#1")).rows(scan)
    assert rows.tolist() == [False, True]


class TestLogs:
    def test_rotated_files_belong_to_a_log(self, tmp_path: Path) -> None:
        path = tmp_path / "answers.jsonl"
        assert log_files(path) == []
        assert log_files(tmp_path / "none" / "answers.jsonl") == []
        scan = scan_sources([Source(1, str(path), log=True)], tmp_path / "scan")
        assert len(scan) == 0
        write(tmp_path / "answers.1.jsonl", "second")
        (tmp_path / "answers.10.jsonl.gz").write_bytes(gzip.compress(b'{"text": "first"}\n'))
        for other in ("answers.x.jsonl", "other.1.jsonl", "answers.2.txt"):
            write(tmp_path / other, "no")
        write(path, "third")
        scan = scan_sources([Source(1, str(path), log=True)], tmp_path / "scan")
        assert texts_of(scan) == ["first", "second", "third"]

    def test_a_line_that_is_being_written_waits_for_the_next_scan(self, tmp_path: Path) -> None:
        path = write(tmp_path / "answers.jsonl", "whole")
        with path.open("a") as file:
            file.write('{"text": "hal')
        source = Source(1, str(path), log=True)
        assert texts_of(scan_sources([source], tmp_path / "scan", now=1)) == ["whole"]
        with path.open("a") as file:
            file.write('f"}\n')
        scan = scan_sources([source], tmp_path / "scan", now=2)
        assert [(row[2], row[5]) for row in rows(scan)] == [("answers.jsonl#1", 1), ("answers.jsonl#2", 2)]

    def test_a_rotation_during_the_scan_loses_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path, older = tmp_path / "answers.jsonl", tmp_path / "answers.1.jsonl"
        write(older, "old")
        write(path, "live")
        calls: list[Path] = []

        def rotating(file: Path) -> str:
            calls.append(file)
            if len(calls) == 2:
                path.replace(older)
                write(path, "new")
            return file_identity(file)

        monkeypatch.setattr("draftstore.text.scans.file_identity", rotating)
        source = Source(1, str(path), log=True)
        assert texts_of(scan_sources([source], tmp_path / "scan", now=1)) == ["live"]
        scan = scan_sources([source], tmp_path / "scan", now=2)
        assert [(row[0], row[5]) for row in rows(scan)] == [
            (plain_digest("live"), 1),
            (plain_digest("new"), 2),
        ]


@pytest.mark.parametrize("metadata", [{}, {METADATA: "[]"}])
def test_a_damaged_scan_is_refused(tmp_path: Path, metadata: dict[str, str]) -> None:
    row: Any = (bytes(16), None, None, [], "a", 1, 1, False, 1, 0, 1)  # of a file that nobody names
    pl.DataFrame([row], COLUMNS, orient="row").write_parquet(tmp_path / "scan", metadata=metadata)
    with pytest.raises(CorpusError, match=r"cannot be read .*remove it"):
        scan_sources([], tmp_path / "scan")
