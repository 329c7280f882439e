"""Warming a store before the first request: reads its files into memory, compiles its kernels, drafts once.

Warming runs beside requests in the same process, so it works in pieces of a fraction of a millisecond, reads without
the GIL, and sleeps after each piece: a thread that never sleeps would block a busy processor for milliseconds.
"""

import ctypes
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from draftstore.drafting.drafter import StoreDrafter
from draftstore.stores.partition import Extents
from draftstore.stores.registry import KINDS, Store, kind_of
from draftstore.trees import batch

PIECE = 1 << 20
"""Bytes read at a time."""
PAGE = os.sysconf("SC_PAGE_SIZE")
MAP_PIECE = 1 << 20
"""Bytes of pages mapped at a time, which bounds the delay of concurrent page faults."""
REST = 0.001
"""Seconds between two pieces: requests lose a twentieth of their time, not a fifth."""
SHARE = 0.5
"""Fraction of available memory that warming a store may fill."""
SAMPLES = 200
"""Drafts per warm-up."""

_POPULATE_READ = 22  # madvise(2), Linux 5.14
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def warm_store(store: Store, drafters: Iterable[StoreDrafter], extents: Extents | None = None) -> None:
    """Warm a store."""
    warm_files((store.path / name for name in store.manifest.files), extents=extents)
    batch.warm_up()
    contexts, queries = store.samples(SAMPLES)
    for drafter in drafters:
        drafter.warm_up()
        for rows in (*(slice(row, row + 1) for row in range(len(contexts))), slice(0, 2)):
            dense: dict[str, Any] = {} if queries is None else {"queries": queries[rows]}
            drafter.draft_batch(contexts[rows], **dense).encode_trees()
            time.sleep(REST)


def warm_files(paths: Iterable[Path], most: int | None = None, extents: Extents | None = None) -> int:
    """Read mapped files into memory and into this process's page table."""
    left = int(available_memory() * SHARE) if most is None else most
    done = 0
    for size, path, places in sorted(_mapped(paths)):
        begin, end = (extents or {}).get(path.name, (0, size))
        begin -= begin % PAGE
        end = _read(path, begin, min(end, begin + left - done))
        for start, offset, length in places:
            first, last = max(begin, offset), min(end, offset + length)
            _map_pages(start + first - offset, max(last - first, 0))
        done += end - begin
    return done


def available_memory() -> int:
    """Return the bytes that can be filled without evicting other pages."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * PAGE


def _mapped(paths: Iterable[Path]) -> list[tuple[int, Path, list[tuple[int, int, int]]]]:
    """Return the mapped files: size, path, and for each mapping its address, file offset and size."""
    maps: dict[int, list[tuple[int, int, int]]] = {}
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        addresses, _, offset, _, inode, *_ = line.split()
        start, stop = (int(address, 16) for address in addresses.split("-"))
        maps.setdefault(int(inode), []).append((start, int(offset, 16), stop - start))
    found = ((path.stat(), path) for path in paths)
    return [(status.st_size, path, maps[status.st_ino]) for status, path in found if status.st_ino in maps]


def _read(path: Path, begin: int, end: int) -> int:
    """Read a part of a file into the page cache; return where that ends."""
    buffer = bytearray(PIECE)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    place = begin
    try:
        while place < end and (count := os.preadv(descriptor, [buffer], place)):
            place += count
            time.sleep(REST)
    finally:
        os.close(descriptor)
    return max(begin, min(place, end))


def _map_pages(start: int, size: int) -> None:
    """Enter pages of a mapping into the page table, to save page faults in requests; needs Linux 5.14."""
    for place in range(0, size, MAP_PIECE):
        if _libc.madvise(start + place, min(MAP_PIECE, size - place), _POPULATE_READ):
            return
        time.sleep(REST)


def load_kernels() -> None:
    """Compile all lookup kernels or load them from numba's cache; once, before processes are forked.

    Loading them while answering requests would block a process for a tenth of a second.
    """
    batch.warm_up()
    for name in KINDS:
        kind_of(name).load_kernels()
