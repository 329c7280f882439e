"""The entries of a CREST store: one interface, LMDB here, other backends through entry points.

A key is an n-gram: its tokens as big-endian integers, u16 if all ids are below 65,535, else u32, so that keys sort like
tokens. A value is encoded by `draftstore.stores.crest.codes`; backends store it unchanged.

LMDB follows references to pages unchecked, out of the file if they are damaged: `check_pages` reads them first.

A package adds a backend with an entry point in the group `draftstore.backends` (opens the entries of a store) and one
in `draftstore.loaders` (loads the entries of a new store).
"""

import errno
import hashlib
import struct
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, Protocol

import lmdb
import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from draftstore.errors import BuildError, StoreError
from draftstore.options import Shown
from draftstore.storage.files import replacing
from draftstore.storage.manifest import Manifest, load_manifest
from draftstore.storage.plugins import load_plugin
from draftstore.storage.report import OnProgress

LMDB = "lmdb"
LMDB_FILE = "trees.lmdb"
POSTGRES = "postgres"
BACKENDS = (LMDB, POSTGRES)
Backend = Annotated[
    str | None,
    Shown(choices=BACKENDS, unset="the first that each was built for", expert=True),
    Field(description="Backend that holds the entries of CREST stores.", examples=[POSTGRES]),
]
"""An option of commands that read CREST stores."""
FIRST_MAP = 1 << 24
"""Initial map size of a new LMDB file, in bytes; doubled when the map is full."""
META = struct.Struct("=10xH4xII16xI44x4xHHQQ16xQQ")
"""A meta page of LMDB: page flags; magic, version; page size; flags, depth, branch and leaf pages and root of the tree;
last page."""
MAGIC, VERSION, NO_PAGE = 0xBEEFC0DE, 1, 2**64 - 1
BRANCH, LEAF, META_PAGE = 1, 2, 8


class Entries(Protocol):
    """The entries of one CREST store."""

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the value of every key, None if absent; one read transaction for all keys."""

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield all entries in key order."""

    def close(self) -> None:
        """Close the file or connection."""


def key_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the type of a token in a key; its largest value is not a token."""
    return np.dtype(">u2" if vocab_size <= np.iinfo(np.uint16).max else ">u4")


def entries_digest(items: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the SHA-256 of entries in key order, each part prefixed by its length as u32: equal for all backends."""
    digest = hashlib.sha256()
    for key, value in items:
        digest.update(struct.pack("<I", len(key)) + key + struct.pack("<I", len(value)) + value)
    return digest.hexdigest()


def first_backend(manifest: Manifest) -> str:
    """Return the default backend for the entries of a store."""
    return next(iter(manifest.parameters.get("backends", [])), LMDB)


def open_entries(path: Path, manifest: Manifest, backend: str | None = None) -> Entries:
    """Open the entries of a store in a backend, one of `BACKENDS`; default: the store's first.

    Raises StoreError if the store has no such backend, or its entries cannot be opened, and MissingPluginError if the
    backend is not installed.
    """
    available = manifest.parameters.get("backends", [])
    chosen = backend or first_backend(manifest)
    if chosen not in available:
        raise StoreError(
            f"{path} is not in {chosen}, only in {', '.join(available)}: build it with both", "backend"
        )
    if chosen == LMDB:
        return LmdbEntries(path / LMDB_FILE)
    opened: Entries = load_plugin("draftstore.backends", chosen, f"the backend {chosen!r}")(path, manifest)
    return opened


def load_entries(backend: str, store: Path, published: Path, file: Path, progress: OnProgress) -> None:
    """Load the entries of a new store, published at another path, from an LMDB file into another backend."""
    load = load_plugin("draftstore.loaders", backend, f"the backend {backend!r}")
    with closing(LmdbEntries(file)) as entries:
        load(store, published, load_manifest(store), entries, progress)


_ENVIRONMENTS: weakref.WeakValueDictionary[tuple[int, int], lmdb.Environment] = weakref.WeakValueDictionary()
_OPENING = threading.Lock()


def _open_lmdb(path: Path) -> lmdb.Environment:
    """Return an open file for reading, shared by all its readers in this process, which may open it only once.

    It is closed with its last reader. A forked child can continue reading: without locks, no state belongs to the
    parent alone.
    """
    with _OPENING:
        status = path.stat()
        identity = status.st_dev, status.st_ino
        environment = _ENVIRONMENTS.get(identity)
        if environment is None:
            check_pages(path)
            environment = lmdb.open(
                str(path),
                subdir=False,
                readonly=True,
                lock=False,
                readahead=False,
                create=False,
                max_readers=1,
            )
            _ENVIRONMENTS[identity] = environment
        return environment


