"""Headless Chromium for tests of pages, without a network."""

import contextlib
import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path

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
    alone = "disable-background-networking disable-component-update disable-quic disable-sync no-first-run"
    for argument in f"{alone} headless=new no-sandbox disable-dev-shm-usage window-size=1200,1500".split():
        options.add_argument(f"--{argument}")
    options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")  # no network but this machine
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    return chrome


def show(browser, path):
    browser.get(path.as_uri())
    WebDriverWait(browser, 20).until(lambda b: b.execute_script("return document.documentElement.dataset.ready"))


@contextlib.contextmanager
def screen(browser, width: int, theme: str) -> Iterator[None]:
    """Show pages on a screen of this width in pixels, in a light or a dark theme."""
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    try:
        yield
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def press(browser, keys):
    browser.execute_script("document.activeElement.blur()")
    ActionChains(browser).send_keys(keys).perform()


def pixels(browser, name):
    return browser.execute_script(f"return document.getElementById('{name}').toDataURL()")


def axe_violations(browser) -> list[dict]:
    """Return what axe-core finds in the page: rule, what it says, and elements. Skip the test without axe-core."""
    folder = importlib.util.find_spec("axe_core_python")
    if folder is None:
        pytest.skip("needs axe-core-python")
    script = (Path(folder.submodule_search_locations[0]) / "axe.min.js").read_text(encoding="utf-8")
    browser.execute_script(script)
    run = """const done = arguments[0];
        const failed = (error) => done({violations: [{id: String(error), help: '', nodes: []}]});
        axe.run().then(done, failed);"""
    found = browser.execute_async_script(run)["violations"]
    return [
        {"rule": rule["id"], "help": rule["help"], "nodes": [node["html"][:200] for node in rule["nodes"]]}
        for rule in found
    ]
