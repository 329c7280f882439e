"""Recordings: files of recorded outputs that builds replay before a release moves.

Functions run in the caller's transaction. `schema.catalogue.gates` replays and compares.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from sqlalchemy import NullPool, delete, select
from sqlalchemy.orm import Session

from draftstore.options import Options, Shown
from draftstore.trees.frontier import BUDGET, MAX_BUDGET
from schema.catalogue.builds import CatalogueError, add_build, record_replay
from schema.db.database import make_engine
from schema.models import Recording

TOLERANCE = 0.02
"""Default share of the live build's accepted length that a new one may lose."""


class ReplayRule(Options):
    """A registered recording, independent of sessions."""

    name: Annotated[str, Shown(hidden=True)] = Field(description="Its name.")
    path: Annotated[Path, Shown(hidden=True)] = Field(description="File of recorded outputs.")
    model: Annotated[str | None, Shown(flags=("--recorded-by",), metavar="M")] = Field(
        None, description="Replay only the outputs of this model."
    )
    request: Annotated[bool, Shown(flags=("--request",))] = Field(
        False, description="Draft from the prompt and the output so far as well."
    )
    rows: Annotated[int | None, Shown(metavar="N", unset="all")] = Field(
        None, ge=1, description="Replay at most N outputs."
    )
    budget: int = Field(BUDGET, ge=1, le=MAX_BUDGET, description="Maximum number of nodes in a draft.")
    tolerance: Annotated[float, Shown(metavar="SHARE")] = Field(
        TOLERANCE,
        ge=0,
        lt=1,
        description="Refuse a build whose accepted length is more than this share below the live one's.",
    )


@dataclass(frozen=True)
class Replayed:
    """The result of a build with a recording; without a summary, it was not replayed."""

    rule: ReplayRule
    strategy: str = ""
    summary: dict[str, Any] | None = None  # `ReplayResult.summary()`
    problem: str | None = None  # why it cannot be replayed; a new build is then refused
    skipped: str | None = None  # why there is no result; no build is refused for that

    @property
    def accepted_length(self) -> float | None:
        """Tokens per pass."""
        return None if self.summary is None else float(self.summary["accepted_length"])


def add_recording(session: Session, rule: ReplayRule, releases: Sequence[str]) -> Recording:
    """Register a recording for releases, existing or not; CatalogueError if its name is taken or none is named."""
    if session.get(Recording, rule.name) is not None:
        raise CatalogueError(
            f"the recording {rule.name!r} already exists: `draftstore recordings remove {rule.name}` removes it"
        )
    if not releases:
        raise CatalogueError(f"the recording {rule.name!r} applies to no release: name one", "release")
    settled = {"path": str(rule.path.resolve()), "releases": list(dict.fromkeys(releases))}
    recording = Recording(**rule.model_dump() | settled)
    session.add(recording)
    session.flush()
    session.refresh(recording)
    return recording


def list_recordings(session: Session, release: str | None = None) -> list[Recording]:
    """Return all recordings, or those of a release, sorted by name."""
    query = select(Recording).order_by(Recording.name)
    if release is not None:
        query = query.where(Recording.releases.contains([release]))
    return list(session.scalars(query))


def rules_of(session: Session, release: str) -> tuple[ReplayRule, ...]:
    """Return the recordings of a release."""
    return tuple(
        ReplayRule(**{name: getattr(recording, name) for name in ReplayRule.model_fields})
        for recording in list_recordings(session, release)
    )


def remove_recording(session: Session, name: str) -> None:
    """Remove a recording, but not the results of its replays; CatalogueError if there is none."""
    if session.scalar(delete(Recording).filter_by(name=name).returning(Recording.name)) is None:
        raise CatalogueError(f"no recording {name!r}: `draftstore recordings list` shows all recordings")


def record(store: Path, summary: dict[str, Any], **columns: Any) -> int:
    """Record a replay, see `record_replay`, registering its store if necessary; return the id of the build."""
    with Session(make_engine(poolclass=NullPool)) as session, session.begin():
        build_id = add_build(session, store).id
        record_replay(session, build_id, summary, **columns)
    return build_id
