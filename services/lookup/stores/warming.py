"""Making a store fast before the first request: its files in memory, its kernels compiled, its paths walked.

All of it happens beside requests that are being answered in the same process, so it works in pieces of a fraction of
a millisecond, reads with the interpreter lock released, and rests after each piece: a thread that never rests keeps a
processor for milliseconds when all of them are busy.
"""

import ctypes
import itertools
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftstore.drafting.drafter import StoreDrafter
from draftstore.drafting.projection import Projection
from draftstore.jit import read_only
from draftstore.search.suffix import SuffixIndex, key_layout, segment_table
from draftstore.stores.crest.entries import key_dtype
from draftstore.stores.crest.envelope import Envelope
from draftstore.stores.crest.store import STRATEGIES as CREST_STRATEGIES
from draftstore.stores.crest.store import CrestDrafter, CrestStore
from draftstore.stores.dresd.kernels.nearest import DenseIndex
from draftstore.stores.dresd.kernels.quantised import restore
from draftstore.stores.dresd.store import STRATEGIES as DRESD_STRATEGIES
from draftstore.stores.dresd.store import DresdDrafter, DresdStore
from draftstore.stores.registry import Store
from draftstore.stores.rest.store import STRATEGIES as REST_STRATEGIES
from draftstore.stores.rest.store import RestDrafter, RestStore
from draftstore.text.tokens import sentinel, token_dtype
from draftstore.trees import batch

PIECE = 1 << 20
"""Bytes that are read at a time."""
MAP_PIECE = 1 << 20
"""Bytes whose pages are mapped at a time: requests that touch a page for the first time wait for no more."""
REST = 0.001
"""Seconds between two pieces: requests lose a twentieth of the time to them, not a fifth."""
SHARE = 0.5
"""Of the memory that is available, how much a store may fill while it is warmed."""
SAMPLES = 200
"""Drafts that are made to warm up."""

_POPULATE_READ = 22  # madvise(2), Linux 5.14
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class _NoEntries:
    """Entries of a store that holds none."""

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return [None] * len(keys)

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        return iter(())

    def close(self) -> None:
        pass


def warm_store(store: Store, drafters: Iterable[StoreDrafter]) -> None:
    """Make a store fast.

    Args:
        store: an open store.
        drafters: its drafters, all of which are made to draft.

    Raises:
        DraftstoreError: the store is damaged, or its database cannot be asked.
        OSError: a file cannot be read.
    """
    warm_files(store.path / name for name in store.manifest.files)
    batch.warm_up()
    contexts = sample_contexts(store, SAMPLES)
    queries = sample_queries(store, len(contexts)) if isinstance(store, DresdStore) else None
    for drafter in drafters:
        drafter.warm_up()
        for rows in (*(slice(row, row + 1) for row in range(len(contexts))), slice(0, 2)):
            dense: dict[str, Any] = {} if queries is None else {"queries": queries[rows]}
            drafter.draft_batch(contexts[rows], **dense).encode_trees()
            time.sleep(REST)


def warm_files(paths: Iterable[Path], most: int | None = None) -> int:
    """Have those of some files that are mapped in memory, and in this process's page table.

    Args:
        paths: of the files; those that this process has not mapped are left alone.
        most: bytes at most, smallest files first; None: half of what is available.

    Returns:
        Bytes that were read.
    """
    left = int(available_memory() * SHARE) if most is None else most
    done = 0
    for size, path, places in sorted(_mapped(paths)):
        count = _read(path, min(size, left - done))
        for start, offset, length in places:
            _map_pages(start, min(length, max(count - offset, 0)))
        done += count
    return done


def available_memory() -> int:
    """Return the bytes that can be filled without pushing others out."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _mapped(paths: Iterable[Path]) -> list[tuple[int, Path, list[tuple[int, int, int]]]]:
    """Return the files that this process has mapped: bytes, path, and each map's address, place in the file, bytes."""
    maps: dict[int, list[tuple[int, int, int]]] = {}
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        addresses, _, offset, _, inode, *_ = line.split()
        start, stop = (int(address, 16) for address in addresses.split("-"))
        maps.setdefault(int(inode), []).append((start, int(offset, 16), stop - start))
    found = ((path.stat(), path) for path in paths)
    return [(status.st_size, path, maps[status.st_ino]) for status, path in found if status.st_ino in maps]


def _read(path: Path, most: int) -> int:
    """Read a file into the memory of the system, and return the bytes read."""
    buffer = bytearray(PIECE)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        done = 0
        while done < most and (count := os.preadv(descriptor, [buffer], done)):
            done += count
            time.sleep(REST)
    finally:
        os.close(descriptor)
    return min(done, most)


