"""Headless Chromium for tests of pages, without a network."""

import shutil

import pytest
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.support.ui import WebDriverWait


def start() -> webdriver.Chrome:
    """Return a new browser; skip the test if there is none."""
    binary, driver = (shutil.which("chromium") or shutil.which("google-chrome")), shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("needs chromium and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    alone = [
        "disable-background-networking",
        "disable-component-update",
        "disable-quic",
        "disable-sync",
        "no-first-run",
    ]
    for argument in [*alone, "headless=new", "no-sandbox", "disable-dev-shm-usage", "window-size=1200,1500"]:
        options.add_argument(f"--{argument}")
    options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND")  # no network at all
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    return chrome


def show(browser, path):
    browser.get(path.as_uri())
    WebDriverWait(browser, 20).until(lambda b: b.execute_script("return document.documentElement.dataset.ready"))


def press(browser, keys):
    browser.execute_script("document.activeElement.blur()")
    ActionChains(browser).send_keys(keys).perform()


def pixels(browser, name):
    return browser.execute_script(f"return document.getElementById('{name}').toDataURL()")
