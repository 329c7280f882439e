"""Connections for lookups that the threads of a process share; a forked process connects anew."""

import os
from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from schema.db.database import ask, connect_reader
from schema.db.failures import database_errors


class Pool:
    """A pool of reader connections, as many as threads use at the same time."""

    def __init__(self) -> None:
        self._idle: list[psycopg.Connection[Any]] = []
        self._owner = os.getpid()
        self._inherited: list[psycopg.Connection[Any]] = []

    def fetch(self, query: bytes, parameters: Sequence[object]) -> list[Any]:
        """Run a statement in one round trip and return its rows; a lost connection is silently replaced.

        Raises DatabaseError if the server is down or refuses, or does not answer in time.
        """
        with database_errors():
            for last in (False, True):
                connection = self._take()
                try:
                    return ask(connection, query, parameters)
                except psycopg.OperationalError:
                    if last or not connection.closed:
                        raise
                    self.close()  # the others are lost too
                finally:
                    if connection.pgconn.transaction_status == TransactionStatus.IDLE:
                        self._idle.append(connection)
                    else:
                        connection.close()
        raise AssertionError("two attempts end in an answer or an error")

    def close(self) -> None:
        """Close all connections that are not in use; later calls connect anew."""
        while self._idle and self._owner == os.getpid():
            self._idle.pop().close()

    def _take(self) -> psycopg.Connection[Any]:
        if self._owner != os.getpid():  # the connections are the parent's and stay open
            self._inherited, self._idle, self._owner = self._idle, [], os.getpid()
        try:
            return self._idle.pop()
        except IndexError:
            return connect_reader()
