"""Every page is read in order, its links resolve, and the modules and tests that it names exist."""

import re
from pkgutil import resolve_name

import pytest

from tests import ROOT
from tests.journey.pages import PAGES, anchors_of, links_of, read_page

ATTACKS = "tests/attacks.md"
LINKING = (*PAGES, "CONTRIBUTING.md", "CHANGELOG.md", ATTACKS)


def test_every_page_has_its_place_in_the_reading_order() -> None:
    assert sorted(PAGES[1:]) == sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))


@pytest.mark.parametrize("name", LINKING)
def test_every_link_of_a_page_leads_somewhere(name: str) -> None:
    missing = []
    for link in links_of(read_page(name).text):
        file, _, anchor = link.partition("#")
        path = (ROOT / name).parent / file if file else ROOT / name
        if not path.exists() or (anchor and anchor not in anchors_of(path.read_text(encoding="utf-8"))):
            missing.append(link)
    assert not missing


@pytest.mark.parametrize("name", [*PAGES, "CHANGELOG.md"])
def test_every_module_that_a_page_names_is_there(name: str) -> None:
    text = read_page(name).text
    if name == "CHANGELOG.md":  # the first column of its tables is what was before
        text = re.sub(r"^\|[^|]+\|", "|", text, flags=re.MULTILINE)
    missing = []
    for named in re.findall(r"`(draftstore(?:\.\w+)+)`", text):
        try:
            resolve_name(named)
        except (ImportError, AttributeError):
            missing.append(named)
    assert not missing


def test_every_test_that_the_pages_name_is_there() -> None:
    tests = "".join(
        f"{path.name}\n{path.read_text(encoding='utf-8')}" for path in ROOT.glob("tests/**/test_*.py")
    )
    for name in LINKING:
        for file, _, test in re.findall(r"`(?:tests/\S+/)?(test_\w+\.py)(::(\w+))?`", read_page(name).text):
            assert f"{file}\n" in tests, f"{name}: {file}"
            assert not test or re.search(rf"(def|class) {test}\b", tests), f"{name}: {test}"


def test_every_attack_names_a_test() -> None:
    rows = [line for line in read_page(ATTACKS).text.splitlines() if line.startswith("| ")]
    attacks = [row for row in rows if not row.startswith("| attack ") and "---" not in row]
    assert len(attacks) > 30
    for row in attacks:
        assert "test_" in row or row.endswith("| the same |"), row