def _map_pages(start: int, size: int) -> None:
    """Enter pages of a map into the page table, so that no request stops for each of them; older systems cannot."""
    for place in range(0, size, MAP_PIECE):
        if _libc.madvise(start + place, min(MAP_PIECE, size - place), _POPULATE_READ):
            return
        time.sleep(REST)


def sample_contexts(store: Store, number: int) -> NDArray[np.int32]:
    """Return contexts that occur in a store, int32 [number or fewer, 16]."""
    if isinstance(store, RestStore):
        tokens = store.index.tokens
        places = np.linspace(0, max(len(tokens) - 16, 0), number, dtype=np.int64)
        rows = [tokens[place : place + 16].astype(np.int64) for place in places.tolist()]
    elif isinstance(store, CrestStore):
        dtype = key_dtype(store.manifest.vocab_size)
        rows = [
            np.frombuffer(key, dtype).astype(np.int64)
            for key, _ in itertools.islice(store.entries.items(), number)
        ]
    elif isinstance(store, DresdStore):
        groups = store.index.groups
        rows = [
            np.searchsorted(groups, [entry], side="right") - 1 for entry in _sample_entries(store, number)
        ]
    else:
        rows = []
    contexts = np.full((len(rows), 16), -1, np.int32)
    for context, row in zip(contexts, rows, strict=True):
        context[16 - len(row) :] = np.where(row < store.manifest.vocab_size, row, -1)
    return contexts


def sample_queries(store: DresdStore, number: int) -> NDArray[np.float32]:
    """Return what finds the entries whose first tokens end the contexts of `sample_contexts`: their own vectors."""
    return restore(store.index.vectors[_sample_entries(store, number)])


def _sample_entries(store: DresdStore, number: int) -> NDArray[np.int64]:
    """Return entries from all parts of a store, int64 [number or fewer]."""
    entries = len(store.index.vectors)
    return np.linspace(0, max(entries - 1, 0), min(number, entries), dtype=np.int64)


def load_kernels() -> None:
    """Compile all kernels of lookups, or load them from numba's cache; once, before processes are forked.

    A process that loaded them while it answers would stand still for a tenth of a second.
    """
    batch.warm_up()
    contexts = np.full((2, 16), -1, np.int32)
    for vocab_size in (1, 1 << 16):
        for rule in REST_STRATEGIES.values():
            drafter = RestDrafter(_smallest_index(vocab_size), rule)
            drafter.warm_up()
            for count in (1, 2):
                drafter.draft_batch(contexts[:count]).encode_trees()
    for vocab_size in (1, 1 << 16):
        for blending in CREST_STRATEGIES.values():
            crest = CrestDrafter(_NoEntries(), Envelope(b""), 1, vocab_size, blending)
            crest.warm_up()
            crest.draft_batch(contexts).encode_trees()
    for vocab_size in (1, 1 << 16):
        for dtype in (np.uint16, np.int8):
            dense = DresdDrafter(*_smallest_dense(vocab_size, dtype), next(iter(DRESD_STRATEGIES.values())))
            dense.warm_up()
            for count in (1, 2):
                queries = read_only(np.full((count, 1), np.nan, np.float32))
                dense.draft_batch(contexts[:count], queries=queries).encode_trees()


def _smallest_index(vocab_size: int) -> SuffixIndex:
    """Return the index of one empty document."""
    dtype = token_dtype(vocab_size)
    return SuffixIndex(
        read_only(np.full(1, sentinel(dtype), dtype)),
        read_only(np.zeros(1, np.int32)),
        read_only(np.zeros(1, np.int64)),
        read_only(np.zeros((1, vocab_size + 1), np.int32)),
        read_only(segment_table(np.ones(1, np.int64))[:-1]),
        vocab_size,
        *key_layout(vocab_size),
    )


def _smallest_dense(vocab_size: int, dtype: type[np.generic]) -> tuple[DenseIndex, NDArray[Any], Projection]:
    """Return index, tokens and projection of a dense store without entries, of one dimension."""
    tokens = token_dtype(vocab_size)
    index = DenseIndex(
        read_only(np.empty((0, 1), dtype)),
        read_only(np.empty(0, np.uint32)),
        read_only(np.zeros(vocab_size + 1, np.int64)),
        read_only(np.zeros(vocab_size + 1, np.int32)),
        read_only(np.zeros(1, np.int64)),
        read_only(np.empty((0, 1), np.float32)),
    )
    projection = Projection(np.zeros((1, 1), np.float32), np.zeros(1, np.float32))
    return index, read_only(np.full(1, sentinel(tokens), tokens)), projection
