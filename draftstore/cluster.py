"""Work mapped over a Dask cluster: several processes here, or several machines that share a file system.

    tcp://scheduler:8786   the scheduler of a cluster, also tls://
    local:2                two processes on this machine, for the time of the work

Dask starts, finds and replaces workers, and runs the jobs of one that died on another. It sees functions and paths:
data goes through the shared file system.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

import draftstore
from draftstore.errors import BuildError, ClusterError, ClusterGoneError, needs_extra
from draftstore.mapping import Pool

if TYPE_CHECKING:
    from distributed import Client

K = TypeVar("K")
T = TypeVar("T")

CONNECT_SECONDS = 20.0
TRIM = "distributed.nanny.pre-spawn-environ.MALLOC_TRIM_THRESHOLD_"
KEPT_BYTES = 1 << 40
"""Dask has workers give freed memory back at once: tokenizing, which takes it again, then costs a quarter more."""
NO_WORKERS = "distributed.scheduler.no-workers-timeout"
NO_WORKERS_SECONDS = 20
"""Dask does not replace a process here that dies while it starts, of a job that it was given at once. Then none may be
left, and without a limit the jobs would wait for ever; on a cluster of machines, workers may still join."""
LOCAL = re.compile(r"local:([1-9]\d*)")
"""A cluster of so many processes on this machine."""
ADDRESS = re.compile(r"(tcp|tls|ws|wss|ucx)://\S+")


def check_cluster(cluster: str) -> str:
    """Return the name of a cluster."""
    if not LOCAL.fullmatch(cluster) and not ADDRESS.fullmatch(cluster):
        raise ClusterError(
            f"{cluster!r} is no cluster: give the address of a Dask scheduler, as tcp://machine:8786, or local:2 for "
            "two processes on this machine"
        )
    return cluster


@contextmanager
def open_pool(cluster: str | None) -> Iterator[Pool | None]:
    """Yield the processes of a cluster; None if there is none to use.

    Args:
        cluster: `tcp://machine:8786` or `local:2`; None: none.

    Raises:
        ClusterGoneError: no scheduler answers.
        MissingExtraError: `distributed` is not installed.
    """
    if cluster is None:
        yield None
        return
    local = LOCAL.fullmatch(check_cluster(cluster))
    with needs_extra("distributed", "dask"):
        import dask
        from distributed import Client, LocalCluster
    with ExitStack() as stack:
        if local:
            scratch = TemporaryDirectory(prefix="draftstore-", ignore_cleanup_errors=True)
            with dask.config.set({TRIM: KEPT_BYTES, NO_WORKERS: NO_WORKERS_SECONDS}):
                cluster = stack.enter_context(
                    LocalCluster(
                        n_workers=int(local[1]),
                        threads_per_worker=1,
                        memory_limit=0,  # the machine's: segments are of known size, and nobody else is there
                        dashboard_address=None,
                        # Without a dashboard it listens all the same, on a port that another one may have.
                        scheduler_kwargs={"dashboard_address": "127.0.0.1:0"},
                        local_directory=stack.enter_context(scratch),
                    )
                )
        try:
            client = stack.enter_context(Client(cluster, timeout=CONNECT_SECONDS, set_as_default=False))
        except OSError as error:
            raise ClusterGoneError(f"no Dask scheduler answers at {cluster}: {error}") from None
        yield DaskPool(client, str(cluster) if local is None else f"local:{local[1]}")


class DaskPool(Pool):
    """The workers of a Dask cluster, also those that join it later.

    Not `ClientExecutor` of distributed 2026.8: it fails in its own thread if a job is cancelled while being fetched.

    Attributes:
        client: connection to the scheduler.
    """

    def __init__(self, client: "Client", name: str) -> None:
        """Use the workers that a client knows."""
        self.client = client
        self._name = name

    def results(self, function: Callable[..., T], jobs: Mapping[K, tuple[Any, ...]]) -> Iterator[tuple[K, T]]:
        """Run jobs, see `draftstore.mapping.Pool`."""
        from distributed import KilledWorker, as_completed
        from distributed.comm.core import CommClosedError
        from distributed.scheduler import NoValidWorkerError, NoWorkerError

        keys: dict[Any, K] = {}
        try:
            for key, arguments in jobs.items():
                # Not pure: Dask would take the result of an equal job before, whose files may be gone.
                keys[self.client.submit(function, *arguments, pure=False)] = key
            for future, result in as_completed(keys, loop=self.client.loop, with_results=True):
                if future.cancelled():
                    raise result
                key = keys.pop(future)
                del future  # what somebody holds is computed again if the worker with it dies
                yield key, result
        except (KilledWorker, NoWorkerError, NoValidWorkerError):  # the last: while they leave
            raise BuildError(
                f"no worker of {self._name} stayed to end a job: they were stopped, or died of it one after the other, "
                "perhaps because memory ran out: run the command again with workers that stay, larger ones or smaller "
                "--segment-tokens; it resumes where it stopped"
            ) from None
        except (CancelledError, CommClosedError):
            raise ClusterGoneError(
                f"the scheduler of {self._name} went away: run the command again, it resumes where it stopped"
            ) from None
        finally:
            if keys and self.client.status == "running":
                self.client.cancel(list(keys))

    def require(self, folder: Path) -> None:
        """Refuse to begin unless every worker sees a folder, and has the versions that are here.

        Raises:
            ClusterError: it does not, or there is no worker.
        """
        expected: dict[str, Any] = {**versions(), "sees": True}
        try:
            self.client.wait_for_workers(1, timeout=CONNECT_SECONDS)
        except TimeoutError:
            raise ClusterError(
                f"the cluster {self._name} has no workers: start some with `dask worker`"
            ) from None
        found: dict[str, dict[str, Any]] = self.client.run(look, folder)
        for worker, answer in sorted(found.items()):
            if not answer["sees"]:
                raise ClusterError(
                    f"the worker {worker} cannot write to {folder}: build on storage that all machines of the cluster "
                    "have at the same path, as the same user"
                )
            for package, ours in expected.items():
                if answer[package] != ours:
                    raise ClusterError(
                        f"the worker {worker} has {package} {answer[package]}, and this process {ours}: install the "
                        "same version on all machines of the cluster"
                    )


def look(folder: Path) -> dict[str, Any]:
    """Return the versions of this process, and whether it can write to a folder."""
    return {**versions(), "sees": os.access(folder, os.R_OK | os.W_OK | os.X_OK)}


def versions() -> dict[str, str]:
    """Return the versions that decide the bytes of a store, and `absent` for a package that is not there."""
    found = {"draftstore": draftstore.__version__}
    for package in ("tokenizers", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found
