"""The picture of benchmarks.growth: accepted length over tokens, with the law and its range."""
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PICTURE = Path("docs/growth.svg")


def draw_growth(path: Path, measured: Sequence[dict[str, Any]], laws: Sequence[dict[str, Any]]) -> None:
    """Draw."""
