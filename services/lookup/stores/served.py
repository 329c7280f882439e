"""The stores that a worker answers from: each name stands for one open store, which is swapped for a newer one.

    served = open_stores.get("chat")                      # on the thread of the event loop, for an answer made at once
    answer(served.drafter("backoff"), served.build)

    served = open_stores.borrow("chat")                   # for what takes longer, on any thread
    try:
        ...
    finally:
        served.release()

A store that was replaced is closed after its last reader, in a thread of its own: to unmap a large file takes a while.
An answer that needs several steps borrows a store once, and so comes from one build as a whole.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from typing import Any

from draftstore.drafting.drafter import StoreDrafter, projection_of
from draftstore.errors import DraftstoreError, StoreError
from draftstore.remote.queries import encode_projection
from draftstore.remote.wire import short_hash
from draftstore.storage.manifest import load_manifest, manifest_digest
from draftstore.stores.crest.entries import POSTGRES
from draftstore.stores.registry import Store, kind_of, open_store
from services.lookup.stores.targets import Target
from services.lookup.stores.warming import warm_store

LOG = logging.getLogger(__name__)
FILES = "files"
"""The backend of stores that have no other."""
DIGEST_SHOWN = 16


class UnknownReleaseError(DraftstoreError):
    """Nothing of this name is served here."""


class ServedStore:
    """An open store under the name that it is served by.

    Attributes:
        name: what clients ask for.
        digest: SHA-256 of its manifest, in hexadecimal digits.
        build: the beginning of it, as answers carry it.
        tokenizer: fingerprint of the tokenizer, as answers carry it.
        manifest: of the store.
        kind: of the store.
        backend: where it is read: `files`, `lmdb` or `postgres`.
        blocking: whether a lookup waits for a server, and belongs into a thread.
        strategies: that it can follow.
        default_strategy: the one that stands for none.
        context_size: tokens that its default drafter looks at.
        projection: from hidden states to the queries of a dense store; None for others.
        encoded_projection: the same as the payload of an answer; empty for others.
    """

    def __init__(self, name: str, store: Store, digest: str, backend: str) -> None:
        """Take over an open store, and close it in the end.

        Raises:
            DraftstoreError: nothing is drafted from it, or no frame holds its projection.
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
        """How many have borrowed it and not given it back."""
        return self._readers

    @property
    def closed(self) -> bool:
        """Whether it can no longer be read."""
        return self._store is None

    def drafter(self, strategy: str = "") -> StoreDrafter:
        """Return the drafter that follows a strategy; callers do not keep it longer than the store.

        Raises:
            DraftstoreError: no such strategy.
        """
        drafter = self._drafters.get(strategy)
        if drafter is None:
            assert self._store is not None, "closed"
            drafter = self._drafters[strategy] = self._store.drafter(strategy)
        return drafter

    def warm(self) -> None:
        """Make it fast, see `services.lookup.stores.warming`.

        Raises:
            DraftstoreError: it is damaged, or its database cannot be asked.
            OSError: a file cannot be read.
        """
        assert self._store is not None, "closed"
        warm_store(self._store, [self.drafter(strategy) for strategy in self.strategies])

    def acquire(self) -> None:
        """Count one reader more; only where the store cannot have been replaced since it came from the open stores."""
        with self._lock:
            assert self._store is not None, "closed"
            self._readers += 1

    def release(self) -> None:
        """Count one reader less; the last one of a store that was replaced has it closed."""
        with self._lock:
            self._readers -= 1
            retire = self._retire if self._readers == 0 else None
        if retire is not None:
            retire()

    def retire(self, close: Callable[[], None]) -> None:
        """Have `close` called as soon as there is no reader."""
        with self._lock:
            self._retire = close
            waiting = self._readers > 0
        if not waiting:
            close()

    def close(self) -> None:
        """Let go of files and connections."""
        store, self._store = self._store, None
        self._drafters.clear()
        if store is not None:
            store.close()

    def describe(self) -> dict[str, Any]:
        """Return what clients may know of it, as JSON values; nothing about where it lies."""
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
            "opened_at": self.opened_at.isoformat(timespec="seconds"),
        }


def open_served(target: Target, *, warm: bool = True) -> ServedStore:
    """Open what a name stands for, and make it fast.

    Args:
        target: what to open.
        warm: whether to read it into memory and to draft from it first.

    Raises:
        DraftstoreError: it cannot be opened, or another build lies there.
        OSError: a file cannot be read.
    """
    digest = _require_digest(target, target.digest)
    manifest = load_manifest(target.path)
    backend = kind_of(manifest.kind).backend(manifest, target.backend)
    store = open_store(target.path, backend)
    try:
        # A build that takes the place of another one moves whole directories: files of both may be open here.
        _require_digest(target, digest)
        served = ServedStore(target.name, store, digest, backend or FILES)
        if warm:
            served.warm()
    except BaseException:
        store.close()
        raise
    return served


def _require_digest(target: Target, expected: str | None) -> str:
    """Return the digest of the store that lies at a target.

    Raises:
        StoreError: there is none, or another one than expected.
    """
    digest = manifest_digest(target.path)
    if expected not in (None, digest):
        raise StoreError(
            f"{target.path} now holds another store (manifest {digest[:12]}, expected {str(expected)[:12]}): "
            "publish the build that lies there, or build the expected one again"
        )
    return digest


class OpenStores:
    """The open stores by name.

    Without borrowing, a store is safe to read only on the thread that calls `put` and `remove`: that of the event loop.
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

    def borrow(self, name: str) -> ServedStore:
        """Return the store of a name, which stays open until the caller calls its `release`; for any thread.

        Raises:
            UnknownReleaseError: nothing of this name is served.
        """
        with self._lock:
            served = self.get(name)
            served.acquire()
            return served

    def put(self, name: str, served: ServedStore) -> ServedStore | None:
        """Answer to a name from another store now; return the one before, which is closed after its last reader."""
        with self._lock:
            before = self._stores.get(name)
            self._stores[name] = served
        self._retire(before)
        return before

    def remove(self, name: str) -> ServedStore | None:
        """Answer to a name no more; return its store, which is closed after its last reader."""
        with self._lock:
            before = self._stores.pop(name, None)
        self._retire(before)
        return before

    def names(self) -> list[str]:
        """Return all names that are served."""
        return sorted(self._stores)

    def describe(self, allowed: Callable[[str], bool] = lambda _: True) -> list[dict[str, Any]]:
        """Return what is served, as JSON values.

        Args:
            allowed: tells whether the asker may know of a name.
        """
        stores = [self._stores.get(name) for name in self.names() if allowed(name)]
        return [served.describe() for served in stores if served is not None]

    def close(self) -> None:
        """Close all stores, and return when those without readers are closed."""
        for name in self.names():
            self.remove(name)
        self._closing.shutdown(wait=True)

    def _retire(self, served: ServedStore | None) -> None:
        if served is not None:
            served.retire(partial(self._close_soon, served))

    def _close_soon(self, served: ServedStore) -> None:
        """Close a store off this thread, or here where that has ended."""
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
