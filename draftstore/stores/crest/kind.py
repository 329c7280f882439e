"""The kind `crest`."""

from contextlib import closing
from pathlib import Path
from typing import cast

from draftstore.storage.manifest import Manifest
from draftstore.stores.crest.entries import LMDB, Entries, entries_digest, first_backend, open_entries
from draftstore.stores.crest.envelope import Envelope
from draftstore.stores.crest.store import KIND, STRATEGIES, CrestDrafter, CrestStore
from draftstore.stores.kind import Kind


class CrestKind(Kind):
    """Precomputed draft trees of n-grams, in a file or in PostgreSQL."""

    title = "CREST"
    strategies = STRATEGIES
    builder = "draftstore.stores.crest.build"

    def open(self, path: Path, backend: str | None = None) -> CrestStore:
        """Open a store."""
        return CrestStore.open(path, backend=backend)

    def backend(self, manifest: Manifest, wanted: str | None) -> str:
        """Return the backend of a store's entries: `wanted`, by default the first."""
        return wanted or first_backend(manifest)

    def verify_entries(self, path: Path, manifest: Manifest) -> list[str]:
        """Compare entries outside the store's directory with their recorded hash."""
        problems = []
        for backend in manifest.parameters.get("backends", []):
            if backend == LMDB:
                continue  # verified with the other files
            with closing(open_entries(path, manifest, backend)) as entries:
                found, expected = entries_digest(entries.items()), manifest.parameters["entries_sha256"]
            if found != expected:
                problems.append(
                    f"the entries of {path} in {backend} have SHA-256 {found}, expected {expected}: build it again"
                )
        return problems

    def load_kernels(self) -> None:
        """Compile the kernels."""
        CrestDrafter(cast("Entries", None), Envelope(b""), 1, 1).warm_up()  # reads no entries


STORE_KIND = CrestKind(KIND)
