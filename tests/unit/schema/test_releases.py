"""Publishing and rollback: whole builds only, in one transaction, by many at once, and every move is kept."""

import itertools
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
from sqlalchemy import Engine, select, text
from sqlalchemy.orm import Session

from draftstore.stores.crest.entries import entries_digest
from schema import catalogue
from schema.catalogue import CatalogueError
from schema.models import Build, Release, ReleaseMove
from schema.partitions import attach_partition, create_partition
from tests.fakes.databases import write_store

SECONDS = 20


@pytest.fixture
def builds(session: Session, tmp_path: Path) -> list[Build]:
    """Return five whole builds."""
    return [catalogue.add_build(session, write_store(tmp_path / f"store-{i}")) for i in range(5)]


def live(session: Session, name: str = "chat") -> int | None:
    return session.scalar(select(Release.build_id).filter_by(name=name))


class TestRemove:
    def test_the_name_is_free_again_and_the_builds_stay(self, session: Session, builds: list[Build]) -> None:
        for build in builds[:2]:
            catalogue.publish(session, "chat", build.id)
        catalogue.publish(session, "code", builds[0].id)
        assert catalogue.remove(session, "chat") == builds[1].id
        assert [release.name for release in catalogue.list_releases(session)] == ["code"]
        with pytest.raises(CatalogueError, match="no release 'chat'"):
            catalogue.remove(session, "chat")
        catalogue.drop_build(session, builds[1].id)
        catalogue.publish(session, "chat", builds[2].id)
        assert [move.to_build for move in catalogue.release_history(session, "chat")] == [builds[2].id]
        with pytest.raises(CatalogueError, match="nothing to roll back to"):
            catalogue.rollback(session, "chat")


class TestPublish:
    @pytest.mark.parametrize("kind", ["ngrams", "tokens"])
    def test_what_does_not_draft_is_refused(self, session: Session, tmp_path: Path, kind: str) -> None:
        build = catalogue.add_build(session, write_store(tmp_path / "other", kind=kind))
        with pytest.raises(CatalogueError, match=f"of kind '{kind}', which gives no drafts"):
            catalogue.publish(session, "chat", build.id)
        assert live(session) is None

    def test_every_move_is_kept_with_its_time(self, session: Session, builds: list[Build]) -> None:
        for build in builds[:3]:
            release = catalogue.publish(session, "chat", build.id)
            assert (release.name, release.build_id, live(session)) == ("chat", build.id, build.id)
        catalogue.publish(session, "code", builds[4].id)
        moves = catalogue.release_history(session, "chat")
        ids: list[int | None] = [None, *(build.id for build in builds[:3])]
        assert [(move.from_build, move.to_build) for move in moves] == list(itertools.pairwise(ids))
        assert {move.action for move in moves} == {"publish"}
        assert all(move.moved_at.tzinfo for move in moves)
        assert [release.name for release in catalogue.list_releases(session)] == ["chat", "code"]

    def test_to_publish_the_live_build_changes_nothing(self, session: Session, builds: list[Build]) -> None:
        for _ in range(2):
            catalogue.publish(session, "chat", builds[0].id)
        assert len(catalogue.release_history(session, "chat")) == 1

    def test_unfinished_builds_are_refused(self, session: Session, tmp_path: Path) -> None:
        build = catalogue.start_build(session, "rest", "chat", tmp_path)
        with pytest.raises(CatalogueError, match="is running; only finished builds"):
            catalogue.publish(session, "chat", build.id)
        catalogue.fail_build(session, build.id, "the disk is full")
        with pytest.raises(CatalogueError, match="is failed: the disk is full; only"):
            catalogue.publish(session, "chat", build.id)
        with pytest.raises(CatalogueError, match="no build 12345"):
            catalogue.publish(session, "chat", 12345)
        assert live(session) is None

    @pytest.mark.parametrize(
        ("damage", "problem"),
        [
            (lambda path: (path / "entries.bin").unlink(), "entries.bin is missing"),
            (lambda path: (path / "entries.bin").write_bytes(b"123456"), "has 6 bytes, expected 3"),
            (lambda path: (path / "entries.bin").write_bytes(b"abc"), "has SHA-256"),
            (lambda path: (path / "manifest.json").unlink(), "is not a store"),
            (lambda path: (path / "manifest.json").write_text("{}"), "format version None"),
            (
                lambda path: (
                    write_store(path / "new").joinpath("manifest.json").replace(path / "manifest.json")
                ),
                "now holds another store",
            ),
            (lambda path: path.rename(path.with_name("gone")), "is not a store"),
        ],
    )
    def test_builds_that_do_not_verify_are_refused(
        self, session: Session, builds: list[Build], damage: Callable[[Path], Any], problem: str
    ) -> None:
        catalogue.publish(session, "chat", builds[0].id)
        damage(Path(builds[1].path))
        with pytest.raises(CatalogueError, match="does not verify: .*" + problem):
            catalogue.publish(session, "chat", builds[1].id)
        assert live(session) == builds[0].id
        assert len(catalogue.release_history(session, "chat")) == 1

    @pytest.mark.parametrize("name", ["", "a b", "-a", "a/b", "chat\n", "ü"])
    def test_names_that_are_refused(self, session: Session, builds: list[Build], name: str) -> None:
        with pytest.raises(CatalogueError, match="cannot be the name of a release"):
            catalogue.publish(session, name, builds[0].id)

    def test_all_problems_are_counted(self, session: Session, builds: list[Build]) -> None:
        with pytest.raises(CatalogueError, match=r"verify: one \(and 2 more problems\)"):
            catalogue.publish(session, "chat", builds[0].id, verify=lambda _: ["one", "two", "three"])


