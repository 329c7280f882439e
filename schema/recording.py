"""What the core reports to the catalogue: a replay of a store."""

from pathlib import Path
from typing import Any

from sqlalchemy import NullPool
from sqlalchemy.orm import Session

from schema.builds import add_build, record_replay
from schema.database import make_engine


def record(
    store: Path, summary: dict[str, Any], *, recordings: Path, model: str | None, strategy: str, budget: int
) -> int:
    """Record a replay, and register its store if nobody has; return the id of the build.

    Raises:
        StoreError: no whole store is there.
        DatabaseError: the database is away or refuses.
    """
    with Session(make_engine(poolclass=NullPool)) as session, session.begin():
        build_id = add_build(session, store).id
        record_replay(
            session,
            build_id,
            summary,
            recordings=recordings.name,
            model=model,
            strategy=strategy,
            budget=budget,
        )
    return build_id
