"""Keys and values of all layers in one tensor each, updated in place.

    keys, values     [layers, 1, heads, length, size]

Accepted rows are moved to the front of a pass by one gather for keys and one for values, whatever the number of layers;
addresses never change, as CUDA graphs require.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, StaticCache

from draftstore.hf.caches import rows_in_place


class CachePool:
    """Keys and values of all layers in one tensor each.

    Attributes:
        length: maximum tokens.
        keys: [layers, 1, heads, length, size]; initially 0, because masked values must be finite.
        values: same shape.
        places: int64 [rows], positions to write the current pass's rows to.
        width: columns that it sees.
        cache: the same tensors as a cache of the model.
    """

    def __init__(self, like: Any, layers: int, length: int, rows: int) -> None:
        """Allocate memory.

        Args:
            like: a filled layer of a `StaticCache`.
            layers: number of layers.
            length: maximum tokens.
            rows: maximum rows of a pass.
        """
        self.length = self.width = length
        self.keys, self.values = (
            torch.zeros(
                (layers, *states.shape[:2], length, states.shape[3]), dtype=states.dtype, device=states.device
            )
            for states in (like.keys, like.values)
        )
        self.places = torch.zeros(1, dtype=torch.int64, device=self.keys.device)
        self._index = torch.empty(rows, dtype=torch.int64, device=self.keys.device)
        self._source = host_buffer(rows, torch.int64, self.keys.device)
        self.cache = Cache(layers=[_Layer(self, index) for index in range(layers)])

    def fits(self, cache: StaticCache, length: int) -> bool:
        """Tell whether a cache's texts fit."""
        layer: Any = cache.layers[0]
        alike = (layer.keys.dtype, layer.keys.device) == (self.keys.dtype, self.keys.device)
        return alike and self.length >= length

    def fill(self, cache: StaticCache, length: int) -> None:
        """Copy the first tokens of a cache."""
        layers: Sequence[Any] = cache.layers
        for index, layer in enumerate(layers):
            self.keys[index, :, :, :length] = layer.keys[:, :, :length]
            self.values[index, :, :, :length] = layer.values[:, :, :length]

    def spill(self, cache: StaticCache, start: int, stop: int) -> None:
        """Copy tokens from `start` on back to a cache, which then holds `stop` tokens."""
        layers: Sequence[Any] = cache.layers
        for index, layer in enumerate(layers):
            layer.keys[:, :, start:stop] = self.keys[index, :, :, start:stop]
            layer.values[:, :, start:stop] = self.values[index, :, :, start:stop]
            layer.cumulative_length.fill_(stop)

    def move(self, past: int, rows: Sequence[int]) -> None:
        """Copy rows of the last pass to its front, in all layers at once; see `draftstore.hf.caches.move_rows`."""
        settled = rows_in_place(rows)
        count = len(rows) - settled
        if count == 0:
            return
        # This buffer's last copy is done: a later pass has already returned a token.
        self._source.numpy()[:count] = rows[settled:]
        index = self._index[:count].copy_(self._source[:count], non_blocking=True).add_(past)
        for states in (self.keys, self.values):
            states[:, :, :, past + settled : past + len(rows)] = states.index_select(3, index)


class _Layer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """A layer of the pool as a cache of the model: new keys and values go to the rows set in the pool."""

    is_compileable = True
    is_sliding = False

    def __init__(self, pool: "CachePool", index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pool = pool
        self.keys, self.values = pool.keys[index], pool.values[index]
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the pool is allocated."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the rows of a pass, [1, heads, rows, size] each; return the visible columns."""
        assert self.keys is not None
        assert self.values is not None
        self.keys.index_copy_(2, self._pool.places, key_states)
        self.values.index_copy_(2, self._pool.places, value_states)
        return self.keys[:, :, : self._pool.width], self.values[:, :, : self._pool.width]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002 (named so by transformers)
        """Return the columns of a mask."""
        return self._pool.width, 0

    def get_seq_length(self) -> int:
        """Return 0: positions and mask are always given, so no model uses it."""
        return 0

    def get_max_length(self) -> int:
        """Return the length of the pool."""
        return self._pool.length


def fits_pool(cache: StaticCache) -> bool:
    """Tell whether the layers of a filled cache all have the same shape."""
    layers: list[Any] = list(cache.layers)
    return len({(layer.keys.shape, layer.values.shape) for layer in layers}) == 1


def host_buffer(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return host memory, pinned if a GPU copies from it."""
    return torch.zeros(size, dtype=dtype, pin_memory=device.type == "cuda")
