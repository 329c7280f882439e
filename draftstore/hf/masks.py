"""Attention masks of a pass: each row attends to the past, itself, and its ancestors in the tree, within its range.

A pass over a tree of n nodes has n + 1 rows: row 0 is the text's last token, row i + 1 is node i. Their keys follow
those of the past, in the same order:

            past  | 0 1 2 3          tree   | 1 - 2
    row 0   x x x | x . . .                 | 3
    row 1   x x x | x x . .
    row 2   x x x | x x x .          with a window of 3:   . . x | x x x .
    row 3   x x x | x . . x

A mask is an additive bias for the attention scores, 0 or minus infinity, in the model's type. (A boolean mask would be
converted to it in every layer by `sdpa`, and be added as 0 and 1 by `eager`.) A model whose layers have different
attention ranges takes one for each type of layer.
"""

from collections.abc import Mapping
from typing import Any

import torch
from transformers.cache_utils import get_layer_types_and_kwargs

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
NO_CACHE = "dummy"  # layers without their own keys and values


Views = Mapping[str, int | None]
"""Attention range by type of layer: None is the whole text, otherwise the tokens of a sliding window or a chunk."""


def views_of(config: Any) -> Views:
    """Return the attention ranges of a model's layers from its text configuration."""
    known: Any = get_layer_types_and_kwargs(config)
    types, settings = known
    if isinstance(settings, dict):  # transformers before 5.19: one for all layers whose range is limited
        settings = [{} if kind == FULL else settings for kind in types]
    found = {kind: each.get("sliding_window") for kind, each in zip(types, settings, strict=True)}
    return {kind: size for kind, size in found.items() if kind != NO_CACHE}


def attention_masks(
    views: Views,
    past: torch.Tensor,
    places: torch.Tensor,
    depths: torch.Tensor,
    among: torch.Tensor,
    width: int,
    dtype: torch.dtype,
) -> torch.Tensor | dict[str, torch.Tensor]:
    """Return the bias of a pass, [texts, 1, rows, width], for the model's layers: one, or one for each type.

    Args:
        past: int64 [texts, 1], number of tokens of each text before the pass; they lie in columns 0, 1, ... in order.
        places: int64 [texts, rows], the columns of the rows.
        depths: int64 [texts, rows].
        among: bool [texts, rows, rows], which rows attend to which.
        width: number of columns.
        dtype: the model's type.
    """
    texts, rows = depths.shape
    columns = torch.arange(width, device=past.device)
    seen = (
        (columns < past)[:, None]
        .expand(texts, rows, width)
        .scatter(2, places[:, None].expand_as(among), among)
    )
    whole = torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -torch.inf)
    own = past + depths  # positions of the rows, and of all columns
    held = columns.expand(texts, width).scatter(1, places, own)
    masks = {}
    for kind, size in views.items():
        mask = whole
        if size is not None and kind == CHUNKED:
            mask = whole.masked_fill(held[:, None] // size != own[:, :, None] // size, -torch.inf)
        elif size is not None:
            mask = whole.masked_fill(held[:, None] <= own[:, :, None] - size, -torch.inf)
        masks[kind] = mask[:, None]
    return masks if len(masks) > 1 else next(iter(masks.values()))
