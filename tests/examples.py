"""How many examples property tests draw."""

from hypothesis import settings


def examples(number: int) -> settings:
    """Draw so many examples where a profile draws a hundred; see `tests.conftest` for the profiles."""
    return settings(max_examples=number * settings().max_examples // 100)
