"""A real Chromium without a window, for tests of the page and for its picture."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-background-timer-throttling",
    "--disable-backgrounding-occluded-windows",
    "--disable-renderer-backgrounding",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--lang=en-US",
)
needs_browser = pytest.mark.skipif(
    not (CHROMIUM and DRIVER),
    reason="no browser to test the page in: apt-get install chromium chromium-driver",
)


@contextmanager
def open_browser(width: int = 1280, height: int = 900, *, dark: bool = False) -> Iterator[Chrome]:
    """Start a browser with an empty profile; Selenium is told where everything is, so it downloads nothing."""
    assert CHROMIUM
    assert DRIVER
    with tempfile.TemporaryDirectory(prefix="draftstore-browser-", ignore_cleanup_errors=True) as profile:
        options = ChromeOptions()
        options.binary_location = CHROMIUM
        for flag in (*FLAGS, f"--window-size={width},{height}", f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        service = Service(DRIVER, log_output=os.devnull, env={**os.environ, "SE_OFFLINE": "true"})
        browser = Chrome(options, service)
        try:
            browser.set_page_load_timeout(60)
            features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
            # Headless windows have a frame too: say how large the page itself is.
            size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            yield browser
        finally:
            browser.quit()
