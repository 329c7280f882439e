"""A real browser without a window."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

BROWSER, DRIVER = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    not (BROWSER and DRIVER),
    reason="no browser to test the page in: apt-get install chromium chromium-driver",
)


@contextmanager
def running_browser(profile: Path) -> Iterator[Chrome]:
    """Start a browser with an empty profile, which logs its console; Selenium downloads nothing."""
    options = ChromeOptions()
    options.binary_location = str(BROWSER)
    for flag in (
        "headless=new",
        "no-sandbox",
        "disable-dev-shm-usage",
        "lang=en-US",
        f"user-data-dir={profile}",
    ):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = Chrome(options, Service(DRIVER, env={**os.environ, "SE_OFFLINE": "true"}))
    try:
        yield chrome
    finally:
        chrome.quit()
