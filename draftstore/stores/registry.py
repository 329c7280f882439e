"""The registry of store kinds, and functions for stores of any kind."""

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

from draftstore.errors import StoreError
from draftstore.storage.manifest import Manifest, load_manifest, verify_files
from draftstore.storage.report import OnProgress, ignore
from draftstore.stores.kind import Builder, Kind, Store

__all__ = ["KINDS", "Store", "builder_of", "kind_of", "open_store", "strategies_of", "verify_store"]

KINDS = {
    "rest": "draftstore.stores.rest.store",
    "crest": "draftstore.stores.crest.store",
    "dresd": "draftstore.stores.dresd.store",
    "recycling": "draftstore.recycling.store",
}
"""Module of each kind, whose `STORE_KIND` is imported on first use."""


def kind_of(name: str) -> Kind:
    """Return a kind of store; for an unregistered name, such as counts, a kind without drafts."""
    if name not in KINDS:
        return Kind(name)
    kind: Kind = import_module(KINDS[name]).STORE_KIND
    return kind


def builder_of(name: str) -> Builder | None:
    """Return the builder of a kind of store; None if no command builds such stores."""
    module = kind_of(name).builder
    return import_module(module).BUILDER if module else None


def strategies_of(kinds: Iterable[str]) -> set[str]:
    """Return the union of the strategies of some kinds."""
    return {strategy for name in kinds for strategy in kind_of(name).strategies}


def open_store(path: Path | str, backend: str | None = None) -> Store:
    """Open a store of any kind that can draft.

    Args:
        backend: backend of a CREST store's entries; default: the first one that it was built for.

    Raises:
        StoreError: not a store that can draft, unknown version, missing or truncated files, or no such backend.
    """
    path = Path(path)
    name = load_manifest(path).kind
    if name not in KINDS:
        drafting = ", ".join(repr(kind) for kind in KINDS if kind_of(kind).strategies)
        raise StoreError(f"{path} is a store of kind {name!r}, which gives no drafts: expected {drafting}")
    return kind_of(name).open(path, backend)


def verify_store(path: Path, manifest: Manifest, on_bytes: OnProgress = ignore) -> list[str]:
    """Compare all data of a store, in its directory and its backends, with the recorded hashes.

    Returns one sentence for each problem. `on_bytes` receives, after each file, the bytes read and the total.
    """
    return verify_files(path, manifest, on_bytes) or kind_of(manifest.kind).verify_entries(path, manifest)
