"""Take the picture of the page that the documentation shows.

    python -m tests.screenshot http://127.0.0.1:7780 docs/page.png --text "..."

Needs a running service (`draftstore serve`), and Chromium with its driver.
"""

import argparse
from pathlib import Path

from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select, WebDriverWait

from tests.fakes.browsers import open_browser
from tests.fakes.waiting import SECONDS

TEXT = "USER: Can you help me with my homework? ASSISTANT: Of course! I'd be happy"


def take(
    address: str, out: Path, *, text: str = TEXT, release: str = "", width: int = 1240, height: int = 0,
    dark: bool = False, budget: int = 24,
) -> None:  # fmt: skip
    """Open the page, type a text, wait for its draft, and write a PNG.

    Args:
        address: of the service.
        out: the file to write.
        text: what is typed.
        release: what is asked; the first one by default.
        width: of the window, in pixels.
        height: of the window; 0 takes the whole page.
        dark: whether the person likes dark pages.
        budget: most nodes.
    """
    with open_browser(width, height or 900, dark=dark) as browser:
        browser.get(address)
        wait = WebDriverWait(browser, SECONDS)
        wait.until(lambda b: b.find_element(By.ID, "about").text)
        if release:
            Select(browser.find_element(By.ID, "release")).select_by_visible_text(release)
        browser.execute_script("document.getElementById('budget').value = arguments[0]", budget)
        browser.find_element(By.ID, "text").send_keys(text)
        wait.until(lambda b: b.find_elements(By.CSS_SELECTOR, "#tree:not(.stale) .node"))
        wait.until(lambda b: b.find_element(By.CSS_SELECTOR, "#curve path").get_attribute("d"))
        if not height:
            height = int(browser.execute_script("return document.documentElement.scrollHeight"))
            size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        assert browser.save_screenshot(str(out))


def main() -> None:
    """Take a picture as the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("address")
    parser.add_argument("out", type=Path)
    parser.add_argument("--text", default=TEXT)
    parser.add_argument("--release", default="")
    parser.add_argument("--width", type=int, default=1240)
    parser.add_argument("--height", type=int, default=0)
    parser.add_argument("--budget", type=int, default=24)
    parser.add_argument("--dark", action="store_true")
    given = parser.parse_args()
    take(
        given.address, given.out, text=given.text, release=given.release, width=given.width,
        height=given.height, dark=given.dark, budget=given.budget,
    )  # fmt: skip


if __name__ == "__main__":
    main()
