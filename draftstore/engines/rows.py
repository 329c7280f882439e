"""The texts in the rows of an engine's batch, identified by their token ids alone.

An engine that provides no request ids moves requests between the rows of its batch, swaps them, removes them and brings
them back. A text is identified by its previous ids: a row continues the text whose ids precede the row's new ones.
Texts with equal ids are also equal to a drafter, so they may be swapped, but no two rows ever get the same text.

A text that stays in its row costs the same however long it is: its last ids are compared, and some before. Whole texts
are compared where another one has the same length and end, and for rows whose text was elsewhere.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.drafting.slots import enlarged
from draftstore.engines.texts import Texts, find_texts
from draftstore.errors import EngineError
from draftstore.jit import as_input


class Found(NamedTuple):
    """The texts of rows.

    Attributes:
        slots: int64 [rows], the slot of each text; -1: a new one.
        begun: int64 [rows], the text that was in the row of a new one that begins with it; -1: none.
        ids: int32 [any], the new ids of known texts, one text after another.
        stops: int64 [rows], the end of each text's ids.
    """

    slots: NDArray[np.int64]
    begun: NDArray[np.int64]
    ids: NDArray[np.int32]
    stops: NDArray[np.int64]


class Rows:
    """Finds the text of every row by comparing ids."""

    def __init__(self, texts: Texts) -> None:
        """Search `texts`, which others extend and forget."""
        self._texts = texts
        self._there: NDArray[np.int64] = np.empty(0, np.int64)

    def find(
        self, table: NDArray[np.int32], rows: NDArray[np.int64], sizes: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> Found:  # fmt: skip
        """Find the texts of rows.

        Args:
            table: int32 [at least rows, any], the ids in every row.
            rows: int64 [rows], the rows with new ids, ascending.
            sizes: int64 [rows], number of ids of each text.
            counts: int64 [rows], number of new ones at its end.
        """
        last = rows[-1] if len(rows) else -1
        if last >= len(table) or (sizes > table.shape[1]).any() or (counts > sizes).any():
            raise EngineError("a row ends outside the table of ids")
        self._there = enlarged(self._there, last + 1, fill=-1)
        return Found(
            *find_texts(self._texts.state, self._there, as_input(table, np.int32), rows, sizes, counts)
        )

    def keep(self, rows: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """Set the texts of rows, each in a slot of its own; other rows have none."""
        self._there[:] = -1
        self._there[rows] = slots
