"""Transient failures, worth a retry: interrupted I/O, and a database that is down.

Bad input, wrong parameters, a full disk or missing permissions are permanent.
"""

from errno import EAGAIN, EBUSY, EHOSTUNREACH, EIO, ENETDOWN, ENETUNREACH, ESTALE

from schema.db.errors import DatabaseAwayError, DatabaseTimeoutError
from schema.db.failures import translate

TRANSIENT = DatabaseAwayError, DatabaseTimeoutError, ConnectionError, TimeoutError
CODES = EAGAIN, EBUSY, EHOSTUNREACH, EIO, ENETDOWN, ENETUNREACH, ESTALE
DELAYS = (2.0, 10.0, 30.0, 60.0)
"""Seconds before each new attempt: together longer than a database takes to restart."""


def is_transient(error: BaseException | None) -> bool:
    """Return True if the step may succeed on a retry, judging by the error or its causes."""
    if error is None:
        return False
    if isinstance(translate(error) or error, TRANSIENT) or getattr(error, "errno", None) in CODES:
        return True
    return is_transient(error.__cause__ or (None if error.__suppress_context__ else error.__context__))
