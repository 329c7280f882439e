"""What the tables refuse and say, whoever writes to them: tried in SQL, past all our functions."""

import re
from typing import Any

import pytest
from sqlalchemy import Engine, inspect, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

import schema.collections.models  # noqa: F401 (its tables belong to the same metadata)
from schema.models import Base

FINISHED: dict[str, Any] = {
    "state": "finished",
    "digest": "d",
    "manifest": "{}",
    "size_bytes": 1,
    "finished_at": "2026-01-01",
}


def insert(session: Session, table: str, **values: Any) -> Any:
    """Insert a row and return its first column."""
    columns = ", ".join(values)
    query = f"INSERT INTO {table} ({columns}) VALUES (:{', :'.join(values)}) RETURNING *"
    return session.execute(text(query), values).scalars().one()


def a_build(session: Session, **values: Any) -> Any:
    return insert(session, "builds", **{"kind": "rest", "name": "n", "path": "/p", **values})


def test_defaults_of_a_new_build(session: Session) -> None:
    build_id = a_build(session)
    row = session.execute(text("SELECT * FROM builds WHERE id = :id"), {"id": build_id}).mappings().one()
    assert (row["state"], row["backends"], row["parameters"], row["timings"]) == ("running", [], {}, {})
    assert row["started_at"].tzinfo is not None
    assert row["digest"] is row["finished_at"] is row["error"] is None


@pytest.mark.parametrize(
    ("values", "constraint"),
    [
        ({"kind": "magic"}, "ck_builds_kind"),
        ({"state": "paused"}, "ck_builds_state"),
        ({"state": "failed"}, "ck_builds_failed"),
        *(({**FINISHED, missing: None}, "ck_builds_finished") for missing in FINISHED if missing != "state"),
        ({"corpus_id": -1}, "fk_builds_corpus_id"),
        ({"source_id": -1}, "fk_builds_source_id"),
    ],
)
def test_builds_that_are_refused(session: Session, values: dict[str, Any], constraint: str) -> None:
    with pytest.raises(IntegrityError, match=constraint):
        a_build(session, **values)


def test_one_store_is_one_build(session: Session) -> None:
    a_build(session, **FINISHED)
    a_build(session, **{**FINISHED, "digest": "another"})
    with pytest.raises(IntegrityError, match="uq_builds_path_digest"):
        a_build(session, **FINISHED)


def test_runs_at_one_place_may_be_many(session: Session) -> None:
    assert a_build(session) != a_build(session)


@pytest.mark.parametrize("name", ["", " chat", "chat vicuna", "-chat", "a/b", "chat\n", "ü"])
def test_names_of_releases_that_are_refused(session: Session, name: str) -> None:
    build_id = a_build(session)
    with pytest.raises(IntegrityError, match="ck_releases_name"):
        insert(session, "releases", name=name, build_id=build_id)


def test_a_live_build_cannot_be_deleted(session: Session) -> None:
    insert(session, "releases", name="chat", build_id=a_build(session))
    with pytest.raises(IntegrityError, match="fk_releases_build_id"):
        session.execute(text("DELETE FROM builds"))


def test_what_goes_with_a_build_and_what_stays(session: Session) -> None:
    build_id = a_build(session)
    made_from_it = a_build(session, source_id=build_id)
    insert(session, "ngram_spectrum", build_id=build_id, n=1, count=1, ngrams=1)
    session.execute(text("DELETE FROM builds WHERE id = :id"), {"id": build_id})
    assert session.scalar(text("SELECT count(*) FROM ngram_spectrum")) == 0
    source = text("SELECT source_id FROM builds WHERE id = :id")
    assert session.execute(source, {"id": made_from_it}).scalar_one() is None


def test_everything_is_described_and_named_by_the_convention(shared_engine: Engine) -> None:
    inspector = inspect(shared_engine)
    for name, table in Base.metadata.tables.items():
        assert inspector.get_table_comment(name)["text"] == table.comment
        assert table.comment, name
        for column in inspector.get_columns(name):
            obvious = column["name"] in {"id", "build_id"} or column["name"].endswith("_at")
            assert column["comment"] or obvious, f"{name}.{column['name']}"
        found = [
            inspector.get_pk_constraint(name)["name"],
            *(key["name"] for key in inspector.get_foreign_keys(name)),
            *(key["name"] for key in inspector.get_check_constraints(name)),
            *(key["name"] for key in inspector.get_unique_constraints(name)),
        ]
        for key in found:
            assert re.match(f"(pk|fk|ck|uq)_{name}", str(key)), key
