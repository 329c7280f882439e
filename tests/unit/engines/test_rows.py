"""The texts in the rows of an engine's batch: one per row, preserved through every move."""

from collections.abc import Sequence
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftstore.engines.rows import Found, Rows
from draftstore.engines.texts import TAIL, Texts, append_ids
from draftstore.errors import EngineError
from draftstore.jit import read_only

Row = tuple[int, list[int], int]
"""The place, the ids, and the number of new ones."""


class Batch:
    """Rows whose texts grow as those of a proposer; each has a name that no other ever gets."""

    def __init__(self) -> None:
        self.texts = Texts()
        self.rows = Rows(self.texts)
        self.names: dict[int, int] = {}
        self._new = count()

    def see(self, rows: Sequence[Row]) -> Found:
        """Look for the texts of rows."""
        table = np.full((8, max(len(ids) for _, ids, _ in rows) + 2), -5, np.int32)
        sizes, counts = np.zeros(8, np.int32), np.zeros(8, np.int64)
        for place, ids, new in rows:
            table[place, : len(ids)], sizes[place], counts[place] = ids, len(ids), new
        return self.rows.find(table, sizes, counts)

    def find(self, rows: Sequence[Row]) -> list[int]:
        """Return the names of the texts in rows, in the order of their places, and go on with their ids."""
        if not rows:
            return []
        found, ordered = self.see(rows), sorted(rows)
        assert found.rows.tolist() == [place for place, _, _ in ordered]
        assert found.sizes.tolist() == [len(ids) for _, ids, _ in ordered]
        start = 0
        for place, (slot, (_, ids, new)) in enumerate(zip(found.slots.tolist(), ordered, strict=True)):
            added = found.ids[start : found.stops[place]]
            start = found.stops[place]
            if slot < 0:
                assert len(added) == 0
                slot = next(slot for slot in count() if slot not in self.names)
                self.texts.put(slot, read_only(np.array(ids, np.int32)))
                self.names[slot], found.slots[place] = next(self._new), slot
            else:
                assert added.tolist() == ids[-new:]
                self.texts.reserve(np.array([slot]), np.array([new]))
                append_ids(self.texts.state, slot, added)
            assert self.texts.ids(slot).tolist() == ids
        self.rows.slots[found.rows] = found.slots
        return [self.names[slot] for slot in found.slots.tolist()]

    def forget(self, slot: int) -> None:
        self.texts.drop(slot)
        del self.names[slot]


def test_a_text_that_was_forgotten_gets_another_name() -> None:
    rows = Batch()
    (name,) = rows.find([(0, [1, 2], 1)])
    rows.forget(0)
    assert rows.find([(0, [1, 2, 3], 1)]) != [name]


def test_a_text_that_went_on_unseen_is_known_where_it_was() -> None:
    rows = Batch()
    rows.find([(2, [1, 2], 1)])
    found = rows.see([(2, [1, 2, 3, 4, 5], 1)])
    assert (found.slots.tolist(), found.begun.tolist()) == ([-1], [0])
    rows.find([(2, [1, 2], 1)])
    found = rows.see([(2, [9, 2, 3, 4, 5, 6], 1)])
    assert (found.slots.tolist(), found.begun.tolist()) == ([-1], [-1])


def test_rows_that_end_outside_their_table_are_refused() -> None:
    table = np.ones((2, 4), np.int32)
    for sizes, counts in (([5, 2], [1, 1]), ([2], [0, 1]), ([2, 2, 2], [0, 0, 1]), ([1], [2]), ([-1], [1])):
        with pytest.raises(EngineError, match="outside the table"):
            Rows(Texts()).find(table, np.array(sizes), np.array(counts))


moves = st.lists(
    st.tuples(
        st.permutations(range(5)), st.lists(st.lists(st.integers(1, 2), max_size=3), min_size=5, max_size=5)
    ),
    max_size=32,
)


begins = st.sampled_from([[], [3] * 20 + [1] * TAIL])
"""What follows the first two ids: texts whose ends agree, and the few ids that are compared before these."""


@given(moves, begins)
def test_every_text_keeps_its_name_through_all_moves(
    steps: list[tuple[list[int], list[list[int]]]], begin: list[int]
) -> None:
    rows = Batch()
    texts = [[1, number + 10, *begin] for number in range(5)]
    names = dict(enumerate(rows.find([(number, text, 1) for number, text in enumerate(texts)])))
    for order, added in steps:
        present = [number for number in order if added[number]]
        for number in present:
            texts[number] = texts[number] + added[number]
        given = [(place, texts[number], len(added[number])) for place, number in enumerate(present)]
        assert rows.find(given) == [names[number] for number in present]


@given(moves, begins)
def test_no_two_rows_have_one_name(steps: list[tuple[list[int], list[list[int]]]], begin: list[int]) -> None:
    rows = Batch()
    texts, known = [[1, *begin]] * 5, dict[int, list[int]]()
    for order, added in steps:
        present = [number for number in order if added[number]]
        for number in present:
            texts[number] = texts[number] + added[number]
        names = rows.find(
            [(place, texts[number], len(added[number])) for place, number in enumerate(present)]
        )
        assert len(set(names)) == len(names)
        for name, number in zip(names, present, strict=True):
            before = texts[number][: -len(added[number])]
            assert known.setdefault(name, before) == before
            known[name] = texts[number]
        assert len(known) <= 5


def test_two_texts_that_swap_rows_are_told_apart_though_they_end_alike() -> None:
    rows = Batch()
    texts = [[1, number, *[3] * 200] for number in (1, 2)]
    names = rows.find([(place, text, 1) for place, text in enumerate(texts)])
    swapped = [(1 - place, [*text, 4], 1) for place, text in enumerate(texts)]
    assert rows.find(swapped) == names[::-1]
