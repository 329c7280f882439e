"""Keys and values of several texts, of all layers in one tensor each, updated in place.

    keys, values     [layers, slots, heads, length, size]

Every text has a slot, in which its tokens lie one after the other from column 0 on, whatever the others have: there are
no gaps and no padding, so nothing must be compacted.

    slot 0    a b c d e f g | root n0 n1 n2           a pass appends as many rows to each text, at its own end;
    slot 1    p q r | root n0 n1 n2                   accepted rows are moved to the front of what it appended

Rows are moved by one gather and one scatter for keys and for values, whatever the number of layers and texts. Addresses
never change, as CUDA graphs require, until the pool is resized.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import psutil
import torch
from transformers.cache_utils import Cache, CacheLayerMixin, StaticCache

from draftstore.hf.caches import rows_in_place

CPU_SHARE, GPU_SHARE = 0.5, 0.85
"""Shares of the free memory that the texts of a batch may take."""


class CachePool:
    """Keys and values of all layers in one tensor each.

    Attributes:
        keys: [layers, slots, heads, length, size]; initially 0, because masked values must be finite.
        values: same shape.
        texts: slots that the current pass writes to and sees.
        places: int64 [texts, rows], columns that it writes its rows to.
        width: columns that it sees.
        cache: the same tensors as a cache of the model.
    """

    def __init__(self, like: Any, layers: int, length: int, rows: int, slots: int = 1) -> None:
        """Allocate memory.

        Args:
            like: a filled layer of any cache of the model.
            layers: number of layers.
            length: maximum tokens of a text.
            rows: maximum rows of a pass that are kept.
            slots: maximum texts.
        """
        self._rows = rows
        self.keys, self.values = (
            torch.zeros(
                (layers, slots, states.shape[1], length, states.shape[3]),
                dtype=states.dtype,
                device=states.device,
            )
            for states in (like.keys, like.values)
        )
        self.places = torch.zeros((1, 1), dtype=torch.int64, device=self.keys.device)
        self._prepare()

    def _prepare(self) -> None:
        """Prepare what depends on the size of the pool."""
        self.width, self.texts = self.length, slice(0, 1)
        self._index = torch.empty(2 * self.slots * self._rows, dtype=torch.int64, device=self.keys.device)
        self._source = host_buffer(len(self._index), torch.int64, self.keys.device)
        self.cache = Cache(layers=[_Layer(self, index) for index in range(len(self.keys))])

    @property
    def slots(self) -> int:
        """Return the maximum number of texts."""
        return int(self.keys.shape[1])

    @property
    def length(self) -> int:
        """Return the maximum tokens of a text."""
        return int(self.keys.shape[3])

    def fits(self, cache: StaticCache, length: int) -> bool:
        """Return True if a cache's texts fit."""
        layer: Any = cache.layers[0]
        alike = (layer.keys.dtype, layer.keys.device) == (self.keys.dtype, self.keys.device)
        return alike and self.length >= length

    def fill(self, cache: StaticCache, columns: torch.Tensor) -> None:
        """Copy columns of a cache, int64 [any], to the front of slot 0, and clear what lies behind them."""
        layers: Sequence[Any] = cache.layers
        for index, layer in enumerate(layers):
            self.keys[index, :1, :, : len(columns)] = layer.keys.index_select(2, columns)
            self.values[index, :1, :, : len(columns)] = layer.values.index_select(2, columns)
        self._clear(0, len(columns))

    def spill(self, cache: StaticCache, start: int, stop: int, offset: int = 0) -> None:
        """Copy tokens of slot 0 from `start` on back to a cache, in which they lie `offset` columns further on."""
        layers: Sequence[Any] = cache.layers
        for index, layer in enumerate(layers):
            layer.keys[:, :, start + offset : stop + offset] = self.keys[index, :1, :, start:stop]
            layer.values[:, :, start + offset : stop + offset] = self.values[index, :1, :, start:stop]
            layer.cumulative_length.fill_(stop + offset)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first tokens of one slot to another, and clear what lies behind them."""
        for states in (self.keys, self.values):
            states[:, target, :, :length] = states[:, source, :, :length]
        self._clear(target, length)

    def _clear(self, slot: int, length: int) -> None:
        """Clear what lies behind the first tokens of a slot."""
        # Numbers that are not finite must not stay: a hidden row has a weight of 0, and 0 times NaN is NaN.
        for states in (self.keys, self.values):
            states[:, slot, :, length:] = 0

    def most_tokens(self) -> int:
        """Return how many tokens of all slots together there is memory for now: half of a CPU's, most of a GPU's."""
        each = 0
        for states in (self.keys, self.values):
            layers, _, heads, _, size = states.shape
            each += layers * heads * size * states.element_size()
        if self.keys.device.type == "cuda":
            return int(GPU_SHARE * torch.cuda.mem_get_info(self.keys.device)[0]) // each
        return int(CPU_SHARE * psutil.virtual_memory().available) // each

    def resize(self, length: int, used: int, texts: int) -> None:
        """Allocate anew."""
        kept = [*range(texts), self.slots - 1]
        try:
            with torch.inference_mode(mode=False), torch.no_grad():  # must be writable outside of it
                for name in ("keys", "values"):
                    old = getattr(self, name)
                    new = old.new_zeros((*old.shape[:3], length, old.shape[4]))
                    for slot in kept:  # those that nobody uses take no memory on a CPU until they are written
                        new[:, slot, :, :used] = old[:, slot, :, :used]
                    setattr(self, name, new)
                    del old, new  # frees it before the next one is allocated
        except BaseException:
            self.keys, self.values = self.keys[..., :0, :].clone(), self.values[..., :0, :].clone()
            raise
        finally:
            with torch.inference_mode(mode=False):
                self._prepare()

    def move(self, pasts: Sequence[int], kept: Sequence[Sequence[int]]) -> None:
        """Copy rows of the last pass to its front, in all texts and layers at once.

        Args:
            pasts: tokens of each text before the pass.
            kept: rows to keep of each text, see `draftstore.hf.caches.move_rows`.
        """
        settled = min(map(rows_in_place, kept))
        count = max(map(len, kept)) - settled
        if count <= 0:
            return
        # This buffer's last copy is done: a later pass has already returned a token.
        source = self._source[: 2 * len(kept) * count].view(2, len(kept), count)
        moves = source.numpy()
        moves[:] = np.arange(settled, settled + count)  # without a row to keep, a column stays
        for text, rows in enumerate(kept):
            moves[0, text, : max(0, len(rows) - settled)] = rows[settled:]
        moves += np.asarray(pasts)[:, None]
        index = self._index[: source.numel()].view(source.shape).copy_(source, non_blocking=True)
        for states in (self.keys[:, : len(kept)], self.values[:, : len(kept)]):
            shape = (*states.shape[:3], count, states.shape[4])
            origin, target = (each[None, :, None, :, None].expand(shape) for each in index)
            states.scatter_(3, target, states.gather(3, origin))


class _Layer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """A layer of the pool as a cache of the model: new keys and values go to the places set in the pool."""

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
        """Write the rows of a pass, [texts, heads, rows, size] each; return the visible columns."""
        pool = self._pool
        places = pool.places[:, None, :, None]
        seen = []
        for own, states in ((self.keys, key_states), (self.values, value_states)):
            assert own is not None
            texts = own[pool.texts]
            texts.scatter_(2, places.expand(states.shape), states)
            seen.append(texts[:, :, : pool.width])
        return seen[0], seen[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002 (named so by transformers)
        """Return the columns of a mask."""
        return self._pool.width, 0

    def get_seq_length(self) -> int:
        """Return 0: positions and mask are always given, so no model uses it."""
        return 0

    def get_max_length(self) -> int:
        """Return the length of the pool."""
        return self._pool.length


def fits_pool(cache: Cache) -> bool:
    """Return True if the layers of a filled cache all have the same shape."""
    layers: list[Any] = list(cache.layers)
    return len({(layer.keys.shape, layer.values.shape) for layer in layers}) == 1


def host_buffer(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return host memory, pinned if a GPU copies from it."""
    return torch.zeros(size, dtype=dtype, pin_memory=device.type == "cuda")
