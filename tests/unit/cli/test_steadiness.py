"""A run says that its times mean little if the machine was loaded, or equal passes took different times."""

from hypothesis import given
from hypothesis import strategies as st

from draftstore.cli.steadiness import Steadiness


@given(st.integers(1, 10**9), st.integers(0, 30), st.integers(0, 30))
def test_the_quartiles_of_the_passes_decide(took: int, steady: int, slow: int) -> None:
    found = Steadiness.of(0.0, [took] * (3 * steady + 4) + [10 * took] * min(slow, steady))
    assert (found.spread, found.doubt) == (0, "")
    assert "differ by 900 %" in Steadiness.of(0.0, [took] * (steady + 2) + [10 * took] * (steady + 2)).doubt


@given(st.floats(0, 1000))
def test_a_load_above_the_cores_counts(load: float) -> None:
    found = Steadiness.of(load, [])
    assert bool(found.doubt) == (found.load_average > found.cores)
