import errno
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftstore.errors import BuildError
from draftstore.storage import files
from draftstore.storage.files import (
    hash_file,
    json_text,
    locked_directory,
    publish,
    remove,
    replacing,
    write_atomic,
    write_json,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def no_space(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_hash_of_many_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert hash_file(tmp_path / "a") == expected
    monkeypatch.setattr(files, "HASH_CHUNK", 2)
    assert hash_file(tmp_path / "a") == expected


def test_an_atomic_write_replaces(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_atomic(path, b"old")
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("old", [None, b"old"])
@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_failing_write_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, old: bytes | None
) -> None:
    path = tmp_path / "a"
    if old is not None:
        path.write_bytes(old)
    before = names(tmp_path)
    monkeypatch.setattr({"fsync": "os.fsync", "replace": "pathlib.Path.replace"}[fails], no_space)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, b"new")
    assert names(tmp_path) == before
    assert old is None or path.read_bytes() == old


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


def test_publishing_gives_the_name(tmp_path: Path) -> None:
    publish(finished_directory(tmp_path / "work", "new"), tmp_path / "out")
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / "inner" / "file").read_text() == "new"


@pytest.mark.parametrize("there", ["directory", "link", "dangling link"])
def test_what_publishing_replaces_is_retired(tmp_path: Path, there: str) -> None:
    out, other = tmp_path / "out", finished_directory(tmp_path / "other", "other")
    if there == "directory":
        finished_directory(out, "old")
    else:
        out.symlink_to(other if there == "link" else tmp_path / "nowhere")
    publish(finished_directory(tmp_path / "work", "new"), out)
    assert names(tmp_path) == [".out.retired", "other", "out"]
    assert (out / "inner" / "file").read_text() == "new"
    assert (other / "inner" / "file").read_text() == "other"


def test_unflushed_directory_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = finished_directory(tmp_path / "out", "old")
    work = finished_directory(tmp_path / "work", "new")
    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        publish(work, old)
    assert (old / "inner" / "file").read_text() == "old"
    assert (work / "inner" / "file").read_text() == "new"


HOLDER = """
import sys, time
from contextlib import suppress
from pathlib import Path
from draftstore.storage.files import locked_directory

with locked_directory(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_the_lock_refuses_a_second_process_and_goes_with_the_first(tmp_path: Path) -> None:
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


def test_the_lock_is_freed_by_an_exception(tmp_path: Path) -> None:
    path = tmp_path / "work"
    with pytest.raises(ZeroDivisionError), locked_directory(path):
        raise ZeroDivisionError
    with locked_directory(path):
        pass


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
