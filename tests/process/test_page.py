"""The web page in a real browser."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver import Chrome, Keys
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select, WebDriverWait

from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.text.tokenizer import TextTokenizer
from services.lookup.app import PAGE, render_page
from tests.fakes.browsers import needs_browser, running_browser
from tests.fakes.sites import Running, browse, grant, running_site, serving
from tests.fakes.waiting import SECONDS

pytestmark = [needs_browser, pytest.mark.slow]
EVIL = "say <script>document.title='owned'</script> now\n\tand <img src=x onerror=\"document.title='owned'\"> twice"
TEXT = "The quick brown"


@pytest.fixture(scope="module")
def evil_store(small_tokenizer: TextTokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evil")
    (folder / "evil.jsonl").write_text(5 * (json.dumps({"text": EVIL}) + "\n"))
    options = RestOptions(corpus=(folder / "evil.jsonl",), name="evil")
    return build_rest(options, small_tokenizer, folder / "store", workers=1).path


@pytest.fixture(scope="module")
def site(small_store: Path, small_crest: Path, evil_store: Path) -> Iterator[Running]:
    with running_site({"chat": small_crest, "code": small_store, "evil": evil_store}) as running:
        yield running


@pytest.fixture(scope="module")
def address(site: Running) -> Iterator[str]:
    with serving(site.app()) as address:
        yield address


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    with running_browser(tmp_path_factory.mktemp("profile")) as chrome:
        yield chrome


@pytest.fixture
def browser(chrome: Chrome, address: str) -> Iterator[Chrome]:
    """Return a browser with the page loaded; nothing may appear in its console."""
    chrome.get("about:blank")
    chrome.get_log("browser")  # type: ignore[no-untyped-call]
    chrome.get(address)
    wait_for(chrome, lambda: of(chrome, "about").text)
    yield chrome
    assert chrome.get_log("browser") == []  # type: ignore[no-untyped-call]


def wait_for(browser: Chrome, condition: Callable[[], Any]) -> Any:
    """Wait until something is true, and return it; elements may come and go meanwhile."""
    wait = WebDriverWait(browser, SECONDS, ignored_exceptions=[StaleElementReferenceException])
    return wait.until(lambda _: condition())


def of(browser: Chrome, name: str) -> Any:
    return browser.find_element(By.ID, name)


def choose(browser: Chrome, name: str, value: str) -> None:
    Select(of(browser, name)).select_by_visible_text(value)


def fill(browser: Chrome, name: str, value: object) -> None:
    of(browser, name).clear()
    of(browser, name).send_keys(str(value))


def draft(browser: Chrome, release: str, text: str, budget: int = 16) -> list[Any]:
    """Ask for a draft as a person does, and return its nodes."""
    choose(browser, "release", release)
    fill(browser, "budget", budget)
    of(browser, "text").send_keys(text)
    return nodes(browser)


def nodes(browser: Chrome) -> list[Any]:
    """Return the nodes of the tree once it belongs to what is typed."""

    def drawn() -> list[Any]:
        found = browser.find_elements(By.CSS_SELECTOR, "#tree:not(.stale) .node")
        return found if of(browser, "nodes").text == str(len(found)) else []

    return list(wait_for(browser, drawn))


def test_the_page_needs_nothing_from_elsewhere() -> None:
    html = render_page(256)
    assert re.search(r'{{|(src|href)="(?!/|#)|<script(?![^>]* src=)|<style|\son\w+=|\sstyle=', html) is None
    for path in (PAGE / "static").iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert re.search(r"https?:|innerHTML|eval\(", text) is None, path


def test_a_draft_is_drawn_while_a_text_is_typed(browser: Chrome, address: str) -> None:
    found = draft(browser, "code", TEXT)
    with browse(address) as client:
        reply = client.post("/v1/draft", json={"release": "code", "text": TEXT, "budget": 16}).json()
    [expected] = reply["drafts"]
    assert len(found) == 16
    for node, drawn in zip(expected["nodes"], found, strict=True):
        assert drawn.get_attribute("aria-label").startswith(f"{node['shown']}, probability ")
    mark = browser.find_element(By.CSS_SELECTOR, "#mirror mark")
    assert mark.get_property("textContent") == expected["matched_text"]
    total = sum(node["prob"] for node in expected["nodes"])
    assert float(of(browser, "expected").text) == pytest.approx(total, abs=0.006)


def test_nothing_that_a_store_holds_is_taken_for_markup(browser: Chrome) -> None:
    found = draft(browser, "evil", "say <", 64)
    browser.execute_script("document.querySelector('#listing').open = true")
    assert "script" in browser.find_element(By.CSS_SELECTOR, "#listing tbody").text
    ActionChains(browser).move_to_element(found[0]).perform()
    wait_for(browser, lambda: of(browser, "tip").text)
    assert browser.find_elements(By.CSS_SELECTOR, "main img, main script, #tip img") == []
    assert browser.title != "owned"


def test_a_node_is_explained_and_chosen_by_pointer_or_keyboard(browser: Chrome) -> None:
    found = draft(browser, "code", TEXT)
    ActionChains(browser).move_to_element(found[2]).perform()
    assert "rank 3 of 16" in wait_for(browser, lambda: of(browser, "tip").text)
    chosen = TEXT + found[0].get_attribute("aria-label").split(", probability")[0].replace("␣", " ")
    found[0].click()
    wait_for(browser, lambda: of(browser, "text").get_property("value") == chosen)
    nodes(browser)
    of(browser, "text").send_keys(Keys.TAB)
    for key in (Keys.ARROW_RIGHT, Keys.ARROW_LEFT, Keys.ARROW_DOWN, Keys.ARROW_UP):
        before = browser.switch_to.active_element
        before.send_keys(key)
        assert browser.switch_to.active_element != before
    assert "rank 1 of 16" in of(browser, "tip").text
    browser.switch_to.active_element.send_keys(Keys.ENTER)
    wait_for(browser, lambda: of(browser, "text").get_property("value") > chosen)


def test_release_strategy_and_limits_can_be_chosen(browser: Chrome) -> None:
    draft(browser, "chat", TEXT)
    assert of(browser, "about").text.startswith("CREST on lmdb")
    choose(browser, "release", "code")
    wait_for(browser, lambda: of(browser, "about").text.startswith("REST"))
    before = [node.text for node in nodes(browser)]
    choose(browser, "strategy", "longest")
    wait_for(browser, lambda: [node.text for node in nodes(browser)] != before)
    for budget, words in ((0, "0 nodes"), (9999, "0 to 256")):
        fill(browser, "budget", budget)
        wait_for(browser, lambda: words in of(browser, "message").text)  # noqa: B023


def test_figures_are_live(browser: Chrome, site: Running) -> None:
    draft(browser, "chat", TEXT)
    site.metrics.of("chat").counts["swaps"] += 1
    site.site.live_figures.sample()
    wait_for(browser, lambda: of(browser, "swaps").text == "1")
    assert re.fullmatch(r"[\d.]+ (µs|ms)", of(browser, "p99").text)
    assert re.search(r"^chat .* 1 \d+ 0$", of(browser, "by-release").text, re.MULTILINE)


def test_the_page_waits_for_a_service_that_is_away(chrome: Chrome, site: Running) -> None:
    with serving(site.app()) as address:
        chrome.get(address)
        wait_for(chrome, lambda: of(chrome, "about").text)
        [first, *_] = draft(chrome, "code", TEXT)
    wait_for(chrome, lambda: of(chrome, "state").text == "away")
    with serving(site.app(), port=int(address.rsplit(":", 1)[1])):
        wait_for(chrome, lambda: of(chrome, "state").text == "ready")
        assert first.is_displayed()  # the same build: what is drawn still holds


def test_a_service_that_needs_a_token(chrome: Chrome, small_crest: Path) -> None:
    with running_site({"chat": small_crest}, grant("a", "secret", "*")) as own, serving(own.app()) as address:
        chrome.get(address)
        wait_for(chrome, lambda: of(chrome, "state").text == "token needed")
        of(chrome, "token").send_keys("wrong", Keys.ENTER)
        wait_for(chrome, lambda: "unknown" in of(chrome, "notice").text)
        of(chrome, "token").send_keys("secret", Keys.ENTER)
        wait_for(chrome, lambda: of(chrome, "about").text)
        chrome.refresh()
        wait_for(chrome, lambda: of(chrome, "about").text)  # kept in this tab
        of(chrome, "forget").click()
        wait_for(chrome, lambda: of(chrome, "token-form").is_displayed())
