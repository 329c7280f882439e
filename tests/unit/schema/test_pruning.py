"""Pruning: old builds and leftovers are removed; what is needed stays, as does anything not made by a flow."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session, sessionmaker

from draftstore.storage.locks import lease
from schema.catalogue import pruning
from schema.catalogue.builds import (
    CatalogueError,
    add_build,
    drop_build,
    fail_build,
    get_build,
    list_builds,
    start_build,
)
from schema.catalogue.pruning import Pruning
from schema.catalogue.publishing import publish, rollback
from schema.models import Build
from schema.renewal.making import store_path
from tests.fakes.databases import write_store


class Site:
    """A data folder with builds, as flows make them, and a catalogue of its own."""

    def __init__(self, home: Path, engine: Engine) -> None:
        self.home, self.transaction = home, sessionmaker(engine).begin

    def path(self, number: int, kind: str = "rest", name: str = "chat") -> Path:
        return store_path(self.home, kind, name, number=number)

    def build(self, number: int, **changes: Any) -> int:
        """Make a store and register it."""
        write_store(self.path(number, **changes), **{"name": "chat", **changes})
        with self.transaction() as session:
            return add_build(session, self.path(number, **changes)).id

    def fail(self, number: int) -> tuple[int, Path]:
        """Leave a failed build with its working directory."""
        path = self.path(number)
        partial = path.with_name(f".{path.name}.partial")
        partial.mkdir(parents=True)
        (partial / "build.json").write_text("{}")
        with self.transaction() as session:
            build_id = start_build(session, "rest", "chat", path).id
            fail_build(session, build_id, "the disk is full")
        return build_id, partial

    def prune(self, keep: int = 1, **options: Any) -> Pruning:
        return pruning.prune(self.transaction, self.home, keep, **options)

    def builds(self) -> set[int]:
        with self.transaction() as session:
            return {build.id for build in list_builds(session)}


@pytest.fixture
def site(engine: Engine, tmp_path: Path) -> Site:
    return Site(tmp_path / "home", engine)


def test_the_newest_of_each_kind_and_name_are_kept(site: Site) -> None:
    rest = [site.build(number) for number in range(4)]
    others = [site.build(9, kind="crest"), site.build(8, name="code")]
    found = site.prune(2)
    assert [(removal.what, removal.build_id, removal.bytes) for removal in found.removed] == [
        ("store", rest[0], 3), ("store", rest[1], 3)
    ]  # fmt: skip
    assert site.builds() == {*rest[2:], *others}
    assert [site.path(number).exists() for number in range(4)] == [False, False, True, True]
    assert site.prune(2) == Pruning([], [])


def test_builds_that_a_release_needs_are_kept(site: Site) -> None:
    ids = [site.build(number) for number in range(6)]
    for build_id in ids[:3]:
        publish(site.transaction, "chat", build_id)
    publish(site.transaction, "other", ids[3])
    site.prune(1)
    assert site.builds() == {ids[1], ids[2], ids[3], ids[5]}  # one was live long ago, four never
    assert rollback(site.transaction, "chat").build_id == ids[1]


def test_sources_of_live_builds_are_kept(site: Site) -> None:
    source, newer, live = site.build(0), site.build(1), site.build(2, name="chat-dense")
    with site.transaction() as session:
        get_build(session, live).source_id = source
    assert site.prune(dry_run=True).removed[0].build_id == source
    publish(site.transaction, "chat-dense", live)
    assert site.prune() == Pruning([], [])
    assert site.builds() == {source, newer, live}


def test_open_and_recent_stores_and_other_files_are_kept(site: Site) -> None:
    old, newest = site.build(0), site.build(1)
    assert site.prune(older_than=timedelta(hours=1)) == Pruning([], [])
    use = lease(site.path(0))
    assert site.prune() == Pruning([], [str(site.path(0))])
    assert site.builds() == {old, newest}
    use.close()
    (site.path(0) / "notes.txt").write_text("mine")
    assert [removal.build_id for removal in site.prune().removed] == [old]
    assert site.builds() == {newest}
    assert [path.name for path in site.path(0).iterdir()] == ["notes.txt"]


def test_a_dry_run_changes_nothing(site: Site) -> None:
    ids = {site.build(number) for number in range(2)}
    _, partial = site.fail(7)
    site.build(8)
    found = site.prune(dry_run=True)
    assert {removal.what for removal in found.removed} == {"store", "unfinished"}
    assert ids < site.builds()
    assert partial.exists()
    assert found == site.prune()
    assert not partial.exists()


class TestUnfinished:
    def test_resumable_builds_are_kept_until_a_newer_one_is_finished(self, site: Site) -> None:
        failed, partial = site.fail(1)
        assert site.prune() == Pruning([], [])
        assert partial.exists()
        newer = site.build(2)
        assert {removal.what for removal in site.prune().removed} == {"store", "unfinished"}
        assert (site.builds(), partial.exists()) == ({newer}, False)
        assert failed != newer

    def test_a_complete_store_of_a_killed_build_is_removed(self, site: Site) -> None:
        paths = [write_store(site.path(number), name="chat") for number in (1, 2)]
        with site.transaction() as session:
            for path in (paths[0], *paths):
                killed = start_build(session, "rest", "chat", path).id
                fail_build(session, killed, "killed")
        assert site.prune() == Pruning([], [])  # the next run may find them whole
        with site.transaction() as session:
            found = add_build(session, paths[1]).id
        newer = {found, site.build(3)}
        site.prune(2)
        assert (site.builds(), [path.exists() for path in paths]) == (newer, [False, True])

    def test_folders_of_dropped_builds_are_removed_unless_in_use(self, site: Site) -> None:
        failed, partial = site.fail(1)
        with site.transaction() as session:
            drop_build(session, failed)
        working = lease(partial)  # a lock on the directory, as every build holds
        assert site.prune() == Pruning([], [])
        working.close()
        (found,) = site.prune().removed
        assert (found.what, found.path, found.bytes) == ("unfinished", str(partial), 2)
        assert not partial.parent.exists()  # nothing else was there


def test_nothing_outside_the_stores_of_flows_is_touched(site: Site, tmp_path: Path) -> None:
    for number in range(3):
        name = site.path(number).name
        elsewhere = write_store(tmp_path / "stores" / "chat" / name, name="elsewhere")
        of_people = write_store(site.home / "stores" / "mine" / f"store-{number}", name="mine")
        target = write_store(tmp_path / "targets" / name, name="linked")
        link = site.home / "stores" / "linked" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)
        with site.transaction() as session:
            for path in (elsewhere, of_people):
                add_build(session, path)
            add_build(session, target).path = str(link)
    (site.home / "stores" / "mine" / ".notes.partial").mkdir()
    assert site.prune() == Pruning([], [])
    assert len(site.builds()) == 9


@pytest.mark.parametrize("when", ["before", "half", "after"])
def test_a_pruning_that_was_killed_is_continued(
    site: Site, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    site.build(0)
    newest = site.build(1)

    def fail(*_: object) -> None:
        raise OSError

    def remove_half(path: Path) -> None:
        (path / "entries.bin").unlink()
        raise OSError

    steps: dict[str, tuple[str, Callable[..., None]]] = {
        "before": ("remove_store", fail), "half": ("remove_store", remove_half), "after": ("drop_build", fail)
    }  # fmt: skip
    with monkeypatch.context() as patch, pytest.raises(OSError):  # noqa: PT011, PT012
        patch.setattr(pruning, *steps[when])
        site.prune()
    with pytest.raises(CatalogueError, match="only finished builds"):
        publish(site.transaction, "chat", min(site.builds()))
    site.prune()
    assert site.builds() == {newest}
    assert list(site.path(0).parent.iterdir()) == [site.path(1)]


def test_a_build_that_is_published_meanwhile_is_kept(
    site: Site, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = site.build(0)
    site.build(1)
    plan = pruning._old_builds

    def publish_then(*arguments: Any) -> Any:
        found = plan(*arguments)
        publish(site.transaction, "chat", old)
        return found

    monkeypatch.setattr(pruning, "_old_builds", publish_then)
    assert site.prune() == Pruning([], [])
    with Session(engine) as session:
        assert session.get_one(Build, old).state == "finished"
    assert site.path(0).exists()
