"""Attention masks of a pass: each row attends to the past, itself, and its ancestors in the tree.

A pass over a tree of n nodes has n + 1 rows: row 0 is the text's last token, row i + 1 is node i. Their keys follow
those of the past, in the same order:

            past  | 0 1 2 3          tree   | 1 - 2
    row 0   x x x | x . . .                 | 3
    row 1   x x x | x x . .
    row 2   x x x | x x x .
    row 3   x x x | x . . x

`sdpa` and `eager` take an additive bias for the attention scores, 0 or minus infinity, in the model's type. (A boolean
mask would be converted to it in every layer by `sdpa`, and be added as 0 and 1 by `eager`.) `flex_attention` takes
blocks of 128 x 128 and a function; it would accept the bias too, but the code that torch 2.13 then compiles for CPUs
crashes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention.flex_attention import BlockMask

from draftstore.jit import kernel, read_only
from draftstore.trees.tree import DraftTree

BLOCK = 128
"""Rows and columns of a block of `flex_attention`."""


class Shape(NamedTuple):
    """The tree structure of a pass's rows.

    Attributes:
        bias: float32 [n + 1, n + 1], 0 where a row may attend to a column, else minus infinity.
        offsets: int64 [n + 1], depth of each row: 0 for row 0.
    """

    bias: NDArray[np.float32]
    offsets: NDArray[np.int64]


def shape_of(tree: DraftTree) -> Shape:
    """Return the structure of a tree's rows."""
    return Shape(*_shape(read_only(np.ascontiguousarray(tree.parents, np.int16))))


@kernel
def _shape(parents):  # type: ignore[no-untyped-def]
    """Compute the attributes of a `Shape` from int16 [n] parents, each an earlier node or -1."""
    rows = len(parents) + 1
    bias = np.full((rows, rows), -np.inf, np.float32)
    offsets = np.zeros(rows, np.int64)
    bias[0, 0] = 0.0
    for row in range(1, rows):
        parent = parents[row - 1] + 1
        offsets[row] = offsets[parent] + 1
        bias[row, :row] = bias[parent, :row]
        bias[row, row] = 0.0
    return bias, offsets


def attention_bias(
    shape: Shape, past: int, width: int, hidden: torch.Tensor | None, like: torch.Tensor
) -> torch.Tensor:
    """Return the bias of a pass, [1, 1, n + 1, width], over `past` keys and a tree; `hidden`, float [<= past], pads."""
    rows = len(shape.offsets)
    bias = like.new_zeros(1, 1, rows, width)
    bias[0, 0, :, past : past + rows] = torch.from_numpy(shape.bias)
    if hidden is not None:
        bias[..., : len(hidden)] = hidden
    if width > past + rows:
        bias[..., past + rows :] = -torch.inf
    return bias


def block_mask(
    shape: Shape, past: int, width: int, hidden: torch.Tensor | None, device: torch.device
) -> BlockMask:
    """Return the mask of a pass for `flex_attention`; see `attention_bias`.

    Blocks of the past are computed without calling the function, blocks behind the rows not at all. The function reads
    a tensor, so that it has the same code in every pass and is compiled once.
    """
    rows = len(shape.offsets)
    tiles, blocks = -(-rows // BLOCK), -(-width // BLOCK)
    allowed = torch.zeros(tiles * BLOCK, blocks * BLOCK, dtype=torch.bool, device=device)
    allowed[:rows, :past] = True
    if hidden is not None:
        allowed[:rows, : len(hidden)] = hidden == 0
    allowed[:rows, past : past + rows] = torch.from_numpy(shape.bias == 0)

    def mask_mod(_batch: Any, _head: Any, row: Any, column: Any) -> Any:
        return allowed[row, column]

    full = past // BLOCK if hidden is None else 0
    used = -(-(past + rows) // BLOCK)
    return BlockMask.from_kv_blocks(
        *_block_list(full, used, tiles, blocks, device),
        *_block_list(0, full, tiles, blocks, device),
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod,
        seq_lengths=(rows, width),
    )


def _block_list(
    start: int, stop: int, tiles: int, blocks: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of blocks for every tile of rows, int32 [1, 1, tiles], and which, [1, 1, tiles, blocks]."""
    order = torch.arange(start, start + blocks, dtype=torch.int32, device=device).clamp_(max=blocks - 1)
    counts = torch.full((1, 1, tiles), stop - start, dtype=torch.int32, device=device)
    return counts, order.expand(1, 1, tiles, blocks).contiguous()


def padding_bias(attention_mask: torch.Tensor | None, past: int, like: torch.Tensor) -> torch.Tensor | None:
    """Return the bias for padding: float [past], on the device of `like`; None without padding."""
    if attention_mask is None or bool((attention_mask[0, :past] != 0).all()):
        return None
    seen = attention_mask[0, :past].to(like.device) != 0
    return like.new_zeros(past).masked_fill(~seen, -torch.inf)


@contextmanager
def masks_by_model(model: Any, cache: Any) -> Iterator[None]:
    """Let a model with `flex_attention` and a static cache create its own masks.

    Otherwise transformers (at least 5.20 to 5.23) creates them earlier and fails: a `BlockMask` is not `contiguous()`.
    """
    attention = model.config.get_text_config(decoder=True)._attn_implementation
    if attention != "flex_attention" or not cache.is_compileable:
        yield
        return
    model.create_masks_for_generate = lambda attention_mask=None, **_arguments: attention_mask
    try:
        yield
    finally:
        model.__dict__.pop("create_masks_for_generate", None)
