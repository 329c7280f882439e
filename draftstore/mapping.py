"""Work mapped over processes: of this machine here, of a Dask cluster in `draftstore.cluster`.

A job is a function of a module and its arguments. It reads and writes files, under paths that all processes share, and
may run twice or be cut off: what it leaves is the same, or is not looked at.
"""

import ctypes
import os
import shutil
import signal
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol, TypeVar

from draftstore.errors import BuildError

K = TypeVar("K")
T = TypeVar("T")

_SET_PARENT_DEATH_SIGNAL = 1  # prctl(2)


class Pool(Protocol):
    """Processes that work for a build."""

    def results(self, function: Callable[..., T], jobs: Mapping[K, tuple[Any, ...]]) -> Iterator[tuple[K, T]]:
        """Run jobs; yield the key and the result of each when it is done, in any order.

        Args:
            function: a function of a module.
            jobs: its arguments.

        Raises:
            BuildError: jobs were lost with their processes; errors of the jobs themselves come as they are.
        """

    def require(self, folder: Path) -> None:
        """Refuse to begin unless every process sees a folder, and has the versions that are here.

        Raises:
            ClusterError: which does not.
        """


class ExecutorPool(Pool):
    """An executor of the standard library as a pool.

    Attributes:
        executor: takes the jobs.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor = executor

    def results(self, function: Callable[..., T], jobs: Mapping[K, tuple[Any, ...]]) -> Iterator[tuple[K, T]]:
        """Run jobs, see `Pool`."""
        futures = {self.executor.submit(function, *arguments): key for key, arguments in jobs.items()}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            for future in futures:
                future.cancel()
            self.abandon()
            raise

    def require(self, folder: Path) -> None:
        """Do nothing: all is of one machine."""

    def abandon(self) -> None:
        """Give up jobs at work."""


class LocalPool(ExecutorPool):
    """Processes of this machine, which end with this one.

    They are spawned: forking a process with threads (tokenizers, numba) may deadlock.
    """

    def __init__(self, processes: int) -> None:
        self._processes = ProcessPoolExecutor(
            processes, get_context("spawn"), _end_with_parent, (os.getpid(),)
        )
        super().__init__(self._processes)

    def __enter__(self) -> "LocalPool":
        return self

    def __exit__(self, *_: object) -> None:
        self._processes.shutdown()

    def results(self, function: Callable[..., T], jobs: Mapping[K, tuple[Any, ...]]) -> Iterator[tuple[K, T]]:
        """Run jobs, see `Pool`."""
        try:
            yield from super().results(function, jobs)
        except (BrokenProcessPool, MemoryError):
            raise out_of_memory() from None

    def abandon(self) -> None:
        """Kill the processes: otherwise they complete their jobs, minutes after Ctrl-C."""
        for process in list((self._processes._processes or {}).values()):
            process.kill()


@contextmanager
def attempt(target: Path) -> Iterator[Path]:
    """Yield a new folder beside `target` that becomes it, unless another process was faster.

    So a part that is there is whole, whoever tried to make it and died, or was taken for dead and went on.
    """
    folder = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    folder.mkdir()
    try:
        yield folder
        try:
            folder.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def out_of_memory() -> BuildError:
    """Return what to say when a process that sorts was killed, or memory ran out."""
    return BuildError(
        "a sorting process was killed, perhaps because memory ran out: run the command again with fewer "
        "--workers or smaller --segment-tokens; it resumes where it stopped"
    )


def _end_with_parent(parent: int) -> None:
    """Let this worker process be killed with the build, and end without a traceback on Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the call above
        os._exit(1)