class LmdbEntries:
    """Entries in one immutable LMDB file, mapped and shared by all readers, without a lock file.

    A missing or damaged file raises a StoreError, also while reading.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._environment: lmdb.Environment | None = _open_lmdb(path)
        except (OSError, lmdb.Error) as error:
            raise self._unreadable(error) from None

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the value of every key; see `Entries`."""
        assert self._environment is not None, "closed"
        try:
            with self._environment.begin() as transaction:
                get = transaction.get
                return [get(key) for key in keys]
        except lmdb.Error as error:
            raise self._unreadable(error) from None

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield all entries in key order."""
        assert self._environment is not None, "closed"
        try:
            with self._environment.begin() as transaction:
                yield from transaction.cursor()
        except lmdb.Error as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: Exception) -> StoreError:
        return StoreError(f"{self.path} cannot be read ({error}): the store is damaged, build it again")

    def close(self) -> None:
        """Close this reader; the last one unmaps the file."""
        self._environment = None


def write_lmdb(path: Path, items: Sequence[tuple[bytes, bytes]]) -> int:
    """Write pairs of key and value, keys strictly ascending, atomically to a compact LMDB file; return its size."""
    draft = path.with_name(f".{path.name}.draft")
    draft.unlink(missing_ok=True)
    size = max(FIRST_MAP, 2 * sum(len(key) + len(value) + 16 for key, value in items))
    try:
        _fill_lmdb(draft, items, size)
        with (
            lmdb.open(str(draft), subdir=False, readonly=True, lock=False) as environment,
            replacing(path) as temporary,
            temporary.open("wb") as file,
        ):
            environment.copyfd(file.fileno(), compact=True)  # without free pages
    except lmdb.Error as error:  # a full disk raises one of several kinds
        kind = errno.ENOSPC if isinstance(error, lmdb.DiskError) else errno.EIO
        raise OSError(kind, f"{path} cannot be written ({error}): make sure that the disk has room") from None
    finally:
        draft.unlink(missing_ok=True)
    return path.stat().st_size


def _fill_lmdb(path: Path, items: Sequence[tuple[bytes, bytes]], size: int) -> None:
    """Append all entries in one transaction; if the map is too small, enlarge it and start again."""
    while True:
        with lmdb.open(str(path), subdir=False, map_size=size, lock=False, sync=False) as environment:
            try:
                with environment.begin(write=True) as transaction:
                    consumed, added = transaction.cursor().putmulti(
                        items, dupdata=False, overwrite=False, append=True
                    )
            except lmdb.MapFullError:  # aborts the whole transaction
                size *= 2
                continue
        if added != len(items):  # LMDB silently drops entries out of order
            raise BuildError(
                f"the keys of {len(items):,} entries do not ascend: {added:,} of {consumed:,} were added"
            )
        return


def check_pages(path: Path) -> None:
    """Raise lmdb.CorruptedError if a meta page, the root or a branch page is damaged; LMDB refuses other formats."""
    head = np.fromfile(path, np.uint8, META.size).tobytes()
    if len(head) < META.size or META.unpack(head)[1:3] != (MAGIC, VERSION):
        return
    size = META.unpack(head)[3]
    data = np.memmap(path, np.uint8, "r")
    _require(512 <= size <= 1 << 15 and 2 * size <= len(data))
    pages = data[: len(data) // size * size].reshape(-1, size)
    for page in pages[:2]:
        *kind, depth, branches, leaves, root, last = META.unpack(page[: META.size])
        _require(kind == [META_PAGE, MAGIC, VERSION, size, 0] and last < len(pages))
        if root != NO_PAGE or depth:
            levels = [np.array([min(root, len(pages))])]
            for _ in range(1, depth):
                levels.append(_pages_below(pages[: last + 1], levels[-1], BRANCH))
            if depth == 1:
                _pages_below(pages[: last + 1], levels[0], LEAF)
            found = np.unique(np.concatenate(levels))
            _require(len(found) == branches + leaves and len(levels[-1]) == leaves and found[-1] <= last)


def _pages_below(pages: NDArray[np.uint8], numbers: NDArray[np.int64], kind: int) -> NDArray[np.int64]:
    """Check pages of one kind and return the numbers of the pages below branch pages."""
    _require(len(numbers) < len(pages) and numbers.min() >= 2 and numbers.max() < len(pages))
    size = pages.shape[1]
    words = pages[numbers].view(np.uint16).astype(np.int64)
    begin, end = words[:, 6], words[:, 7]  # of the free space, between the places of nodes and the nodes
    _require((words[:, 5] == kind) & (begin >= 22 - 2 * kind) & (begin <= end) & (end <= size))
    rows, columns = np.nonzero(np.arange(8, size // 2) < begin[:, None] // 2)
    nodes = words[rows, columns + 8]
    _require((nodes % 2 == 0) & (nodes >= end[rows]) & (nodes <= size - 8))
    low, high, top, key = (words[rows, nodes // 2 + part] for part in range(4))
    inside = np.where(top & 1, 8, low | high << 16) if kind == LEAF else 0  # bytes of values
    _require(nodes + 8 + key + inside <= size)
    return low | high << 16 | top << 32


def _require(sound: bool | NDArray[np.bool_]) -> None:
    if not np.asarray(sound).all():
        raise lmdb.CorruptedError("a page does not fit the file")
