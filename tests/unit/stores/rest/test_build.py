import errno
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftstore.errors import BuildError, CorpusError, TruncatedCorpusError
from draftstore.storage.manifest import load_manifest, verify_files
from draftstore.storage.staging import BuildResult
from draftstore.stores.rest import segments as segments_module
from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.stores.rest.segments import read_segments
from draftstore.stores.rest.store import RestStore
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from draftstore.text.tokens import sentinel
from tests.conftest import small_tokenizer_folder, write_texts
from tests.fakes import killed
from tests.reference import sort_suffixes

pytestmark = pytest.mark.usefixtures("no_fsync")

SEGMENT_TOKENS = 400


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "corpus").mkdir()
    return write_texts(tmp_path / "corpus" / "c.jsonl", 30)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "stores").mkdir()
    return tmp_path / "stores" / "store"


def build(tokenizer: TextTokenizer, corpus: Path, out: Path, workers: int = 1, **changes: Any) -> BuildResult:
    """Build with small segments; `overwrite` and the fields of RestOptions may differ."""
    overwrite = changes.pop("overwrite", False)
    options = RestOptions(corpus=(corpus,), name="test", **{"segment_tokens": SEGMENT_TOKENS, **changes})
    return build_rest(options, tokenizer, out, overwrite=overwrite, workers=workers)


def contents(store: Path) -> dict[str, bytes]:
    """Return the bytes of every file but the manifest, which holds the time."""
    paths = [path for path in store.rglob("*") if path.is_file() and path.name != "manifest.json"]
    return {path.relative_to(store).as_posix(): path.read_bytes() for path in paths}


def require_whole(store: Path) -> None:
    manifest = load_manifest(store)
    assert verify_files(store, manifest) == []
    assert set(contents(store)) == set(manifest.files)
    RestStore.open(store)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- what is built ---


def documents_of(store: Path) -> list[list[int]]:
    """Return the closed documents of a store, without their sentinels."""
    tokens = np.fromfile(store / "tokens.bin", "<u2")
    ends = np.flatnonzero(tokens == sentinel(tokens.dtype))
    assert len(ends)
    assert ends[-1] == len(tokens) - 1
    return [part[:-1].tolist() for part in np.split(tokens, ends + 1)[:-1]]


def test_the_store_holds_the_documents(small_tokenizer: TextTokenizer, corpus: Path, out: Path) -> None:
    result = build(small_tokenizer, corpus, out)
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    documents = documents_of(out)
    assert documents == [small_tokenizer.encode(text, bos=False).tolist() for text in texts]
    assert result.manifest == load_manifest(out)
    tokens = sum(map(len, documents))
    table = read_segments(out)
    assert result.manifest.counts == {
        "documents": 30, "tokens": tokens, "entries": tokens + 30, "segments": len(table),
    }  # fmt: skip
    assert len(table) > 3
    assert (result.reused, result.report.documents, result.path) == (False, 30, out)
    assert build(small_tokenizer, corpus, out).reused
    assert load_tokenizer(out / "tokenizer").fingerprint == small_tokenizer.fingerprint
    assert names(out.parent) == ["store"]


