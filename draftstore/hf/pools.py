"""The KV cache of several texts: all layers in a few tensors, updated in place.

    keys, values     [layers, slots, heads, length, size], for all layers of the same shape

Every text has a slot, which holds its tokens consecutively from column 0 on, independent of other texts: there are no
gaps and no padding, so nothing needs compaction. Layers with a window also keep everything: the mask limits them.

    slot 0    a b c d e f g | root n0 n1 n2           a pass appends the same number of rows to each text;
    slot 1    p q r | root n0 n1 n2                   accepted rows are moved to the front of these

Rows are moved by one gather and one scatter for each tensor, regardless of the number of layers and texts. Addresses,
on which CUDA graphs depend, change only when the pool is resized.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import psutil
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

CPU_SHARE, GPU_SHARE = 0.5, 0.85
"""Shares of free memory that the texts of a batch may use."""


class CachePool:
    """Keys and values of all layers.

    Attributes:
        slots: maximum texts.
        length: maximum tokens of a text, including the rows of a pass.
        texts: slots that the current pass writes to and sees.
        places: int64 [texts, rows], columns that it writes its rows to; for a single text, possibly just the first one.
        width: number of columns that it sees.
        cache: the pool as a cache of the model.
    """

    def __init__(self, like: Cache, slots: int, rows: int) -> None:
        """Prepare an empty pool: `like` is a filled cache of the model, `rows` the maximum rows of a pass."""
        self.slots, self.length = slots, 0
        alike: dict[Any, list[int]] = {}
        layers: list[Any] = list(like.layers)
        for index, layer in enumerate(layers):
            if getattr(layer, "keys", None) is not None:
                states = layer.keys, layer.values
                key = tuple((each.shape[1], each.shape[3], each.dtype, each.device) for each in states)
                alike.setdefault(key, []).append(index)
        self._states = [
            torch.zeros((len(indices), slots, heads, 0, size), dtype=dtype, device=device)
            for key, indices in alike.items()
            for heads, size, dtype, device in key
        ]
        self._homes = {
            index: (group, place)
            for group, indices in enumerate(alike.values())
            for place, index in enumerate(indices)
        }
        self._layers = len(layers)
        device = self._states[0].device
        self._source = host_buffer(2 * slots * rows, torch.int64, device)
        self._prepare()

    def _prepare(self) -> None:
        self.length = self._states[0].shape[3]
        self.width, self.texts = self.length, slice(0, 1)
        self.places: torch.Tensor | int = 0
        self.cache = Cache(layers=[_Layer(self, *self._of(index)) for index in range(self._layers)])

    def _of(self, layer: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return keys and values of a layer, [slots, heads, length, size]; None if it has none of its own."""
        if layer not in self._homes:
            return None, None
        group, place = self._homes[layer]
        return self._states[2 * group][place], self._states[2 * group + 1][place]

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first tokens of one slot to another, and clear the rest of the target."""
        # Non-finite values must not remain: a masked row has a weight of 0, and 0 times NaN is NaN.
        for states in self._states:
            if source != target:
                states[:, target, :, :length] = states[:, source, :, :length]
            states[:, target, :, length:] = 0

    def most_tokens(self) -> int:
        """Return the total tokens that fit into the memory that is free now: half of a CPU's, most of a GPU's."""
        each = sum(len(one) * one.shape[2] * one.shape[4] * one.element_size() for one in self._states)
        device = self._states[0].device
        if device.type == "cuda":
            return int(GPU_SHARE * torch.cuda.mem_get_info(device)[0]) // each
        return int(CPU_SHARE * psutil.virtual_memory().available) // each

    def resize(self, length: int, used: int, texts: int) -> None:
        """Reallocate for a new maximum length, keeping the first `used` columns of the texts and of the last slot."""
        held = {*range(texts), self.slots - 1}
        try:
            with torch.inference_mode(mode=False), torch.no_grad():  # must be writable outside inference mode
                for index, old in enumerate(self._states):
                    new = old.new_zeros((*old.shape[:3], length, old.shape[4]))
                    for slot in held:  # the others take no memory on a CPU until they are written
                        new[:, slot, :, :used] = old[:, slot, :, :used]
                    self._states[index] = new
                    del old, new  # free it before the next one is allocated
        except BaseException:
            self._states = [each[..., :0, :].clone() for each in self._states]
            raise
        finally:
            with torch.inference_mode(mode=False):
                self._prepare()

    def move(self, pasts: Sequence[int], kept: Sequence[Sequence[int]]) -> None:
        """Copy rows of the last pass to its front, in all texts and layers together.

        `pasts` are the tokens of each text before the pass, `kept` the rows to keep of each, ascending and distinct; an
        empty list undoes the pass.
        """
        most = max(map(len, kept))
        settled = next((place for place in range(most) if not _in_place(kept, place)), most)
        count = most - settled
        if count <= 0:
            return
        # The previous copy from this buffer is complete: a later pass has already returned a token.
        source = self._source[: 2 * len(kept) * count].view(2, len(kept), count)
        moves = source.numpy()
        moves[:] = columns = np.arange(settled, most)
        stay = columns.tolist()  # columns without a row to keep
        moves[0] = [[*rows[settled:], *stay[max(0, len(rows) - settled) :]] for rows in kept]
        moves += np.asarray(pasts)[:, None]
        sent = {
            device: source.to(device, non_blocking=True)[:, None, :, None, :, None]
            for device in {states.device for states in self._states}
        }
        for states in self._states:
            origin, target = sent[states.device]
            some = states[:, : len(kept)]
            shape = (*some.shape[:3], count, some.shape[4])
            some.scatter_(3, target.expand(shape), some.gather(3, origin.expand(shape)))


class _Layer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """A layer of the pool as a cache layer of the model: new keys and values go to the places set in the pool."""

    is_compileable = True
    is_sliding = False

    def __init__(self, pool: CachePool, keys: torch.Tensor | None, values: torch.Tensor | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pool = pool
        self.keys, self.values = keys, values
        self.is_initialized = True

    def lazy_initialization(self, *_states: torch.Tensor) -> None:
        """Do nothing: the pool is already allocated."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the rows of a pass, [texts, heads, rows, size] each; return the visible columns."""
        pool, places, rows = self._pool, self._pool.places, key_states.shape[2]
        seen = []
        for own, states in ((self.keys, key_states), (self.values, value_states)):
            assert own is not None
            texts = own[pool.texts]
            if isinstance(places, int):
                texts[:, :, places : places + rows] = states
            else:
                index = places.to(states.device)[:, None, :, None].expand(states.shape)
                texts.scatter_(2, index, states.to(own.dtype))  # the type differs under autocast
            seen.append(texts[:, :, : pool.width])
        return seen[0], seen[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002 (named so by transformers)
        """Return the width of a mask, and its offset."""
        return self._pool.width, 0

    def get_seq_length(self) -> int:
        """Return 0: positions and mask are always given, so no model uses this value."""
        return 0

    def get_max_length(self) -> int:
        """Return the length of the pool."""
        return self._pool.length


def _in_place(kept: Sequence[Sequence[int]], place: int) -> bool:
    """Return whether the rows that all texts keep at a place are already there."""
    return all(len(rows) <= place or rows[place] == place for rows in kept)


def host_buffer(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return host memory, pinned if a GPU copies from it."""
    return torch.zeros(size, dtype=dtype, pin_memory=device.type == "cuda")
