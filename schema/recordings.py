"""Recordings: files of recorded outputs that builds replay before a release moves.

Functions run in the caller's transaction. `schema.replaying` replays, `schema.gates` compares.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from schema.builds import CatalogueError
from schema.models import Recording

TOLERANCE = 0.02
"""Default share of the live build's accepted length that a new one may lose."""


class Rule(NamedTuple):
    """A registered recording, independent of sessions.

    Attributes:
        name: its name.
        path: file of recorded outputs.
        model: only the outputs of this model; None: of all.
        request: whether the request drafts beside the store.
        rows: at most so many outputs; None: all.
        budget: maximum nodes of a draft.
        tolerance: share of the live build's accepted length that a new one may lose.
    """

    name: str
    path: Path
    model: str | None = None
    request: bool = False
    rows: int | None = None
    budget: int = 64
    tolerance: float = TOLERANCE


class Replayed(NamedTuple):
    """The result of a build with a recording; without a summary it was not replayed.

    Attributes:
        rule: the recording.
        strategy: how drafts were made.
        summary: `ReplayResult.summary()`.
        problem: why it cannot be replayed, which refuses a new build.
        skipped: why there is no result, which refuses nothing.
    """

    rule: Rule
    strategy: str = ""
    summary: dict[str, Any] | None = None
    problem: str | None = None
    skipped: str | None = None

    @property
    def accepted_length(self) -> float | None:
        """Tokens per pass."""
        return None if self.summary is None else float(self.summary["accepted_length"])


def add_recording(session: Session, rule: Rule, releases: Sequence[str]) -> Recording:
    """Register a recording for some releases, which need not exist yet.

    Raises:
        CatalogueError: the name is taken, or no release is named.
    """
    if session.get(Recording, rule.name) is not None:
        raise CatalogueError(
            f"there is a recording {rule.name!r} already: `draftstore replays remove {rule.name}` removes it"
        )
    if not releases:
        raise CatalogueError(f"the recording {rule.name!r} holds for no release: name one with --release")
    fields = rule._asdict() | {"path": str(rule.path.resolve()), "releases": list(dict.fromkeys(releases))}
    recording = Recording(**fields)
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


def rules_of(session: Session, release: str) -> tuple[Rule, ...]:
    """Return the recordings of a release."""
    return tuple(
        Rule(**{name: getattr(recording, name) for name in Rule._fields} | {"path": Path(recording.path)})
        for recording in list_recordings(session, release)
    )


def remove_recording(session: Session, name: str) -> None:
    """Remove a recording; results of its replays stay.

    Raises:
        CatalogueError: there is none.
    """
    if session.scalar(delete(Recording).filter_by(name=name).returning(Recording.name)) is None:
        raise CatalogueError(f"no recording {name!r}: `draftstore replays list` shows all recordings")
