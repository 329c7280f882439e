"""The kind `crest`."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from draftstore.storage.manifest import Manifest
from draftstore.stores.crest.entries import LMDB, entries_digest, first_backend, open_entries
from draftstore.stores.crest.envelope import Envelope
from draftstore.stores.crest.store import KIND, STRATEGIES, CrestDrafter, CrestStore
from draftstore.stores.kind import CONTEXT_TOKENS, Kind


class CrestKind(Kind):
    """Precomputed draft trees of n-grams, in a file or in PostgreSQL."""

    title = "CREST"
    strategies = tuple(STRATEGIES)

    def open(self, path: Path, backend: str | None = None) -> CrestStore:
        """Open a store."""
        return CrestStore.open(path, backend=backend)

    def backend(self, manifest: Manifest, wanted: str | None) -> str:
        """Return the backend of a store's entries: the wanted one, by default the first."""
        return wanted or first_backend(manifest)

    def verify_entries(self, path: Path, manifest: Manifest) -> list[str]:
        """Compare entries outside the store's directory with their recorded hash."""
        problems = []
        for backend in manifest.parameters.get("backends", []):
            if backend == LMDB:
                continue  # verified with the other files
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

    def load_kernels(self) -> None:
        """Compile the kernels for ids of both widths."""
        contexts = np.full((2, CONTEXT_TOKENS), -1, np.int32)
        for vocab_size in (1, 1 << 16):
            for blending in STRATEGIES.values():
                drafter = CrestDrafter(_NoEntries(), Envelope(b""), 1, vocab_size, blending)
                drafter.warm_up()
                drafter.draft_batch(contexts).encode_trees()


class _NoEntries:
    """Entries of an empty store."""

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return [None] * len(keys)

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        return iter(())

    def close(self) -> None:
        pass


STORE_KIND = CrestKind(KIND)
