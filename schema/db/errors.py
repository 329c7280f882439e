"""Errors of the database, whose messages say what to do."""

from draftstore.errors import DraftstoreError


class DatabaseError(DraftstoreError):
    """Base of all database errors."""


class DatabaseUrlError(DatabaseError):
    """DRAFTSTORE_DATABASE_URL or DRAFTSTORE_READER_URL is not the URL of a PostgreSQL database."""


class DatabaseAwayError(DatabaseError):
    """The server does not answer or went away; a retry may help."""


class DatabaseAccessError(DatabaseError):
    """The server refuses: password, user, missing database or missing rights."""


class ReaderError(DatabaseError):
    """The role that should only read may do more, or cannot be created."""


class DatabaseTimeoutError(DatabaseError):
    """A statement timed out, waited too long for a lock, or lost a deadlock; a retry may help."""


class DatabaseFullError(DatabaseError):
    """The server has no room left: disk, memory or connections."""


class SchemaError(DatabaseError):
    """The tables have another revision than this version of draftstore needs: older, newer, or none."""


class EmbeddedServerError(DatabaseError):
    """The embedded PostgreSQL server cannot be started here."""
