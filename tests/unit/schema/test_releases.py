"""Publishing and rollback: only intact builds, in one transaction, concurrently, with every move recorded."""

import dataclasses
import itertools
import shutil
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, select, text
from sqlalchemy.orm import Session, sessionmaker

from draftstore.storage.manifest import TokenizerIdentity, load_manifest, save_manifest
from schema.catalogue import publishing
from schema.catalogue.builds import CatalogueError, add_build, drop_build, fail_build, start_build
from schema.catalogue.gates import CHECKS, Candidate, RefusedError
from schema.catalogue.publishing import Moved
from schema.catalogue.recordings import Replayed, ReplayRule, add_recording
from schema.catalogue.releases import list_releases, release_history, remove_release
from schema.models import Build, Release
from tests.fakes.databases import publish, rollback, write_store
from tests.fakes.waiting import SECONDS, in_threads


@pytest.fixture
def builds(session: Session, tmp_path: Path) -> list[Build]:
    """Return five whole builds."""
    return [add_build(session, write_store(tmp_path / f"store-{i}")) for i in range(5)]


COUNTS = {"documents": 100, "tokens": 1000, "entries": 3}
READ = {"sources": [], "characters": 4000, "bad_records": 0, "empty_documents": 1}


def vary(folder: Path, **changes: Any) -> Path:
    """Write a REST store of a model with all figures, or one that differs."""
    manifest = load_manifest(write_store(folder))
    known = {"counts": COUNTS, "corpus": READ, "target_model": "m"}
    save_manifest(folder, dataclasses.replace(manifest, **{**known, **changes}))
    return folder


def live(session: Session, name: str = "chat") -> int | None:
    return session.scalar(select(Release.build_id).filter_by(name=name))


def test_removing_a_release_frees_its_name_and_keeps_builds(session: Session, builds: list[Build]) -> None:
    for build in builds[:2]:
        publish(session, "chat", build.id)
    publish(session, "code", builds[0].id)
    assert remove_release(session, "chat") == builds[1].id
    assert [release.name for release in list_releases(session)] == ["code"]
    with pytest.raises(CatalogueError, match="no release 'chat'"):
        remove_release(session, "chat")
    drop_build(session, builds[1].id)
    publish(session, "chat", builds[2].id)
    assert [move.to_build for move in release_history(session, "chat")] == [builds[2].id]


