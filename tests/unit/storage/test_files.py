import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from draftstore.errors import BuildError, StoreError
from draftstore.storage import files
from draftstore.storage.files import (
    SMALL_BYTES,
    AnyText,
    file_identity,
    hash_file,
    json_text,
    link_or_copy,
    load_json,
    locked_directory,
    map_file,
    map_or_empty,
    publish,
    remove,
    replacing,
    write_at,
    write_atomic,
    write_json,
)
from tests.unit.storage.test_staging import names


def no_space(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_hash_of_many_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert hash_file(tmp_path / "a") == expected
    monkeypatch.setattr(files, "HASH_CHUNK", 2)
    assert hash_file(tmp_path / "a") == expected


@pytest.mark.parametrize("fails", ["os.fsync", "pathlib.Path.replace"])
def test_a_failing_write_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    monkeypatch.setattr(fails, no_space)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, b"new")
    assert names(tmp_path) == ["a"]
    assert path.read_bytes() == b"old"


def test_replacement_is_private_from_the_start(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with replacing(path, 0o600) as filling:
        assert names(tmp_path) == [filling.name]
        assert filling.stat().st_mode & 0o777 == 0o600
        filling.write_bytes(b"new")
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"new", 0o600)
    with suppress(KeyboardInterrupt), replacing(path) as filling:
        filling.write_bytes(b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["a"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(value=JSON)
def test_json_text_is_read_back(value: Any) -> None:
    assert json.loads(json_text(value)) == value


def test_json_text_of_a_path_that_is_not_utf_8(tmp_path: Path) -> None:
    value = {"é": os.fsdecode(b"\xff.txt"), "a": 1}
    write_json(tmp_path / "v.json", value)
    assert (tmp_path / "v.json").read_bytes() == '{\n  "a": 1,\n  "é": "\\udcff.txt"\n}\n'.encode()
    assert json.loads((tmp_path / "v.json").read_text("utf-8")) == value


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "Expecting property name"),
        ("[" * 100_000, "recursion"),
        ('{"a": 1}', "^a: Input should be an instance of str$"),
        ('{"b": 1, "format_version": 1}', "^format_version: Input should be an instance of str$"),
        ("[]", "^Input should be a valid dictionary$"),
    ],
)
def test_unexpected_json_is_refused_with_its_place(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        load_json(text, TypeAdapter(dict[str, AnyText]))


def test_arrays_are_written_and_mapped(tmp_path: Path) -> None:
    path, empty = tmp_path / "a", tmp_path / "empty"
    path.write_bytes(bytes(12))
    empty.touch()
    write_at(path, np.array([7, 8], np.uint16), 3)
    found = map_file(path, np.dtype("<u2"))
    assert found.tolist() == [0, 0, 0, 7, 8, 0]
    assert not found.flags.writeable
    assert map_or_empty(path, np.dtype("<u2")).tolist() == found.tolist()
    assert map_or_empty(empty, np.dtype("<u2")).shape == (0,)
    for wrong, dtype in ((empty, "<u2"), (path, "V5"), (tmp_path / "absent", "<u2")):
        with pytest.raises(
            StoreError, match=f"{wrong} cannot be mapped .* the store is damaged, build it again"
        ):
            map_file(wrong, np.dtype(dtype))


def test_files_are_linked_or_else_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("text")
    link_or_copy(tmp_path / "a", tmp_path / "linked")
    monkeypatch.setattr(os, "link", no_space)
    link_or_copy(tmp_path / "a", tmp_path / "copied")
    inodes = [(tmp_path / name).stat().st_ino for name in ("a", "linked", "copied")]
    assert inodes[0] == inodes[1] != inodes[2]
    assert (tmp_path / "copied").read_text() == "text"


def test_remove(tmp_path: Path) -> None:
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "kept").mkdir()
    (tmp_path / "file").touch()
    for name in ("folder", "link", "file", "absent"):
        remove(tmp_path / name)
    assert names(tmp_path) == ["kept"]


def finished_directory(path: Path, content: str) -> Path:
    (path / "inner").mkdir(parents=True)
    (path / "inner" / "file").write_text(content)
    return path


