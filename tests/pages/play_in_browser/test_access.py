"""The playground for everyone: the keyboard, axe-core's rules, phones and narrow screens."""

import json

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from tests.pages import browser as chromium
from tests.pages.play_in_browser.play_page import VIEWS

pytestmark = pytest.mark.slow


def test_every_control_is_reached_by_the_keyboard(page):
    page.open("one")
    reached = set()
    for _ in range(90):
        ActionChains(page.browser).send_keys(Keys.TAB).perform()
        reached.add(page.js("return document.activeElement.id || document.activeElement.className"))
    wanted = {"text", "write", "head-0.0", "head-1.3", "attentions-1", "scale-off", "mask-none", "rope-base"}
    wanted |= {"start", "other"}
    assert wanted <= reached and "tab-attention" in reached
    page.js("document.getElementById('head-1.2').focus()")
    ActionChains(page.browser).send_keys(Keys.SPACE).perform()
    assert "Head 1.2 off" in page.settle().said
    page.js("document.getElementById('tab-attention').focus()")
    ActionChains(page.browser).send_keys(Keys.ARROW_RIGHT).perform()
    assert page.settle().find("tab-map").get_attribute("aria-selected") == "true"


@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing(page, width, theme):
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    edits = {"heads": {"1.2": "off", "0.1": "mean"}, "layers": [0]}
    try:
        for name, views in (("one", VIEWS), ("two", VIEWS[:3])):
            for view in views:
                page.open(name, view=view, theme=theme, pin=9, edits0=json.dumps(edits), colours="difference")
                assert chromium.axe_violations(page.browser) == [], (name, view)
                assert page.js("return document.documentElement.scrollWidth <= innerWidth"), (name, view)
    finally:
        page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