class TestEntriesInTheDatabase:
    ENTRIES: ClassVar = [(bytes([0, key]), b"tree") for key in range(3)]

    def _build(self, session: Session, folder: Path) -> Build:
        digest = entries_digest(self.ENTRIES)
        store = write_store(folder, kind="crest", backends=["postgres"], entries_sha256=digest)
        build = catalogue.add_build(session, store)
        session.execute(text(create_partition("trees", build.id)))
        for key, value in self.ENTRIES:
            values = {"build_id": build.id, "key": key, "value": value}
            session.execute(text(f"INSERT INTO trees_{build.id} VALUES (:build_id, :key, :value)"), values)
        for statement in attach_partition("trees", build.id):
            session.execute(text(statement))
        return build

    def test_they_are_verified_too(self, engine: Engine, tmp_path: Path) -> None:
        with Session(engine) as session, session.begin():
            build_id = self._build(session, tmp_path / "s").id
        with Session(engine) as session, session.begin():
            assert catalogue.publish(session, "chat", build_id).build_id == build_id

    @pytest.mark.parametrize(
        ("damage", "problem"),
        [
            ("UPDATE trees SET value = 'tree.' WHERE key = '\\x0001'", "SHA-256"),
            ("DELETE FROM trees WHERE key = '\\x0001'", "SHA-256"),
            ("DROP TABLE trees_{}", "holds no trees"),
        ],
    )
    def test_damage_is_refused(self, engine: Engine, tmp_path: Path, damage: str, problem: str) -> None:
        with Session(engine) as session, session.begin():
            build_id = self._build(session, tmp_path / "s").id
            session.execute(text(damage.format(build_id)))
        with (
            pytest.raises(CatalogueError, match=f"does not verify: .*{problem}"),
            Session(engine) as session,
            session.begin(),
        ):
            catalogue.publish(session, "chat", build_id)


class TestRollback:
    def test_it_walks_back_through_what_was_published(self, session: Session, builds: list[Build]) -> None:
        one, two, three, four, _ = (build.id for build in builds)
        for build_id in (one, two, three):
            catalogue.publish(session, "chat", build_id)
        assert catalogue.rollback(session, "chat").build_id == two
        assert catalogue.rollback(session, "chat").build_id == one
        with pytest.raises(CatalogueError, match=f"no build before build {one}"):
            catalogue.rollback(session, "chat")
        catalogue.publish(session, "chat", four)
        assert catalogue.rollback(session, "chat").build_id == one
        assert live(session) == one
        moves = catalogue.release_history(session, "chat")
        assert [move.action for move in moves].count("rollback") == 3
        assert all(after.from_build == before.to_build for before, after in itertools.pairwise(moves))

    def test_a_build_that_was_published_twice(self, session: Session, builds: list[Build]) -> None:
        one, two, three, *_ = (build.id for build in builds)
        for build_id in (one, two, one, three):
            catalogue.publish(session, "chat", build_id)
        assert [catalogue.rollback(session, "chat").build_id for _ in range(3)] == [one, two, one]

    def test_dropped_builds_are_passed_over(self, session: Session, builds: list[Build]) -> None:
        one, two, three, *_ = (build.id for build in builds)
        for build_id in (one, two, one, three):
            catalogue.publish(session, "chat", build_id)
        catalogue.drop_build(session, two)
        assert catalogue.rollback(session, "chat").build_id == one
        with pytest.raises(CatalogueError, match="nothing to roll back to"):
            catalogue.rollback(session, "chat")

    def test_not_to_a_build_that_no_longer_verifies(self, session: Session, builds: list[Build]) -> None:
        for build in builds[:2]:
            catalogue.publish(session, "chat", build.id)
        (Path(builds[0].path) / "entries.bin").write_bytes(b"abc")
        with pytest.raises(CatalogueError, match="does not verify"):
            catalogue.rollback(session, "chat")
        assert live(session) == builds[1].id

    def test_there_is_no_such_release(self, session: Session) -> None:
        with pytest.raises(CatalogueError, match="no release 'chat'"):
            catalogue.rollback(session, "chat")
        with pytest.raises(CatalogueError, match="no release 'chat'"):
            catalogue.release_history(session, "chat")


