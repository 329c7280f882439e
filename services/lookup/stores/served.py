"""The stores that a worker serves: each name stands for one open store, which a newer build replaces by a swap.

    served = open_stores.get("chat")                      # on the event loop's thread, for an immediate answer
    answer(served.drafter("backoff"), served.build)

    served = open_stores.borrow("chat")                   # for longer work, on any thread
    try:
        ...
    finally:
        served.release()

A replaced store is closed after its last reader, in a separate thread, because unmapping a large file takes a while.
An answer in several steps borrows its store once, so that it comes from a single build.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from typing import Any

from draftstore.drafting.drafter import StoreDrafter, projection_of
from draftstore.errors import DraftstoreError, StoreError
from draftstore.remote.queries import encode_projection
from draftstore.remote.wire import short_hash
from draftstore.storage.lease import StoreLease
from draftstore.storage.manifest import load_manifest, manifest_digest
from draftstore.stores.crest.entries import POSTGRES
from draftstore.stores.partition import Extents, Partition
from draftstore.stores.registry import Store, kind_of, open_store
from services.lookup.stores.targets import Target
from services.lookup.stores.warming import warm_store

LOG = logging.getLogger(__name__)
FILES = "files"
"""Backend of stores without a choice."""
DIGEST_SHOWN = 16


class UnknownReleaseError(DraftstoreError):
    """No store of this name is served."""


class ServedStore:
    """An open store and the name that it is served by.

    Attributes:
        name: name that clients use.
        digest: SHA-256 of its manifest, in hexadecimal digits.
        build: prefix of the digest, as sent in answers.
        tokenizer: fingerprint of the tokenizer, as sent in answers.
        manifest: manifest of the store.
        kind: kind of the store.
        backend: backend of its entries: `files`, `lmdb` or `postgres`.
        blocking: whether lookups wait for a server, and belong in a thread.
        strategies: supported strategies.
        default_strategy: strategy used if a request names none.
        context_size: tokens that its default drafter looks at.
        projection: maps hidden states to queries of a dense store; None for others.
        encoded_projection: the projection as payload of an answer; empty for others.
        partition: the part of the store that is served; None: all of it.
    """

    def __init__(
        self,
        name: str,
        store: Store,
        digest: str,
        backend: str,
        lease: StoreLease | None = None,
        partition: Partition | None = None,
    ) -> None:
        """Take ownership of an open store, and of the mark that it is in use.

        Raises:
            DraftstoreError: stores of this kind have no drafter, or the projection does not fit into a frame.
        """
        self.name = name
        self.digest = digest
        self.build = short_hash(digest)
        self.manifest = store.manifest
        self.tokenizer = short_hash(store.manifest.tokenizer.fingerprint)
        self.kind = store.manifest.kind
        self.backend = backend
        self.blocking = backend == POSTGRES
        self.opened_at = datetime.now(UTC)
        self._store: Store | None = store
        self._closed = False
        self._lease = lease
        self._extents: Extents = {}
        self.partition: Partition | None = None
        if partition is not None:
            self._store, self._extents = kind_of(self.kind).take(store, partition)
            self.partition = None if self._store is store else partition
            store = self._store
        self._drafters: dict[str, StoreDrafter] = {"": store.drafter()}
        self._lock = threading.Lock()
        self._readers = 0
        self._retire: Callable[[], None] | None = None
        self.context_size = self._drafters[""].context_size
        self.strategies = store.strategies
        self.default_strategy = store.default_strategy
        self.projection = projection_of(self._drafters[""])
        self.encoded_projection = b"" if self.projection is None else encode_projection(self.projection)

    @property
    def readers(self) -> int:
        """Number of borrowers."""
        return self._readers

    @property
    def closed(self) -> bool:
        """Whether it is closed, and its files are no longer mapped."""
        return self._closed

    def drafter(self, strategy: str = "") -> StoreDrafter:
        """Return the drafter of a strategy; callers must not keep it longer than the store.

        Raises:
            DraftstoreError: no such strategy.
        """
        drafter = self._drafters.get(strategy)
        if drafter is None:
            assert self._store is not None, "closed"
            drafter = self._drafters[strategy] = self._store.drafter(strategy)
        return drafter

    def warm(self) -> None:
        """Warm the store, see `services.lookup.stores.warming`.

        Raises:
            DraftstoreError: the store is damaged, or its database is down.
            OSError: a file cannot be read.
        """
        assert self._store is not None, "closed"
        warm_store(self._store, [self.drafter(strategy) for strategy in self.strategies], self._extents)

    def acquire(self) -> None:
        """Add a reader; only while the store cannot have been replaced since it was looked up."""
        with self._lock:
            assert self._store is not None, "closed"
            self._readers += 1

    def release(self) -> None:
        """Remove a reader; the last reader of a replaced store triggers its closing."""
        with self._lock:
            self._readers -= 1
            retire = self._retire if self._readers == 0 else None
        if retire is not None:
            retire()

    def retire(self, close: Callable[[], None]) -> None:
        """Call `close` as soon as there are no readers."""
        with self._lock:
            self._retire = close
            waiting = self._readers > 0
        if not waiting:
            close()

    def revive(self) -> None:
        """Serve it again after it was replaced; only for readers, as it may be closed otherwise."""
        with self._lock:
            assert self._readers > 0, "nobody keeps it open"
            self._retire = None

    def close(self) -> None:
        """Close its files and connections."""
        store, self._store = self._store, None
        self._drafters.clear()
        if store is not None:
            store.close()
        if self._lease is not None:
            self._lease.close()
        self._closed = True

    def describe(self) -> dict[str, Any]:
        """Return its public description as JSON values, without its path."""
        manifest, projection = self.manifest, self.projection
        return {
            "name": self.name,
            "kind": self.kind,
            "build": self.digest[:DIGEST_SHOWN],
            "tokenizer": {"name": manifest.tokenizer.name, "fingerprint": manifest.tokenizer.fingerprint},
            "vocab_size": manifest.vocab_size,
            "target_model": manifest.target_model,
            "projection": projection
            and {
                "digest": projection.digest,
                "dims": projection.dims,
                "hidden_size": projection.hidden_size,
            },
            "context_size": self.context_size,
            "strategies": list(self.strategies),
            "default_strategy": self.default_strategy,
            "backend": self.backend,
            "documents": manifest.counts.get("documents", 0),
            "tokens": manifest.counts.get("tokens", 0),
            "entries": manifest.counts.get("entries", 0),
            "created": manifest.created,
            "partition": self.partition and str(self.partition),
            "opened_at": self.opened_at.isoformat(timespec="seconds"),
        }


def open_served(target: Target, partition: Partition | None = None, *, warm: bool = True) -> ServedStore:
    """Open and warm the store of a target."""
    with ExitStack() as opened:
        lease = StoreLease(target.path)
        opened.callback(lease.close)
        digest = _require_digest(target, target.digest)
        manifest = load_manifest(target.path)
        backend = kind_of(manifest.kind).backend(manifest, target.backend)
        store = open_store(target.path, backend)
        opened.callback(store.close)
        # A new build replaces the whole directory: files of both builds may have been opened here.
        _require_digest(target, digest)
        served = ServedStore(target.name, store, digest, backend or FILES, lease, partition)
        if warm:
            served.warm()
        opened.pop_all()
    return served


def _require_digest(target: Target, expected: str | None) -> str:
    """Return the digest of the store at a target's path."""
    digest = manifest_digest(target.path)
    if expected not in (None, digest):
        raise StoreError(
            f"{target.path} now holds another store (manifest {digest[:12]}, expected {str(expected)[:12]}): "
            "publish the build that lies there, or build the expected one again"
        )
    return digest


