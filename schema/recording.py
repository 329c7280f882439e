"""Recording of replays in the catalogue, for the core package."""

from pathlib import Path
from typing import Any

from sqlalchemy import NullPool
from sqlalchemy.orm import Session

from schema.builds import add_build, record_replay
from schema.database import make_engine


def record(
    store: Path, summary: dict[str, Any], *, recordings: Path, model: str | None, strategy: str, budget: int
) -> int:
    """Record a replay, registering its store if necessary; return the id of the build.

    Raises:
        StoreError: no complete store there.
        DatabaseError: the database is down or refuses.
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
