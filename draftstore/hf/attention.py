"""Attention of several rows over shared keys, without a copy of keys and values for every query head.

Most models have fewer heads of keys than of queries. With a mask, `sdpa` of transformers copies keys and values for
each of them in every layer, unless a pass has a single row: at 8 texts of 512 tokens that takes longer than the
attention itself. Here the queries of the heads that share keys become further rows instead:

    queries   [texts, heads x groups, rows, size]  ->  [texts, heads, groups x rows, size]
    mask      [texts, 1, rows, columns]            ->  [texts, 1, groups x rows, columns]
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, local
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_SDPA = "sdpa"
_LOCK = Lock()
_HERE = local()
_inside = 0
_own: Any = None
"""What somebody has put in place of the function of transformers."""


@contextmanager
def shared_keys() -> Iterator[None]:
    """Have passes of this thread share keys; others, and what else runs in this process, are as before."""
    global _inside, _own
    with _LOCK:
        if not _inside:
            _own = ALL_ATTENTION_FUNCTIONS._local_mapping.get(_SDPA)
            ALL_ATTENTION_FUNCTIONS[_SDPA] = _attend
        _inside += 1
    before, _HERE.on = getattr(_HERE, "on", False), True
    try:
        yield
    finally:
        _HERE.on = before
        with _LOCK:
            _inside -= 1
            if not _inside:
                ALL_ATTENTION_FUNCTIONS._local_mapping.pop(_SDPA)
                if _own is not None:
                    ALL_ATTENTION_FUNCTIONS[_SDPA] = _own


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the attention of a layer; see `transformers.integrations.sdpa_attention` for the arguments."""
    groups = getattr(module, "num_key_value_groups", 1)
    if (
        not getattr(_HERE, "on", False)
        or groups == 1
        or attention_mask is None
        or attention_mask.shape[1] != 1
        or dropout
        or any(others.get(name) is not None for name in ("position_bias", "cache", "softcap"))
    ):
        function = _own or ALL_ATTENTION_FUNCTIONS._global_mapping[_SDPA]
        found: tuple[torch.Tensor, None] = function(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others
        )
        return found
    texts, heads, rows, size = query.shape
    output = scaled_dot_product_attention(
        query.reshape(texts, heads // groups, groups * rows, size),
        key,
        value,
        attn_mask=attention_mask[..., : key.shape[2]].repeat(1, 1, groups, 1),
        scale=scaling,
    )
    # Kernels of a GPU return rows before heads, which no view can split.
    return output.reshape(texts, heads, rows, value.shape[-1]).transpose(1, 2).contiguous(), None