@pytest.mark.parametrize("there", ["nothing", "directory", "link", "dangling link"])
def test_publishing_keeps_the_directory_that_it_replaces(tmp_path: Path, there: str) -> None:
    out, other = tmp_path / "out", finished_directory(tmp_path / "other", "other")
    if there == "directory":
        finished_directory(out, "old")
    elif there != "nothing":
        out.symlink_to(other if there == "link" else tmp_path / "nowhere")
    publish(finished_directory(tmp_path / "work", "new"), out, tmp_path / "replaced")
    assert names(tmp_path) == ["other", "out", *([] if there == "nothing" else ["replaced"])]
    assert (out / "inner" / "file").read_text() == "new"
    assert (other / "inner" / "file").read_text() == "other"


def test_unflushed_directory_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = finished_directory(tmp_path / "out", "old")
    work = finished_directory(tmp_path / "work", "new")
    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        publish(work, old, tmp_path / "replaced")
    assert (old / "inner" / "file").read_text() == "old"
    assert (work / "inner" / "file").read_text() == "new"


HOLDER = """
import sys, time
from pathlib import Path
from draftstore.storage.files import locked_directory

with locked_directory(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_the_lock_refuses_others_until_its_process_ends(tmp_path: Path) -> None:
    path = tmp_path / "parent" / "work"
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with (
            pytest.raises(BuildError, match=rf"another build is running in {path}: wait"),
            locked_directory(path),
        ):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with locked_directory(path):
        assert path.is_dir()


def test_the_holder_may_remove_the_directory(tmp_path: Path) -> None:
    path = tmp_path / "work"
    with locked_directory(path):
        remove(path)
        with locked_directory(path):  # another directory of that name
            assert path.is_dir()


def test_lock_survives_removal_of_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, opened, vanish = tmp_path / "work", os.open, iter([True, False])

    def open_and_lose(*arguments: Any) -> int:
        descriptor = opened(*arguments)
        if next(vanish, False):
            path.rmdir()
        return descriptor

    monkeypatch.setattr(os, "open", open_and_lose)
    with locked_directory(path):
        assert path.is_dir()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep hashes here, also those of files that were just written."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "SETTLED_NS", -(10**12))
    return tmp_path / "cache" / "draftstore" / "hashes"


@pytest.fixture
def large(tmp_path: Path) -> Path:
    path = tmp_path / "large.jsonl"
    path.write_bytes(b"a" * (SMALL_BYTES + 1))
    return path


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the files that are read, as they are."""
    seen: list[Path] = []

    def read(path: Path) -> str:
        seen.append(path)
        return hash_file(path)

    monkeypatch.setattr(files, "hash_file", read)
    return seen


def edit(path: Path) -> None:
    """Change a file, and put its time back."""
    stat = path.stat()
    with path.open("r+b") as file:
        file.write(b"b")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def swap(path: Path) -> None:
    """Put a file of the same size and time in its place."""
    stat = path.stat()
    other = path.with_name("other")
    other.write_bytes(b"b" + path.read_bytes()[1:])
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.replace(path)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("change", [edit, swap])
@pytest.mark.parametrize("size", [1, SMALL_BYTES + 1])
def test_changes_that_keep_size_and_time_are_seen(
    tmp_path: Path, size: int, change: Callable[[Path], None]
) -> None:
    path = tmp_path / "c.jsonl"
    path.write_bytes(b"a" * size)
    before = file_identity(path)
    assert file_identity(path) == before
    time = path.stat().st_ctime_ns
    while path.stat().st_ctime_ns == time:  # until the clock of the file system ticks
        change(path)
    assert file_identity(path) != before


@pytest.mark.usefixtures("cache")
def test_a_large_file_is_read_once_until_it_changes(large: Path, reads: list[Path]) -> None:
    assert len({file_identity(large) for _ in range(3)}) == 1
    assert reads == [large]
    os.utime(large, ns=(1, 1))
    file_identity(large)
    assert reads == [large] * 2


@pytest.mark.parametrize("kept", ["", "[]", '{"sha256": 1}', "{"])
def test_a_damaged_cache_is_ignored(large: Path, cache: Path, reads: list[Path], kept: str) -> None:
    before = file_identity(large)
    (file,) = cache.iterdir()
    file.write_text(kept)
    assert file_identity(large) == before
    assert len(reads) == 2


def test_without_a_cache_files_are_read_every_time(
    large: Path, tmp_path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert file_identity(large) == file_identity(large)
    assert len(reads) == 2


def test_hashes_of_recent_changes_are_not_cached(
    large: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "SETTLED_NS", 10**12)
    file_identity(large)
    assert not cache.exists()
