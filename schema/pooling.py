"""A connection pool that the threads of a process share, with a time limit for every answer.

    pool = join_pool()
    rows = pool.fetch(b"SELECT value FROM ... WHERE key = ANY(%b)", (keys,), seconds=2.0)
    pool.leave()

There is one pool per database and process; the last user closes it. A forked process reconnects. A lost connection is
replaced within the call, so that a server restart goes unnoticed.
"""

import atexit
import logging
import os
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from typing import Any, TypeVar, cast

import psycopg
from psycopg_pool import ConnectionPool, PoolTimeout

from draftstore.errors import DraftstoreError
from schema.database import connect_as, database_url, is_embedded
from schema.errors import DatabaseAwayError
from schema.failures import database_errors

MAX_CONNECTIONS = 8
"""Maximum connections of a process: so many lookups run concurrently, others wait."""
CONNECT_SECONDS = 5.0
"""Maximum seconds that a call waits for a connection."""
CONNECT_TIMEOUT = 3
"""Time limit in seconds for connecting."""
PATIENCE = 0.02
"""Seconds between two checks for connection errors."""

Waited = TypeVar("Waited")

# Errors reach callers as exceptions; without a handler Python would also print the pool's log.
logging.getLogger("psycopg.pool").addHandler(logging.NullHandler())


class NoAnswerError(psycopg.OperationalError):
    """The server exceeded the time limit; the connection is closed."""


class LimitedConnection(psycopg.Connection[Any]):
    """A connection on which no operation takes longer than `limit`, even if the server hangs or the network is cut."""

    limit = CONNECT_SECONDS
    """Time limit in seconds for one statement."""

    def wait(self, gen: Generator[Any, Any, Waited], *args: Any, **kwargs: Any) -> Waited:
        """Wait as psycopg does, but at most `limit` seconds.

        Raises:
            NoAnswerError: the time is over.
        """
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
    """The connections of this process to one database."""

    def __init__(self, url: str | None) -> None:
        """Connect nowhere yet.

        Args:
            url: URL of the database; None: the embedded one, whose URL may change.
        """
        self.url = url
        self.readers = 0
        self._pool: ConnectionPool[LimitedConnection] | None = None
        self._owner = 0
        self._failures = 0
        self._failure: DraftstoreError = DatabaseAwayError("nothing has failed yet")

    def fetch(self, query: bytes, parameters: Sequence[object], seconds: float) -> list[Any]:
        """Run a prepared statement in one round trip and return its rows; retries if a connection was lost.

        Args:
            query: the statement.
            parameters: its parameters, passed in binary.
            seconds: time limit.

        Raises:
            DatabaseError: the server is down, refuses or hangs.
            psycopg.Error: the statement is wrong.
        """
        with database_errors():
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
                    self._opened().drain()  # the others are lost too
                finally:
                    self._opened().putconn(connection)
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
        """Close all connections of this process."""
        pool, self._pool = self._pool, None
        if pool is not None and self._owner == os.getpid():
            pool.close()

    def _take(self) -> LimitedConnection:
        """Take a connection from the pool.

        The pool connects in its own threads and reports only timeouts to callers, so errors of those attempts are
        raised here, as soon as they occur.

        Raises:
            DatabaseError: an attempt to connect failed.
            PoolTimeout: no connection became free in time.
        """
        pool, known = self._opened(), self._failures
        end = time.monotonic() + CONNECT_SECONDS
        while True:
            with suppress(PoolTimeout):
                return pool.getconn(PATIENCE)
            if self._failures != known:
                raise type(self._failure)(*self._failure.args)
            if time.monotonic() > end:
                raise PoolTimeout(f"no connection within {CONNECT_SECONDS:g} seconds")

    def _opened(self) -> ConnectionPool[LimitedConnection]:
        """Return this process's pool."""
        if self._pool is None or self._owner != os.getpid():
            with _guard:
                if self._pool is None or self._owner != os.getpid():
                    _inherited.append(self._pool)  # the parent's pool
                    self._pool = self._new_pool()
                    self._owner = os.getpid()
        return self._pool

    def _new_pool(self) -> ConnectionPool[LimitedConnection]:
        """Return a pool that connects on demand and gives up immediately on failure."""
        return ConnectionPool(
            connection_class=cast(type[LimitedConnection], self),  # the pool calls only `connect`
            min_size=0,
            max_size=MAX_CONNECTIONS,
            reconnect_timeout=0.0,
            open=True,
        )

    def connect(self, _conninfo: str, **_options: object) -> LimitedConnection:
        """Connect for the pool.

        Raises:
            DraftstoreError: the server is down or refuses.
        """
        try:
            connection = connect_as(
                LimitedConnection, self.url, reading=True, autocommit=True, connect_timeout=CONNECT_TIMEOUT
            )
            # The plan does not depend on the keys, so a generic one saves planning each lookup.
            connection.execute("SET plan_cache_mode = force_generic_plan")
        except DraftstoreError as error:
            self._failure = error
            self._failures += 1
            raise
        return connection


_guard = threading.RLock()
_pools: dict[str | None, SharedPool] = {}
_inherited: list[object] = []
"""Pools of the parent process, kept but not used after a fork."""


def _after_fork() -> None:
    """Replace the lock in a forked process: another thread of the parent may have held it."""
    global _guard
    _guard = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


def join_pool() -> SharedPool:
    """Return the pool of the default database; the caller must leave it in the end.

    Raises:
        DatabaseUrlError: the URL is not that of a PostgreSQL database.
        EmbeddedServerError: the embedded server cannot be started.
    """
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
