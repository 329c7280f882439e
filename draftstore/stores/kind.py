"""What a kind of store is: one object that says how stores of the kind are opened, checked, shown and warmed.

Each kind is described in its own folder, in a module `kind` that holds its object as `STORE_KIND`;
`draftstore.stores.registry` names that module. Commands and services ask the object and know no kinds.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from draftstore.drafting.drafter import StoreDrafter
from draftstore.errors import DraftstoreError, StoreError
from draftstore.storage.manifest import Manifest

CONTEXT_TOKENS = 16
"""Tokens of a sample context: no drafter looks at more."""


T = TypeVar("T")


class Samples(NamedTuple):
    """What finds something in a store, to draft from it before the first request.

    Attributes:
        contexts: int32 [n, 16], filled up with -1 in front.
        queries: float32 [n, dims] of a store that is asked with hidden states; None of others.
    """

    contexts: NDArray[np.int32]
    queries: NDArray[np.float32] | None = None


class Store(Protocol):
    """An open store."""

    path: Path
    manifest: Manifest
    strategies: tuple[str, ...]
    default_strategy: str

    def drafter(self, strategy: str = ..., **changes: Any) -> StoreDrafter:
        """Return a drafter that follows a strategy."""

    def samples(self, number: int) -> Samples:
        """Return contexts from all parts of the store, `number` or fewer."""

    def close(self) -> None:
        """Let go of its files and connections."""


class Kind:
    """A kind of store; what a kind does not say for itself is said here, and is all that kinds without drafts need.

    Attributes:
        name: as manifests have it.
        title: for people.
        strategies: that drafters of its stores can follow; none where `open_store` opens no such store.
        asked_with_states: whether drafts take hidden states of a model, and a text alone is not enough.
    """

    title = ""
    strategies: tuple[str, ...] = ()
    asked_with_states = False

    def __init__(self, name: str) -> None:
        """Describe the kind that manifests call `name`."""
        self.name = name

    def open(self, path: Path, backend: str | None = None) -> Store:
        """Open a store.

        Args:
            path: its directory.
            backend: where its entries are read, in kinds that have a choice.

        Raises:
            StoreError: it cannot be opened, or has no such backend.
        """
        if backend is not None:
            raise StoreError(
                f"{path} is a store of kind {self.name!r}, which has no backends: leave --backend out"
            )
        return self.open_files(path)

    def open_files(self, path: Path) -> Store:
        """Open a store of a kind without backends; see `open`."""
        raise StoreError(f"{path} is a store of kind {self.name!r}, which gives no drafts")

    def backend(self, manifest: Manifest, wanted: str | None) -> str | None:  # noqa: ARG002
        """Return where the entries of a store are read: as wanted, by default the first; None without a choice."""
        return None

    def verify_entries(self, path: Path, manifest: Manifest) -> list[str]:  # noqa: ARG002
        """Compare what a store keeps outside its directory with the recorded hashes.

        Returns:
            One sentence for each problem.

        Raises:
            StoreError: it cannot be read.
        """
        return []

    def info(self, manifest: Manifest) -> Iterator[tuple[str, str]]:  # noqa: ARG002
        """Yield the rows, label and text, that `draftstore info` shows of this kind alone."""
        yield from ()

    def figures(self, manifest: Manifest) -> dict[str, Any]:  # noqa: ARG002
        """Return what decides the quality of a store, by name, for the page of the flow that built it."""
        return {}

    def load_kernels(self) -> None:
        """Compile the kernels that drafts of this kind run, or load them from numba's cache."""


def strategy_named(name: str, strategies: Mapping[str, T]) -> T:
    """Return the strategy of a name.

    Raises:
        DraftstoreError: there is none; the message lists those that there are.
    """
    if name not in strategies:
        raise DraftstoreError(f"unknown strategy {name!r}: expected one of {', '.join(sorted(strategies))}")
    return strategies[name]


def sample_contexts(rows: Sequence[NDArray[Any]], vocab_size: int) -> NDArray[np.int32]:
    """Return tokens [at most 16] of some places of a store as contexts, int32 [n, 16]; -1 for ids that are none."""
    contexts = np.full((len(rows), CONTEXT_TOKENS), -1, np.int32)
    for context, row in zip(contexts, rows, strict=True):
        context[CONTEXT_TOKENS - len(row) :] = np.where(row < vocab_size, row, -1)
    return contexts
