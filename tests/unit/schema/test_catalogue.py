"""Builds and corpora: recorded as they happen, found again, marked when their process is gone, dropped completely."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import Engine, select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from draftstore.decoding.replay import ReplayResult
from draftstore.errors import StoreError
from draftstore.storage.manifest import load_manifest, manifest_digest
from schema.catalogue.builds import (
    CatalogueError,
    add_build,
    drop_build,
    fail_build,
    fail_cut_off,
    find_build,
    finish_build,
    get_build,
    record_replay,
    start_build,
)
from schema.db.partitions import attach_partition, create_partition
from schema.models import PARTITIONED, Build, Replay
from tests.fakes.databases import publish, write_store
from tests.fakes.waiting import until

BUILDER = """
import sys
from pathlib import Path
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session
from schema.catalogue.builds import start_build
from tests.fakes.databases import new_engine
with Session(new_engine(sys.argv[1])) as session, session.begin():
    build_id = start_build(session, "rest", "chat", Path("/nowhere")).id
print(build_id, flush=True)
sys.stdin.read()
"""


class TestBuilding:
    def test_a_build_is_recorded_from_start_to_finish(self, session: Session, tmp_path: Path) -> None:
        build = start_build(session, "rest", "chat", tmp_path / "s", parameters={"segments": 2})
        assert (build.state, build.digest, build.corpus_id) == ("running", None, None)
        write_store(tmp_path / "s", segment_tokens=7)
        finish_build(session, build.id, timings={"index": 1.5})
        session.expire_all()
        manifest = load_manifest(tmp_path / "s")
        assert build.state == "finished"
        assert build.finished_at is not None
        assert build.digest == manifest_digest(tmp_path / "s")
        assert build.manifest is not None
        assert build.manifest["counts"] == manifest.counts
        assert build.size_bytes == manifest.size
        assert build.parameters == {"segments": 2, "segment_tokens": 7}
        assert build.timings == {"index": 1.5}
        assert build.corpus is not None
        assert (build.corpus.documents, build.corpus.tokens, build.corpus.characters) == (2, 10, 40)
        assert (build.corpus.tokenizer, build.corpus.sources) == ("small-bpe", ["texts.jsonl"])

    def test_failed_builds_can_finish_but_finished_ones_cannot_fail(
        self, session: Session, tmp_path: Path
    ) -> None:
        build = start_build(session, "rest", "chat", write_store(tmp_path / "s"))
        fail_build(session, build.id, "the server went away")
        finish_build(session, build.id)
        session.expire_all()
        assert (build.state, build.error) == ("finished", None)
        with pytest.raises(CatalogueError, match="can no longer fail"):
            fail_build(session, build.id, "too late")
        with pytest.raises(CatalogueError, match="already finished"):
            finish_build(session, build.id)

    def test_text_that_postgresql_rejects_is_escaped(self, session: Session, tmp_path: Path) -> None:
        folder = write_store(Path(os.fsdecode(bytes(tmp_path) + b"/caf\xe9")), name="a\0b")
        build = add_build(session, folder)
        failed = start_build(session, "rest", "chat", tmp_path)
        fail_build(session, failed.id, "disk full \0 \udcff", timings={"tokenize": 2.0})
        session.expire_all()
        assert (Path(build.path).name, build.name) == (r"caf\udce9", r"a\x00b")
        assert (failed.state, failed.error) == ("failed", r"disk full \x00 \udcff")
        assert failed.timings == {"tokenize": 2.0}

    def test_a_build_is_finished_by_one_whole_store_of_its_kind(
        self, session: Session, tmp_path: Path
    ) -> None:
        build = start_build(session, "crest", "chat", tmp_path / "s")
        with pytest.raises(StoreError, match="is not a store"):
            finish_build(session, build.id)
        write_store(tmp_path / "s", kind="rest")
        with pytest.raises(StoreError, match="expected 'crest'"):
            finish_build(session, build.id)
        other = add_build(session, tmp_path / "s")
        again = start_build(session, "rest", "chat", tmp_path / "s")
        with pytest.raises(CatalogueError, match=f"is already build {other.id}"):
            finish_build(session, again.id)
        for unfinished in (build, again):
            assert unfinished.state == "running"
            fail_build(session, unfinished.id, "not needed")

    def test_stores_of_one_corpus_share_it(self, session: Session, tmp_path: Path) -> None:
        builds = [add_build(session, write_store(tmp_path / str(i))) for i in range(2)]
        other = add_build(session, write_store(tmp_path / "other", corpus="corpus-2"))
        none = add_build(session, write_store(tmp_path / "none", kind="recycling", corpus=None))
        assert builds[0].corpus_id == builds[1].corpus_id != other.corpus_id
        assert none.corpus_id is None


class TestFinding:
    def test_builds_are_found_by_id_path_and_digest(self, session: Session, tmp_path: Path) -> None:
        here = write_store(tmp_path / "here")
        build = add_build(session, here)
        moved = shutil.copytree(here, tmp_path / "moved")
        for reference in (build.id, str(build.id), here, str(here), moved):
            assert find_build(session, reference) is build
        twin = add_build(session, moved)
        assert twin is not build
        assert find_build(session, moved) is twin
        assert find_build(session, here) is build
        assert add_build(session, here) is build

    def test_unknown_builds_and_stores_are_refused(self, session: Session, tmp_path: Path) -> None:
        with pytest.raises(CatalogueError, match="no build 12345"):
            find_build(session, 12345)
        with pytest.raises(CatalogueError, match="draftstore catalogue add"):
            find_build(session, write_store(tmp_path / "s"))
        with pytest.raises(StoreError, match="is not a store"):
            find_build(session, tmp_path)


class TestCutOff:
    """A build whose process is gone is told from one that is being made."""

    def test_builds_of_killed_processes_are_marked_as_failed(self, database: str, engine: Engine) -> None:
        command = [sys.executable, "-c", BUILDER, database]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            build_id = int(process.stdout.readline())
            with Session(engine) as session, session.begin():
                assert fail_cut_off(session) == []
                with pytest.raises(CatalogueError, match="is still running"):
                    drop_build(session, build_id)
            process.send_signal(signal.SIGKILL)
            process.wait(60)
        locks = text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'")
        with engine.connect() as connection:  # the server notices a little later
            until(lambda: connection.scalar(locks) == 0)
        with Session(engine) as session, session.begin():
            assert fail_cut_off(session) == [build_id]
            assert fail_cut_off(session) == []
            build = get_build(session, build_id)
            assert build.state == "failed"
            assert "run it again" in str(build.error)


class TestDropping:
    def test_dropping_a_build_removes_all_its_rows_and_no_others(
        self, session: Session, tmp_path: Path
    ) -> None:
        builds = [add_build(session, write_store(tmp_path / str(i), kind="crest")) for i in range(2)]
        for build in builds:
            for table in PARTITIONED:
                session.execute(text(create_partition(table, build.id)))
            for statement in attach_partition("trees", build.id):
                session.execute(text(statement))
            session.execute(text(f"INSERT INTO trees VALUES ({build.id}, 'k', 'v')"))
            result = ReplayResult(rows=2, tokens=30, passes=10, drafted=500, misses=1, lookup_ns=[1000, 3000])
            record_replay(
                session, build.id, result.summary(), recordings=Path("a.jsonl"), strategy="backoff", budget=64
            )
        [replay] = session.scalars(select(Replay).filter_by(build_id=builds[0].id))
        assert (replay.accepted_length, replay.nodes_mean, replay.miss_rate) == (3.0, 50.0, 0.1)
        assert (replay.lookup_p50_us, replay.strategy, replay.budget) == (2.0, "backoff", 64)
        drop_build(session, builds[0].id)
        left = session.execute(text("SELECT build_id FROM trees")).scalars().all()
        assert left == [builds[1].id]
        query = text("SELECT count(*) FROM pg_class WHERE relname IN ('ngrams_' || :id, 'trees_' || :id)")
        assert session.execute(query, {"id": builds[0].id}).scalar_one() == 0
        assert session.execute(query, {"id": builds[1].id}).scalar_one() == 2
        assert [replay.build_id for replay in session.query(Replay)] == [builds[1].id]
        assert session.query(Build).one() is builds[1]
        assert (tmp_path / "0" / "manifest.json").exists()


def test_constraints_refuse_incomplete_builds_and_the_removal_of_live_ones(
    session: Session, tmp_path: Path
) -> None:
    build = add_build(session, write_store(tmp_path / "s"))
    publish(session, "chat", build.id)
    copied = "kind, name, path, state, digest, manifest, size_bytes, finished_at"
    for statement, constraint in (
        ("DELETE FROM builds", "fk_releases_build_id"),
        ("UPDATE releases SET name = 'a b'", "ck_releases_name"),
        ("UPDATE builds SET digest = NULL", "ck_builds_finished"),
        ("UPDATE builds SET finished_at = NULL", "ck_builds_finished"),
        (
            "INSERT INTO builds (kind, name, path, state) VALUES ('rest', 'n', '/p', 'failed')",
            "ck_builds_failed",
        ),
        ("INSERT INTO builds (kind, name, path) VALUES ('magic', 'n', '/p')", "ck_builds_kind"),
        (f"INSERT INTO builds ({copied}) SELECT {copied} FROM builds", "uq_builds_path_digest"),
    ):
        with pytest.raises(IntegrityError, match=constraint), session.begin_nested():
            session.execute(text(statement))
