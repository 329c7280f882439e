"""The page on security names tests that exist."""

import re

import pytest

from tests import ROOT

PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(test_\w+\.py)(?:::(\w+))?`", PAGE)))


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_a_promise_has_its_test(file: str, name: str) -> None:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob(file)]
    assert texts
    assert not name or any(re.search(rf"^ *(?:async )?(?:def|class) {name}\b", text, re.M) for text in texts)


def test_every_row_has_a_test() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and "---" not in line]
    attacks = [row for row in rows if not row.startswith("| attack ")]
    assert len(attacks) > 30
    for row in attacks:
        assert "test_" in row or row.endswith("| the same |"), row
