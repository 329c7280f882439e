"""Helpers of the catalogue commands: a session, and rows as printable values."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from sqlalchemy import NullPool
from sqlalchemy.orm import Session

from draftstore.cli.common import status
from schema.db.database import make_engine
from schema.models import Base, Build


@contextmanager
def catalogue_session(*, make: bool = False) -> Iterator[Session]:
    """Yield a session in one transaction, committed at the end; `make` creates the private catalogue if necessary."""
    with status("opening the catalogue"):
        engine = make_engine(make=make, poolclass=NullPool)
    with Session(engine, expire_on_commit=False) as session, session.begin():
        yield session


def confirm(question: str) -> None:
    """Ask for confirmation; without an answer, end the command."""
    try:
        click.confirm(question, abort=True, err=True)
    except click.Abort:
        raise click.ClickException("not confirmed, nothing is changed: answer y, or give --yes") from None


def row_fields(row: Base, *excluded: str) -> dict[str, Any]:
    """Return the columns of a row by name."""
    names = [column.name for column in row.__table__.columns]
    return {name: getattr(row, name) for name in names if name not in excluded}


def build_fields(build: Build) -> dict[str, Any]:
    """Return a row of `builds` as fields, without the manifest, which `draftstore info` shows."""
    return row_fields(build, "corpus_id", "source_id", "parameters", "manifest", "size_bytes") | {
        "source": build.source_id,
        "bytes": build.size_bytes,
        "counts": dict((build.manifest or {}).get("counts", {})),
    }
