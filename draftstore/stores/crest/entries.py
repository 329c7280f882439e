"""Where the entries of a CREST store lie: one interface, LMDB here, other backends through entry points.

A key is an n-gram: its tokens as big-endian numbers, u16 where all ids are below 65,535, else u32, so that the bytes
sort as the tokens do. A value is what `draftstore.stores.crest.envelope` packs; backends keep it as it is.

A package adds a backend by an entry point in the group `draftstore.backends` (it opens the entries of a store) and one
in `draftstore.loaders` (it takes the entries of a new store in).
"""

import errno
import hashlib
import os
import struct
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import lmdb
import numpy as np
from numpy.typing import NDArray

from draftstore.errors import BuildError, StoreError
from draftstore.plugins import load_plugin
from draftstore.storage.manifest import Manifest

LMDB = "lmdb"
LMDB_FILE = "trees.lmdb"
POSTGRES = "postgres"
BACKENDS = (LMDB, POSTGRES)
FIRST_MAP = 1 << 24
"""Bytes of the first map of a new LMDB file; it doubles when it is full."""


class Entries(Protocol):
    """The entries of one CREST store."""

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the value of every key, None where there is none; one read transaction for all."""

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield all entries in the order of their keys."""

    def close(self) -> None:
        """Let go of the file or connection."""


Opener = Callable[[Path, Manifest], Entries]
Loader = Callable[..., None]


def key_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the type of a token in a key; its largest value is no token."""
    return np.dtype(">u2" if vocab_size <= np.iinfo(np.uint16).max else ">u4")


def context_bytes(contexts: NDArray[np.int32], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return contexts in the type of keys; ids that cannot be in one become its largest value, which never is."""
    return np.minimum(contexts.view(np.uint32), np.iinfo(dtype).max).astype(dtype)


