"""The attention map in Chromium: each cell can be chosen, by mouse and by keys, also when the text changes."""

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

pytestmark = pytest.mark.slow


@pytest.fixture
def opened(page):
    page.open("one", view="map")
    page.wait(lambda: page.js("return document.getElementById('attention-map') !== null"))
    page.js("document.getElementById('attention-map').scrollIntoView({block: 'center'})")
    return page


def move_to(page, row, column):
    """Return the actions that move the mouse to the middle of a cell."""
    canvas = page.find("attention-map")
    left, top, cell = (float(canvas.get_attribute(f"data-{name}")) for name in ("left", "top", "cell"))
    x, y = left + (column + 0.5) * cell, top + (row + 0.5) * cell
    shift = x - canvas.size["width"] / 2, y - canvas.size["height"] / 2
    return ActionChains(page.browser).move_to_element_with_offset(canvas, *map(round, shift))


def is_said(page, row, column):
    said = page.find("pointed").text
    return said.startswith(f"query {row} ") and f", key {column} " in said


def test_a_click_chooses_any_cell(opened):
    move_to(opened, 5, 3).click().perform()
    ActionChains(opened.browser).move_to_element(opened.find("tab-map")).perform()
    opened.wait(lambda: is_said(opened, 5, 3))
    assert opened.state["pin"] == "5"
    opened.click("head-0.1")  # another result of the same text
    opened.wait(lambda: is_said(opened, 5, 3))
    move_to(opened, 5, 3).click().perform()  # again: no cell is chosen
    ActionChains(opened.browser).move_to_element(opened.find("tab-map")).perform()
    opened.wait(lambda: opened.find("pointed").text == "Point at a cell of the map.")
    assert "pin" not in opened.state


def test_keys_move_through_the_map(opened):
    opened.open("one", view="map", pin=5)
    opened.wait(lambda: is_said(opened, 5, 5))
    opened.js("document.querySelector('.map').focus()")
    for key, row, column in ((Keys.ARROW_LEFT, 5, 4), (Keys.ARROW_LEFT, 5, 3), (Keys.ARROW_DOWN, 6, 3)):
        ActionChains(opened.browser).send_keys(key).perform()
        opened.wait(lambda row=row, column=column: is_said(opened, row, column))


def test_a_cell_under_the_mouse_can_be_beyond_a_shorter_text(opened):
    move_to(opened, 20, 3).perform()
    opened.wait(lambda: is_said(opened, 20, 3))
    script = "const field = document.getElementById('text'); field.value = 'the cat';"
    opened.js(script + "field.dispatchEvent(new Event('input', { bubbles: true }))")
    opened.settle()
    opened.wait(lambda: opened.find("pointed").text == "Point at a cell of the map.")
