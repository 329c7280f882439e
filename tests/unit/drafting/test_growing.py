import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from draftstore.drafting.growing import GrowingIds

ids = st.lists(st.integers(0, 1), max_size=400)


@given(ids, st.lists(st.tuples(st.integers(0, 500), ids)))
def test_a_text_is_what_was_put(begin: list[int], changes: list[tuple[int, list[int]]]) -> None:
    text, wanted = GrowingIds(begin), begin
    for start, new in changes:
        before, view = wanted, text.ids
        wanted = [*before[: min(start, len(before))], *new]
        grew = text.put(min(start, len(before)), new)
        assert text.ids.tolist() == wanted
        assert len(text) == len(wanted)
        assert grew == (wanted[: len(before)] == before)
        if grew:
            assert view.tolist() == before


@given(ids, ids, st.none() | st.integers(1, 9))
def test_the_beginning_of_a_text_is_known(known: list[int], new: list[int], last: int | None) -> None:
    text = GrowingIds(known)
    assert text.begins(np.array([*known, *new]), last)
    other = [*new, *known, 2]
    first = 0 if last is None else max(0, len(known) - last)
    same = other[first : len(known)] == known[first:]
    assert text.begins(np.array(other), last) == same
    assert not known or not text.begins(np.array(known[:-1]), last)
