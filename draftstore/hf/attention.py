"""Attention of a pass: which rows attend to which, and shared keys without a copy for every query head.

Each row attends to the past, itself, and its ancestors in the tree, within its range. A pass over a tree of n nodes has
n + 1 rows: row 0 is the text's last token, row i + 1 is node i. Their keys follow those of the past, in the same order:

            past  | 0 1 2 3          tree   | 1 - 2
    row 0   x x x | x . . .                 | 3
    row 1   x x x | x x . .
    row 2   x x x | x x x .          with a window of 3:   . . x | x x x .
    row 3   x x x | x . . x

A mask is an additive bias for the attention scores, 0 or minus infinity, in the model's type. (A boolean mask would be
converted to it in every layer by `sdpa`, and be added as 0 and 1 by `eager`.) A model whose layers have different
attention ranges takes one for each type of layer.

Most models have fewer heads of keys than of queries. Given a mask, `sdpa` of transformers copies keys and values
for each query head in every layer, unless a pass has a single row: with 8 texts of 512 tokens, that takes longer than
the attention itself. Here the queries of the heads that share keys become further rows instead:

    queries   [texts, heads x groups, rows, size]  ->  [texts, heads, groups x rows, size]
    mask      [texts, 1, rows, columns]            ->  [texts, 1, groups x rows, columns]

A prompt has no tree: its rows attend to all columns up to their own. With its copies for the groups, a mask that says
so would take gigabytes for long prompts. A `CausalMask` has no content, unless other code computes with it: kernels
that know this pattern need none, others get a few rows at a time.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import local
from typing import Any, Self

import torch
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_map_only
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_HERE = local()
"""`masks`: masks of this thread's pass, repeated for all groups, by mask and groups; None outside a pass."""
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
NO_CACHE = "dummy"  # layers without their own keys and values
BLOCK = 1024
"""Rows of a causal pass that share a mask with content, counted for all heads that share keys."""
Views = Mapping[str, int | None]
"""Attention range by type of layer: None is the whole text, otherwise the tokens of a sliding window or a chunk."""


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
        groups = getattr(module, "num_key_value_groups", 1)
        inactive = torch.compiler.is_compiling() or getattr(_HERE, "masks", None) is None
        special = dropout or any(
            others.get(name) is not None for name in ("position_bias", "cache", "softcap")
        )
        ours = not (inactive or special)
        if ours and isinstance(attention_mask, CausalMask):
            output = _attend_causally(query, key, value, attention_mask, groups, scaling)
        elif ours and groups > 1 and attention_mask is not None and attention_mask.shape[1] == 1:
            mask = _mask_of_groups(attention_mask, groups)
            output = _attend(query, key, value, mask, groups, scaling)
        else:
            if isinstance(attention_mask, CausalMask):
                attention_mask = attention_mask.last(query.shape[2])
            settings = {"dropout": dropout, "scaling": scaling, **others}
            return self._usual(module, query, key, value, attention_mask, **settings)
        return output.transpose(1, 2).contiguous(), None


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    groups: int,
    scaling: float | None,
) -> torch.Tensor:
    """Return the attention of all heads, [texts, heads x groups, rows, size]; `mask` is that of all groups."""
    texts, heads, rows, size = query.shape
    output = scaled_dot_product_attention(
        query.reshape(texts, heads // groups, groups * rows, size), key, value, attn_mask=mask, scale=scaling
    )
    # GPU kernels return rows before heads, which no view can split.
    return output.reshape(texts, heads, rows, value.shape[-1])


def _attend_causally(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: "CausalMask",
    groups: int,
    scaling: float | None,
) -> torch.Tensor:
    """Return the same for the last rows of a text, without a mask of all rows."""
    rows, columns = mask.shape[2:]
    if _knows_pattern(query, key, value, groups):
        begins = rows == columns
        bias = None if begins else causal_lower_right(rows, columns)
        return scaled_dot_product_attention(
            query, key, value, bias, is_causal=begins, scale=scaling, enable_gqa=groups > 1
        )
    parts, seen = [], columns - rows
    for some in torch.split(query, max(1, BLOCK // groups), 2):
        seen += some.shape[2]
        last = _mask_of_groups(mask.last(some.shape[2]), groups)[..., columns - seen :]
        parts.append(_attend(some, key[:, :, :seen], value[:, :, :seen], last, groups, scaling))
    return torch.cat(parts, 2)


def _knows_pattern(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, groups: int) -> bool:
    """Return True if a kernel without a mask computes the attention of the last rows of a text."""
    if query.device.type == "cpu":
        return query.shape[2] == key.shape[2] and query.shape[3] == value.shape[3]
    return can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, False, groups > 1))


def _mask_of_groups(mask: torch.Tensor, groups: int) -> torch.Tensor:
    """Return a mask for the rows of all groups; layers share the result."""
    if mask.shape[2] == 1 or groups == 1:
        return mask  # one row for all, or one group
    key = id(mask), groups
    if key not in _HERE.masks:
        _HERE.masks[key] = mask, mask.repeat(1, 1, groups, 1)  # keeping `mask` alive reserves its id
    repeated: torch.Tensor = _HERE.masks[key][1]
    return repeated


class CausalMask(torch.Tensor):
    """The mask of the last rows of a text, [1, 1, rows, columns], without content until other code computes with it."""

    _parts: dict[int, torch.Tensor]

    @staticmethod
    def __new__(cls, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Self:
        """Make a mask for the last `rows` of a text of `columns` tokens."""
        made = torch.Tensor._make_wrapper_subclass(cls, (1, 1, rows, columns), dtype=dtype, device=device)
        made._parts = {}
        return made

    def last(self, rows: int) -> torch.Tensor:
        """Return the mask of some last rows, [1, 1, rows, columns], with content."""
        if rows not in self._parts:
            columns = self.shape[3]
            hidden = torch.full((1, 1, rows, columns), -torch.inf, dtype=self.dtype, device=self.device)
            self._parts[rows] = hidden.triu_(columns - rows + 1)
        return self._parts[rows]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute with its content, whatever the operation."""
        args, kwargs = tree_map_only(cls, lambda mask: mask.last(mask.shape[2]), (args, kwargs or {}))
        return func(*args, **kwargs)


def views_of(config: Any) -> Views:
    """Return the attention ranges of a model's layers from its text configuration."""
    known: Any = get_layer_types_and_kwargs(config)
    types, settings = known
    if isinstance(settings, dict):  # transformers before 5.19: one for all layers whose range is limited
        settings = [{} if kind == FULL else settings for kind in types]
    found = {kind: each.get("sliding_window") for kind, each in zip(types, settings, strict=True)}
    return {kind: size for kind, size in found.items() if kind != NO_CACHE}


def causal_masks(
    views: Views, rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor | dict[str, torch.Tensor] | None:
    """Return the masks of the last rows of a text of `width` tokens; None if some layers do not see all of it.

    They are used like those of `attention_masks`.
    """
    if any(size is not None and size < width for size in views.values()):
        return None
    mask: torch.Tensor = CausalMask(rows, width, dtype, device)
    return dict.fromkeys(views, mask) if len(views) > 1 else mask


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
