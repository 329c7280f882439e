import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.texts import StopStrings


def shown(stops: list[str], texts: list[str]) -> tuple[str, bool]:
    """Return what can be seen of texts, and whether they were ended."""
    found = StopStrings(stops)
    text = "".join(map(found.push, texts)) + found.finish()
    return text, found.found()


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        ([], "all of it", "all of it"),
        (["END"], "some END more", "some "),
        (["END"], "some EN", "some EN"),
        (["END"], "EEND", "E"),
        (["aab"], "aaab", "a"),
        (["b", "abc"], "xabc", "xa"),
        (["\n\n", "x"], "one\ntwo\n\nthree", "one\ntwo"),
        (["東京"], "in 東東京", "in 東"),
        (["END"], "END", ""),
    ],
)
def test_stop_strings(stops: list[str], text: str, expected: str) -> None:
    assert shown(stops, list(text)) == (expected, expected != text)


def test_nothing_of_a_stop_string_is_seen_while_it_may_come() -> None:
    stops = StopStrings(["</s>", "User:"])
    assert [stops.push(text) for text in ("a<", "/", "b Us", "er", ":", "more")] == [
        "a",
        "",
        "</b ",
        "",
        "",
        "",
    ]
    assert stops.found()


@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    cut=st.integers(1, 5),
)
def test_the_earliest_stop_string_ends_a_text(text: str, stops: list[str], cut: int) -> None:
    """However a text is cut, nothing of the stop string that completes first is seen."""
    seen, found = shown(stops, [text[i : i + cut] for i in range(0, len(text), cut)])
    assert found == any(stop in text for stop in stops)
    assert text.startswith(seen)
    assert not any(stop in seen for stop in stops)
    if not found:
        assert seen == text