def test_a_release_with_a_longer_name_keeps_working(
    session: Session, builds: list[Build], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "a" * 200
    with monkeypatch.context() as before:
        before.setattr("draftstore.options.NAME", "a*")
        publish(session, name, builds[0].id)
    publish(session, name, builds[1].id)
    assert [release.name for release in list_releases(session)] == [name]
    assert live(session, name) == builds[1].id


class TestPublish:
    def test_every_move_is_kept_with_its_time(self, session: Session, builds: list[Build]) -> None:
        for build in (*builds[:3], builds[2]):  # to publish the live build changes nothing
            release = publish(session, "chat", build.id)
            assert (release.name, release.build_id, live(session)) == ("chat", build.id, build.id)
        publish(session, "code", builds[4].id)
        moves = release_history(session, "chat")
        ids: list[int | None] = [None, *(build.id for build in builds[:3])]
        assert [(move.from_build, move.to_build) for move in moves] == list(itertools.pairwise(ids))
        assert {move.action for move in moves} == {"publish"}
        assert all(move.moved_at.tzinfo for move in moves)
        assert [release.name for release in list_releases(session)] == ["chat", "code"]

    def test_only_finished_builds_that_draft_are_published(self, session: Session, tmp_path: Path) -> None:
        build = start_build(session, "rest", "chat", tmp_path)
        with pytest.raises(CatalogueError, match="is running; only finished builds"):
            publish(session, "chat", build.id)
        fail_build(session, build.id, "the disk is full")
        with pytest.raises(CatalogueError, match="is failed: the disk is full; only"):
            publish(session, "chat", build.id)
        with pytest.raises(CatalogueError, match="no build 12345"):
            publish(session, "chat", 12345)
        counts = add_build(session, write_store(tmp_path / "other", kind="ngrams"))
        with pytest.raises(CatalogueError, match="of kind 'ngrams', which gives no drafts"):
            publish(session, "chat", counts.id)
        for name in ("", "a b", "-a", "chat\n", "a" * 63):
            with pytest.raises(CatalogueError, match="cannot be the name of a release"):
                publish(session, name, counts.id)
        assert live(session) is None

    @pytest.mark.parametrize(
        ("damage", "problem"),
        [
            (lambda path: (path / "entries.bin").unlink(), "entries.bin is missing"),
            (lambda path: (path / "entries.bin").write_bytes(b"abc"), "has SHA-256"),
            (lambda path: path.rename(path.with_name("gone")), "is not a store"),
            (
                lambda path: shutil.copytree(write_store(path / "new"), path, dirs_exist_ok=True),
                "now holds another store",
            ),
        ],
    )
    def test_builds_that_do_not_verify_are_refused(
        self, session: Session, builds: list[Build], damage: Callable[[Path], Any], problem: str
    ) -> None:
        publish(session, "chat", builds[0].id)
        damage(Path(builds[1].path))
        with pytest.raises(CatalogueError, match="does not verify: .*" + problem):
            publish(session, "chat", builds[1].id)
        assert live(session) == builds[0].id
        assert len(release_history(session, "chat")) == 1


class TestRollback:
    def test_rollbacks_walk_back_through_publications(self, session: Session, builds: list[Build]) -> None:
        one, two, three, four, _ = (build.id for build in builds)
        for build_id in (one, two, three):
            publish(session, "chat", build_id)
        assert rollback(session, "chat").build_id == two
        assert rollback(session, "chat").build_id == one
        with pytest.raises(CatalogueError, match=f"no build before build {one}"):
            rollback(session, "chat")
        publish(session, "chat", four)
        assert rollback(session, "chat").build_id == one
        assert live(session) == one
        moves = release_history(session, "chat")
        assert [move.action for move in moves].count("rollback") == 3
        assert all(after.from_build == before.to_build for before, after in itertools.pairwise(moves))

    def test_rollbacks_skip_dropped_builds_and_repeated_publications(
        self, session: Session, builds: list[Build]
    ) -> None:
        one, two, three, *_ = (build.id for build in builds)
        for build_id in (one, two, one, three):
            publish(session, "chat", build_id)
        assert [rollback(session, "chat").build_id for _ in range(3)] == [one, two, one]
        for build_id in (two, one, three):
            publish(session, "chat", build_id)
        drop_build(session, two)
        assert rollback(session, "chat").build_id == one
        with pytest.raises(CatalogueError, match="nothing to roll back to"):
            rollback(session, "chat")

    def test_a_rollback_checks_that_files_exist_without_reading_them(
        self, session: Session, builds: list[Build]
    ) -> None:
        for build in builds[:3]:
            publish(session, "chat", build.id)
        (Path(builds[1].path) / "entries.bin").write_bytes(b"abc")  # as long as it was
        assert rollback(session, "chat").build_id == builds[1].id
        (Path(builds[0].path) / "entries.bin").write_bytes(b"ab")
        with pytest.raises(CatalogueError, match="does not verify"):
            rollback(session, "chat")
        assert live(session) == builds[1].id


class TestTransactions:
    def test_no_transaction_is_open_while_a_store_is_read(self, engine: Engine, tmp_path: Path) -> None:
        transaction = sessionmaker(engine).begin
        with transaction() as session:
            ids = [add_build(session, write_store(tmp_path / str(i))).id for i in range(2)]
            add_recording(session, ReplayRule(name="chats", path=tmp_path / "chats.jsonl"), ["chat"])
        open_ones = "SELECT state FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        looked = []

        def look() -> None:
            with engine.connect() as connection:
                assert "idle in transaction" not in set(connection.scalars(text(open_ones)))
            looked.append(True)

        def verify(_: Candidate) -> list[str]:
            look()
            return []

        def measure(rule: ReplayRule, builds: Sequence[Candidate]) -> list[Replayed]:
            look()
            return [Replayed(rule, skipped="away") for _ in builds]

        for build_id in ids:
            publishing.publish(transaction, "chat", build_id, verify=verify, measure=measure)
        assert publishing.rollback(transaction, "chat", verify=verify).build_id == ids[0]
        assert len(looked) == 5

    @pytest.mark.parametrize("change", ["drop", "publish"])
    def test_concurrent_moves_are_noticed(self, engine: Engine, tmp_path: Path, change: str) -> None:
        transaction = sessionmaker(engine).begin
        with transaction() as session:
            ids = [add_build(session, write_store(tmp_path / str(i))).id for i in range(3)]
        publishing.publish(transaction, "chat", ids[0])

        def meanwhile(_: Candidate) -> list[str]:
            if change == "publish":
                publishing.publish(transaction, "chat", ids[2])
            else:
                with transaction() as session:
                    drop_build(session, ids[1])
            return []

        with pytest.raises(CatalogueError, match=r"has just been moved|no build"):
            publishing.publish(transaction, "chat", ids[1], verify=meanwhile)
        with transaction() as session:
            assert live(session) == ids[2 if change == "publish" else 0]


class TestGates:
    """What may not go live, and how that is overridden."""

    def _publish(self, session: Session, folder: Path, **changes: Any) -> Moved:
        for name, differences in (("live", {}), ("new", changes)):
            build = add_build(session, vary(folder / name, **differences))
            moved = publish(session, "chat", build.id)
        return moved

    @pytest.mark.parametrize(
        ("check", "reason", "changes"),
        [
            ("tokenizer", "tokenizer 'other' (digest)", {"tokenizer": TokenizerIdentity("other", "digest")}),
            ("model", "made for the model 'n', and the live build", {"target_model": "n"}),
            ("tokens", "799 tokens, 20.1% fewer than the 1,000", {"counts": {**COUNTS, "tokens": 799}}),
            ("corpus", "3,199 characters, 20.0% fewer", {"corpus": {**READ, "characters": 3199}}),
            ("bad-records", "2 bad records of 103, 1.9%", {"corpus": {**READ, "bad_records": 2}}),
        ],
    )
    def test_too_different_builds_are_refused_unless_forced(
        self, session: Session, tmp_path: Path, check: str, reason: str, changes: dict[str, Any]
    ) -> None:
        one, two = (
            add_build(session, vary(tmp_path / name, **differences))
            for name, differences in (("live", {}), ("new", changes))
        )
        publish(session, "chat", one.id)
        others = set(CHECKS) - {check}
        for force in ((), others):
            with pytest.raises(
                RefusedError, match=f"does not go live as chat: {check}: .*override {check} \\(force\\)$"
            ) as caught:
                publish(session, "chat", two.id, force=force)
            assert reason in caught.value.refusals[check]
            assert (live(session), caught.value.exit_code) == (one.id, 3)
        assert two.parameters["gates"]["chat"]["refused"] == caught.value.refusals
        moved = publish(session, "chat", two.id, force=[check])
        assert moved.verdict.forced == caught.value.refusals
        assert two.parameters["gates"] == {"chat": {"forced": caught.value.refusals}}
        assert rollback(session, "chat").build_id == one.id  # whatever the difference

    def test_another_kind_may_lack_strategies(self, session: Session, tmp_path: Path) -> None:
        with pytest.raises(RefusedError) as caught:
            self._publish(session, tmp_path, kind="crest")
        assert caught.value.refusals.keys() == {"kind", "strategy"}
        assert "may request longest, which it does not support" in caught.value.refusals["strategy"]

    def test_small_differences_pass(self, session: Session, tmp_path: Path) -> None:
        smaller = {**READ, "characters": 3200, "fingerprint": "smaller", "bad_records": 1}
        moved = self._publish(session, tmp_path, counts={**COUNTS, "tokens": 800}, corpus=smaller)
        assert moved.verdict.sentences() == []

    def test_figures_that_a_manifest_lacks_are_not_checked(self, session: Session, tmp_path: Path) -> None:
        moved = self._publish(session, tmp_path, corpus={"sources": []})
        assert moved.verdict.sentences() == [
            f"corpus not checked: the manifest of build {moved.build_id} lacks the characters",
            f"bad-records not checked: the manifest of build {moved.build_id} lacks the bad records",
        ]

    def test_the_first_build_of_a_release_is_checked_by_itself(
        self, session: Session, tmp_path: Path
    ) -> None:
        build = add_build(session, vary(tmp_path / "s", corpus={**READ, "bad_records": 50}))
        with pytest.raises(RefusedError, match=r"bad-records: 50 bad records of 151"):
            publish(session, "chat", build.id)
        with pytest.raises(CatalogueError, match="not a check: size; expected tokenizer, "):
            publish(session, "chat", build.id, force=["size"])
        assert live(session) is None


class TestManyAtOnce:
    @pytest.fixture
    def ids(self, engine: Engine, tmp_path: Path) -> list[int]:
        """Return four whole builds."""
        with Session(engine) as session, session.begin():
            stores = [write_store(tmp_path / str(i), corpus=None) for i in range(4)]
            return [add_build(session, store).id for store in stores]

    def test_concurrent_publications_form_one_chain(self, engine: Engine, ids: list[int]) -> None:
        barrier = threading.Barrier(len(ids))

        def move(build_id: int) -> None:
            barrier.wait(SECONDS)
            while True:
                try:
                    publishing.publish(sessionmaker(engine).begin, "chat", build_id)
                except CatalogueError as error:
                    assert "has just been moved" in str(error)  # noqa: PT017
                else:
                    break

        in_threads(partial(move, build_id) for build_id in ids)
        with Session(engine) as session:
            moves = release_history(session, "chat")
            chain = [move.to_build for move in moves]
            assert sorted(chain) == ids
            assert [move.from_build for move in moves] == [None, *chain[:-1]]
            assert live(session) == chain[-1]

    def test_a_build_is_not_dropped_while_it_is_published(self, engine: Engine, ids: list[int]) -> None:
        verified, errors = threading.Event(), []

        def move() -> None:
            with Session(engine) as session, session.begin():
                publish(session, "chat", ids[0])
                verified.set()
                with Session(engine) as other:
                    assert live(other) is None  # nobody sees it before it is committed

        def drop() -> None:
            verified.wait(SECONDS)
            try:
                with Session(engine) as session, session.begin():
                    drop_build(session, ids[0])
            except CatalogueError as error:
                errors.append(str(error))

        in_threads([move, drop])
        assert ["is live" in error for error in errors] == [True]
        with Session(engine) as session:
            assert live(session) == ids[0]
