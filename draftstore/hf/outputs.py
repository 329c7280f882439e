"""The outputs of a forward pass for the texts of a batch, as the decode loop reads them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from draftstore.decoding.acceptance import Walks, walk_greedily
from draftstore.hf.members import Member
from draftstore.hf.passes import BatchRows
from draftstore.trees.batch import DraftBatch


class BatchOutputs:
    """What a model says of the drafts of a batch: `draftstore.decoding.loop.Outputs`."""

    def __init__(self, rows: BatchRows, drafts: DraftBatch, members: Sequence[Member]) -> None:
        self._rows, self._drafts, self._members = rows, drafts, members

    def walks(self) -> Walks:
        """Return what greedy texts emit; others choose row by row."""
        greedy = [member.greedy for member in self._members]
        if not any(greedy):
            return Walks.unknown(len(greedy))
        walks = walk_greedily(self._drafts, self._rows.best())
        walks.sizes[~np.array(greedy)] = 0
        return walks

    def choose(self, text: int, row: int, emitted: Sequence[int]) -> int:
        """Return the token that a text emits at a row."""
        return self._members[text].choose(self._rows[text].logits(row), emitted)

    def settle(self, text: int, tokens: int) -> None:
        """Do nothing: rows are chosen when they are reached."""

    def candidates(self, text: int) -> NDArray[np.int32]:
        """Return int32 [n + 1, 8], the most likely tokens at each row of a text."""
        return self._rows[text].candidates()

    def hidden(self, texts: Sequence[int], rows: Sequence[int]) -> NDArray[np.float16] | None:
        """Return float16 [texts, hidden_size], the last hidden states at a row of each text."""
        return self._rows.states(texts, rows)
