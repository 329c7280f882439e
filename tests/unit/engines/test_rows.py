"""The texts in the rows of an engine's batch: one per row, preserved through every move."""

from collections.abc import Hashable, Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from draftstore.drafting.growing import GrowingIds
from draftstore.engines.rows import Row, Rows


class Batch:
    """Rows whose texts grow as those of a proposer."""

    def __init__(self) -> None:
        self.texts: dict[Hashable, GrowingIds] = {}
        self.rows = Rows(self.texts)

    def find(self, rows: Sequence[Row]) -> list[Hashable]:
        names = self.rows.find(rows)
        for name, each in zip(names, rows, strict=True):
            self.texts.setdefault(name, GrowingIds()).put(0, each.ids)
        return names


def row(place: int, ids: list[int], new: int = 1) -> Row:
    return Row(place, np.array(ids, np.int32), new)


def test_a_text_that_was_forgotten_gets_another_name() -> None:
    rows = Batch()
    (name,) = rows.find([row(0, [1, 2])])
    rows.texts.clear()
    assert rows.find([row(0, [1, 2, 3])]) != [name]


def test_a_text_that_went_on_unseen_is_found_where_it_was() -> None:
    rows = Batch()
    (name,) = rows.find([row(2, [1, 2])])
    assert rows.find([row(2, [1, 2, 3, 4, 5])]) == [name]
    assert rows.find([row(2, [9, 2, 3, 4, 5, 6])]) != [name]


moves = st.lists(
    st.tuples(
        st.permutations(range(5)), st.lists(st.lists(st.integers(1, 2), max_size=3), min_size=5, max_size=5)
    ),
    max_size=32,
)


@given(moves)
def test_every_text_keeps_its_name_through_all_moves(steps: list[tuple[list[int], list[list[int]]]]) -> None:
    rows = Batch()
    texts = [[number + 10, 1] for number in range(5)]
    names = dict(enumerate(rows.find([row(number, text) for number, text in enumerate(texts)])))
    for order, added in steps:
        present = [number for number in order if added[number]]
        for number in present:
            texts[number] = texts[number] + added[number]
        given = [row(place, texts[number], len(added[number])) for place, number in enumerate(present)]
        assert rows.find(given) == [names[number] for number in present]


@given(moves)
def test_no_two_rows_have_one_name(steps: list[tuple[list[int], list[list[int]]]]) -> None:
    rows = Batch()
    texts, known = [[1]] * 5, dict[Hashable, list[int]]()
    for order, added in steps:
        present = [number for number in order if added[number]]
        for number in present:
            texts[number] = texts[number] + added[number]
        given = [row(place, texts[number], len(added[number])) for place, number in enumerate(present)]
        names = rows.find(given)
        assert len(set(names)) == len(names)
        for name, number in zip(names, present, strict=True):
            before = texts[number][: -len(added[number])]
            assert known.setdefault(name, before) == before
            known[name] = texts[number]
        assert len(known) <= 5
