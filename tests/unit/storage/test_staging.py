"""Steps that are done once, and stores that are published when complete."""

import json
from contextlib import closing
from pathlib import Path

import pytest

from draftstore.errors import BuildError, CorpusError, StoreError
from draftstore.storage.files import locked_directory
from draftstore.storage.locks import StoreLease
from draftstore.storage.manifest import Manifest, TokenizerIdentity, load_manifest, save_manifest
from draftstore.storage.report import ReadReport
from draftstore.storage.staging import (
    STORE,
    BuildResult,
    build_store,
    build_time,
    hash_files,
    once,
    remove_store,
)


class Step:
    """A step that counts how often it is done."""

    def __init__(self, value: object = None) -> None:
        self.value = value
        self.done = 0

    def __call__(self) -> object:
        self.done += 1
        return self.value


@pytest.mark.parametrize("value", [None, 3, 0.1 + 0.2, {"sizes": [1, 2]}, "", []])
def test_a_step_is_done_once(tmp_path: Path, value: object) -> None:
    step = Step(value)
    for _ in range(3):
        assert once(tmp_path / "marker", step) == value
    assert step.done == 1


def test_an_empty_file_is_a_marker(tmp_path: Path) -> None:
    (tmp_path / "marker").touch()
    step = Step(7)
    assert once(tmp_path / "marker", step) is None
    assert step.done == 0


def test_a_step_that_fails_is_not_marked(tmp_path: Path) -> None:
    def fail() -> None:
        raise CorpusError("no")

    with pytest.raises(CorpusError):
        once(tmp_path / "marker", fail)
    assert list(tmp_path.iterdir()) == []


def test_step_with_an_invalid_result_is_repeated(tmp_path: Path) -> None:
    marker, made = tmp_path / "marker", tmp_path / "made"

    def make() -> int:
        assert not marker.exists(), "a crash here must not leave the old marker"
        made.write_text("x" * 5)
        return 5

    def still(size: int) -> bool:
        return made.exists() and made.stat().st_size == size

    assert once(marker, make, still) == 5
    made.write_text("cut")
    assert once(marker, make, still) == 5
    assert made.read_text() == "xxxxx"
    assert json.loads(marker.read_text()) == 5


def build(
    out: Path,
    text: str = "",
    *,
    files: tuple[str, ...] = (),
    resumable: bool = False,
    fail: bool = False,
    overwrite: bool = False,
) -> BuildResult:
    """Build a store of some files, whose manifest names a text."""

    def fill(partial: Path) -> ReadReport:
        store = partial / STORE
        store.mkdir(exist_ok=True)
        once(partial / "begun", lambda: None)
        if resumable:
            (partial / "tokens").mkdir(exist_ok=True)
            once(partial / "tokens" / "shard-0.json", lambda: None)
        if fail:
            raise CorpusError("no")
        for name in files:
            (store / name).parent.mkdir(exist_ok=True)
            (store / name).write_text(text)
        counts = {"documents": 1, "entries": 0, "tokens": 0}
        identity = TokenizerIdentity("t", "0")
        manifest = Manifest(
            "rest", "a", build_time(), 9, "uint16", identity, {"plan": plan}, {}, counts, hash_files(store)
        )
        save_manifest(store, manifest)
        return ReadReport(1)

    plan = {"kind": "rest", "text": text}
    return build_store(out, plan, "a", overwrite, fill)


def test_a_store_is_built_once_and_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "folder" / "a"
    assert not build(out, "one").reused
    assert build(out, "one").reused
    with pytest.raises(BuildError, match="another build: choose another --out, or pass --overwrite"):
        build(out, "two")
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def test_a_failed_build_leaves_only_what_it_can_resume_from(tmp_path: Path) -> None:
    out, partial = tmp_path / "a", tmp_path / ".a.partial"
    for resumable in (False, True):
        with pytest.raises(CorpusError):
            build(out, resumable=resumable, fail=True)
        assert (partial / "begun").exists() == resumable
    assert not build(out).reused
    assert not partial.exists()


def test_overwriting_spares_what_is_not_the_store_s(tmp_path: Path) -> None:
    out = build(tmp_path / "a", "old", files=("data/x", "y")).path
    (out / "data" / "mine.txt").write_text("precious")
    (out / "NOTES.txt").write_text("precious")
    build(out, "new", files=("y",), overwrite=True)
    found = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert found == {"manifest.json", "y", "data/mine.txt", "NOTES.txt"}
    assert list(tmp_path.iterdir()) == [out]


def test_a_store_that_is_open_is_not_overwritten(tmp_path: Path) -> None:
    out = build(tmp_path / "a", "old").path
    with closing(StoreLease(out)), pytest.raises(BuildError, match="is open in another process"):
        build(out, "new", overwrite=True)
    assert load_manifest(out).parameters["plan"]["text"] == "old"


def test_one_build_at_a_time(tmp_path: Path) -> None:
    with (
        locked_directory(tmp_path / ".a.partial"),
        pytest.raises(BuildError, match="another build is running"),
    ):
        build(tmp_path / "a")


def test_only_what_is_the_store_s_is_removed(tmp_path: Path) -> None:
    store = build(tmp_path / "a").path
    (store / "NOTES.txt").write_text("precious")
    assert remove_store(store) == [store / "NOTES.txt"]
    store = build(tmp_path / "b").path
    assert remove_store(store) == []
    assert not store.exists()


def test_a_store_that_is_open_is_not_removed(tmp_path: Path) -> None:
    store = build(tmp_path / "a").path
    with closing(StoreLease(store)), pytest.raises(StoreError, match="is open in another process"):
        remove_store(store)
    assert load_manifest(store)


def test_removing_follows_no_link_and_is_continued(tmp_path: Path) -> None:
    store, other = build(tmp_path / "a", files=("data/x", "y")).path, tmp_path / "other"
    (store / "data").rename(other)
    (store / "data").symlink_to(other)
    (store / "y").unlink()  # as after a kill
    assert remove_store(store) == [store / "data"]
    assert (other / "x").exists()