class TestManyAtOnce:
    def test_publishing_from_many_threads_makes_one_chain(self, engine: Engine, tmp_path: Path) -> None:
        ids = self._add_builds(engine, tmp_path, 6)
        barrier = threading.Barrier(len(ids))

        def publish(build_id: int) -> None:
            barrier.wait(SECONDS)
            with Session(engine) as session, session.begin():
                catalogue.publish(session, "chat", build_id)

        self._run([partial(publish, build_id) for build_id in ids])
        with Session(engine) as session:
            moves = catalogue.release_history(session, "chat")
            chain = [move.to_build for move in moves]
            assert sorted(chain) == ids
            assert [move.from_build for move in moves] == [None, *chain[:-1]]
            assert live(session) == chain[-1]

    def test_two_rollbacks_at_once_go_back_once(self, engine: Engine, tmp_path: Path) -> None:
        ids = self._add_builds(engine, tmp_path, 3)
        with Session(engine) as session, session.begin():
            for build_id in ids:
                catalogue.publish(session, "chat", build_id)
        barrier, errors = threading.Barrier(2), []

        def meet(_: Build) -> list[str]:
            barrier.wait(SECONDS)  # both have decided where to go
            return []

        def rollback() -> None:
            try:
                with Session(engine) as session, session.begin():
                    catalogue.rollback(session, "chat", verify=meet)
            except CatalogueError as error:
                errors.append(str(error))

        self._run([rollback, rollback])
        assert ["has just been moved" in error for error in errors] == [True]
        with Session(engine) as session:
            assert live(session) == ids[1]

    def test_a_build_is_not_dropped_while_it_is_published(self, engine: Engine, tmp_path: Path) -> None:
        ids = self._add_builds(engine, tmp_path, 1)
        verified, errors = threading.Event(), []

        def publish() -> None:
            with Session(engine) as session, session.begin():
                catalogue.publish(session, "chat", ids[0])
                verified.set()
                with Session(engine) as other, other.begin():
                    assert live(other) is None  # nobody sees it before it is committed

        def drop() -> None:
            verified.wait(SECONDS)
            try:
                with Session(engine) as session, session.begin():
                    catalogue.drop_build(session, ids[0])
            except CatalogueError as error:
                errors.append(str(error))

        self._run([publish, drop])
        assert ["is live" in error for error in errors] == [True]
        with Session(engine) as session:
            assert live(session) == ids[0]

    def test_what_fails_half_way_leaves_the_release_alone(self, engine: Engine, tmp_path: Path) -> None:
        ids = self._add_builds(engine, tmp_path, 2)
        with Session(engine) as session, session.begin():
            catalogue.publish(session, "chat", ids[0])
        with pytest.raises(RuntimeError), Session(engine) as session, session.begin():  # noqa: PT012
            catalogue.publish(session, "chat", ids[1])
            raise RuntimeError
        with Session(engine) as session:
            assert live(session) == ids[0]
            assert session.query(ReleaseMove).count() == 1

    def _add_builds(self, engine: Engine, folder: Path, number: int) -> list[int]:
        with Session(engine) as session, session.begin():
            return [
                catalogue.add_build(session, write_store(folder / str(i), corpus=None)).id
                for i in range(number)
            ]

    def _run(self, calls: list[Callable[[], None]]) -> None:
        threads = [threading.Thread(target=call) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
            assert not thread.is_alive()
