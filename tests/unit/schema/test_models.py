"""What the tables refuse and say, whoever writes to them: tried in SQL, past all our functions."""

from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

import schema.collections.models  # noqa: F401 (its tables belong to the same metadata)

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


@pytest.mark.parametrize(
    ("values", "constraint"),
    [
        ({"kind": "magic"}, "ck_builds_kind"),
        ({"state": "paused"}, "ck_builds_state"),
        ({"state": "failed"}, "ck_builds_failed"),
        *(({**FINISHED, missing: None}, "ck_builds_finished") for missing in FINISHED if missing != "state"),
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
