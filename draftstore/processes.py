"""Processes that end with their parent, and work spread over them."""

import ctypes
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import TypeVar

_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)
_SET_PARENT_DEATH_SIGNAL = 1
T = TypeVar("T")
R = TypeVar("R")


def end_with_parent() -> None:
    """Have this process killed when its parent ends, for whatever reason; Linux only."""
    if _PRCTL is not None:
        _PRCTL(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def map_apart(function: Callable[[T], R], items: Sequence[T], workers: int) -> Iterator[R]:
    """Call a function with each item in one of several processes; yield results as they are completed.

    Raises the error of the function, or BrokenProcessPool if a process was killed.
    """
    # Forking with threads (tokenizers) may deadlock.
    with ProcessPoolExecutor(workers, get_context("spawn"), _begin, (os.getpid(),)) as processes:
        futures = [processes.submit(function, item) for item in items]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BaseException:  # else they would finish their parts, minutes after Ctrl-C
            for process in list((processes._processes or {}).values()):
                process.kill()
            raise


def _begin(parent: int) -> None:
    """Let this process be killed with the build, and end without a traceback on Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_with_parent()
    if os.getppid() != parent:  # the parent died before the call above
        os._exit(1)
