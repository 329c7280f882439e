"""The identity of a file is its content: small files are read every time, large ones after a change."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from draftstore.storage import files
from draftstore.storage.files import SMALL_BYTES, file_identity, hash_file


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
def test_a_damaged_cache_is_read_anew(large: Path, cache: Path, reads: list[Path], kept: str) -> None:
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


def test_what_changed_just_now_is_not_kept(large: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SETTLED_NS", 10**12)
    file_identity(large)
    assert not cache.exists()
