import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftstore.errors import BuildError, CorpusError, StoreError, TruncatedCorpusError
from draftstore.storage.files import locked_directory
from draftstore.storage.manifest import load_manifest, verify_files
from draftstore.storage.staging import BuildResult
from draftstore.stores.rest import segments as segments_module
from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.stores.rest.segments import read_segments
from draftstore.stores.rest.store import RestStore
from draftstore.text import tokenizing as tokenizing_module
from draftstore.text.encoding import tokenize_corpus
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from draftstore.text.tokens import sentinel
from tests.conftest import small_tokenizer_folder, write_texts
from tests.examples import examples
from tests.fakes import killed
from tests.fakes.progress import Steps
from tests.fakes.waiting import is_alive, until

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
    assert load_tokenizer(out / "tokenizer").fingerprint == small_tokenizer.fingerprint
    assert names(out.parent) == ["store"]


def test_every_segment_is_sorted(small_tokenizer: TextTokenizer, corpus: Path, out: Path) -> None:
    build(small_tokenizer, corpus, out)
    tokens = np.fromfile(out / "tokens.bin", "<u2").tolist()
    suffixes = np.fromfile(out / "suffixes.bin", "<i4")
    for start, length, _ in read_segments(out).tolist():
        segment = tokens[start : start + length]
        assert len(segment) <= SEGMENT_TOKENS
        assert suffixes[start : start + length].tolist() == sorted(range(length), key=lambda i: segment[i:])


@examples(25)
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
    lengths_found = read_segments(folder / "store")[:, 1]
    assert lengths_found.max() <= segment_tokens
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


