from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftstore.errors import CorpusError
from draftstore.text import fragments
from draftstore.text.fragments import Finder, Fragment

LETTERS = "aAb\0éÉßS😀\ud800İ"


@given(
    text=st.text(LETTERS, max_size=40),
    wanted=st.lists(st.tuples(st.text(LETTERS, min_size=1, max_size=9), st.booleans()), max_size=5),
    window=st.integers(1, 20),
)
def test_fragments_are_found_where_the_text_contains_one(
    text: str, wanted: list[tuple[str, bool]], window: int
) -> None:
    expected = any(
        part.casefold() in text.casefold() if ignore_case else part in text for part, ignore_case in wanted
    )
    with patch.object(fragments, "WINDOW", window):
        found = Finder(Fragment.of(part, ignore_case=ignore_case) for part, ignore_case in wanted)(text)
    assert found == expected


def test_nothing_of_the_text_is_kept() -> None:
    assert "secret" not in repr(Fragment.of("a secret name"))


def test_an_empty_text_is_refused() -> None:
    with pytest.raises(CorpusError, match="empty text"):
        Fragment.of("")
