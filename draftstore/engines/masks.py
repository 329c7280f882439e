"""Arrays that an engine verifies: rows of tokens, and the rows that each row attends to.

    row      0     1     2     3     4     5            mask   1 . . . . .
    token    the   cat   dog   sat   sat   sat                 1 1 . . . .
    above    -     0     0     1     3     4                   1 . 1 . . .
             |     `-- the tree --'  `-------'                 1 1 . 1 . .
             last token              padding                   1 1 . 1 1 .
             of the text                                       1 1 . 1 1 1

Every text has the same number of rows. A shorter tree is padded with a chain below its last node, which is a leaf: a
padding row is a draft like any other, and siblings keep different tokens, on which exact sampling depends.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from draftstore.jit import kernel
from draftstore.trees.batch import DraftBatch


def rows_and_mask(
    batch: DraftBatch, lasts: Sequence[int], rows: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return tokens, int64 [texts * rows], and mask, bool [texts * rows * rows], of the likeliest `rows - 1` nodes."""
    tokens = np.empty((len(lasts), rows), np.int64)
    mask = np.zeros((len(lasts), rows, rows), np.bool_)
    _fill(tokens, mask, batch.tokens, batch.parents, batch.sizes, np.array(lasts, np.int64))
    return tokens.ravel(), mask.ravel()


@kernel
def _fill(tokens, mask, nodes, parents, sizes, lasts):
    """Fill tokens and the mask, initially all False, from the trees of a batch."""
    for text in range(len(lasts)):
        tokens[text, 0] = lasts[text]
        mask[text, 0, 0] = True
        for row in range(1, tokens.shape[1]):
            if row <= sizes[text]:
                tokens[text, row] = nodes[text, row - 1]
                above = parents[text, row - 1] + 1
            else:
                tokens[text, row] = tokens[text, row - 1]
                above = row - 1
            for column in range(above + 1):
                mask[text, row, column] = mask[text, above, column]
            mask[text, row, row] = True