class OpenStores:
    """The open stores by name.

    Without borrowing, a store is safe to read only on the event loop's thread, which calls `put` and `remove`.
    """

    def __init__(self) -> None:
        self._stores: dict[str, ServedStore] = {}
        self._lock = threading.Lock()
        self._closing = ThreadPoolExecutor(1, "draftstore-closing")

    def get(self, name: str) -> ServedStore:
        """Return the store of a name.

        Raises:
            UnknownReleaseError: nothing of this name is served.
        """
        try:
            return self._stores[name]
        except KeyError:
            raise UnknownReleaseError(f"nothing is served under the name {name!r}") from None

    def still(self, served: ServedStore) -> bool:
        """Return True if a store is what its name stands for."""
        return self._stores.get(served.name) is served

    def borrow(self, name: str) -> ServedStore:
        """Return the store of a name, kept open until the caller calls its `release`; thread-safe."""
        with self._lock:
            served = self.get(name)
            served.acquire()
            return served

    def put(self, name: str, served: ServedStore) -> ServedStore | None:
        """Serve a name from another store; return the old one, which is closed after its last reader."""
        with self._lock:
            before = self._stores.get(name)
            self._stores[name] = served
        self._retire(before)
        return before

    def remove(self, name: str) -> ServedStore | None:
        """Stop serving a name; return its store, which is closed after its last reader."""
        with self._lock:
            before = self._stores.pop(name, None)
        self._retire(before)
        return before

    def names(self) -> list[str]:
        """Return all served names."""
        return sorted(self._stores)

    def describe(self, allowed: Callable[[str], bool] = lambda _: True) -> list[dict[str, Any]]:
        """Return descriptions of all stores as JSON values.

        Args:
            allowed: tells whether the client may see a name.
        """
        stores = [self._stores.get(name) for name in self.names() if allowed(name)]
        return [served.describe() for served in stores if served is not None]

    def close(self) -> None:
        """Close all stores; return when those without readers are closed."""
        for name in self.names():
            self.remove(name)
        self._closing.shutdown(wait=True)

    def _retire(self, served: ServedStore | None) -> None:
        if served is not None:
            served.retire(partial(self._close_soon, served))

    def _close_soon(self, served: ServedStore) -> None:
        """Close a store in the closing thread, or here if that has ended."""
        try:
            self._closing.submit(_close, served)
        except RuntimeError:
            _close(served)


def _close(served: ServedStore) -> None:
    try:
        served.close()
    except Exception:
        LOG.exception("the old store of %r cannot be closed", served.name)
    else:
        LOG.info("closed build %s of %r", served.digest[:DIGEST_SHOWN], served.name)
