"""The stores to serve: named directories, and releases of the catalogue."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from draftstore.errors import StoreError
from draftstore.options import require_name
from draftstore.storage.manifest import manifest_digest
from schema.catalogue.releases import LiveRelease


class Target(NamedTuple):
    """A name and the store to serve under it.

    Attributes:
        name: name that clients use.
        path: directory of the store.
        digest: SHA-256 of the expected manifest; None if it cannot be read.
        backend: backend for the entries of a CREST store; None: the first that it was built for.
    """

    name: str
    path: Path
    digest: str | None = None
    backend: str | None = None


def parse_store(argument: str) -> Target:
    """Return the target of `--store [NAME=]DIR`, with its name or the folder's; DraftstoreError if that is invalid."""
    name, separator, folder = argument.partition("=")
    if not separator or "/" in name:
        name, folder = "", argument
    path = Path(folder).expanduser().resolve()
    name = name or path.name
    require_name(name, f"a store (give it one with --store NAME={folder})")
    return Target(name, path)


def with_digest(target: Target, backend: str | None = None) -> Target:
    """Return the target with the digest of its directory's current content, which a new build may have replaced."""
    try:
        return target._replace(digest=manifest_digest(target.path), backend=backend)
    except (StoreError, OSError):
        return target._replace(digest=None, backend=backend)


def catalogue_targets(
    live: Iterable[LiveRelease], names: Iterable[str] = (), backend: str | None = None
) -> list[Target]:
    """Return the targets of the named releases, or of all if no names are given."""
    wanted = set(names)
    return [
        Target(name, Path(path), digest, backend if backend in backends else None)
        for name, _, _, path, digest, backends in live
        if not wanted or name in wanted
    ]
