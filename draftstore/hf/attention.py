"""Attention of several rows over shared keys, without a copy of keys and values for every query head.

Most models have fewer heads of keys than of queries. Given a mask, `sdpa` of transformers copies keys and values
for each query head in every layer, unless a pass has a single row: with 8 texts of 512 tokens, that takes longer than
the attention itself. Here the queries of the heads that share keys become further rows instead:

    queries   [texts, heads x groups, rows, size]  ->  [texts, heads, groups x rows, size]
    mask      [texts, 1, rows, columns]            ->  [texts, 1, groups x rows, columns]
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import local
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_HERE = local()
"""`masks`: masks of this thread's pass, repeated for all groups, by mask and groups; None outside a pass."""


@contextmanager
def shared_keys() -> Iterator[None]:
    """Make passes of this thread share keys; other threads are not affected."""
    usual = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if not isinstance(usual, _Sharing):
        ALL_ATTENTION_FUNCTIONS["sdpa"] = _Sharing(usual)
    before, _HERE.masks = getattr(_HERE, "masks", None), {}
    try:
        yield
    finally:
        _HERE.masks = before


class _Sharing:
    """The attention of transformers, or ours in threads inside `shared_keys`."""

    def __init__(self, usual: Callable[..., Any]) -> None:
        self._usual = usual

    def __call__(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **others: Any,
    ) -> Any:
        """Compute the attention of a layer; see `transformers.integrations.sdpa_attention` for the arguments."""
        groups = getattr(module, "num_key_value_groups", 1)
        elsewhere = torch.compiler.is_compiling() or getattr(_HERE, "masks", None) is None
        special = dropout or any(
            others.get(name) is not None for name in ("position_bias", "cache", "softcap")
        )
        if elsewhere or special or groups == 1 or attention_mask is None or attention_mask.shape[1] != 1:
            settings = {"dropout": dropout, "scaling": scaling, **others}
            return self._usual(module, query, key, value, attention_mask, **settings)
        texts, heads, rows, size = query.shape
        output = scaled_dot_product_attention(
            query.reshape(texts, heads // groups, groups * rows, size),
            key,
            value,
            attn_mask=_mask_of_groups(attention_mask, groups),
            scale=scaling,
        )
        # GPU kernels return rows before heads, which no view can split.
        return output.reshape(texts, heads, rows, value.shape[-1]).transpose(1, 2).contiguous(), None


def _mask_of_groups(mask: torch.Tensor, groups: int) -> torch.Tensor:
    """Return a mask for the rows of all groups; layers share the result."""
    if mask.shape[2] == 1:
        return mask  # one row for all
    key = id(mask), groups
    if key not in _HERE.masks:
        _HERE.masks[key] = mask, mask.repeat(1, 1, groups, 1)  # keeping `mask` alive reserves its id
    repeated: torch.Tensor = _HERE.masks[key][1]
    return repeated
