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
    """The texts of the rows with new ids.

    Attributes:
        rows: int64 [rows], their places in the batch, ascending.
        sizes: int64 [rows], number of ids of each text.
        slots: int64 [rows], the slot of each text; -1: a new one.
        begun: int64 [rows], the text that was in the row of a new one that begins with it; -1: none.
        ids: int32 [any], the new ids of known texts, one text after another.
        stops: int64 [rows], the end of each text's ids.
    """

    rows: NDArray[np.int64]
    sizes: NDArray[np.int64]
    slots: NDArray[np.int64]
    begun: NDArray[np.int64]
    ids: NDArray[np.int32]
    stops: NDArray[np.int64]


class Rows:
    """Finds the text of every row by comparing ids.

    Attributes:
        slots: int64 [any], the text of each row, which is set for new ones by others; -1: none.
    """

    def __init__(self, texts: Texts) -> None:
        """Search `texts`, which others extend and forget."""
        self._texts = texts
        self.slots: NDArray[np.int64] = np.empty(0, np.int64)

    def find(self, table: NDArray[np.int32], sizes: NDArray[np.int32], counts: NDArray[np.int64]) -> Found:
        """Find the texts of rows.

        Args:
            table: int32 [at least rows, any], the ids in every row.
            sizes: int32 [at least rows], number of ids of each text.
            counts: int64 [rows], number of new ones at its end.
        """
        self.slots = enlarged(self.slots, len(counts), fill=-1)
        found = Found(
            *find_texts(
                self._texts.state, self.slots, as_input(table, np.int32), as_input(sizes, np.int32), counts
            )
        )
        if len(found.rows) and found.rows[0] < 0:
            raise EngineError("a row ends outside the table of ids")
        return found