def entries_digest(items: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the SHA-256 of entries in key order, each part after its length as u32: the same for all backends."""
    digest = hashlib.sha256()
    for key, value in items:
        digest.update(struct.pack("<I", len(key)) + key + struct.pack("<I", len(value)) + value)
    return digest.hexdigest()


def first_backend(manifest: Manifest) -> str:
    """Return where the entries of a store are read, unless another backend is named."""
    return next(iter(manifest.parameters.get("backends", [])), LMDB)


def open_entries(path: Path, manifest: Manifest, backend: str | None = None) -> Entries:
    """Open the entries of a store.

    Args:
        path: its directory.
        manifest: its manifest.
        backend: one of `BACKENDS`; by default the first that the store has.

    Raises:
        StoreError: the store has no such backend, or it cannot be opened.
        MissingPluginError: the backend is not installed.
    """
    held = manifest.parameters.get("backends", [])
    chosen = backend or first_backend(manifest)
    if chosen not in held:
        raise StoreError(
            f"{path} is not in {chosen}, only in {', '.join(held)}: build it with --backend both"
        )
    if chosen == LMDB:
        return LmdbEntries(path / LMDB_FILE)
    opened: Entries = load_plugin("draftstore.backends", chosen, f"the backend {chosen!r}")(path, manifest)
    return opened


def load_entries(backend: str, *arguments: Any) -> None:
    """Have another backend take the entries of a new store in; the arguments are those of its loader.

    Raises:
        MissingPluginError: no such backend is installed.
    """
    load_plugin("draftstore.loaders", backend, f"the backend {backend!r}")(*arguments)


class _Shared:
    """An open LMDB file. A process may open a file once only, so all readers of one file share this.

    A child reads on in what its parent had open: nothing is locked, so nothing of it is the parent's alone.
    """

    def __init__(self, path: Path, identity: tuple[int, int]) -> None:
        self.env = lmdb.open(
            str(path), subdir=False, readonly=True, lock=False, readahead=False, create=False, max_readers=1
        )
        self.identity = identity
        self.readers = 0


_SHARED: dict[tuple[int, int], _Shared] = {}
_SHARING = threading.RLock()  # a reader that is dropped while another one opens leaves in the same thread


def _join(path: Path) -> _Shared:
    """Return the open environment of a file, opened if it is not yet, with one reader more."""
    with _SHARING:
        status = path.stat()
        identity = (status.st_dev, status.st_ino)
        shared = _SHARED.get(identity) or _SHARED.setdefault(identity, _Shared(path, identity))
        shared.readers += 1
        return shared


def _leave(shared: _Shared) -> None:
    """Let one reader go, and with the last one the file."""
    with _SHARING:
        shared.readers -= 1
        if shared.readers == 0:
            del _SHARED[shared.identity]
            shared.env.close()


class LmdbEntries:
    """Entries in one immutable LMDB file, mapped and shared by all readers; without a lock file."""

    def __init__(self, path: Path) -> None:
        """Map the file.

        Raises:
            StoreError: it is missing or no LMDB file.
        """
        try:
            self._environment: _Shared | None = _join(path)
        except (OSError, lmdb.Error) as error:
            raise StoreError(
                f"{path} cannot be opened ({error}): the store is damaged, build it again"
            ) from None
        self.path = path
        self._leave = weakref.finalize(self, _leave, self._environment)

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the value of every key; see `Entries`.

        Raises:
            StoreError: the file is damaged.
        """
        assert self._environment is not None, "closed"
        try:
            with self._environment.env.begin() as transaction:
                get = transaction.get
                return [get(key) for key in keys]
        except lmdb.Error as error:
            raise StoreError(
                f"{self.path} cannot be read ({error}): the store is damaged, build it again"
            ) from None

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield all entries in the order of their keys.

        Raises:
            StoreError: the file is damaged.
        """
        assert self._environment is not None, "closed"
        try:
            with self._environment.env.begin() as transaction:
                yield from transaction.cursor()
        except lmdb.Error as error:
            raise StoreError(
                f"{self.path} cannot be read ({error}): the store is damaged, build it again"
            ) from None

    def close(self) -> None:
        """Let go of the file; its last reader unmaps it."""
        self._environment = None
        self._leave()


def write_lmdb(path: Path, items: Sequence[tuple[bytes, bytes]]) -> int:
    """Write entries to a compact LMDB file, atomically; return its bytes.

    Args:
        path: the new file.
        items: keys with values, keys strictly ascending.

    Raises:
        BuildError: the keys do not ascend.
        OSError: the disk is full, and nothing of the file is left.
    """
    draft = path.with_name(f".{path.name}.draft")
    draft.unlink(missing_ok=True)
    size = max(FIRST_MAP, 2 * sum(len(key) + len(value) + 16 for key, value in items))
    try:
        _fill_lmdb(draft, items, size)
        with lmdb.open(str(draft), subdir=False, readonly=True, lock=False) as environment:
            _copy_compact(environment, path)
    except lmdb.Error as error:  # a full disk comes as one of several
        kind = errno.ENOSPC if isinstance(error, lmdb.DiskError) else errno.EIO
        raise OSError(kind, f"{path} cannot be written ({error}): make sure that the disk has room") from None
    finally:
        draft.unlink(missing_ok=True)
    return path.stat().st_size


def _fill_lmdb(path: Path, items: Sequence[tuple[bytes, bytes]], size: int) -> None:
    """Append all entries in one transaction; a map that turns out too small grows and the work is done again."""
    while True:
        with lmdb.open(str(path), subdir=False, map_size=size, lock=False, sync=False) as environment:
            try:
                with environment.begin(write=True) as transaction:
                    _append(transaction, items)
            except lmdb.MapFullError:  # aborts the whole transaction
                size *= 2
            else:
                return


def _append(transaction: lmdb.Transaction, items: Sequence[tuple[bytes, bytes]]) -> None:
    """Append entries; LMDB refuses a key out of order without raising.

    Raises:
        BuildError: a key does not ascend.
    """
    consumed, added = transaction.cursor().putmulti(items, dupdata=False, overwrite=False, append=True)
    if added != len(items):
        raise BuildError(
            f"the keys of {len(items):,} entries do not ascend: {added:,} of {consumed:,} were taken"
        )


def _copy_compact(environment: lmdb.Environment, path: Path) -> None:
    """Copy an environment without free pages, flush it to disk and give it its name."""
    unfinished = path.with_name(f".{path.name}.copy")
    try:
        with unfinished.open("wb") as file:
            environment.copyfd(file.fileno(), compact=True)
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
