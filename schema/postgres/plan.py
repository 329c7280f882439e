"""Names, files and the plan shared by clients and supervisor.

This module, `programs`, `cluster`, `state` and `supervisor` import only the standard library: the supervisor runs them
in a bare interpreter, which starts in a few hundredths of a second.
"""

import json
import os
import sys
from dataclasses import asdict, dataclass

MAJOR = "18"  # of PostgreSQL; other clusters are refused
NAME = "draftstore"  # of the role, the database and the cluster
READER = "draftstore_reader"  # the role of queries and lookups
PORT = 5432  # never opened: part of the socket's name
SOCKET_FILE = f".s.PGSQL.{PORT}"
SOCKET_BYTES = 100  # the limit is 107; some programs append to the path

CLIENTS_LOCK = "clients.lock"  # shared by all processes that use the server
SUPERVISOR_LOCK = "supervisor.lock"  # held by the supervisor
SERVER_LOCK = "server.lock"  # held by the supervisor and inherited by all server processes
STATE = "server.json"
LOG = "server.log"
DATA = "data"


class ClusterError(Exception):
    """The cluster cannot be created or started; the message is for people."""


@dataclass(frozen=True)
class ClusterPlan:
    """The supervisor's instructions: paths, and the users that run and use the server.

    `uid` and `gid` run the server, `user` is the name of the account that connects. The server stays up `linger`
    seconds after its last client.
    """

    base: str
    binaries: str
    user: str
    uid: int
    gid: int
    linger: float

    def to_json(self) -> str:
        """Return the plan as a command-line argument."""
        return json.dumps(asdict(self))

    @property
    def switches_user(self) -> bool:
        """Whether the server runs under another account."""
        return self.uid != os.geteuid()


def say(message: str) -> None:
    """Write a line of the supervisor to the log."""
    sys.stderr.write(f"draftstore: {message}\n")
    sys.stderr.flush()