@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=12), segment_tokens=st.integers(2, 50))
def test_any_documents_in_any_segments(
    small_tokenizer: TextTokenizer,
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    segment_tokens: int,
) -> None:
    folder = tmp_path_factory.mktemp("build")
    texts = ["".join(chr(97 + (i * i + n) % 26) for i in range(n)) for n in lengths]
    (folder / "c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    expected = [small_tokenizer.encode(text, bos=False).tolist() for text in texts if text]
    try:
        build(small_tokenizer, folder / "c.jsonl", folder / "store", segment_tokens=segment_tokens)
    except CorpusError:
        assert not expected
        return
    require_whole(folder / "store")
    tokens = np.fromfile(folder / "store" / "tokens.bin", "<u2").tolist()
    suffixes = np.fromfile(folder / "store" / "suffixes.bin", "<i4").tolist()
    for start, length, _ in read_segments(folder / "store").tolist():
        assert length <= segment_tokens
        assert suffixes[start : start + length] == sort_suffixes(tokens[start : start + length])
    pieces = documents_of(folder / "store")
    for ids in expected:  # a document longer than a segment comes in pieces that fill one
        found: list[int] = []
        while len(found) < len(ids):
            piece = pieces.pop(0)
            assert piece
            found += piece
            assert len(piece) == segment_tokens - 1 or found == ids
        assert found == ids
    assert pieces == []


# --- the same bytes ---


def test_two_builds_are_the_same_bytes(
    small_tokenizer: TextTokenizer, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    first = build(small_tokenizer, corpus, tmp_path / "a")
    second = build(small_tokenizer, corpus, tmp_path / "b", workers=2)
    assert first.manifest.counts["segments"] > 3
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert first.manifest.created == "2023-11-14T22:13:20+00:00"
    manifests = [(tmp_path / name / "manifest.json").read_bytes() for name in "ab"]
    assert manifests[0] == manifests[1]
    assert second.reused is False


# --- texts that are not there, or not right ---


def test_a_truncated_corpus_gives_no_store_unless_that_is_allowed(
    small_tokenizer: TextTokenizer, corpus: Path, out: Path
) -> None:
    whole = build(small_tokenizer, corpus, out.with_name("whole"))
    corpus.write_bytes(corpus.read_bytes()[:-9])
    with pytest.raises(TruncatedCorpusError, match="line 30: the file ends in the middle of a record"):
        build(small_tokenizer, corpus, out)
    assert not out.exists()
    made = build(small_tokenizer, corpus, out, allow_truncated=True)
    assert (made.manifest.counts["documents"], made.manifest.corpus["truncated"]) == (29, 1)
    assert (whole.manifest.counts["documents"], whole.manifest.corpus["truncated"]) == (30, 0)
    again = build(small_tokenizer, corpus, out, allow_truncated=True)
    assert (again.reused, again.report.truncated) == (True, 1)
    with pytest.raises(
        BuildError, match="is another build"
    ):  # the truncated store is not taken for the whole one
        build(small_tokenizer, corpus, out)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", ""),
        ('{"text": ""}\n{"text": " \\n "}\n{"messages": []}\n', ": 3 empty documents"),
        (
            '{"content": "x"}\n' * 16,
            ": 16 bad records, the first .*line 1: .*name another column",
        ),
    ],
)
def test_nothing_to_build_from(
    small_tokenizer: TextTokenizer, corpus: Path, out: Path, text: str, reason: str
) -> None:
    corpus.write_text(text)
    with pytest.raises(CorpusError, match=rf"^no text found in {corpus}{reason}"):
        build(small_tokenizer, corpus, out)
    assert names(out.parent) == []


def test_a_resumed_build_reports_skipped_records_too(
    small_tokenizer: TextTokenizer, corpus: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with corpus.open("a") as file:
        file.write('bad\n{"text": ""}\n{"other": 1}\n')
    other, folder = corpus.with_name("other.jsonl"), corpus.parent / "folder"
    other.write_text('{"content": "x"}\n')
    folder.mkdir()
    for name in ("a.py", "b.parquet"):
        (folder / name).write_text("x = 1\n")
    options = RestOptions(corpus=(corpus, other, folder), name="test")
    monkeypatch.setattr(segments_module, "sort_segment", no_space)
    with pytest.raises(OSError, match="No space left"):
        build_rest(options, small_tokenizer, out, workers=1)
    monkeypatch.undo()
    report = build_rest(options, small_tokenizer, out, workers=1).report
    assert (report.documents, report.bad_records, report.empty_documents) == (31, 3, 1)
    assert (report.unread, report.passed_over) == ([str(other)], {".parquet": 1})
    places = [problem.place for problem in report.problems]
    assert places[:2] == [f"{corpus}:line {number}" for number in (31, 33)]


@pytest.mark.parametrize("change", ["corpus", "tokenizer", "segments"])
def test_another_build_is_refused(
    small_tokenizer: TextTokenizer, wide_tokenizer: TextTokenizer, corpus: Path, out: Path, change: str
) -> None:
    build(small_tokenizer, corpus, out)
    if change == "corpus":
        write_texts(corpus, 31)
    tokenizer = wide_tokenizer if change == "tokenizer" else small_tokenizer
    with pytest.raises(BuildError, match=rf"{out} exists and is another build: choose another folder, or"):
        build(tokenizer, corpus, out, segment_tokens=SEGMENT_TOKENS + (change == "segments"))


# --- builds that do not end well ---


def no_space(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def killed_worker(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_worker_raises_an_error_with_advice(
    small_tokenizer: TextTokenizer, corpus: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments_module, "sort_segment", killed_worker)
    with pytest.raises(BuildError, match=r"a sorting process was killed, .*(workers, segment_tokens)"):
        build(small_tokenizer, corpus, out, workers=2)
    assert not out.exists()
    monkeypatch.undo()
    build(small_tokenizer, corpus, out)
    require_whole(out)


def test_a_killed_build_ends_with_the_same_bytes(tmp_path: Path, out: Path) -> None:
    """Killed between tokenizing and sorting."""
    corpus = write_texts(tmp_path / "c.jsonl", 600)
    tokenizer = small_tokenizer_folder(tmp_path / "small-bpe")
    reached = (out.parent / ".store.partial" / "store" / "segments.bin").exists
    assert killed.kill_when(killed.rest_store, (corpus, tokenizer, out), reached)
    assert not out.exists()
    for target in (out, tmp_path / "whole"):
        killed.run(killed.rest_store, (corpus, tokenizer, target, 1))
    require_whole(out)
    assert contents(out) == contents(tmp_path / "whole")
    assert names(out.parent) == ["store"]
