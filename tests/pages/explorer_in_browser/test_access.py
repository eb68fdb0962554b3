"""The explorer for everyone: axe-core's rules, keyboard, touch, zoom, and its state in the address."""

import json
import re

import numpy as np
import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from tests.pages import browser as chromium
from tests.pages.browser import pixels
from tests.pages.explorer_in_browser.explorer_page import go, plot

FULL = "tab=Map&layer=1&head=3&pin=7&show=key&cell=20%2C4&values=logits&length=256&theme=dark"


@pytest.mark.slow
@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", ["text", "stories", "pair"])
def test_axe_finds_nothing(pages, browser, sized, name, theme, width):
    sized(width)
    for tab in ("Text", "Heads", "Map", "Positions", "Lines", "Beside", "Guess"):
        for more in ("", "&pin=3&cell=2%2C1&values=logits&layer=1"):
            go(browser, pages / f"{name}.html", f"tab={tab}&theme={theme}{more}")
            found = chromium.axe_violations(browser)
            assert not found, f"{tab} {more}: {json.dumps(found, indent=1)}"
            assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth"), (
                f"{tab}: too wide"
            )


@pytest.mark.slow
def test_the_address_restores_the_page(pages, browser):
    go(browser, pages / "text.html", FULL)
    assert sorted(browser.current_url.partition("#")[2].split("&")) == sorted(FULL.split("&"))
    pressed = [e.get_attribute("id") for e in browser.find_elements(By.CSS_SELECTOR, "[aria-pressed=true]")]
    assert pressed == ["layer-1", "head-3", "show-logits"]
    assert re.match(r"query 20 .*\nkey 4 ", browser.find_element(By.ID, "pointed").text)
    assert browser.execute_script("return document.documentElement.dataset.theme") == "dark"
    before = pixels(browser, "map")
    browser.execute_script("location.hash = 'tab=Text&pin=7&show=key'")
    WebDriverWait(browser, 10).until(lambda b: b.find_elements(By.CSS_SELECTOR, "#queries-7.pinned"))
    browser.execute_script(f"location.hash = '{FULL}'")
    WebDriverWait(browser, 10).until(lambda b: b.find_elements(By.ID, "map") and pixels(b, "map") == before)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fragment", ["tab=X&layer=99&head=-1&pin=1e9&cell=a,b&base=abc&length=7&theme=x", "%", "cell=99,0"]
)
def test_an_address_that_does_not_fit_is_ignored(pages, browser, fragment):
    go(browser, pages / "text.html", fragment)
    assert browser.find_element(By.ID, "tab-Text").get_attribute("aria-selected") == "true"
    typical = browser.execute_script("return JSON.parse(document.getElementById('data').textContent).attention.typical")
    assert browser.find_element(By.CSS_SELECTOR, ".pinned").get_attribute("id") == f"queries-{typical[0][0]}"
    assert browser.get_log("browser") == []


@pytest.mark.slow
def test_tabs_follow_the_arrow_keys(pages, browser):
    go(browser, pages / "text.html", "tab=Text")
    browser.execute_script("document.getElementById('tab-Text').focus()")
    focused = lambda: browser.execute_script(
        "return [document.activeElement.id, document.querySelector('[role=tabpanel]').getAttribute('aria-labelledby')]"
    )
    for key, tab in (
        ("\ue014", "Heads"),
        ("\ue014", "Map"),
        ("\ue012", "Heads"),
        ("\ue010", "Guess"),
        ("\ue014", "Text"),
    ):
        ActionChains(browser).send_keys(key).perform()
        WebDriverWait(browser, 10).until(lambda _, tab=tab: focused() == [f"tab-{tab}", f"tab-{tab}"])


@pytest.mark.slow
def test_shortcuts_can_be_switched_off(pages, browser):
    tab = lambda: browser.find_element(By.CSS_SELECTOR, "[role=tab][aria-selected=true]").get_attribute("id")
    go(browser, pages / "text.html", "tab=Text")
    chromium.press(browser, "4")
    WebDriverWait(browser, 10).until(lambda _: tab() == "tab-Positions")
    browser.execute_script("document.getElementById('length').focus()")
    ActionChains(browser).send_keys("1").perform()
    assert tab() == "tab-Positions", "no shortcut while a field has the focus"
    browser.find_element(By.ID, "shortcuts").click()
    WebDriverWait(browser, 10).until(lambda b: "shortcuts=off" in b.current_url)
    chromium.press(browser, "1")
    assert tab() == "tab-Positions"
    browser.find_element(By.ID, "shortcuts").click()
    chromium.press(browser, "1")
    WebDriverWait(browser, 10).until(lambda _: tab() == "tab-Text")


