"""Steps that run once, and stores that are published only when complete, whatever happens in between."""

import functools
import json
import os
import shutil
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftstore.errors import BuildError, CorpusError, StoreError
from draftstore.storage.files import locked_directory
from draftstore.storage.locks import lease
from draftstore.storage.manifest import (
    FileEntry,
    Manifest,
    TokenizerIdentity,
    load_manifest,
    save_manifest,
    verify_files,
)
from draftstore.storage.report import ReadReport
from draftstore.storage.staging import (
    STORE,
    BuildResult,
    build_store,
    build_time,
    hash_files,
    once,
    remove_store,
    require_space,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def files_of(folder: Path) -> dict[str, str]:
    """Return the text of every file but the manifest, which holds the time."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"]
    return {path.relative_to(folder).as_posix(): path.read_text() for path in paths}


# --- steps ---


@pytest.mark.parametrize("value", [None, 0.1 + 0.2, {"sizes": [1, 2]}, ""])
def test_a_step_is_done_once(tmp_path: Path, value: object) -> None:
    done: list[int] = []

    def step() -> object:
        done.append(1)
        return value

    for _ in range(3):
        assert once(tmp_path / "marker", step) == value
    assert done == [1]


def test_a_step_that_fails_is_not_marked(tmp_path: Path) -> None:
    def fail() -> None:
        raise CorpusError("no")

    with pytest.raises(CorpusError):
        once(tmp_path / "marker", fail)
    assert names(tmp_path) == []


def test_step_with_an_invalid_result_is_repeated(tmp_path: Path) -> None:
    marker, made = tmp_path / "marker", tmp_path / "made"

    def make() -> int:
        assert not marker.exists(), "a crash here must not leave the old marker"
        made.write_text("x" * 5)
        return 5

    def is_valid(size: int) -> bool:
        return made.exists() and made.stat().st_size == size

    assert once(marker, make, is_valid) == 5
    made.write_text("cut")
    assert once(marker, make, is_valid) == 5
    assert made.read_text() == "xxxxx"
    assert json.loads(marker.read_text()) == 5


# --- builds ---


def build(
    out: Path,
    text: str = "",
    *,
    files: tuple[str, ...] = ("data/x", "y"),
    name: str = "a",
    resumable: bool = False,
    fail: bool = False,
    overwrite: bool = False,
) -> BuildResult:
    """Build a store of some files, each of which is written in a step of its own and says the text."""

    def fill(partial: Path) -> ReadReport:
        store = partial / STORE
        store.mkdir(exist_ok=True)
        assert partial.stat().st_mode & 0o777 == 0o700
        if resumable:
            (partial / "tokens").mkdir(exist_ok=True)
            once(partial / "tokens" / "shard-0.json", lambda: None)
        if fail:
            raise CorpusError("no")
        for number, file in enumerate(files):
            path = store / file
            once(
                partial / f"step-{number}",
                functools.partial(write, path, text),
                functools.partial(holds, path),
            )
        for old in store.glob("*manifest*"):
            old.unlink()
        counts = {"documents": 1, "entries": 0, "tokens": 0}
        identity = TokenizerIdentity("t", "0")
        found = hash_files(store)
        parameters = {"plan": plan}
        save_manifest(
            store, Manifest("rest", name, build_time(), 9, "uint16", identity, parameters, {}, counts, found)
        )
        return ReadReport(1)

    plan = {"kind": "rest", "text": text}
    return build_store(out, plan, name, overwrite, fill)


def write(path: Path, text: str) -> int:
    """Write a file in two parts, so that a crash can come between them."""
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as file:
        file.write(text)
    with path.open("a") as file:
        file.write(f" in {path.name}")
    return path.stat().st_size


def holds(path: Path, size: int) -> bool:
    return path.exists() and path.stat().st_size == size


def require_whole(store: Path, text: str) -> None:
    manifest = load_manifest(store, "rest")
    assert verify_files(store, manifest) == []
    assert {file: files_of(store)[file] for file in manifest.files} == {
        "data/x": f"{text} in x",
        "y": f"{text} in y",
    }


def test_a_store_is_built_once_and_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "folder" / "a"
    first = build(out, "one")
    assert not first.reused
    before = out.stat().st_ino
    again = build(out, "one")
    assert again.reused
    assert (again.manifest, again.path, again.report.documents) == (first.manifest, out, 1)
    for text, name in (("two", "a"), ("one", "b")):
        with pytest.raises(BuildError, match="another build: choose another folder, or replace it"):
            build(out, text, name=name)
    assert out.stat().st_ino == before
    assert not build(out, "one", overwrite=True).reused
    assert out.stat().st_ino != before
    assert names(out.parent) == [out.name]


def test_a_failed_build_leaves_only_resumable_work(tmp_path: Path) -> None:
    out, partial = tmp_path / "a", tmp_path / ".a.partial"
    for resumable in (False, True):
        with pytest.raises(CorpusError):
            build(out, resumable=resumable, fail=True)
        assert partial.exists() == resumable
    assert not build(out).reused
    assert not partial.exists()


def test_other_inputs_start_clean(tmp_path: Path) -> None:
    with pytest.raises(CorpusError):
        build(tmp_path / "a", "old", resumable=True, fail=True)
    write(tmp_path / ".a.partial" / "step-0", "")
    (tmp_path / ".a.partial" / STORE / "left over").touch()
    build(tmp_path / "a", "new")
    require_whole(tmp_path / "a", "new")
    assert "left over" not in names(tmp_path / "a")


def test_overwriting_keeps_foreign_files(tmp_path: Path) -> None:
    out = build(tmp_path / "a", "old").path
    (out / "data" / "mine.txt").write_text("precious")
    (out / "NOTES.txt").write_text("precious")
    build(out, "new", files=("y",), overwrite=True)
    assert files_of(out) == {"y": "new in y", "data/mine.txt": "precious", "NOTES.txt": "precious"}
    build(out, "newer", files=("NOTES.txt",), overwrite=True)
    assert files_of(out) == {
        "NOTES.txt": "newer in NOTES.txt", "NOTES.txt~": "precious", "data/mine.txt": "precious",
    }  # fmt: skip
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("there", ["folder", "file", "dangling link"])
def test_only_stores_are_replaced(tmp_path: Path, there: str, overwrite: bool) -> None:
    out = tmp_path / "a"
    if there == "folder":
        out.mkdir()
        (out / "thesis.tex").write_text("years of work")
    elif there == "file":
        out.write_text("years of work")
    else:
        out.symlink_to(tmp_path / "nowhere")
    with pytest.raises(BuildError, match="is not a store" if overwrite else "exists and is another build"):
        build(out, overwrite=overwrite)
    assert names(tmp_path) == ["a"]
    assert there != "folder" or (out / "thesis.tex").exists()


def test_an_empty_folder_becomes_the_store(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    build(tmp_path / "a", "one")
    require_whole(tmp_path / "a", "one")
    assert names(tmp_path) == ["a"]


def test_a_damaged_store_is_replaced_only_when_asked(tmp_path: Path) -> None:
    out = build(tmp_path / "a", "one").path
    (out / "y").write_text("cut")
    with pytest.raises(BuildError, match="exists and is another build"):
        build(out, "one")
    build(out, "one", overwrite=True)
    require_whole(out, "one")


def test_a_link_to_a_store_is_replaced_and_its_target_kept(tmp_path: Path) -> None:
    out, elsewhere = tmp_path / "a", build(tmp_path / "elsewhere", "old").path
    out.symlink_to(elsewhere)
    build(out, "new", overwrite=True)
    assert not out.is_symlink()
    require_whole(out, "new")
    require_whole(elsewhere, "old")
    assert names(tmp_path) == ["a", "elsewhere"]


def test_a_store_that_is_open_is_neither_overwritten_nor_removed(tmp_path: Path) -> None:
    out = build(tmp_path / "a", "old").path
    with lease(out):
        with pytest.raises(BuildError, match="is open in another process"):
            build(out, "new", overwrite=True)
        with pytest.raises(StoreError, match="is open in another process"):
            remove_store(out)
    require_whole(out, "old")


def test_one_build_at_a_time(tmp_path: Path) -> None:
    with (
        locked_directory(tmp_path / ".a.partial"),
        pytest.raises(BuildError, match="another build is running"),
    ):
        build(tmp_path / "a")
    build(tmp_path / "a")


# --- a crash at every single change of the disk ---


class Crash(BaseException):
    """The end of a process, as near as an exception comes: from here on nothing changes on the disk."""


CHANGES = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link")


class Disk:
    """Counts the changes under a folder and, once there were enough, forbids all others."""

    folder = ""
    changes = 0
    limit: float = float("inf")

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Take part in every audit event of this process (a hook cannot be removed)."""
        if not self.folder or event not in CHANGES:
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


@pytest.mark.usefixtures("no_fsync")
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_build_may_be_killed_at_any_moment(tmp_path: Path, overwrite: bool) -> None:
    """What opens is whole, the same build ends it, and nobody loses a file that is not the store's."""
    old, folder = build(tmp_path / "old", "old").path, tmp_path / "stores"
    (old / "data" / "mine.txt").write_text("precious")
    out = folder / "a"

    def prepare() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        if overwrite:
            shutil.copytree(old, out)

    def work() -> None:
        build(out, "new", overwrite=overwrite)

    prepare()
    assert DISK.run(folder, work)
    total = DISK.changes
    assert total > 20
    absent = 0
    for limit in range(total):
        prepare()
        assert not DISK.run(folder, work, limit)
        if out.exists():
            require_whole(out, load_manifest(out).parameters["plan"]["text"])
        else:
            absent += 1
        # The second attempt crashes as well, somewhere else; the third one may finish.
        DISK.run(folder, work, limit * 7 % total)
        work()
        require_whole(out, "new")
        build(out, "new")
        assert names(folder) == ["a"]
        assert not overwrite or (out / "data" / "mine.txt").read_text() == "precious"
    assert absent == 1 if overwrite else absent > 20


def test_a_removal_may_be_killed_at_any_moment(tmp_path: Path) -> None:
    store, limit, ended = tmp_path / "a", 0, False
    while not ended:
        build(store, "one")
        ended = DISK.run(tmp_path, lambda: remove_store(store), limit)
        if not ended and limit:
            with pytest.raises(StoreError):
                load_manifest(store)
            if (store / "manifest.json").exists():
                remove_store(store)
        shutil.rmtree(store, ignore_errors=True)
        limit += 1
    assert limit > 3


# --- removal ---


def test_removing_keeps_foreign_files(tmp_path: Path) -> None:
    store = build(tmp_path / "a").path
    (store / "NOTES.txt").write_text("precious")
    assert remove_store(store) == [store / "NOTES.txt"]
    store = build(tmp_path / "b").path
    assert remove_store(store) == []
    assert not store.exists()


def test_removing_follows_no_link(tmp_path: Path) -> None:
    store, other = build(tmp_path / "a").path, tmp_path / "other"
    (store / "data").rename(other)
    (store / "data").symlink_to(other)
    assert remove_store(store) == [store / "data"]
    assert (other / "x").exists()


def test_every_file_is_measured_with_progress(tmp_path: Path) -> None:
    write(tmp_path / "data" / "x", "one")
    write(tmp_path / "y", "two")
    seen: list[tuple[int, int]] = []
    found = hash_files(tmp_path, lambda *done: seen.append(done))
    assert found == {name: FileEntry.of(tmp_path / name) for name in ("data/x", "y")}
    assert seen == [(8, 16), (16, 16)]


def test_too_little_space_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**12, 0, 3 * 10**9))
    require_space(tmp_path, 3 * 10**9)
    with pytest.raises(BuildError, match=r"needs about 3\.5 GB, 3\.0 GB are free: make room and run"):
        require_space(tmp_path, 3_500_000_000)
