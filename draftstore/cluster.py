"""Parts of a build on a Ray cluster: its nodes read the corpus and write whole files into a folder that all share.

    with Cluster(address, folder) as cluster:
        cluster.check(is_ready)                            a problem of any node ends the build before the work
        for result in cluster.map(function, items): ...    as they are completed

Parts whose node or process dies run again elsewhere, so a part may run twice, even at the same time.
"""

import hashlib
import os
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from draftstore.errors import BuildError, needs_extra
from draftstore.storage.files import remove

VARIABLE = "DRAFTSTORE_CLUSTER"
RETRIES = 3
"""How often a part runs again after its process or node has died."""
NONCE = ".cluster"
CONNECT_SECONDS = 10.0
T = TypeVar("T")
R = TypeVar("R")


def address_of(given: str | None = None) -> str | None:
    """Return the address of the cluster to use: as given, else that of $DRAFTSTORE_CLUSTER; None: this machine."""
    return given or os.environ.get(VARIABLE) or None


class Cluster(AbstractContextManager["Cluster"]):
    """A connection to a Ray cluster of which this machine is a node."""

    def __init__(self, address: str, folder: Path) -> None:
        """Connect, and check that all nodes share `folder` and run these sources.

        Raises:
            MissingExtraError: Ray is not installed.
            BuildError: there is no cluster, or a node cannot take part.
        """
        with needs_extra("ray", "ray"):
            import ray
        self._ray: Any = ray
        self._nonce = folder.absolute() / f"{NONCE}-{secrets.token_hex(8)}"
        if ray.is_initialized():
            raise BuildError("this process is connected to a Ray cluster already: close it first", "cluster")
        handler = signal.getsignal(signal.SIGTERM)
        try:
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()  # Ray would wait for ever
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (OSError, ValueError, RuntimeError) as error:
            raise BuildError(
                f"no Ray cluster at {address} has this machine as a node ({error}): start one with `ray start --head`, "
                f"join it with `ray start --address={address}`",
                "cluster",
            ) from None
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, handler)  # Ray sets its own
        try:
            self._nonce.write_text(self._nonce.name)
            self.check(_share, self._nonce, os.geteuid())
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all parts that still run, and disconnect."""
        self._ray.shutdown()
        remove(self._nonce)

    def check(self, problem: Callable[..., str], *args: object) -> None:
        """Call a function on every node; BuildError if it returns a problem, or a node cannot run it."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as OnNode

        nodes = [node for node in self._ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        remote = self._ray.remote(num_cpus=0, max_retries=0)(_call)
        if not nodes:
            raise BuildError("the cluster has no node with a core", "cluster")
        places = [OnNode(node["NodeID"], soft=False) for node in nodes]
        own = sources_digest()
        calls = [remote.options(scheduling_strategy=place).remote(own, problem, *args) for place in places]
        for node, call in zip(nodes, calls, strict=True):
            try:
                found = self._ray.get(call)
            except self._ray.exceptions.RayTaskError as error:
                found = str(error.cause) if isinstance(error.cause, BuildError) else _unable(error.cause)
            except self._ray.exceptions.RayError:  # it has died meanwhile
                continue
            if found:
                place = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
                raise BuildError(f"node {place} of the cluster cannot take part: {found}", "cluster")

    def map(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
        """Call a function with each item, one for each core of the cluster at a time; yield results as they come.

        BuildError if a part was killed again and again; else the error of the function.
        """
        remote = self._ray.remote(num_cpus=1, max_retries=RETRIES)(_call)
        own, shared = sources_digest(), self._ray.put(function)
        pending = [remote.remote(own, shared, item) for item in items]
        while pending:
            done, pending = self._ray.wait(pending)
            try:
                result: R = self._ray.get(done[0])
            except self._ray.exceptions.RayTaskError as error:
                raise error.cause from None
            except self._ray.exceptions.RayError as error:
                raise BuildError(
                    f"a part was lost again and again, perhaps because memory ran out ({type(error).__name__}): "
                    "run this again, which resumes, with smaller segments or fewer parts at a time "
                    "(`ray start --num-cpus`)",
                    "cluster",
                ) from None
            yield result


def _call(digest: str, function: Callable[..., R], *args: object) -> R:
    if sources_digest() != digest:
        raise BuildError("its draftstore has other sources: install the same version on all nodes")
    os.environ.setdefault("RAYON_NUM_THREADS", "1")  # of tokenizers: a part has one core
    return function(*args)


def _unable(error: Exception) -> str:
    reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return f"it cannot run this version of draftstore ({reason})"


def _share(nonce: Path, user: int) -> str:
    """Return why this node cannot take part; empty if it can."""
    if os.geteuid() != user:
        return f"it runs as user {os.geteuid()}, not as {user}: start Ray as the same user everywhere"
    with suppress(OSError):
        if nonce.read_text() == nonce.name:
            return ""
    return f"it does not see {nonce.parent}: choose a folder that all nodes share"


@cache
def sources_digest() -> str:
    """Return the SHA-256 of the sources of this package."""
    root, digest = Path(__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
