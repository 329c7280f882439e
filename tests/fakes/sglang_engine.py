"""What SGLang 0.5.23 does with the arrays of its n-gram worker, and the objects that it hands to it.

Read from its files `kernels/ops/speculative/reconstruct_tree.py` (links), `srt/speculative/ngram_worker.py` (calls of
the worker), `srt/managers/schedule_batch.py` (requests). `tests/unit/engines/test_sglang_itself.py` compares the links
with its own code where it is installed.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

VERSION = "0.5.23"
Says = Callable[[Sequence[int]], int]
"""A model: the next token of a text."""


class Links(NamedTuple):
    """How SGLang finds its way through the rows of one text: depth, first child and next sibling of each row."""

    depths: list[int]
    children: list[int]
    siblings: list[int]


def links_of(mask: NDArray[Any]) -> Links:
    """Return what SGLang reads from a mask.

    Args:
        mask: bool [n, n].
    """
    rows = range(len(mask))
    above = [[column for column in range(row) if mask[row, column]] for row in rows]
    parents = [max(columns, default=-1) for columns in above]
    return Links(
        [len(columns) for columns in above],
        [min((row for row in rows if parent in above[row]), default=-1) for parent in rows],
        [
            min((row for row in rows if row > one and parents[row] == parents[one] >= 0), default=-1)
            for one in rows
        ],
    )


def verify(tokens: NDArray[Any], mask: NDArray[Any], text: Sequence[int], says: Says) -> list[int]:
    """Return what SGLang emits for one text, greedy: what the model says along the accepted rows.

    Args:
        tokens: int64 [n].
        mask: bool [n, n].
        text: the whole text; its last token is row 0.
        says: the model, which sees the text up to its last token and the rows that a row attends to.
    """
    links, row, emitted = links_of(mask), 0, []
    while row >= 0:
        seen = [*text[:-1], *(int(tokens[column]) for column in np.flatnonzero(mask[row]))]
        emitted.append(says(seen))
        row = links.children[row]
        while row >= 0 and tokens[row] != emitted[-1]:
            row = links.siblings[row]
    return emitted


class Request:
    """A request as workers see it."""

    def __init__(self, rid: str, prompt: Sequence[int], params: Mapping[str, Any] | None = None) -> None:
        self.rid = rid
        self.origin_input_ids_unpadded = array("q", prompt)
        self.output_ids = array("q")
        self.sampling_params = SimpleNamespace(custom_params=params)
