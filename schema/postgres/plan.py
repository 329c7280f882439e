"""What clients and supervisor agree on: names, files, and the plan that one gives the other.

This module, `programs`, `cluster`, `state` and `supervisor` use the standard library alone: the supervisor runs them in
a bare interpreter, which starts in a few hundredths of a second.
"""

import json
import os
import sys
from dataclasses import asdict, dataclass

MAJOR = "18"  # of PostgreSQL; clusters of another one are refused
NAME = "draftstore"  # of the role, the database and the cluster
PORT = 5432  # no port is opened: it is part of the socket's name
SOCKET_FILE = f".s.PGSQL.{PORT}"
SOCKET_BYTES = 100  # a socket's path may have 107; programs that add something to it get a few

CLIENTS_LOCK = "clients.lock"  # shared by every process that uses the server
SUPERVISOR_LOCK = "supervisor.lock"  # held by the one supervisor
SERVER_LOCK = "server.lock"  # held by the supervisor and inherited by every process of the server
STATE = "server.json"
LOG = "server.log"
DATA = "data"


class ClusterError(Exception):
    """The cluster cannot be made or started; the message is for a person."""


@dataclass(frozen=True)
class ClusterPlan:
    """What a supervisor is told: where everything is, and who runs and who uses the server.

    Attributes:
        base: The folder of the cluster, its locks and its log.
        binaries: The folder that holds bin/postgres, as the wheel installed it.
        user: Name of the operating system's user who connects.
        uid: User who runs the server.
        gid: Group that runs the server.
        linger: Seconds that the server stays up after its last client.
    """

    base: str
    binaries: str
    user: str
    uid: int
    gid: int
    linger: float

    def to_json(self) -> str:
        """Return the plan as one argument of a command line."""
        return json.dumps(asdict(self))

    @property
    def switches_user(self) -> bool:
        """Whether the server runs under another account than ours."""
        return self.uid != os.geteuid()


def say(message: str) -> None:
    """Write a line of the supervisor's own to the log."""
    sys.stderr.write(f"draftstore: {message}\n")
    sys.stderr.flush()
