"""Errors of the database, and the translation of psycopg's and SQLAlchemy's: messages say what to do."""

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from psycopg.conninfo import conninfo_to_dict

from draftstore.errors import DraftstoreError


class DatabaseError(DraftstoreError):
    """The database cannot be used; the message says what to do."""


class DatabaseAwayError(DatabaseError):
    """The server does not answer or went away; a retry may help."""


class DatabaseTimeoutError(DatabaseError):
    """A statement timed out, waited too long for a lock, or lost a deadlock; a retry may help."""


AWAY = "start it, or name another with DRAFTSTORE_DATABASE_URL (see `draftstore db status`), and try again"
ACCESS = "check the user, the password and the database in DRAFTSTORE_DATABASE_URL"
TIMEOUT = "something else uses the same tables, or the server is slow: try again later"
FULL = "make room (disk, memory or connections) on the server and try again"

STATES: tuple[tuple[tuple[str, ...], type[DatabaseError], str], ...] = (
    (("08", "57P"), DatabaseAwayError, AWAY),
    (("28", "3D"), DatabaseError, ACCESS),
    (("42501",), DatabaseError, "the user lacks a right that it needs: grant it, or name another user"),
    (("55P03", "57014", "25P03", "25P04", "40"), DatabaseTimeoutError, TIMEOUT),
    (("53",), DatabaseError, FULL),
)
"""Meanings of SQLSTATEs for users, by prefix."""

REFUSALS = (
    "authentication failed",
    "no password supplied",
    "does not exist",
    "no pg_hba.conf entry",
    "permission denied for database",
    "is not permitted to log in",
)
"""Messages of refused connections, which have no SQLSTATE."""


def translate(error: BaseException | None) -> DatabaseError | None:
    """Return our error for one of psycopg's or SQLAlchemy's; None if users cannot do anything about it."""
    original = getattr(error, "orig", error)
    if not isinstance(original, psycopg.Error):
        return None
    text = " ".join(str(original).split())
    state = original.sqlstate
    if state is not None:
        found = (
            kind(f"the database: {text}: {advice}")
            for begin, kind, advice in STATES
            if state.startswith(begin)
        )
        return next(found, None)
    if not isinstance(original, psycopg.OperationalError):
        return None
    if any(refusal in text for refusal in REFUSALS):
        return DatabaseError(f"the database refuses the connection: {text}: {ACCESS}")
    if "too many clients" in text or "remaining connection slots" in text:
        return DatabaseError(f"the database has no connection left: {text}: {FULL}")
    text = text.partition(" Is the server running")[0]  # libpq's advice, replaced by ours
    return DatabaseAwayError(f"the database does not answer: {text}: {AWAY}")


@contextmanager
def database_errors() -> Iterator[None]:
    """Translate database errors inside the block to `DatabaseError` if users can do something about them."""
    try:
        yield
    except Exception as error:
        if ours := translate(error):
            raise ours from error
        raise


def describe(url: str) -> str:
    """Return a name of a database for messages, without user and password."""
    parts = conninfo_to_dict(url)
    where = parts.get("host") or parts.get("hostaddr") or "this machine"
    return f"the database {parts.get('dbname') or parts.get('user') or 'postgres'!r} on {where}"
