"""Transient failures, worth a retry: interrupted I/O, and a database or a cluster that is down.

Bad input, wrong parameters, a full disk or missing permissions are permanent.
"""

import errno
from collections.abc import Iterator

from draftstore.errors import ClusterGoneError
from schema.errors import DatabaseAwayError, DatabaseTimeoutError
from schema.failures import translate

TRANSIENT = (
    ClusterGoneError,
    DatabaseAwayError,
    DatabaseTimeoutError,
    BlockingIOError,
    ConnectionError,
    TimeoutError,
)
TRANSIENT_CODES = frozenset(
    {errno.EBUSY, errno.EHOSTUNREACH, errno.EIO, errno.ENETDOWN, errno.ENETUNREACH, errno.ESTALE}
)
DELAYS = (2.0, 10.0, 30.0, 60.0)
"""Seconds before each new attempt: together longer than a database takes to restart."""


def is_transient(error: BaseException) -> bool:
    """Return True if the step may succeed when it is tried again."""
    return any(
        isinstance(translate(one) or one, TRANSIENT)
        or (isinstance(one, OSError) and one.errno in TRANSIENT_CODES)
        for one in _causes(error)
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