@pytest.mark.slow
def test_zoom_keeps_the_cell_under_the_pointer(pages, browser, sized):
    sized(1440)
    go(browser, pages / "text.html", "tab=Map")
    browser.execute_script("document.getElementById('map').scrollIntoView({block: 'center'})")
    before = plot(browser)
    x, y = (before[f"{side}_"] + before[side] + (n + 0.5) * before["cell"] for side, n in (("left", 4), ("top", 20)))
    wheel = {"type": "mouseWheel", "x": x, "y": y, "deltaX": 0, "deltaY": -200, "modifiers": 2}
    browser.execute_cdp_cmd("Input.dispatchMouseEvent", wheel)
    WebDriverWait(browser, 10).until(lambda _: plot(browser)["cell"] > 1.5 * before["cell"])
    after = plot(browser)
    cell_at = [
        (at - after[f"{side}_"] - after[side]) / after["cell"] + after[axis]
        for side, axis, at in (("left", "x", x), ("top", "y", y))
    ]
    np.testing.assert_allclose(cell_at, [4.5, 20.5], atol=0.05)
    browser.find_element(By.XPATH, "//button[text()='whole map']").click()
    WebDriverWait(browser, 10).until(lambda _: plot(browser)["cell"] == before["cell"])


@pytest.mark.slow
def test_keys_move_the_crosshair(pages, browser):
    go(browser, pages / "text.html", "tab=Map&cell=3,1")
    browser.execute_script("document.querySelector('.map').focus()")
    for key, query, place in (("\ue015", 4, 1), ("\ue014", 4, 2), ("\ue013", 3, 2), ("\ue012", 3, 1)):
        ActionChains(browser).send_keys(key).perform()
        pattern = rf"query {query} .*\nkey {place} "
        WebDriverWait(browser, 10).until(lambda b, p=pattern: re.match(p, b.find_element(By.ID, "pointed").text))
    WebDriverWait(browser, 10).until(lambda b: "cell=3%2C1" in b.current_url)


@pytest.mark.slow
def test_touch_pins_and_two_fingers_zoom(pages, browser, sized):
    sized(390, touch=True)
    touch = lambda kind, *points: browser.execute_cdp_cmd(
        "Input.dispatchTouchEvent",
        {"type": kind, "touchPoints": [{"x": x, "y": y, "id": n} for n, (x, y) in enumerate(points)]},
    )
    go(browser, pages / "text.html", "tab=Text&pin=none")
    box = browser.execute_script(
        "const b = document.getElementById('queries-5').getBoundingClientRect();"
        "return [b.x + b.width / 2, b.y + b.height / 2]"
    )
    touch("touchStart", box)
    touch("touchEnd")
    WebDriverWait(browser, 10).until(lambda b: b.find_elements(By.CSS_SELECTOR, "#queries-5.pinned"))
    go(browser, pages / "text.html", "tab=Map")
    browser.execute_script("document.getElementById('map').scrollIntoView({block: 'center'})")
    at = plot(browser)
    x, y = (at[f"{side}_"] + at[side] + (n + 0.5) * at["cell"] for side, n in (("left", 2), ("top", 9)))
    touch("touchStart", (x, y))
    touch("touchEnd")
    WebDriverWait(browser, 10).until(lambda b: "cell=9%2C2" in b.current_url)
    touch("touchStart", (x, y), (x + 40, y))
    for apart in range(50, 121, 10):
        touch("touchMove", (x, y), (x + apart, y))
    touch("touchEnd")
    WebDriverWait(browser, 10).until(lambda _: plot(browser)["cell"] > 2 * at["cell"])
    assert "cell=9%2C2" in browser.current_url, "a pinch pins nothing"


@pytest.mark.slow
def test_controls_are_large_enough_for_fingers(pages, browser, sized):
    sized(390, touch=True)
    for tab in ("Text", "Heads", "Map", "Positions", "Lines", "Beside", "Guess"):
        go(browser, pages / "text.html", f"tab={tab}")
        small = browser.execute_script("""
            const shown = [...document.querySelectorAll("button, select, input")].filter((e) => e.offsetParent);
            const sizes = shown.map((e) => [e.id || e.textContent, e.getBoundingClientRect()]);
            return sizes.filter(([, box]) => Math.min(box.width, box.height) < 40).map(([name]) => name)""")
        assert small == [], tab
        hints = browser.find_elements(By.CLASS_NAME, "by-pointer")
        assert hints and not any(hint.is_displayed() for hint in hints)
