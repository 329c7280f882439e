"""Helpers of the catalogue commands: a session, and values for people and programs."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import NullPool
from sqlalchemy.orm import Session

from draftstore.cli.common import status
from schema.database import make_engine
from schema.models import Build, Corpus


@contextmanager
def catalogue_session() -> Iterator[Session]:
    """Yield a session in one transaction, committed at the end; starts the embedded server if necessary."""
    with status("opening the catalogue"):
        engine = make_engine(poolclass=NullPool)
    with Session(engine, expire_on_commit=False) as session, session.begin():
        yield session


def time_text(time: datetime | None) -> str:
    """Return a time in UTC to the second, without the zone."""
    return time.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S") if time else ""


def number_text(number: float | None) -> str:
    """Return a number with thousands separators; empty for None."""
    return "" if number is None else f"{number:,}"


def build_fields(build: Build) -> dict[str, Any]:
    """Return a row of `builds` as JSON values, without the manifest, which `draftstore info` shows."""
    return {
        "id": build.id,
        "kind": build.kind,
        "name": build.name,
        "state": build.state,
        "path": build.path,
        "digest": build.digest,
        "source": build.source_id,
        "backends": build.backends,
        "counts": counts(build),
        "bytes": build.size_bytes,
        "timings": build.timings,
        "started_at": _iso(build.started_at),
        "finished_at": _iso(build.finished_at),
        "error": build.error,
    }


def corpus_fields(corpus: Corpus | None) -> dict[str, Any] | None:
    """Return a row of `corpora` as JSON values."""
    if corpus is None:
        return None
    names = ("id", "name", "sources", "fingerprint", "tokenizer", "documents", "tokens", "characters")
    return {name: getattr(corpus, name) for name in names}


def counts(build: Build) -> dict[str, int]:
    """Return the counts of a finished build: documents, tokens, entries."""
    return dict((build.manifest or {}).get("counts", {}))


def _iso(time: datetime | None) -> str | None:
    return time.astimezone(UTC).isoformat() if time else None
