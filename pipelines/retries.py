"""Which failures pass by themselves: input and output that was interrupted, and a database that is away.

Bad input, a wrong parameter, a full disk or a missing permission stay as they are however often one tries.
"""

import errno
from collections.abc import Iterator

from schema.errors import DatabaseAwayError, DatabaseTimeoutError
from schema.failures import translate

PASSING = frozenset(
    {
        errno.EAGAIN,
        errno.EBUSY,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTUNREACH,
        errno.EINTR,
        errno.EIO,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.EPIPE,
        errno.ESTALE,
        errno.ETIMEDOUT,
    }
)
DELAYS = (2.0, 10.0, 30.0, 60.0)
"""Seconds before each new attempt: together longer than a database takes to restart."""


def passes_by_itself(error: BaseException) -> bool:
    """Tell whether the same step may succeed a little later."""
    return any(
        isinstance(translate(one) or one, DatabaseAwayError | DatabaseTimeoutError)
        or (isinstance(one, OSError) and one.errno in PASSING)
        for one in _causes(error)
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what it was raised from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
