"""A connection pool that the threads of a process share, with a time limit for every answer.

    pool = join_pool()
    rows = pool.fetch(b"SELECT value FROM ... WHERE key = ANY(%b)", (keys,), seconds=2.0)
    pool.leave()

There is one pool per database and process; the last user closes it. A forked process reconnects. A lost connection is
replaced within the call, so that a server restart goes unnoticed.
"""

import atexit
import os
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import psycopg
from psycopg.pq import TransactionStatus

from schema.database import connect_as, database_url, is_embedded
from schema.failures import database_errors

MAX_CONNECTIONS = 8
"""Maximum connections of a process: so many lookups run concurrently, others wait."""
CONNECT_SECONDS = 5.0
"""Maximum seconds that a call waits for a connection that others use."""
CONNECT_TIMEOUT = 3
"""Time limit in seconds for connecting."""

Waited = TypeVar("Waited")


class NoAnswerError(psycopg.OperationalError):
    """The server exceeded the time limit; the connection is closed."""


class LimitedConnection(psycopg.Connection[Any]):
    """A connection on which no operation takes longer than `limit`, even if the server hangs or the network is cut."""

    limit = CONNECT_SECONDS
    """Time limit in seconds for one statement."""

    def wait(self, gen: Generator[Any, Any, Waited], *args: Any, **kwargs: Any) -> Waited:
        """Wait as psycopg does, but at most `limit` seconds; then raise NoAnswerError."""
        try:
            return super().wait(_limited(gen, time.monotonic() + self.limit), *args, **kwargs)
        except TimeoutError:
            self.close()
            raise NoAnswerError(f"no answer within {self.limit:g} seconds") from None


def _limited(gen: Generator[Any, Any, Waited], end: float) -> Generator[Any, Any, Waited]:
    """Run a psycopg generator until `end`; psycopg resumes it at least ten times a second."""
    try:
        state = next(gen)
        while True:
            ready = yield state
            if not ready and time.monotonic() > end:
                raise TimeoutError
            state = gen.send(ready)
    except StopIteration as stop:
        return cast(Waited, stop.value)


class SharedPool:
    """The connections of this process to one database; `url` is None for the embedded one, whose URL may change."""

    def __init__(self, url: str | None) -> None:
        self.url = url
        self.readers = 0
        self.reset()

    def reset(self) -> None:
        """Start without connections, as in a forked process."""
        self._idle: list[LimitedConnection] = []
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)

    def fetch(self, query: bytes, parameters: Sequence[object], seconds: float) -> list[Any]:
        """Run a prepared statement in one round trip and return its rows; retries if a connection was lost.

        Raises DatabaseError if the server is down or refuses, or does not answer within `seconds`.
        """
        with database_errors(), self._slot():
            for last in (False, True):
                connection = self._take()
                try:
                    connection.limit = seconds
                    with connection.cursor(binary=True) as cursor:
                        return cursor.execute(query, parameters, prepare=True).fetchall()
                except NoAnswerError:
                    raise
                except psycopg.OperationalError:
                    if last or not connection.closed:
                        raise
                    self.close()  # the others are lost too
                finally:
                    if connection.pgconn.transaction_status == TransactionStatus.IDLE:
                        self._idle.append(connection)
                    else:
                        connection.close()
        raise AssertionError("two rounds end in an answer or an error")

    def leave(self) -> None:
        """Leave the pool; the last user closes it."""
        with _guard:
            self.readers -= 1
            if self.readers:
                return
            _pools.pop(self.url, None)
        self.close()

    def close(self) -> None:
        """Close all connections that are not in use."""
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    @contextmanager
    def _slot(self) -> Iterator[None]:
        slots = self._slots
        if not slots.acquire(timeout=CONNECT_SECONDS):
            raise psycopg.OperationalError(f"no connection is free within {CONNECT_SECONDS:g} seconds")
        try:
            yield
        finally:
            slots.release()

    def _take(self) -> LimitedConnection:
        try:
            return self._idle.pop()
        except IndexError:
            connection = connect_as(
                LimitedConnection, self.url, reading=True, autocommit=True, connect_timeout=CONNECT_TIMEOUT
            )
            # The plan does not depend on the keys, so a generic one saves planning each lookup.
            connection.execute("SET plan_cache_mode = force_generic_plan")
            return connection


_guard = threading.RLock()
_pools: dict[str | None, SharedPool] = {}
_inherited: list[object] = []
"""Connections of the parent process, kept but not used after a fork."""


def _after_fork() -> None:
    """Replace locks, which another thread of the parent may have held, and leave its connections to the parent."""
    global _guard
    _guard = threading.RLock()
    for pool in _pools.values():
        _inherited.append(pool._idle)
        pool.reset()


os.register_at_fork(after_in_child=_after_fork)


def join_pool() -> SharedPool:
    """Return the pool of the default database; the caller must leave it in the end."""
    current = database_url(reading=True)
    url = None if is_embedded(reading=True) else current
    with _guard:
        pool = _pools.setdefault(url, SharedPool(url))
        pool.readers += 1
        return pool


@atexit.register
def close_pools() -> None:
    """Close all pools before the process ends; later users reopen them."""
    with _guard:
        pools = list(_pools.values())
    for pool in pools:
        pool.close()
