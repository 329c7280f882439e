"""The page for people, in a real browser."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome, Keys
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select, WebDriverWait

from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.text.tokenizer import TextTokenizer
from services.lookup.web import page
from services.lookup.web.messages import ReleaseEntry
from tests.fakes.browsers import needs_browser, open_browser
from tests.fakes.sites import Running, grant, running_site, serving
from tests.fakes.waiting import SECONDS

EVIL = "<script>document.title='owned'</script>"
TOKEN = "a-token-for-the-page"


@pytest.fixture(scope="module")
def evil_store(small_tokenizer: TextTokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store of texts that would run, were they markup."""
    folder = tmp_path_factory.mktemp("evil")
    texts = [f"say {EVIL} now\n\tand <img src=x onerror=\"document.title='owned'\"> twice" for _ in range(5)]
    (folder / "evil.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    build_rest(RestOptions((folder / "evil.jsonl",), "evil"), small_tokenizer, folder / "store", workers=1)
    return folder / "store"


@pytest.fixture(scope="module")
def service(small_store: Path, small_crest: Path, evil_store: Path) -> Iterator[tuple[Running, str]]:
    stores = {"chat": small_crest, "code": small_store, "evil": evil_store}
    with running_site(stores) as running, serving(running.app()) as address:
        yield running, address


@pytest.fixture(scope="module")
def shared_browser() -> Iterator[Chrome]:
    with open_browser() as browser:
        yield browser


@pytest.fixture
def browser(shared_browser: Chrome, service: tuple[Running, str]) -> Iterator[Chrome]:
    """Return a browser with the page loaded; nothing may appear in its console."""
    shared_browser.get_log("browser")  # type: ignore[no-untyped-call]
    shared_browser.get(service[1])
    wait_for(shared_browser, lambda: shared_browser.find_element(By.ID, "about").text)
    yield shared_browser
    assert [line for line in shared_browser.get_log("browser") if "favicon" not in line["message"]] == []  # type: ignore[no-untyped-call]


def wait_for(browser: Chrome, condition: Callable[[], Any]) -> Any:
    """Wait until something is true, and return it; elements may come and go meanwhile."""
    from selenium.common.exceptions import StaleElementReferenceException

    wait = WebDriverWait(browser, SECONDS, ignored_exceptions=[StaleElementReferenceException])
    return wait.until(lambda _: condition())


def of(browser: Chrome, name: str) -> Any:
    return browser.find_element(By.ID, name)


def choose(browser: Chrome, name: str, value: str) -> None:
    Select(of(browser, name)).select_by_visible_text(value)


def nodes(browser: Chrome) -> list[Any]:
    """Return the nodes of the tree that belongs to what is typed now."""
    return browser.find_elements(By.CSS_SELECTOR, "#tree:not(.stale) .node")


def draft(browser: Chrome, release: str, text: str, budget: int = 16) -> list[Any]:
    """Ask for a draft as a person does, and return its nodes."""
    choose(browser, "release", release)
    of(browser, "budget").clear()
    of(browser, "budget").send_keys(str(budget))
    of(browser, "text").send_keys(text)
    wait_for(browser, lambda: of(browser, "mirror").text.strip())

    def drawn() -> list[Any]:
        found = nodes(browser)
        return found if of(browser, "nodes").text == str(len(found)) else []

    return list(wait_for(browser, drawn))


def asked(browser: Chrome, what: str) -> int:
    """Return how often the page has asked for something, and has been answered."""
    names = "return performance.getEntriesByType('resource').map((entry) => entry.name)"
    return sum(name.endswith(f"/v1/{what}") for name in browser.execute_script(names))


def typed(browser: Chrome) -> str:
    return str(of(browser, "text").get_property("value"))


# --- without a browser -----------------------------------------------------------------------------------------


def test_names_are_escaped_in_the_html() -> None:
    entry = ReleaseEntry(
        name=f'"{EVIL}', kind="rest", build="0", tokenizer={"name": EVIL, "fingerprint": "0"},
        vocab_size=1, strategies=[EVIL], default_strategy=EVIL, target_model=EVIL,
    )  # fmt: skip
    html = page.render([entry], wants_token=False, notice=EVIL)
    assert EVIL not in html
    assert html.count("&lt;script&gt;") >= 4


def test_the_page_needs_nothing_from_elsewhere() -> None:
    html = page.render([], wants_token=False)
    assert re.findall(r'(?:src|href)="(?!/|#)', html) == []
    assert re.search(r"<script(?![^>]* src=)|<style|\son\w+=|\sstyle=", html) is None
    for name, asset in page.ASSETS.items():
        text = asset.data.decode()
        assert "https:" not in text
        assert text.count("http:") == text.count("http://www.w3.org/2000/svg"), name
        assert "innerHTML" not in text
        assert "eval(" not in text


# --- with one --------------------------------------------------------------------------------------------------


@needs_browser
def test_a_draft_is_drawn_while_a_text_is_typed(browser: Chrome, service: tuple[Running, str]) -> None:
    text = "The quick brown fox"
    found = draft(browser, "code", text)
    reply = browser.execute_async_script(
        "const done = arguments[1]; fetch('/v1/draft', {method: 'POST', body: arguments[0],"
        " headers: {'Content-Type': 'application/json'}}).then((r) => r.json()).then(done)",
        json.dumps({"release": "code", "text": text, "budget": 16}),
    )
    [expected] = reply["drafts"]
    labels = [node.get_attribute("aria-label") for node in found]
    assert len(found) == len(expected["nodes"]) == 16
    for label, node in zip(labels, expected["nodes"], strict=True):
        assert label.startswith(f"{node['shown']}, probability ")
    assert of(browser, "match-length").text == f"{expected['match_length']} tokens"
    mark = browser.find_element(By.CSS_SELECTOR, "#mirror mark")
    assert mark.get_property("textContent") == expected["matched_text"]
    assert of(browser, "mirror").get_property("textContent") == text + "\n"
    total = sum(node["prob"] for node in expected["nodes"])
    assert float(of(browser, "expected").text) == pytest.approx(total, abs=0.006)
    for name in ("lookup", "round-trip", "browser"):
        assert re.fullmatch(r"[\d.]+ (µs|ms|s)", of(browser, name).text)
    assert len(browser.find_elements(By.CSS_SELECTOR, "#tree .edge")) == 16
    assert of(browser, "legend").is_displayed()


@needs_browser
def test_boxes_do_not_overlap_and_children_stand_right_of_their_parents(browser: Chrome) -> None:
    found = draft(browser, "code", "if item is", 48)
    boxes = [node.rect for node in found]
    for i, one in enumerate(boxes):
        for other in boxes[i + 1 :]:
            apart = abs(one["y"] - other["y"]) >= 20
            beside = one["x"] + one["width"] <= other["x"] or other["x"] + other["width"] <= one["x"]
            assert apart or beside
    [root] = browser.find_elements(By.CSS_SELECTOR, "#tree .root")
    assert all(box["x"] > root.rect["x"] + root.rect["width"] for box in boxes)


@needs_browser
def test_nothing_that_a_store_holds_is_taken_for_markup(browser: Chrome) -> None:
    title = browser.title
    draft(browser, "evil", "say <", 64)
    browser.execute_script("document.querySelector('#listing').open = true")
    listed = wait_for(browser, lambda: browser.find_element(By.CSS_SELECTOR, "#listing tbody").text)
    assert "script" in listed
    for _ in range(5):  # accept the whole of it
        before = typed(browser)
        nodes(browser)[0].send_keys(Keys.ENTER)
        wait_for(browser, lambda before=before: typed(browser) != before)  # type: ignore[misc]
        wait_for(browser, lambda: nodes(browser) or of(browser, "message").is_displayed())
    ActionChains(browser).move_to_element(nodes(browser)[0]).perform()
    assert "probability" in wait_for(browser, lambda: of(browser, "tip").text)
    assert (
        browser.find_elements(By.CSS_SELECTOR, "#tree img, #tree script, #tip img, #listing img, #mirror img")
        == []
    )
    assert browser.title == title


@needs_browser
def test_blanks_and_line_breaks_can_be_seen(browser: Chrome) -> None:
    found = draft(browser, "evil", "now", 32)
    assert any("\\n" in node.text for node in found)
    found = draft(browser, "evil", "\nand <img src", 8)
    assert "\\n" in browser.find_element(By.CSS_SELECTOR, "#tree .root").text or found


@needs_browser
def test_pointing_at_a_node_tells_its_probability_and_rank(browser: Chrome) -> None:
    found = draft(browser, "code", "The quick brown fox")
    ActionChains(browser).move_to_element(found[2]).perform()
    tip = wait_for(browser, lambda: of(browser, "tip").text)
    assert "rank 3 of 16" in tip
    assert re.search(r"probability [\d.e-]+ %", tip)
    ActionChains(browser).move_to_element(of(browser, "draft-title")).perform()
    wait_for(browser, lambda: not of(browser, "tip").is_displayed())


@needs_browser
def test_clicking_a_node_goes_on_from_there(browser: Chrome) -> None:
    text = "The quick brown"
    found = draft(browser, "code", text)
    label = found[0].get_attribute("aria-label").split(", probability")[0]
    found[0].click()
    wait_for(browser, lambda: len(typed(browser)) > len(text))
    assert typed(browser) == text + label.replace("␣", " ")
    wait_for(browser, lambda: nodes(browser))
    assert browser.switch_to.active_element == of(browser, "text")


@needs_browser
def test_an_answer_to_what_was_typed_before_is_not_shown(browser: Chrome) -> None:
    """Hold up every answer until something is typed."""
    choose(browser, "release", "code")
    browser.execute_script(
        "const real = fetch; window.held = 0; window.fetch = async (...question) => {"
        " const answer = await real(...question); if (!question[0].endsWith('/draft')) return answer;"
        " held++; await new Promise((go) => addEventListener('input', go, { once: true })); return answer; }"
    )
    for count, key in enumerate("To", 1):
        of(browser, "text").send_keys(key)
        wait_for(browser, lambda: browser.execute_script("return held") == count)  # noqa: B023
    assert not of(browser, "facts").is_displayed()


@needs_browser
def test_the_keyboard_is_enough(browser: Chrome) -> None:
    text = "The quick brown"
    draft(browser, "code", text)
    of(browser, "text").send_keys(Keys.CONTROL, Keys.ENTER)
    wait_for(browser, lambda: nodes(browser))

    def active() -> str | None:
        return browser.switch_to.active_element.get_attribute("data-index")

    of(browser, "text").send_keys(Keys.TAB)
    assert active() == "0"
    for key, moves in (
        (Keys.ARROW_RIGHT, True),
        (Keys.ARROW_LEFT, True),
        (Keys.ARROW_DOWN, True),
        (Keys.ARROW_UP, True),
    ):
        before = active()
        browser.switch_to.active_element.send_keys(key)
        assert (active() != before) is moves
    assert active() == "0"
    assert of(browser, "tip").is_displayed()  # what pointing tells, the keyboard tells too
    browser.switch_to.active_element.send_keys(Keys.ENTER)
    wait_for(browser, lambda: len(typed(browser)) > len(text))


@needs_browser
def test_release_and_strategy_can_be_picked(browser: Chrome) -> None:
    names = [option.text for option in Select(of(browser, "release")).options]
    assert names == ["chat", "code", "evil"]
    draft(browser, "chat", "The quick brown")
    assert of(browser, "about").text.startswith("CREST on lmdb")
    choose(browser, "release", "code")
    wait_for(browser, lambda: of(browser, "about").text.startswith("REST"))
    by_default = [node.text for node in wait_for(browser, lambda: nodes(browser))]
    choose(browser, "strategy", "longest")
    wait_for(browser, lambda: [node.text for node in nodes(browser)] not in ([], by_default))


@needs_browser
def test_what_cannot_be_drafted_is_said(browser: Chrome) -> None:
    draft(browser, "code", "The quick brown")
    of(browser, "budget").clear()
    of(browser, "budget").send_keys("0")
    wait_for(browser, lambda: "0 nodes" in of(browser, "message").text)
    of(browser, "budget").clear()
    of(browser, "budget").send_keys("9999")
    wait_for(browser, lambda: "0 to 256" in of(browser, "message").text)
    of(browser, "budget").clear()
    of(browser, "budget").send_keys("8")
    wait_for(browser, lambda: nodes(browser))
    of(browser, "text").send_keys(Keys.CONTROL, "a", Keys.NULL, Keys.DELETE)
    wait_for(browser, lambda: "Type a text" in of(browser, "message").text)
    assert not of(browser, "tree").is_displayed()


@needs_browser
def test_figures_are_live(browser: Chrome, service: tuple[Running, str]) -> None:
    running, _ = service
    wait_for(browser, lambda: of(browser, "state").text == "ready")

    def rows() -> dict[str, str]:
        """Return the queries since the start by name of the release; at once, for the page renews the table."""
        lines = "return [...document.querySelectorAll('#by-release tbody tr')].map((row) => row.innerText.split('\\t'))"
        return {cells[0].strip(): cells[8].strip() for cells in browser.execute_script(lines)}

    before = wait_for(browser, lambda: rows().get("chat"))
    draft(browser, "chat", "The quick brown")
    wait_for(browser, lambda: rows()["chat"] != before)

    def measured() -> Any:
        """Ask again, for figures are those of the last seconds, and tell whether the page has them."""
        draft(browser, "chat", " fox")
        return re.fullmatch(r"[\d.]+ (µs|ms)", of(browser, "p99").text)

    wait_for(browser, measured)
    wait_for(
        browser, lambda: browser.find_element(By.CSS_SELECTOR, "#curve path:last-child").get_attribute("d")
    )
    running.workers.figures.slot(0).release("chat").swapped()
    wait_for(browser, lambda: of(browser, "swaps").text == "1")


@needs_browser
def test_the_page_survives_workers_that_are_away(browser: Chrome, service: tuple[Running, str]) -> None:
    running, _ = service
    draft(browser, "code", "The quick brown")
    running.workers.stop()
    try:
        of(browser, "text").send_keys(" fox")
        wait_for(browser, lambda: "no worker" in of(browser, "message").text)
    finally:
        running.workers.start()
    wait_for(browser, lambda: nodes(browser))  # by itself: the page tries again
    browser.get_log("browser")  # type: ignore[no-untyped-call]


@needs_browser
def test_nothing_is_renewed_where_a_service_returns_with_what_it_had(
    browser: Chrome, service: tuple[Running, str]
) -> None:
    running, _ = service
    [first, *_] = draft(browser, "code", "The quick brown")
    before = asked(browser, "releases")
    offered = Select(of(browser, "release")).options + Select(of(browser, "strategy")).options
    running.workers.stop()
    try:
        wait_for(browser, lambda: of(browser, "state").text == "not ready")
    finally:
        running.workers.start()
    wait_for(browser, lambda: of(browser, "state").text == "ready" and asked(browser, "releases") > before)
    assert first.is_displayed()
    assert sum(option.is_selected() for option in offered) == 2
    browser.get_log("browser")  # type: ignore[no-untyped-call]


@needs_browser
@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_hangs_over_the_edge(browser: Chrome, width: int) -> None:
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        draft(browser, "code", "The quick brown fox jumps", 64)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    finally:
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size | {"width": 1280, "height": 900})


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_on_every_step_of_the_scale(browser: Chrome, scheme: str) -> None:
    """Contrast as the WCAG define it, 4.5 and more."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    pairs = browser.execute_script(
        "return [...document.querySelectorAll('#legend li')].map((item) => {"
        " const style = getComputedStyle(item); return [style.color, style.backgroundColor]; })"
    )
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{**features[0], "value": "light"}]})
    assert len(pairs) == 8
    for ink, ground in pairs:
        lighter, darker = sorted((luminance(ink), luminance(ground)), reverse=True)
        assert (lighter + 0.05) / (darker + 0.05) >= 4.5, (ink, ground)


def luminance(color: str) -> float:
    """Return the relative luminance of `rgb(...)`."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return float(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])


