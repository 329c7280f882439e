"""Removal of rejected rows from the caches of transformers.

A pass appends one row of keys and values for the text's last token and one for every drafted node. Rows of the accepted
path are kept, in order, as if the model had read these tokens one by one; the others are removed.

    cached      a b c | root n0 n1 n2 n3        accepted: n1, n3
    kept        a b c | root n1 n3

If accepted rows are already in place, as for every chain and for the first branch of a tree, nothing is copied: the
cache is only truncated.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, StaticCache, StaticLayer


class RollbackCache(ABC):
    """A filled cache of transformers with rollback of rows.

    Attributes:
        trees: whether any subset of rows can be kept; else only a prefix.
        drafts: whether rows can be removed at all.
        length: tokens in the cache.
    """

    trees = False
    drafts = True

    def __init__(self, cache: Any) -> None:
        """Wrap a filled cache."""
        self._cache = cache
        self.length = int(cache.get_seq_length())

    def room(self) -> int | None:
        """Return the maximum rows of a pass; None: unlimited."""
        return None

    def width(self, rows: int) -> int:
        """Return the number of columns in a pass's attention; sliding windows see less."""
        return self.length + rows

    @abstractmethod
    def keep(self, total: int, rows: Sequence[int]) -> None:
        """Keep some rows of the last pass.

        Args:
            total: rows that the pass appended.
            rows: rows to keep, ascending; empty undoes the pass.
        """

    def close(self) -> None:  # noqa: B027 (most have nothing to do)
        """Restore the cache's normal state."""


def rollback_cache(cache: Cache, drafting: bool = True) -> RollbackCache:
    """Wrap a filled cache."""
    if isinstance(cache, DynamicCache) and _consists_of(cache, DynamicLayer):
        return GrowingCache(cache)
    if isinstance(cache, StaticCache) and _consists_of(cache, StaticLayer):
        return FixedCache(cache)
    return CroppedCache(cache) if drafting and can_go_back(cache) else ForwardOnlyCache(cache)


def can_go_back(cache: Cache) -> bool:
    """Return True if a cache, possibly still empty, supports removal of rows."""
    if isinstance(cache, StaticCache) and _consists_of(cache, StaticLayer):
        return True
    return cache.is_croppable and not any(map(_stores_otherwise, cache.layers))


def _stores_otherwise(layer: Any) -> bool:
    """Return True if a layer has its own storage format but standard truncation: quantized layers."""
    kind = type(layer)
    return (
        isinstance(layer, DynamicLayer)
        and kind.update is not DynamicLayer.update
        and kind.crop is DynamicLayer.crop
    )


def _consists_of(cache: Cache, layer_type: type) -> bool:
    """Return True if all layers of a cache have exactly this type and stay on their device."""
    return not cache.offloading and all(type(layer) is layer_type for layer in cache.layers)


class _TreeCache(RollbackCache):
    """A cache in which every layer sees the whole text, so that any rows can be kept."""

    trees = True

    def keep(self, total: int, rows: Sequence[int]) -> None:
        """Move the kept rows to the front and drop the rest; see `RollbackCache`."""
        end = self.length + len(rows)
        if len(rows) < total:
            move_rows(self._cache.layers, self.length, rows)
            for layer in self._cache.layers:
                self._shorten(layer, end)
        self.length = end

    @abstractmethod
    def _shorten(self, layer: Any, length: int) -> None:
        """Truncate a layer."""


class GrowingCache(_TreeCache):
    """A `DynamicCache` without windows."""

    def _shorten(self, layer: Any, length: int) -> None:
        layer.keys = layer.keys[:, :, :length]
        layer.values = layer.values[:, :, :length]


class FixedCache(_TreeCache):
    """A `StaticCache` without windows: attention always sees all of it."""

    def room(self) -> int:
        """Return the remaining rows."""
        return self.width(0) - self.length

    def width(self, rows: int) -> int:  # noqa: ARG002
        """Return the size of the cache."""
        return int(self._cache.get_max_length())

    def _shorten(self, layer: Any, length: int) -> None:
        layer.cumulative_length.fill_(length)


class CroppedCache(RollbackCache):
    """A cache that can only be truncated: sliding windows, layers that share keys, offloaded ones."""

    def __init__(self, cache: Any) -> None:
        """Wrap a filled cache; from now on it keeps what slides out of a window."""
        super().__init__(cache)
        cache.activate_past_recording()

    def keep(self, total: int, rows: Sequence[int]) -> None:
        """Drop the rows after the kept ones. Called even if all are kept: windows shrink only here."""
        self._cache.crop(len(rows) - total)
        self.length += len(rows)

    def close(self) -> None:
        """Stop keeping what slides out of a window."""
        for layer in self._cache.layers:
            if hasattr(layer, "record_past"):
                layer.record_past = False


class ForwardOnlyCache(RollbackCache):
    """A cache without rollback: quantized, or static with a sliding window. For decoding without drafts."""

    drafts = False

    def keep(self, total: int, rows: Sequence[int]) -> None:  # noqa: ARG002 (it cannot do otherwise)
        """Keep all rows."""
        self.length += total


def move_rows(layers: Sequence[Any], past: int, rows: Sequence[int]) -> None:
    """Copy rows of the last pass, ascending and distinct, to its front in every layer; rows in place stay."""
    settled = rows_in_place(rows)
    if settled == len(rows):
        return
    indices: dict[torch.device, torch.Tensor] = {}
    for layer in layers:
        device = layer.keys.device
        if device not in indices:
            indices[device] = torch.tensor([past + row for row in rows[settled:]], device=device)
        for states in (layer.keys, layer.values):
            moved = states.index_select(2, indices[device])
            states[:, :, past + settled : past + len(rows)] = moved


def rows_in_place(rows: Sequence[int]) -> int:
    """Return how many of the kept rows are already at the front of the pass."""
    return next((place for place, row in enumerate(rows) if place != row), len(rows))