def test_a_document_longer_than_a_segment_is_cut(
    small_tokenizer: TextTokenizer, tmp_path: Path, out: Path
) -> None:
    (tmp_path / "long.txt").write_text("the quick brown fox\n" * 500)
    result = build(small_tokenizer, tmp_path / "long.txt", out, segment_tokens=1000)
    assert result.manifest.counts["documents"] == 1
    lengths = read_segments(out)[:, 1].tolist()
    assert len(lengths) == -(-result.manifest.counts["tokens"] // 999)
    assert lengths[:-1] == [1000] * (len(lengths) - 1)
    tokens = small_tokenizer.encode((tmp_path / "long.txt").read_text(), bos=False).tolist()
    assert [token for piece in documents_of(out) for token in piece] == tokens


def test_progress_is_reported(small_tokenizer: TextTokenizer, corpus: Path, out: Path) -> None:
    calls = Steps()
    options = RestOptions(corpus=(corpus,), name="test", segment_tokens=SEGMENT_TOKENS)
    result = build_rest(options, small_tokenizer, out, workers=1, progress=calls)
    assert calls.keys() == {"tokenizing", "sorting", "hashing"}
    for rows in calls.values():
        assert len(rows) > 1
        assert [done for done, _ in rows] == sorted(done for done, _ in rows)
    counts = result.manifest.counts
    assert calls["tokenizing"][-1] == (counts["tokens"], None)
    assert calls["sorting"][0] == (0, counts["entries"])
    assert calls["sorting"][-1] == (counts["entries"], counts["entries"])
    size = sum(entry.size for entry in result.manifest.files.values())
    assert calls["hashing"][-1] == (size, size)


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


def test_much_work_is_done_in_processes_of_their_own(
    small_tokenizer: TextTokenizer, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(small_tokenizer, corpus, tmp_path / "here")
    monkeypatch.setattr(segments_module, "SMALL_TOKENS", 0)
    build(small_tokenizer, corpus, tmp_path / "apart")
    assert contents(tmp_path / "here") == contents(tmp_path / "apart")


# --- texts that are not there, or not right ---


@pytest.mark.parametrize("text", ["", '{"text": ""}\n{"text": " \\n "}\n{"messages": []}\n'])
def test_nothing_to_build_from(small_tokenizer: TextTokenizer, corpus: Path, out: Path, text: str) -> None:
    whole = corpus.read_text()
    corpus.write_text(text)
    reason = ": 3 empty documents" if text else ""
    for _ in range(2):
        with pytest.raises(CorpusError, match=rf"^no text found in {corpus}{reason}$"):
            build(small_tokenizer, corpus, out)
        assert names(out.parent) == []
    corpus.write_text(whole)
    build(small_tokenizer, corpus, out)
    assert names(out.parent) == ["store"]


def test_nothing_usable_says_why(small_tokenizer: TextTokenizer, corpus: Path, out: Path) -> None:
    corpus.write_text('{"content": "x"}\n' * 16)
    with pytest.raises(CorpusError) as caught:
        build(small_tokenizer, corpus, out)
    assert str(caught.value) == (
        f"no text found in {corpus}: 16 bad records, the first {corpus}:line 1: "
        "has neither 'text' nor 'messages' (name another key with --column)"
    )
    assert names(out.parent) == []


def test_a_failed_build_stays_where_it_can_go_on(
    small_tokenizer: TextTokenizer, corpus: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with corpus.open("a") as file:
        file.write("bad\n")
    with pytest.raises(CorpusError, match="line 31: not JSON"):
        build(small_tokenizer, corpus, out, strict=True)
    assert names(out.parent) == []

    def small_shards(*arguments: Any, **options: Any) -> Any:
        return tokenize_corpus(*arguments, **options, shard_tokens=10, batch_chars=10)

    monkeypatch.setattr(tokenizing_module, "tokenize_corpus", small_shards)
    with pytest.raises(CorpusError, match="line 31: not JSON"):
        build(small_tokenizer, corpus, out, strict=True)
    assert (out.parent / ".store.partial" / "tokens" / "shard-00000.json").exists()
    with pytest.raises(CorpusError, match="line 31: not JSON"):
        build(small_tokenizer, corpus, out, strict=True)
    assert names(out.parent) == [".store.partial"]


def test_what_was_not_read_is_remembered(
    small_tokenizer: TextTokenizer, corpus: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = corpus.with_name("other.jsonl")
    other.write_text('{"content": "x"}\n')
    (corpus.parent / "folder").mkdir()
    for name in ("a.py", "a.jsonl", "b.parquet"):
        (corpus.parent / "folder" / name).write_text("x = 1\n")
    options = RestOptions(corpus=(other, corpus, corpus.parent / "folder"), name="test")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizing_module, "save_manifest", no_space)
        with pytest.raises(OSError, match="No space left"):
            build_rest(options, small_tokenizer, out, workers=1)
    for reused in (False, True):
        result = build_rest(options, small_tokenizer, out, workers=1)
        assert result.reused is reused
        assert result.report.unread == [str(other)]
        assert result.report.passed_over == {".jsonl": 1, ".parquet": 1}


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


def test_bad_records_are_reported_also_by_a_build_that_goes_on(
    small_tokenizer: TextTokenizer, corpus: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with corpus.open("a") as file:
        file.write('bad\n{"text": ""}\n{"other": 1}\n')
    with pytest.raises(CorpusError, match=r"c\.jsonl:line 31: not JSON"):
        build(small_tokenizer, corpus, out, strict=True)
    assert not out.exists()
    monkeypatch.setattr(segments_module, "sort_segment", no_space)
    with pytest.raises(OSError, match="No space left"):
        build(small_tokenizer, corpus, out)
    monkeypatch.undo()
    result = build(small_tokenizer, corpus, out)
    assert [problem.place for problem in result.report.problems] == [f"{corpus}:line {n}" for n in (31, 33)]
    again = build(small_tokenizer, corpus, out)
    for report in (result.report, again.report):
        assert (report.documents, report.bad_records, report.empty_documents) == (30, 2, 1)
    assert (result.manifest.corpus["bad_records"], again.reused) == (2, True)


def test_a_path_that_is_no_utf_8(small_tokenizer: TextTokenizer, corpus: Path, tmp_path: Path) -> None:
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.jsonl"))
    corpus.rename(odd)
    result = build(small_tokenizer, odd, tmp_path / "store")
    assert result.manifest.corpus["sources"] == [str(odd)]
    assert load_manifest(tmp_path / "store") == result.manifest


# --- an output that exists ---


def test_the_same_build_is_reused(small_tokenizer: TextTokenizer, corpus: Path, out: Path) -> None:
    first = build(small_tokenizer, corpus, out)
    before = out.stat().st_ino
    again = build(small_tokenizer, corpus, out)
    assert (again.reused, again.manifest, again.path) == (True, first.manifest, out)
    assert out.stat().st_ino == before
    assert names(out.parent) == ["store"]
    assert build(small_tokenizer, corpus, out, overwrite=True).reused is False
    assert out.stat().st_ino != before
    assert names(out.parent) == ["store"]


@pytest.mark.parametrize("change", ["corpus", "tokenizer", "segments", "name"])
def test_another_build_is_refused_unless_it_may_overwrite(
    small_tokenizer: TextTokenizer, corpus: Path, out: Path, tmp_path: Path, change: str
) -> None:
    build(small_tokenizer, corpus, out)
    old = contents(out)
    tokenizer, options = (
        small_tokenizer,
        RestOptions(corpus=(corpus,), name="test", segment_tokens=SEGMENT_TOKENS),
    )
    if change == "corpus":
        write_texts(corpus, 31)
    elif change == "tokenizer":
        tokenizer = other_tokenizer(tmp_path)
    else:
        changes: dict[str, dict[str, Any]] = {"segments": {"segment_tokens": 500}, "name": {"name": "x"}}
        options = options.changed(**changes[change])
    with pytest.raises(
        BuildError, match=rf"{out} exists and is another build: choose another --out, or pass"
    ):
        build_rest(options, tokenizer, out, workers=1)
    assert contents(out) == old
    build_rest(options, tokenizer, out, overwrite=True, workers=1)
    require_whole(out)
    assert (contents(out) != old) == (change != "name")
    assert names(out.parent) == ["store"]


def other_tokenizer(folder: Path) -> TextTokenizer:
    path = small_tokenizer_folder(folder / "other")
    state = json.loads((path / "tokenizer.json").read_text())
    state["normalizer"] = {"type": "Lowercase"}
    (path / "tokenizer.json").write_text(json.dumps(state))
    return load_tokenizer(path)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("there", ["folder", "file", "dangling link"])
def test_what_is_no_store_is_never_replaced(
    small_tokenizer: TextTokenizer, corpus: Path, out: Path, there: str, overwrite: bool
) -> None:
    if there == "folder":
        out.mkdir()
        (out / "thesis.tex").write_text("years of work")
    elif there == "file":
        out.write_text("years of work")
    else:
        out.symlink_to(out.parent / "nowhere")
    with pytest.raises(BuildError, match="is not a store" if overwrite else "exists and is another build"):
        build(small_tokenizer, corpus, out, overwrite=overwrite)
    assert names(out.parent) == ["store"]
    assert there != "folder" or (out / "thesis.tex").exists()


def test_an_empty_folder_and_missing_parents_are_fine(
    small_tokenizer: TextTokenizer, corpus: Path, tmp_path: Path
) -> None:
    empty, deep = tmp_path / "empty", tmp_path / "a" / "b" / "store"
    empty.mkdir()
    for out in (empty, deep):
        build(small_tokenizer, corpus, out)
        require_whole(out)


def test_a_damaged_store_is_replaced_only_when_asked(
    small_tokenizer: TextTokenizer, corpus: Path, out: Path
) -> None:
    build(small_tokenizer, corpus, out)
    (out / "keys.bin").write_bytes(b"")
    with pytest.raises(BuildError, match="exists and is another build"):
        build(small_tokenizer, corpus, out)
    build(small_tokenizer, corpus, out, overwrite=True)
    require_whole(out)


def test_a_link_to_a_store_is_replaced_and_its_target_kept(
    small_tokenizer: TextTokenizer, corpus: Path, out: Path, tmp_path: Path
) -> None:
    build(small_tokenizer, corpus, tmp_path / "elsewhere")
    out.symlink_to(tmp_path / "elsewhere")
    build(small_tokenizer, corpus, out, overwrite=True)
    assert not out.is_symlink()
    require_whole(out)
    require_whole(tmp_path / "elsewhere")
    assert names(out.parent) == ["store"]


# --- builds that do not end well ---


def no_space(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_another_build_at_work(small_tokenizer: TextTokenizer, corpus: Path, out: Path) -> None:
    with (
        locked_directory(out.parent / ".store.partial"),
        pytest.raises(BuildError, match=r"another build is running in .*/\.store\.partial: wait"),
    ):
        build(small_tokenizer, corpus, out)
    build(small_tokenizer, corpus, out)


def test_too_little_space_is_told_before_it_is_used(
    small_tokenizer: TextTokenizer, corpus: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 9, 1))
    with pytest.raises(BuildError, match=r"needs about 0\.0 GB, 0\.0 GB are free: make room"):
        build(small_tokenizer, corpus, out)
    assert names(out.parent) == [".store.partial"]
    monkeypatch.undo()
    build(small_tokenizer, corpus, out)
    require_whole(out)
    assert names(out.parent) == ["store"]


@pytest.mark.parametrize("start", ["tokens", "report", "store", "manifest"])
def test_a_full_disk_leaves_no_store_and_a_rerun_finishes(
    small_tokenizer: TextTokenizer, corpus: Path, tmp_path: Path, out: Path, start: str
) -> None:
    """The disk is full from the first file on whose name starts so."""
    build(small_tokenizer, corpus, tmp_path / "whole")
    with pytest.MonkeyPatch.context() as patch:
        opened = Path.open
        full = False

        def open_or_fail(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            nonlocal full
            inside = path.is_relative_to(out.parent) and mode not in ("r", "rb")
            full = full or (inside and start in (path.parent.name, *path.name.split(".")))
            if full and inside:
                no_space()
            return opened(path, mode, *arguments, **options)

        patch.setattr(Path, "open", open_or_fail)
        with pytest.raises(OSError, match="No space left"):
            build(small_tokenizer, corpus, out)
        assert full
    with pytest.raises(StoreError):
        RestStore.open(out)
    build(small_tokenizer, corpus, out)
    assert contents(out) == contents(tmp_path / "whole")
    assert names(out.parent) == ["store"]


def killed_worker(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_worker_is_an_error_that_says_what_to_do(
    small_tokenizer: TextTokenizer, corpus: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments_module, "sort_segment", killed_worker)
    with pytest.raises(BuildError, match=r"a sorting process was killed, .* fewer --workers or smaller"):
        build(small_tokenizer, corpus, out, workers=2)
    assert not out.exists()
    monkeypatch.undo()
    build(small_tokenizer, corpus, out)
    require_whole(out)


@pytest.mark.parametrize("error", [MemoryError, BrokenProcessPool])
def test_too_little_memory(
    small_tokenizer: TextTokenizer,
    corpus: Path,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: type[Exception],
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(segments_module, "sort_segment", fail)
    with pytest.raises(BuildError, match="because memory ran out"):
        build(small_tokenizer, corpus, out)


@pytest.mark.parametrize("change", ["corpus", "tokenizer"])
def test_other_inputs_start_clean(
    small_tokenizer: TextTokenizer, corpus: Path, out: Path, tmp_path: Path, change: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizing_module, "save_manifest", no_space)
        with pytest.raises(OSError, match="No space left"):
            build(small_tokenizer, corpus, out)
    assert (out.parent / ".store.partial" / "store" / "tokenizer").is_dir()
    tokenizer = other_tokenizer(tmp_path) if change == "tokenizer" else small_tokenizer
    if change == "corpus":
        write_texts(corpus, 30, seed=1)
    build(tokenizer, corpus, out)
    build(tokenizer, corpus, tmp_path / "fresh")
    assert contents(out) == contents(tmp_path / "fresh")
    assert names(out.parent) == ["store"]


ORPHANS = """
import os, time
from draftstore.stores.rest.segments import sorting_processes

with sorting_processes(1) as processes:
    print(processes.submit(os.getpid).result(), flush=True)
    processes.submit(time.sleep, 60).result()
"""


def test_workers_end_with_a_killed_build() -> None:
    with subprocess.Popen([sys.executable, "-c", ORPHANS], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        assert is_alive(worker)
        parent.kill()
    until(lambda: not is_alive(worker))


# --- a crash at every single change of the disk ---


class Crash(BaseException):
    """The end of a process, as near as an exception comes: from here on nothing changes on the disk."""


class Disk:
    """Counts the changes under a folder and, once there were enough, forbids all others."""

    folder = ""
    changes = 0
    limit: float = float("inf")

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Take part in every audit event of this process (a hook cannot be removed)."""
        if not self.folder or event not in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"):
            return
        if event == "open" and not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR):
            return
        path = arguments[0]
        if not isinstance(path, int) and not self._holds(Path(os.fsdecode(path))):
            return
        if self.changes >= self.limit:
            raise Crash
        self.changes += 1

    def _holds(self, path: Path) -> bool:
        return not path.is_absolute() or path.is_relative_to(self.folder)

    def run(self, folder: Path, work: Callable[[], object], limit: float = float("inf")) -> bool:
        """Work until so many changes are made; return whether the work came to its end."""
        self.folder, self.changes, self.limit = str(folder), 0, limit
        try:
            work()
        except Crash:
            return False
        finally:
            self.folder = ""
        return True


DISK = Disk()
sys.addaudithook(DISK.audit)


@pytest.mark.parametrize("overwrite", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_crash_at_any_moment(
    small_tokenizer: TextTokenizer, corpus: Path, out: Path, tmp_path: Path, overwrite: bool
) -> None:
    def work() -> None:
        build(small_tokenizer, corpus, out, segment_tokens=800, overwrite=overwrite)

    build(small_tokenizer, corpus, tmp_path / "whole", segment_tokens=800)
    whole = contents(tmp_path / "whole")
    write_texts(tmp_path / "old.jsonl", 10, seed=1)
    build(small_tokenizer, tmp_path / "old.jsonl", tmp_path / "old")
    old = contents(tmp_path / "old")

    def prepare() -> None:
        shutil.rmtree(out.parent)
        out.parent.mkdir()
        if overwrite:
            shutil.copytree(tmp_path / "old", out)

    prepare()
    assert DISK.run(out.parent, work)
    total = DISK.changes
    assert total > 40
    absent = 0
    for limit in range(total):
        prepare()
        assert not DISK.run(out.parent, work, limit)
        if out.exists():
            require_whole(out)
            assert contents(out) in ([old, whole] if overwrite else [whole])
        else:
            absent += 1
        # The second attempt crashes as well, a little further on; the third one may finish.
        DISK.run(out.parent, work, limit % 7)
        work()
        require_whole(out)
        assert contents(out) == whole
        build(small_tokenizer, corpus, out, segment_tokens=800)
        assert names(out.parent) == ["store"]
    assert absent == 1 if overwrite else absent > 40


@pytest.fixture(scope="module")
def large_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("large") / "c.jsonl", 4_000)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_tokenizer_folder(tmp_path_factory.mktemp("t") / "small-bpe")


@pytest.fixture(scope="module")
def large_store(large_corpus: Path, tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "store"
    killed.run(killed.rest_store, (large_corpus, tokenizer_folder, out))
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    "marker", ["tokens/tokens.json", "store/tokens.bin", "store/first_rows.bin", "store/tokenizer"]
)
def test_killed_when_a_step_is_reached(
    large_corpus: Path, tokenizer_folder: Path, large_store: Path, out: Path, marker: str
) -> None:
    arguments = (large_corpus, tokenizer_folder, out)
    killed.kill_when(killed.rest_store, arguments, (out.parent / ".store.partial" / marker).exists)
    finish(arguments, out, large_store)


def finish(arguments: Sequence[Any], out: Path, whole: Path) -> None:
    """Check that a killed build left no half store, and that the same build ends with the same bytes."""
    if out.exists():
        require_whole(out)
    killed.run(killed.rest_store, (*arguments, 1))
    require_whole(out)
    assert contents(out) == contents(whole)
    assert names(out.parent) == ["store"]