@needs_browser
def test_a_service_that_asks_for_a_token(
    shared_browser: Chrome, small_crest: Path, small_store: Path
) -> None:
    browser = shared_browser
    tokens = grant("person", TOKEN, "chat")
    stores = {"chat": small_crest, "code": small_store}
    with running_site(stores, tokens) as running, serving(running.app()) as address:
        browser.get(address)
        wait_for(browser, lambda: of(browser, "state").text == "token needed")
        assert Select(of(browser, "release")).options == []
        of(browser, "token").send_keys("wrong", Keys.ENTER)
        wait_for(browser, lambda: "not known" in of(browser, "notice").text)
        of(browser, "token").send_keys(TOKEN, Keys.ENTER)
        wait_for(browser, lambda: of(browser, "about").text)
        assert not of(browser, "token-form").is_displayed()
        assert [option.text for option in Select(of(browser, "release")).options] == ["chat"]
        assert draft(browser, "chat", "The quick brown")
        browser.refresh()
        wait_for(browser, lambda: of(browser, "about").text)  # kept in this tab
        assert TOKEN not in browser.current_url
        of(browser, "forget").click()
        wait_for(browser, lambda: of(browser, "token-form").is_displayed())
    browser.get_log("browser")  # type: ignore[no-untyped-call]
