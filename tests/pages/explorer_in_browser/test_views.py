"""The explorer's views in Chromium: what they say, their labels, legends and axes, and what a map draws."""

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from tests.pages.explorer_in_browser.explorer_page import TEXT, go


@pytest.mark.slow
def test_a_typical_token_is_pinned_until_the_reader_chooses_one(pages, browser):
    go(browser, pages / "text.html", "tab=Text")
    typical = browser.execute_script("return JSON.parse(document.getElementById('data').textContent).attention.typical")
    assert typical[0][0] != typical[0][1]
    pinned = lambda: browser.find_element(By.CSS_SELECTOR, ".pinned").get_attribute("id")
    until = lambda place: WebDriverWait(browser, 10).until(lambda _: pinned() == f"queries-{place}")
    click = lambda name: browser.find_element(By.ID, name).click()
    said = "At first, a token that is typical of the head is pinned."
    until(typical[0][0])
    assert browser.find_element(By.ID, "label").text == "previous token"
    first = browser.find_element(By.CSS_SELECTOR, "#strongest tbody tr").text
    assert first.split()[-3:-1] == [str(typical[0][0] - 1), "1"], "position and distance of the largest weight"
    click("head-1")
    until(typical[0][1])
    assert said in browser.find_element(By.ID, "panel").text
    click("head-0")
    click("side-key")
    until(typical[0][0] - 1)  # the key that this query reads the most
    click("head-mean")
    until(len(TEXT) // 2)  # a key that many queries see
    WebDriverWait(browser, 10).until(lambda b: "head=mean" in b.current_url)
    assert "pin=" not in browser.current_url
    click("queries-3")
    for name in ("side-query", "head-0", "layer-1"):
        click(name)
        until(3)
    assert said not in browser.find_element(By.ID, "panel").text


@pytest.mark.slow
def test_positions_say_what_the_run_uses_and_name_their_axes(pages, browser):
    go(browser, pages / "text.html", "tab=Positions")
    badges = lambda: [
        (
            badge.find_element(By.XPATH, "ancestor::section").get_attribute("id"),
            badge.text,
            "used" in badge.get_attribute("class"),
        )
        for badge in browser.find_elements(By.CLASS_NAME, "badge")
    ]
    assert badges() == [("card-learned", "used by this run", True)]
    own, others = browser.find_elements(By.CSS_SELECTOR, ".cards")
    assert [len(group.find_elements(By.CLASS_NAME, "card")) for group in (own, others)] == [1, 5]
    axes = {
        card.get_attribute("id"): [text.text for text in card.find_elements(By.CSS_SELECTOR, "text.axis")]
        for card in browser.find_elements(By.CSS_SELECTOR, ".card")
    }
    assert axes.pop("card-turns") == [] and axes["card-learned"] == ["position (tokens)"] * 2
    assert all(len(names) == 2 and all(names) for names in axes.values())
    lines = browser.find_elements(By.CSS_SELECTOR, "#card-alibi svg > path")
    assert len(lines) == len(browser.find_elements(By.CSS_SELECTOR, "#card-alibi .legend li")) - 1 == 4


@pytest.mark.slow
def test_tokens_of_the_true_alignment_have_frames(pages, browser):
    go(browser, pages / "pair.html", "tab=Text&pin=1&show=query")
    framed = [token.get_attribute("id") for token in browser.find_elements(By.CSS_SELECTOR, ".token.framed")]
    assert framed == ["keys-1", "keys-2"]
    go(browser, pages / "pair.html", "tab=Heads")
    assert browser.find_elements(By.CSS_SELECTOR, ".thumb .line")
