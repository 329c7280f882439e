"""The page on the architecture names modules that exist."""

import re
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
PAGE = CHECKOUT / "docs" / "architecture.md"


def test_every_module_of_the_page_exists() -> None:
    paths = re.findall(r"`([\w/]+(?:\.py|/))`", PAGE.read_text())
    assert len(paths) > 50
    missing = [
        path
        for path in paths
        if not any((root / path).exists() for root in (CHECKOUT, CHECKOUT / "draftstore"))
    ]
    assert missing == []


def test_the_page_is_short() -> None:
    assert len(PAGE.read_text().splitlines()) <= 120
