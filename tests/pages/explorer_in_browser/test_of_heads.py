"""Views of single heads in Chromium: products by dimension, lines, maps side by side, and the game."""

import math

import pytest

from tests.pages.explorer_in_browser.explorer_page import TEXT, go

pytestmark = pytest.mark.slow


def text_of(browser, name):
    return browser.find_element("id", name).text


@pytest.fixture
def text(browser, pages):
    yield pages / "text.html"
    assert browser.get_log("browser") == []


def test_the_products_of_a_pair_add_up_to_its_logit(browser, text):
    go(browser, text, "tab=Map&layer=1&head=2&cell=9,4")
    bars = browser.find_elements("css selector", "#neurons [data-value]")
    total = sum(float(bar.get_attribute("data-value")) for bar in bars)
    shown = float(text_of(browser, "numbers").split("logit ")[1].split()[0])
    assert len(bars) == 8 and math.isclose(total, shown, abs_tol=0.03)
    assert f"{total:.2f}".replace("-", "−") in text_of(browser, "neuron-sum")
    assert "--head=1.2" in text_of(browser, "lab-command")


def test_lines_are_the_weights_of_the_pinned_query(browser, text):
    go(browser, text, "tab=Lines&layer=1&head=2")
    every = browser.find_elements("css selector", "#lines line")
    browser.find_element("id", "line-9").click()
    lines = browser.find_elements("css selector", "#lines line")
    assert 0 < len(lines) < len(every)
    assert {line.get_attribute("data-pair").split(",")[0] for line in lines} == {"9"}
    assert math.isclose(sum(float(line.get_attribute("data-weight")) for line in lines), 1, abs_tol=0.2)
    assert "1.00 of the weight of query 9" in text_of(browser, "lines-total")


def test_maps_side_by_side_have_the_names_of_tokens_and_open_their_head(browser, text):
    go(browser, text, "tab=Beside&beside=layer&layer=1")
    maps = browser.find_elements("css selector", ".named-map")
    names = [name.text for name in maps[0].find_elements("css selector", ".down span")]
    assert len(maps) == 4 and names[:3] == list(TEXT[:3]) and len(names) == 24
    browser.find_element("css selector", "#beside-1-3 button").click()
    assert browser.find_element("id", "head-3").get_attribute("aria-pressed") == "true"


def test_a_game_ends_with_scores(browser, text):
    go(browser, text, "tab=Guess&layer=0&head=1")
    for count in range(8):
        assert text_of(browser, "round").startswith(f"Query {count + 1} of 8")
        browser.find_element("id", "guesses-0").click()
        assert "has the weight" in text_of(browser, "round")
        assert text_of(browser, "scores").startswith(f"Scores after {count + 1} quer")
        browser.find_element("id", "next-query").click()
    assert text_of(browser, "round") == "All 8 queries are done."
    reader, head, *_ = (
        float(cell.text) for cell in browser.find_elements("css selector", "#scores tr td:nth-child(2)") if cell.text
    )
    assert 0 < reader < head <= 1
