"""The pages as a site: links and pictures lead somewhere in it, and nothing is loaded from elsewhere."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from tests import ROOT
from tests.fakes.browsers import needs_browser, running_browser
from tests.fakes.waiting import SECONDS
from tests.journey.pages import README

LINK = re.compile(r'<(\w+)[^>]* (?:src|href)="?([^" >]+)')


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site without the scripts that `make site` takes from npm; any warning fails."""
    folder = tmp_path_factory.mktemp("site")
    without: dict[str, Any] = {"plugins": ["search"], "extra": {}, "extra_javascript": []}
    build(load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(folder), **without))
    return folder


def test_whatever_a_page_refers_to_is_in_the_site(site: Path) -> None:
    pages = [path for path in site.rglob("*.html") if path.name != "404.html"]
    links = [(page, *found) for page in pages for found in LINK.findall(page.read_text(encoding="utf-8"))]
    foreign = {(tag, link) for _, tag, link in links if link.startswith(("http", "//"))}
    assert {tag for tag, _ in foreign} == {"a"}
    local = {page.parent / unquote(link.partition("#")[0]) for page, _, link in links if ":" not in link}
    assert len(local) > 100
    assert not [path for path in local if not path.exists()]
    assert not re.search(r"url\(.?(https?:|//)", "".join(path.read_text() for path in site.rglob("*.css")))


def test_each_part_of_the_site_has_the_order_of_the_readme() -> None:
    order = re.findall(r"\]\(([\w/-]+\.md)\)", README.partition("## Read on")[2])
    for part in (load_config(str(ROOT / "mkdocs.yml")).nav or [])[1:]:
        [pages] = part.values()
        assert pages == sorted(pages, key=order.index)


@pytest.mark.slow
@needs_browser
@pytest.mark.skipif(not shutil.which("npm"), reason="no npm, from which make site takes what draws diagrams")
def test_diagrams_and_search_need_neither_a_server_nor_a_network(tmp_path: Path) -> None:
    subprocess.run(["make", "build/scripts/.done"], cwd=ROOT, check=True)
    build(load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(tmp_path / "site")))
    with running_browser(tmp_path / "profile") as browser:
        wait = WebDriverWait(browser, SECONDS)
        browser.get((tmp_path / "site/index.html").as_uri() + "?q=suffix")
        wait.until(lambda _: browser.find_elements(By.CSS_SELECTOR, "div.mermaid"))
        wait.until(lambda _: browser.find_elements(By.CSS_SELECTOR, ".md-search-result__item"))
        assert browser.get_log("browser") == []  # type: ignore[no-untyped-call]
        loaded = browser.execute_script(
            "return performance.getEntriesByType('resource').map(entry => entry.name)"
        )
    assert not [url for url in loaded if url.startswith("http")]
