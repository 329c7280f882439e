import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftstore.errors import CorpusError
from draftstore.text.fragments import Fragment

LETTERS = st.text("ab\0é😀", max_size=12)


@given(text=LETTERS, fragment=st.text("ab\0é😀", min_size=1, max_size=4))
def test_a_fragment_is_found_where_the_text_contains_it(text: str, fragment: str) -> None:
    assert Fragment.of(fragment).occurs_in(text) == (fragment in text)


def test_nothing_of_the_text_is_kept() -> None:
    assert "secret" not in repr(Fragment.of("a secret name"))
    assert Fragment.of("a").key != Fragment.of("b").key


def test_an_empty_text_is_refused() -> None:
    with pytest.raises(CorpusError, match="empty text"):
        Fragment.of("")
