"""What can go wrong with the database, as errors that say what to do."""

from draftstore.errors import DraftstoreError


class DatabaseError(DraftstoreError):
    """Something is wrong with the database; the kinds below say what."""


class DatabaseUrlError(DatabaseError):
    """DRAFTSTORE_DATABASE_URL names no PostgreSQL database."""


class DatabaseAwayError(DatabaseError):
    """The server does not answer, or went away: worth another try."""


class DatabaseAccessError(DatabaseError):
    """The server refuses: password, user, missing database, missing rights."""


class DatabaseTimeoutError(DatabaseError):
    """A statement took longer than it may, waited too long for a lock, or lost a deadlock: worth another try."""


class DatabaseFullError(DatabaseError):
    """The server has no room left: disk, memory or connections."""


class SchemaError(DatabaseError):
    """The tables are not those that this version of draftstore needs: behind, ahead, or none at all."""


class EmbeddedServerError(DatabaseError):
    """The embedded PostgreSQL server cannot be started here."""
