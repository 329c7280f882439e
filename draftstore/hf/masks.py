"""Which rows of a pass may attend to which: the past, themselves, and their ancestors in the tree.

A pass over a tree of n nodes has n + 1 rows: row 0 is the text's last token, row i + 1 is node i. Their keys stand
behind those of the past, in the same order:

            past  | 0 1 2 3          tree   | 1 - 2
    row 0   x x x | x . . .                 | 3
    row 1   x x x | x x . .
    row 2   x x x | x x x .
    row 3   x x x | x . . x

The mask is handed over as a bias that is added to the attention scores, 0 or minus infinity, in the model's type. All
of `sdpa`, `eager` and `flex_attention` take it as it is. A boolean mask would be turned into the same bias by every
layer of its own in `sdpa`, and be added as 0 and 1 in `eager`. Blocks of `flex_attention` would save nothing: every
row sees all of the past.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from draftstore.jit import kernel, read_only
from draftstore.tree import DraftTree


class Shape(NamedTuple):
    """How the rows of a pass hang together.

    Attributes:
        bias: float32 [n + 1, n + 1], 0 where a row may attend to a column, else minus infinity.
        offsets: int64 [n + 1], tokens from the text's last one to each row: 0 for row 0.
    """

    bias: NDArray[np.float32]
    offsets: NDArray[np.int64]


def shape_of(tree: DraftTree) -> Shape:
    """Return how the rows of a tree hang together."""
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
    """Return the bias of a pass.

    Args:
        shape: of its tree.
        past: keys that were there before the pass.
        width: columns: past + n + 1, or all of a static cache.
        hidden: float [at most past], what is added at the first columns of every row: padding. None if all are seen.
        like: a tensor of the type and on the device of the result.

    Returns:
        [1, 1, n + 1, width].
    """
    rows = len(shape.offsets)
    bias = like.new_zeros(1, 1, rows, width)
    bias[0, 0, :, past : past + rows] = torch.from_numpy(shape.bias)
    if hidden is not None:
        bias[..., : len(hidden)] = hidden
    if width > past + rows:
        bias[..., past + rows :] = -torch.inf
    return bias


def padding_bias(attention_mask: torch.Tensor | None, past: int, like: torch.Tensor) -> torch.Tensor | None:
    """Return what hides the padding: float [past], on the device of `like`; None if there is none.

    Args:
        attention_mask: int [1, at least past], 0 where the text is padding.
        past: keys in the cache.
        like: a tensor of the type and on the device of the result.
    """
    if attention_mask is None or bool((attention_mask[0, :past] != 0).all()):
        return None
    seen = attention_mask[0, :past].to(like.device) != 0
    return like.new_zeros(past).masked_fill(~seen, -torch.inf)
