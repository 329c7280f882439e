"""Timing and memory: pinned calls, percentiles, resident pages, measurements in fresh processes."""

import ctypes
import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, TypeVar
from unittest.mock import patch

import numpy as np
from numpy.typing import ArrayLike

if TYPE_CHECKING:  # memory measurements start without it
    from draftstore.search.suffix import SuffixIndex

Result = TypeVar("Result")

ONE_CORE = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "NUMBA_NUM_THREADS": "1"}
"""Environment that limits native thread pools to one thread."""
PAGE = 4096


def pin_to_one_core() -> set[int]:
    """Pin this process and its children to one core; return the cores it had before."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    return cores


@contextmanager
def undisturbed() -> Iterator[None]:
    """Run a block on one core without garbage collection."""
    cores = pin_to_one_core()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        os.sched_setaffinity(0, cores)


def time_calls(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Call each function once and return the durations in microseconds."""
    times = []
    for call in calls:
        begin = perf_counter_ns()
        call()
        times.append((perf_counter_ns() - begin) / 1000)
    return times


def time_in_turn(
    calls: Mapping[str, Sequence[Callable[[], object]]], rng: np.random.Generator
) -> dict[str, list[float]]:
    """Time the i-th calls of all names in random order, for every i; return durations in microseconds."""
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    for place in range(len(calls[names[0]])):
        for which in rng.permutation(len(names)).tolist():
            call = calls[names[which]][place]
            begin = perf_counter_ns()
            call()
            times[names[which]].append((perf_counter_ns() - begin) / 1000)
    return times


def percentiles(times_us: ArrayLike) -> dict[str, float]:
    """Summarize durations: p50, p99, mean and their number."""
    times = np.asarray(times_us, np.float64)
    p50, p99 = np.percentile(times, [50, 99])
    return {
        "p50": round(p50, 1),
        "p99": round(p99, 1),
        "mean": round(float(times.mean()), 1),
        "samples": times.size,
    }


def resident(trim: bool = False) -> dict[str, int]:
    """Return the resident bytes of this process: anonymous memory, and pages of mapped files.

    Args:
        trim: first return freed malloc memory to the system; glibc only.
    """
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None) if trim else None
    if give_back:
        gc.collect()
        give_back(0)
    sizes = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        key, value = line.split(":")
        sizes[key] = int(value.split()[0]) * 1024
    return {"anonymous": sizes["Anonymous"], "mapped": sizes["Rss"] - sizes["Anonymous"]}


def reset_peak() -> None:
    """Reset the peak of resident memory."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_resident() -> int:
    """Return the peak of resident bytes since `reset_peak`."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def call_fresh(function: Callable[..., Result], *args: object, one_core: bool = True) -> Result:
    """Call a module-level function in a fresh process, on one core or on all; return its result."""
    pool = ProcessPoolExecutor(1, get_context("spawn"), initializer=pin_to_one_core if one_core else None)
    with patch.dict(os.environ, ONE_CORE if one_core else {}), pool:
        return pool.submit(function, *args).result()


def map_pages(index: "SuffixIndex") -> None:
    """Read one byte of every page of a store's arrays, to reach the state of a server that has run for a while."""
    for array in index[:5]:
        array.reshape(-1).view(np.uint8)[::PAGE].max(initial=0)


def progress(message: str) -> None:
    """Report progress on stderr."""
    print(message, file=sys.stderr, flush=True)
