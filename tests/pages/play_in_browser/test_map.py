"""The attention map in Chromium: each cell can be chosen, by mouse and by keys, also when the text changes."""

import numpy as np
import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from mini_gpt.data.tokenizers import ByteTokenizer
from mini_gpt.insight.attention import attention_maps
from tests.pages.play_in_browser.play_page import TEXT

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


def most_read(runs, query, text=TEXT):
    """Return the key that a query of head 0.0 reads the most."""
    tokens = ByteTokenizer().encode(text)[None].astype(np.int32)
    return int(attention_maps(runs[0].model, tokens)[0].weights_BHLS[0, 0, query].argmax())


def test_a_click_chooses_any_cell(opened, runs):
    last = len(TEXT) - 1
    opened.wait(lambda: is_said(opened, last, most_read(runs, last)))
    move_to(opened, 5, 3).click().perform()
    ActionChains(opened.browser).move_to_element(opened.find("tab-map")).perform()
    opened.wait(lambda: is_said(opened, 5, 3))
    assert opened.state["pin"] == "5"
    opened.click("head-1.1")  # another result of the same text
    opened.wait(lambda: is_said(opened, 5, 3))
    move_to(opened, 5, 3).click().perform()  # again: no cell is chosen
    ActionChains(opened.browser).move_to_element(opened.find("tab-map")).perform()
    opened.wait(lambda: is_said(opened, last, most_read(runs, last)))
    assert "pin" not in opened.state


def test_keys_move_through_the_map(opened, runs):
    opened.open("one", view="map", pin=5)
    read = most_read(runs, 5)
    opened.wait(lambda: is_said(opened, 5, read))
    opened.js("document.querySelector('.map').focus()")
    for key, row, column in (
        (Keys.ARROW_RIGHT, 5, read + 1),
        (Keys.ARROW_DOWN, 6, read + 1),
        (Keys.ARROW_LEFT, 6, read),
    ):
        ActionChains(opened.browser).send_keys(key).perform()
        opened.wait(lambda row=row, column=column: is_said(opened, row, column))
