"""The texts in the rows of an engine's batch: one per row, preserved through every move."""

from collections.abc import Sequence
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftstore.engines.texts import TAIL, Rows, Texts
from draftstore.errors import EngineError

Row = tuple[int, list[int], int]
"""The place, the ids, and the number of new ones."""


class Batch:
    """Rows whose texts grow as those of a proposer; each has a name that no other ever gets."""

    def __init__(self) -> None:
        self.texts = Texts()
        self.rows = Rows(self.texts, self._start)
        self.names: dict[int, int] = {}
        self._new = count()

    def _start(self, ids: NDArray[np.int32]) -> int:
        slot = next(slot for slot in count() if slot not in self.names)
        self.texts.put(slot, ids)
        self.names[slot] = next(self._new)
        return slot

    def find(self, rows: Sequence[Row]) -> list[int]:
        """Return the names of the texts in rows, in the order of their places, and go on with their ids."""
        table = np.full((8, max((len(ids) for _, ids, _ in rows), default=0) + 2), -5, np.int32)
        sizes, counts = np.zeros(8, np.int32), np.zeros(8, np.int64)
        for place, ids, new in rows:
            table[place, : len(ids)], sizes[place], counts[place] = ids, len(ids), new
        found, lengths, slots, new_ids, stops = self.rows.find(table, sizes, counts)
        assert found.tolist() == sorted(place for place, _, _ in rows)
        none = np.zeros((1, 3), np.int64)
        self.texts.follow(slots, new_ids, stops, np.zeros(len(slots), np.int64), 1, 1, none)
        for slot, (_, whole, _) in zip(slots.tolist(), sorted(rows), strict=True):
            assert self.texts.ids(slot).tolist() == whole
        assert lengths.tolist() == [len(whole) for _, whole, _ in sorted(rows)]
        return [self.names[slot] for slot in slots.tolist()]

    def forget(self, slot: int) -> None:
        self.texts.drop(slot)
        del self.names[slot]


def test_a_text_that_was_forgotten_gets_another_name() -> None:
    rows = Batch()
    (name,) = rows.find([(0, [1, 2], 1)])
    rows.forget(0)
    assert rows.find([(0, [1, 2, 3], 1)]) != [name]


def test_a_text_that_went_on_unseen_or_changed_is_another() -> None:
    rows = Batch()
    (name,) = rows.find([(2, [1, 2], 1)])
    assert rows.find([(2, [1, 2, 3, 4, 5], 1)]) != [name]
    assert rows.find([(2, [1, 9, 3], 1)]) != [name]
    assert rows.find([(3, [1, 2, 3], 1)]) == [name]


def test_rows_that_end_outside_their_table_are_refused() -> None:
    table = np.ones((2, 4), np.int32)
    for sizes, counts in (([5, 2], [1, 1]), ([2], [0, 1]), ([2, 2, 2], [0, 0, 1]), ([1], [2]), ([-1], [1])):
        with pytest.raises(EngineError, match="outside the table"):
            Batch().rows.find(table, np.array(sizes), np.array(counts))


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
