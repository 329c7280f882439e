"""Drafts of a batch within the limits of a pass: valid trees, of known tokens, no deeper and no larger than allowed."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftstore.decoding.acceptance import check_tree
from draftstore.errors import DecodingError
from draftstore.jit import as_input, kernel
from draftstore.trees.batch import DraftBatch
from draftstore.trees.tree import find_fault


def within_limits(drafts: DraftBatch, limits: NDArray[np.int64]) -> tuple[DraftBatch, dict[int, Exception]]:
    """Return drafts without nodes beyond the limits of their texts, and the errors of invalid ones, which are empty.

    Args:
        limits: int64 [batch, 3], maximum nodes, maximum depth, and limit of the ids of each text.

    Returns:
        The drafts, and by text a DraftTreeError as from `check_tree`, or a DecodingError for an id beyond the limit.
    """
    if not drafts.tokens.size:
        return drafts, {}
    tokens, parents, levels, sizes, faults = _cut(*drafts.inputs(), as_input(limits, np.int64))
    wrong = np.flatnonzero(faults).tolist()
    errors = {text: _error(drafts, text, int(limits[text, 2])) for text in wrong}
    found = drafts._replace(tokens=tokens, parents=parents, levels=levels, sizes=sizes)
    return found.read_only(), errors


def _error(drafts: DraftBatch, text: int, limit: int) -> Exception:
    """Return why a draft is invalid."""
    tree: Any = drafts.trees()[text]
    try:
        check_tree(tree)
    except Exception as error:  # noqa: BLE001 (returned)
        return error
    token = next(token for token in tree.tokens.tolist() if not 0 <= token < limit)
    return DecodingError(
        f"the drafter proposes token {token}, expected an id of the model's vocabulary, below {limit:,}: "
        "use a store that was built with the model's own tokenizer"
    )


@kernel
def _cut(tokens, parents, levels, sizes, limits):
    """Copy the nodes within the limits; return tokens, parents, levels, sizes, and which drafts are invalid."""
    texts, width = tokens.shape
    out_tokens, out_parents = np.empty((texts, width), np.int32), np.empty((texts, width), np.int16)
    out_levels, out_sizes = np.empty((texts, width), np.uint8), np.zeros(texts, np.int32)
    faults, places, depths = np.zeros(texts, np.bool_), np.empty(width, np.int16), np.empty(width, np.int32)
    for text in range(texts):
        size = np.int64(sizes[text])
        faults[text] = find_fault(parents[text, :size], tokens[text, :size]) >= 0
        for node in range(size):
            faults[text] |= not 0 <= tokens[text, node] < limits[text, 2]
        count = np.int64(0)
        for node in range(0 if faults[text] else size):
            parent = np.int64(parents[text, node])
            depths[node] = 1 if parent < 0 else depths[parent] + 1
            if depths[node] <= limits[text, 1] and count < limits[text, 0]:
                places[node] = count
                out_tokens[text, count], out_levels[text, count] = tokens[text, node], levels[text, node]
                out_parents[text, count] = -1 if parent < 0 else places[parent]
                count += 1
        out_sizes[text] = count
    return out_tokens, out_parents, out_levels, out_sizes, faults
