from hypothesis import given
from hypothesis import strategies as st

from services.worker.answers import StopStrings


def shown(stops: list[str], texts: list[str]) -> tuple[str, bool]:
    """Return what can be seen of texts, and whether they were ended."""
    found = StopStrings(stops)
    text = "".join(map(found.push, texts)) + found.finish()
    return text, found.found()


@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    cut=st.integers(1, 5),
)
def test_the_earliest_stop_string_ends_a_text(text: str, stops: list[str], cut: int) -> None:
    """However a text is cut, nothing of the stop string that completes first is seen."""
    seen, found = shown(stops, [text[i : i + cut] for i in range(0, len(text), cut)])
    ends = [*range(cut, len(text), cut), len(text)]
    whole = next((text[:end] for end in ends if any(stop in text[:end] for stop in stops)), None)
    assert found == (whole is not None)
    assert seen == (
        text if whole is None else whole[: min(whole.find(stop) for stop in stops if stop in whole)]
    )
