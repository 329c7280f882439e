"""Connections to the database that the threads of a process share, and that wait only so long for an answer.

    pool = join_pool()
    rows = pool.fetch(b"SELECT value FROM ... WHERE key = ANY(%b)", (keys,), seconds=2.0)
    pool.leave()

One pool for each database and process, closed by the last one who leaves. A forked process connects anew. A lost
connection is replaced within the call, so that a restarted server goes unnoticed.
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

MOST_CONNECTIONS = 8
"""Connections of one process: as many lookups run at once, others wait."""
CONNECT_SECONDS = 5.0
"""How long a call waits for a connection, when others use all of them or the server is slow to take new ones."""
CONNECT_TIMEOUT = 3
"""Seconds that a server has to take a connection."""
PATIENCE = 0.02
"""Seconds between two looks at why no connection comes."""

Waited = TypeVar("Waited")

# What the pool has to say reaches callers as errors; without a handler Python would print it.
logging.getLogger("psycopg.pool").addHandler(logging.NullHandler())


class NoAnswerError(psycopg.OperationalError):
    """The server took longer than it may; the connection is closed."""


class LimitedConnection(psycopg.Connection[Any]):
    """A connection on which nothing takes longer than `limit`, even if the server hangs or the network is cut."""

    limit = CONNECT_SECONDS
    """Seconds for the answer to one statement."""

    def wait(self, gen: Generator[Any, Any, Waited], *args: Any, **kwargs: Any) -> Waited:
        """Wait as psycopg does, but no longer than `limit`.

        Raises:
            NoAnswerError: that time is over.
        """
        try:
            return super().wait(_limited(gen, time.monotonic() + self.limit), *args, **kwargs)
        except TimeoutError:
            self.close()
            raise NoAnswerError(f"no answer within {self.limit:g} seconds") from None


def _limited(gen: Generator[Any, Any, Waited], end: float) -> Generator[Any, Any, Waited]:
    """Pass a generator of psycopg through until `end`; psycopg resumes it ten times a second, ready or not."""
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
            url: the database; None for the embedded one, whose URL may change.
        """
        self.url = url
        self.readers = 0
        self._pool: ConnectionPool[LimitedConnection] | None = None
        self._owner = 0
        self._failures = 0
        self._failure: DraftstoreError = DatabaseAwayError("nothing has failed yet")

    def fetch(self, query: bytes, parameters: Sequence[object], seconds: float) -> list[Any]:
        """Run a prepared statement in one round trip, and return its rows; on another connection if one was lost.

        Args:
            query: the statement.
            parameters: its parameters, passed in binary.
            seconds: how long it may take.

        Raises:
            DatabaseError: the server is away, refuses or hangs.
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
                    self._opened().drain()  # what one connection lost, the others have lost too
                finally:
                    self._opened().putconn(connection)
        raise AssertionError("two rounds end in an answer or an error")

    def leave(self) -> None:
        """Let go of the pool; the last one closes it."""
        with _guard:
            self.readers -= 1
            if self.readers:
                return
            _pools.pop(self.url, None)
        self.close()

    def close(self) -> None:
        """Close all connections that this process has made."""
        pool, self._pool = self._pool, None
        if pool is not None and self._owner == os.getpid():
            pool.close()

    def _take(self) -> LimitedConnection:
        """Take a connection out of the pool.

        The pool connects in threads of its own, and tells callers only that time is over: what went wrong there is
        raised here, as soon as it has.

        Raises:
            DatabaseError: there was an attempt to connect, and it failed.
            PoolTimeout: no connection is to be had in time.
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
        """Return the pool of this process."""
        if self._pool is None or self._owner != os.getpid():
            with _guard:
                if self._pool is None or self._owner != os.getpid():
                    _inherited.append(self._pool)  # our parent's
                    self._pool = self._new_pool()
                    self._owner = os.getpid()
        return self._pool

    def _new_pool(self) -> ConnectionPool[LimitedConnection]:
        """Return a pool that connects when it is asked, and that gives up at once where that fails."""
        return ConnectionPool(
            connection_class=cast(type[LimitedConnection], self),  # of which it calls `connect` alone
            min_size=0,
            max_size=MOST_CONNECTIONS,
            reconnect_timeout=0.0,
            open=True,
        )

    def connect(self, _conninfo: str, **_options: object) -> LimitedConnection:
        """Connect for the pool.

        Raises:
            DraftstoreError: the server is away or refuses.
        """
        try:
            connection = connect_as(
                LimitedConnection, self.url, autocommit=True, connect_timeout=CONNECT_TIMEOUT
            )
            # The plan does not depend on the keys: it need not be made again for each lookup.
            connection.execute("SET plan_cache_mode = force_generic_plan")
        except DraftstoreError as error:
            self._failure = error
            self._failures += 1
            raise
        return connection


_guard = threading.RLock()
_pools: dict[str | None, SharedPool] = {}
_inherited: list[object] = []
"""Pools of the process that this one was forked from: they are left alone."""


def _after_fork() -> None:
    """Give a forked process a guard that no other thread of its parent holds."""
    global _guard
    _guard = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


def join_pool() -> SharedPool:
    """Return the pool of the database that everything uses, for as long as the caller does not leave it.

    Raises:
        DatabaseUrlError: no such database.
        EmbeddedServerError: the embedded server cannot be started.
    """
    current = database_url()
    url = None if is_embedded() else current
    with _guard:
        pool = _pools.setdefault(url, SharedPool(url))
        pool.readers += 1
        return pool


@atexit.register
def close_pools() -> None:
    """Close all pools before the process ends; what still uses one opens it again."""
    with _guard:
        pools = list(_pools.values())
    for pool in pools:
        pool.close()
