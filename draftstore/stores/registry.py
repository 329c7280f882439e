"""Opening a store of any kind."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from draftstore.drafting.drafter import StoreDrafter
from draftstore.errors import StoreError
from draftstore.storage.manifest import Manifest, load_manifest, verify_files
from draftstore.stores.crest.entries import LMDB, entries_digest, open_entries
from draftstore.stores.crest.store import KIND as CREST
from draftstore.stores.crest.store import CrestStore
from draftstore.stores.dresd.store import KIND as DRESD
from draftstore.stores.dresd.store import DresdStore
from draftstore.stores.recycling.store import KIND as RECYCLING
from draftstore.stores.rest.store import KIND as REST
from draftstore.stores.rest.store import RestStore


class Store(Protocol):
    """An open store."""

    path: Path
    manifest: Manifest
    strategies: tuple[str, ...]
    default_strategy: str

    def drafter(self, strategy: str = ..., **changes: Any) -> StoreDrafter:
        """Return a drafter that follows a strategy."""

    def close(self) -> None:
        """Let go of its files and connections."""


DRAFTING: dict[str, type[Store]] = {REST: RestStore, CREST: CrestStore, DRESD: DresdStore}
"""Stores that draft, by kind."""


def open_store(path: Path | str, backend: str | None = None) -> Store:
    """Open a store that drafts, whatever its kind.

    Args:
        path: its directory.
        backend: where the entries of a CREST store are read; by default the first that it was built for.

    Raises:
        StoreError: no store that drafts, unknown version, missing or cut files, no such backend.
    """
    path = Path(path)
    kind = load_manifest(path).kind
    if kind == CREST:
        return CrestStore.open(path, backend=backend)
    if kind == RECYCLING:
        raise StoreError(
            f"{path} is of kind {kind!r}, which drafts only while its model decodes: name it to "
            "`draftstore generate --store` or the worker"
        )
    if kind not in (REST, DRESD):
        raise StoreError(
            f"{path} is of kind {kind!r}, from which nothing is drafted: expected {', '.join(map(repr, DRAFTING))}"
        )
    if backend is not None:
        raise StoreError(f"{path} is a store of kind {kind!r}, which has no backends: leave --backend out")
    return RestStore.open(path) if kind == REST else DresdStore.open(path)


def verify_entries(path: Path, manifest: Manifest) -> list[str]:
    """Compare the entries that a CREST store keeps outside its directory with their recorded hash.

    Returns:
        One sentence for each backend that holds other entries.

    Raises:
        StoreError: a backend cannot be read.
    """
    problems = []
    for backend in manifest.parameters.get("backends", []) if manifest.kind == CREST else []:
        if backend == LMDB:
            continue  # a file like others
        entries = open_entries(path, manifest, backend)
        try:
            found, expected = entries_digest(entries.items()), manifest.parameters["entries_sha256"]
        finally:
            entries.close()
        if found != expected:
            problems.append(
                f"the entries of {path} in {backend} have SHA-256 {found}, expected {expected}: build it again"
            )
    return problems


def verify_store(
    path: Path, manifest: Manifest, on_bytes: Callable[[int], None] = lambda _: None
) -> list[str]:
    """Compare everything that a store holds, here and in its backends, with the recorded hashes.

    Args:
        path: its directory.
        manifest: its manifest.
        on_bytes: called with the size of each file once it has been read, for progress bars.

    Returns:
        One sentence for each problem; empty when all is well.

    Raises:
        StoreError: a backend cannot be read.
    """
    return verify_files(path, manifest, on_bytes) or verify_entries(path, manifest)
